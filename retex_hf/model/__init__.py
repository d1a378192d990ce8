"""`RetexModel`: building, running, changing, saving and sharing."""

from . import pipelines  # noqa: F401  (makes `transformers.pipeline` accept a `RetexModel`)

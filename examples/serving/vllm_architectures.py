"""Print which architectures the installed vLLM takes adapters of, and of which embeddings.

    my-vllm-env/bin/python examples/serving/vllm_architectures.py

The tables in retex_hf/model/export/lora/vllm_support.py are the dense decoders and encoders of this list.
"""

from __future__ import annotations

import importlib
import json

from vllm import __version__
from vllm.model_executor.models.registry import _VLLM_MODELS


def main() -> None:
    taken: dict[str, list[str]] = {}
    unknown = []
    for architecture, (module, name) in sorted(_VLLM_MODELS.items()):
        try:
            model = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
        except Exception:  # of architectures that need further packages
            unknown.append(architecture)
            continue
        if getattr(model, "supports_lora", False):
            taken[architecture] = sorted(getattr(model, "embedding_modules", None) or {})
    print(json.dumps({"vllm": __version__, "embeddings": taken, "not imported": unknown}, indent=1))


if __name__ == "__main__":
    main()

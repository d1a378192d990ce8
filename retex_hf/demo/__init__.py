"""A web page to try a model in a browser. Needs gradio: `pip install "retex-hf[demo]"`."""

from .page import launch, make_demo

__all__ = ["launch", "make_demo"]

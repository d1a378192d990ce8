"""A plugin for vLLM that routes every prompt to the adapter of its task.

It runs in vLLM's own environment: it needs torch, transformers and safetensors, and none of the libraries that build
an artifact.
"""

from .plugin import RetexPlugin

__all__ = ["RetexPlugin"]

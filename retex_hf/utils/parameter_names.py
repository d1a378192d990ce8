"""Names of parameters."""

from __future__ import annotations


def layer_type(name: str) -> str:
    """Return a parameter's name without layer numbers.

    >>> from retex_hf.utils.parameter_names import layer_type
    >>> layer_type("encoder.layer.11.attention.self.query.weight")
    'encoder.layer.attention.self.query.weight'
    """
    return ".".join(part for part in name.split(".") if not part.isdigit()) or name

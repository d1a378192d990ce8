"""The version and the checksum of an artifact's configuration; without the libraries that build a model."""

from __future__ import annotations

import hashlib
import json
from typing import Any

FORMAT_VERSION = 5


def seal(values: dict[str, Any]) -> str:
    """Return the SHA-256 of a configuration's values, independent of whitespace and without its own `"seal"`."""
    section = {key: value for key, value in values["artifact"].items() if key != "seal"}
    text = json.dumps({**values, "artifact": section}, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

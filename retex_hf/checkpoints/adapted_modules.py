"""The modules that an adapter's configuration targets, by peft's rules; peft ignores the other tensors of its file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from peft.utils import TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..errors import CheckpointError, brief
from .patterns import Patterns
from .tuner_layers import default_targets

BIASES = ("none", "all")
ALL_LINEAR = "all-linear"
# The layer of a module: the first number after two names.
LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")
NAMES = "names of modules"


class AdaptedModules:
    """The modules selected by `target_modules` and related settings.

    Args:
        settings: Content of an `adapter_config.json`.
        label: Name of the adapter in messages.
    """

    def __init__(self, settings: Mapping[str, Any], label: str) -> None:
        self._settings = settings
        _check_kinds(settings, label)
        self._patterns = {
            key: Patterns({f"^(?:{settings[key]})": 1}, f"{label}: {key} of its configuration")
            for key in ("target_modules", "exclude_modules", "feedforward_modules")
            if isinstance(settings.get(key), str) and settings[key].lower() != ALL_LINEAR
        }

    def has(self, name: str, model: nn.Module) -> bool:
        """Return whether a module of the model is adapted."""
        saved = (f".{entry}." for entry in self._settings.get("modules_to_save") or ())
        if self._matches("exclude_modules", name) or any(entry in f".{name}." for entry in saved):
            return False
        targets = self._settings.get("target_modules")
        if targets is None:
            return _ends_with(name, default_targets(self._settings["peft_type"]).get(_model_type(model), ()))
        if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
            return isinstance(submodule(model, name), (nn.Linear, Conv1D))
        if not self._matches("target_modules", name):
            return False
        return isinstance(targets, str) or name in targets or self._is_in_layers(name)

    def is_feedforward(self, name: str, model: nn.Module) -> bool:
        """Return whether (IA)³ scales a module's inputs instead of its outputs."""
        if self._settings.get("feedforward_modules") is None:
            return _ends_with(name, TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING.get(_model_type(model), ()))
        return self._matches("feedforward_modules", name)

    def _matches(self, key: str, name: str) -> bool:
        if key in self._patterns:
            return bool(self._patterns[key].value(name, 0))
        return _ends_with(name, self._settings.get(key) or ())

    def _is_in_layers(self, name: str) -> bool:
        layers, names = self._settings.get("layers_to_transform"), self._settings.get("layers_pattern")
        if layers is None or layers == []:
            return True
        names = [names] if isinstance(names, str) else names
        patterns = [re.compile(rf"(?:^|.*?\.){re.escape(entry)}\.(\d+)\.") for entry in names or ()] or [LAYER]
        found = next((match for pattern in patterns if (match := pattern.match(name))), None)
        return found is not None and int(found[1]) in ([layers] if isinstance(layers, int) else layers)


def _model_type(model: nn.Module) -> str:
    return getattr(getattr(model, "config", None), "model_type", None) or ""


def submodule(model: nn.Module, name: str) -> nn.Module | None:
    """Return a module by its name; None if it does not exist."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _ends_with(name: str, targets: Any) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _check_kinds(settings: Mapping[str, Any], label: str) -> None:
    """Refuse settings that peft refuses."""
    biases = (*BIASES, f"{settings['peft_type'].lower()}_only")
    expected = {
        "feedforward_modules": (_is_text_or_texts, NAMES),
        "target_modules": (_is_text_or_texts, NAMES),
        "exclude_modules": (_is_text_or_texts, NAMES),
        "modules_to_save": (_is_texts, f"a list of {NAMES}"),
        "layers_to_transform": (_is_layers, "numbers of layers"),
        "layers_pattern": (_is_text_or_texts, "names of lists of layers"),
        "bias": (lambda value: isinstance(value, str) and value in biases, f"one of {', '.join(biases)}"),
    }
    for key, (is_allowed, words) in expected.items():
        value = settings.get(key)
        if value is not None and not is_allowed(value):
            raise CheckpointError(f"{label}: {key} of its configuration must be {words}, not {brief(value)}.")


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _is_text_or_texts(value: Any) -> bool:
    return isinstance(value, str) or _is_texts(value)


def _is_layers(value: Any) -> bool:
    return all(
        isinstance(entry, int) and not isinstance(entry, bool)
        for entry in (value if isinstance(value, list) else [value])
    )

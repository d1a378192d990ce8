"""The adapter types of peft: those that change weights, and the settings that determine how.

A supported type is described by the settings that its merged weight depends on. Each is checked before peft sees it,
because a configuration is an untrusted file: sizes are bounded by those of the module, texts must be in a list, and
patterns are matched by `patterns.py`. Settings that affect only training (dropout, schedules) are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from peft.tuners.waveft.constants import WAVELET_REDUCTIONS

from ..errors import CheckpointError, brief
from .patterns import Patterns

REMEDY = "merge it with peft's merge_and_unload first, and give the merged checkpoint"
# Beyond it, the product may overflow float32.
LARGEST_NUMBER = 1e30
# A rank or block may exceed the sides of a small module, up to this size.
LEAST_SIZE_LIMIT = 1024
LARGEST_SEED = 2**63 - 1
SIDE, AREA = "side", "area"


@dataclass(frozen=True)
class Setting:
    """The allowed values of a setting: a test, and its description in words. `bound` is the size of a module's weight
    that the value may not exceed."""

    is_allowed: Callable[[Any], bool]
    words: str
    bound: str | None = None


def _is_whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER


def _choice(*values: Any) -> Setting:
    allowed = [(type(value), value) for value in values]
    words = f"one of {', '.join(map(str, values))}"
    return Setting(lambda value: isinstance(value, (str, bool)) and (type(value), value) in allowed, words)


SIZE = Setting(lambda value: _is_whole(value, 1, LARGEST_SEED), "a whole number above 0", SIDE)
# A size for which 0 (or -1) leaves the choice to peft.
FREE_SIZE = Setting(lambda value: _is_whole(value, -1, LARGEST_SEED), "a whole number from -1", SIDE)
COUNT = Setting(lambda value: _is_whole(value, 1, LARGEST_SEED), "a whole number above 0", AREA)
VECTORS = Setting(lambda value: _is_whole(value, 1, 2**24), "a whole number above 0, and at most 16777216")
TERMS = Setting(lambda value: _is_whole(value, 0, 16), "a whole number from 0 to 16")
SEED = Setting(lambda value: _is_whole(value, 0, LARGEST_SEED), "a whole number from 0")
NUMBER = Setting(_is_number, f"a number of at most {LARGEST_NUMBER:g}")
FLAG = Setting(lambda value: isinstance(value, bool), "true or false")
NOT_SET = Setting(lambda value: not value, f"left out, because it is not read: {REMEDY}")
TOKENS = Setting(
    lambda value: isinstance(value, list) and all(_is_whole(entry, 0, 2**31) for entry in value),
    "a list of the numbers of tokens",
)


@dataclass(frozen=True)
class Tuner:
    """A supported adapter type.

    Args:
        prefix: Prefix of the names of its tensors, after the name of their module.
        settings: Settings that the merged weight depends on.
        patterns: Settings with a value per module, and the setting whose value they replace.
        dotted: Whether peft requires a dot before the part of the name that a pattern matches.
    """

    prefix: str
    settings: Mapping[str, Setting] = field(default_factory=dict)
    patterns: Mapping[str, str] = field(default_factory=dict)
    dotted: bool = False


RANKS = {"rank_pattern": "r", "alpha_pattern": "alpha"}
LYCORIS = {"r": SIZE, "alpha": NUMBER, "use_effective_conv2d": FLAG}
PROJECTED = {"r": SIZE, "projection_prng_key": SEED, "save_projection": FLAG}
TUNERS: dict[str, Tuner] = {
    "ADALORA": Tuner(
        "lora_", {"init_r": SIZE, "lora_alpha": NUMBER, "use_dora": NOT_SET, "layer_replication": NOT_SET}
    ),
    "ADAMSS": Tuner(
        "adamss_",
        {
            "r": SIZE, "num_subspaces": SIZE, "subspace_rank": SIZE, "use_dynamic_rank": FLAG, "svd_threshold": NUMBER,
            "random_seed": SEED,
        },
    ),
    "BEFT": Tuner("beft_"),
    "BOFT": Tuner(
        # Only one butterfly factor, which is all that peft merges without a GPU; the tensors of more do not fit.
        "boft_",
        {"boft_block_size": FREE_SIZE, "boft_block_num": FREE_SIZE},
    ),
    "C3A": Tuner("c3a_", {"block_size": SIZE}, {"block_size_pattern": "block_size"}, dotted=True),
    "DEFT": Tuner(
        "deft_",
        {"r": SIZE, "decomposition_method": _choice("relu", "qr"), "alpha": NUMBER, "para": FLAG, "init_scale": NUMBER},
    ),
    "DELORA": Tuner(
        "delora_", {"r": SIZE, "delora_lambda": NUMBER}, {"rank_pattern": "r", "lambda_pattern": "delora_lambda"}
    ),
    "FOURIERFT": Tuner(
        "fourierft_",
        {"n_frequency": COUNT, "scaling": NUMBER, "random_loc_seed": SEED},
        {"n_frequency_pattern": "n_frequency"},
        dotted=True,
    ),
    "GLORA": Tuner(
        "glora_",
        {
            "r": SIZE, "config_A_B": _choice("lora", "vector", "constant", "none"),
            "config_C": _choice("lora", "vector", "none"), "config_D_E": _choice("constant", "none", "vector"),
        },
    ),
    "GRALORA": Tuner("gralora_", {"r": SIZE, "hybrid_r": FREE_SIZE, "alpha": NUMBER, "gralora_k": SIZE}),
    "HIRA": Tuner("hira_", {"r": SIZE}),  # peft ignores its rank_pattern
    "HRA": Tuner("hra_", {"r": SIZE, "apply_GS": FLAG}),
    "IA3": Tuner("ia3_"),
    "LN_TUNING": Tuner("ln_tuning_"),
    "LOHA": Tuner("hada_", LYCORIS, RANKS),
    "LOKR": Tuner("lokr_", {**LYCORIS, "decompose_both": FLAG, "decompose_factor": FREE_SIZE}, RANKS),
    "LORA": Tuner(
        "lora_",
        {
            "r": SIZE, "lora_alpha": NUMBER, "use_rslora": FLAG, "use_dora": FLAG, "lora_bias": FLAG,
            "init_lora_weights": _choice(True, False, "gaussian", "eva", "orthogonal", "pissa", "olora", "mica"),
        },
        {"rank_pattern": "r", "alpha_pattern": "lora_alpha"},
    ),
    "MISS": Tuner("miss_", {"r": SIZE, "mini_r": SIZE, "init_weights": _choice(True, False, "bat", "mini")}),
    "OFT": Tuner(
        "oft_",
        {
            "r": FREE_SIZE, "oft_block_size": FREE_SIZE, "coft": FLAG, "eps": NUMBER, "block_share": FLAG,
            "use_cayley_neumann": FLAG, "num_cayley_neumann_terms": TERMS,
        },
    ),
    "OSF": Tuner("osf_", {"effective_rank": SIZE, "rank_pattern": NOT_SET, "target_svd_config": NOT_SET}),
    "PEANUT": Tuner(
        "peanut_",
        {
            "r": SIZE, "depth": TERMS, "act_fn": _choice("relu", "gelu", "silu", "tanh", "sigmoid"), "scaling": NUMBER,
        },
    ),
    "PSOFT": Tuner(
        "psoft_",
        {
            "r": SIZE, "psoft_alpha": NUMBER, "ab_svd_init": _choice("psoft_init", "pissa_init"),
            "psoft_svd": _choice("full"), "psoft_orth": FLAG, "psoft_mag_a": FLAG, "psoft_mag_b": FLAG,
            "use_cayley_neumann": FLAG, "num_cayley_neumann_terms": TERMS, "cayley_neumann_eps": NUMBER,
            "random_seed": SEED,
        },
    ),
    "PVERA": Tuner("pvera_", {**PROJECTED, "sample_at_inference": NOT_SET}),
    "RANDLORA": Tuner(
        "randlora_",
        {**PROJECTED, "randlora_alpha": NUMBER, "sparse": FLAG, "very_sparse": FLAG},
    ),
    "ROAD": Tuner("road_", {"variant": _choice("road_1", "road_2", "road_4"), "group_size": SIZE}),
    "SHIRA": Tuner("shira_", {"r": SIZE}),
    "SUPERTUNING": Tuner("supertuning_", {"sparsity": NUMBER, "select_top": FLAG, "r": NOT_SET}),
    "TINYLORA": Tuner("tinylora_", {"r": SIZE, "u": SIZE, "weight_tying": NUMBER}),
    "TRAINABLE_TOKENS": Tuner("trainable_tokens_", {"token_indices": TOKENS}),
    "VBLORA": Tuner(
        "vblora_",
        {"r": SIZE, "num_vectors": VECTORS, "vector_length": SIZE, "topk": SIZE, "save_only_topk_weights": FLAG},
    ),
    "VERA": Tuner("vera_", PROJECTED),
    "WAVEFT": Tuner(
        "waveft_",
        {
            "n_frequency": COUNT, "scaling": NUMBER, "random_loc_seed": SEED, "use_idwt": FLAG,
            "wavelet_family": _choice(*sorted(WAVELET_REDUCTIONS)), "proportional_parameters": NOT_SET,
        },
        {"n_frequency_pattern": "n_frequency"},
        dotted=True,
    ),
}  # fmt: skip

_PROMPTS = "puts learned tokens before the input and changes no weight"
_ROUTED = "mixes several adapters for every input, so that no single weight represents it"
_JOINT = "derives its tensors from many modules at once"
REFUSED = {
    "ADAPTION_PROMPT": _PROMPTS, "CARTRIDGE": _PROMPTS, "CPT": _PROMPTS, "MULTITASK_PROMPT_TUNING": _PROMPTS,
    "PREFIX_TUNING": _PROMPTS, "PROMPT_TUNING": _PROMPTS, "P_TUNING": _PROMPTS,
    "LILY": _ROUTED, "POLY": _ROUTED, "XLORA": _ROUTED,
    "SHADOW": "runs a network of its own beside the model and changes no weight",
}  # fmt: skip
JOINT = {"FROD": _JOINT, "UNILORA": _JOINT}


def tuner_of(kind: Any, label: str) -> Tuner:
    """Return the description of a supported type; refuse other types and say why.

    >>> from retex_hf.checkpoints.tuners import tuner_of
    >>> tuner_of("LOHA", "expert 'a'").prefix
    'hada_'
    """
    if isinstance(kind, str) and kind in TUNERS:
        return TUNERS[kind]
    shown = brief(kind, 60)
    if isinstance(kind, str) and kind in REFUSED:
        raise CheckpointError(f"{label} is a PEFT adapter of type {kind}, which {REFUSED[kind]}: it cannot be merged.")
    if isinstance(kind, str) and kind in JOINT:
        raise CheckpointError(f"{label} is a PEFT adapter of type {kind}, which {JOINT[kind]}: {REMEDY}.")
    raise CheckpointError(f"{label} is a PEFT adapter of type {shown}, which is not known here: {REMEDY}.")


class TunerSettings:
    """The checked settings of an adapter; `of` returns those of a module.

    Args:
        kind: Type of the adapter, one of `TUNERS`.
        settings: Content of an `adapter_config.json`.
        label: Name of the adapter in messages.
    """

    def __init__(self, kind: str, settings: Mapping[str, Any], label: str) -> None:
        self._tuner, self._label = TUNERS[kind], label
        self._values: dict[str, Any] = {}
        for key, setting in self._tuner.settings.items():
            value = settings.get(key)
            if value is not None:
                self._check(setting, value, f"{key} of its configuration")
                self._values[key] = value
        self._patterns = {
            target: self._open_pattern(key, target, settings[key])
            for key, target in self._tuner.patterns.items()
            if settings.get(key)
        }

    def of(self, module: str, sides: tuple[int, ...]) -> dict[str, Any]:
        """Return the settings of a module whose weight has these sides."""
        values = dict(self._values)
        for key, patterns in self._patterns.items():
            if "." in module or not self._tuner.dotted:
                value = patterns.value(module, values.get(key))
                values |= {} if value is None else {key: value}
        most = {SIDE: max(LEAST_SIZE_LIMIT, *sides), AREA: prod(sides), None: LARGEST_SEED}
        for key, value in values.items():
            bound = self._tuner.settings[key].bound
            if bound is not None and value > most[bound]:
                raise CheckpointError(
                    f"{self._label}: {key} of its configuration is {brief(value)}, but {module!r} has the shape "
                    f"{sides}: expected {most[bound]} at most."
                )
        return {key: value for key, value in values.items() if self._tuner.settings[key] is not NOT_SET}

    def _open_pattern(self, key: str, target: str, values: Any) -> Patterns:
        where = f"{self._label}: {key} of its configuration"
        if not isinstance(values, dict):
            raise CheckpointError(f"{where} must be names and numbers, not {brief(values)}.")
        for pattern, value in values.items():
            self._check(self._tuner.settings[target], value, f"{key} of its configuration for {brief(pattern)}")
            if self._tuner.dotted and "|" in pattern:  # binds less tightly than the text that peft puts around it
                raise CheckpointError(f"{where} has {brief(pattern)}, a choice, which is not read: {REMEDY}.")
        return Patterns(values, where)

    def _check(self, setting: Setting, value: Any, what: str) -> None:
        if not setting.is_allowed(value):
            raise CheckpointError(f"{self._label}: {what} must be {setting.words}, not {brief(value)}.")

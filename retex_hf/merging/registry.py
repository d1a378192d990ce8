"""Registry of merge methods by name. A method turns the tensors of all experts into one tensor.

A simple method is a function of one parameter's tensors::

    @register_merge("midpoint")
    def midpoint(base, experts, *, pull=0.5):
        return base + pull * (torch.stack(experts).mean(0) - base)

A method that must see all tensors first is registered with `prepare=True`: it receives the tensors as a `TaskTensors`,
may read them any number of times, and returns such a function of `(name, base, experts)`.

A method that learns from data declares what it learns as options whose default is `"auto"`, and names the function that
finds them. That function receives a `retex_hf.merging.calibration.Calibration` (experts in memory, batches, how to read
answers) and those options that it names, and returns values that JSON can hold::

    def best_pull(calibration, *, candidates=(0.3, 0.6, 1.0)):
        weights = calibration.weights

        def score(pull):
            body = weights.body(torch.full((len(weights.tasks),), pull / len(weights.tasks)))
            return sum(calibration.accuracy(body, task) for task in weights.tasks)

        return {"pull": max(candidates, key=score)}


    @register_merge("chosen midpoint", calibrate=best_pull)
    def chosen_midpoint(base, experts, *, pull="auto"):
        return base + pull * (torch.stack(experts).mean(0) - base)


    RetexModel.from_experts(base, experts, RetexConfig(merge="chosen midpoint"), calibration={"task": batches, ...})

The values found replace `"auto"` in the configuration, beside the options they were found with. So merging itself is a
function of tensors and plain numbers, and the saved configuration describes it completely.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ..errors import ConfigError

if TYPE_CHECKING:
    from .calibration import Calibration

AUTO = "auto"


class TaskTensors(Protocol):
    """The tensors that a method with `prepare=True` may read: every tensor that will be merged, one at a time."""

    @property
    def tasks(self) -> list[str]: ...

    @property
    def names(self) -> list[str]: ...

    def read_base(self, name: str) -> Tensor: ...

    def read_expert(self, task: str, name: str) -> Tensor: ...


Merger = Callable[[str, Tensor, list[Tensor]], Tensor]


@dataclass(frozen=True)
class _Method:
    function: Callable
    prepare: bool
    calibrate: Callable[..., dict[str, Any]] | None

    def own(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options that merging itself takes; the others only control how these are found."""
        own = _keyword_options(self.function)
        return {name: value for name, value in options.items() if name in own}


_METHODS: dict[str, _Method] = {}


def register_merge(
    name: str, *, prepare: bool = False, calibrate: Callable[..., dict[str, Any]] | None = None
) -> Callable[[Callable], Callable]:
    """Return a decorator that adds a merge method under a name for `RetexConfig(merge=name)`.

    Args:
        name: Name of the method.
        prepare: The function receives a `TaskTensors` and returns the merger.
        calibrate: `calibrate(calibration, **options)` finds the options that are `"auto"` from data.
    """

    def decorate(function: Callable) -> Callable:
        _METHODS[name] = _Method(function, prepare, calibrate)
        return function

    return decorate


def merge_methods() -> list[str]:
    """Return the names of the registered methods."""
    return sorted(_METHODS)


def options_to_learn(name: str, options: dict[str, Any]) -> list[str]:
    """Return the options of a method to be found from data: those that are `"auto"`."""
    method = _find(name, options)
    if method.calibrate is None:
        return []
    values = method.own({**_keyword_options(method.function), **options})
    return [option for option, value in values.items() if isinstance(value, str) and value == AUTO]


def learns(name: str) -> bool:
    """Return whether a method can find options from data."""
    return _find(name, {}).calibrate is not None


def learn_options(name: str, options: dict[str, Any], calibration: Calibration) -> dict[str, Any]:
    """Return all options of a method, with those that were `"auto"` found from data."""
    method = _find(name, options)
    assert method.calibrate is not None  # `check_calibration` refuses data for other methods
    wanted = options_to_learn(name, options)
    taken = _keyword_options(method.calibrate)
    # An option that both functions take has the merge's default.
    values = {**taken, **_keyword_options(method.function), **options}
    found = method.calibrate(calibration, **{option: values[option] for option in taken})
    missing = [option for option in wanted if found.get(option, AUTO) == AUTO]
    if missing:
        raise ConfigError(f"Merge method {name!r} must find {missing[0]!r} from its calibration data, but did not.")
    # Convert to JSON and back, so that the values equal those read from a saved file.
    return json.loads(json.dumps({**values, **{option: found[option] for option in wanted}}))


def get_merger(name: str, options: dict[str, Any], tensors: TaskTensors) -> Merger:
    """Look up a method, check its options and prepare it; return `merger(name, base, experts) -> tensor`."""
    method = _find(name, options)
    if open_options := options_to_learn(name, options):
        raise ConfigError(_needs_data(name, open_options))
    own = method.own(options)
    if method.prepare:
        merge = method.function(tensors, **own)
    else:

        def merge(_: str, base: Tensor, experts: list[Tensor]) -> Tensor:
            return method.function(base, experts, **own)

    def checked(parameter: str, base: Tensor, experts: list[Tensor]) -> Tensor:
        merged = merge(parameter, base, experts)
        if not isinstance(merged, Tensor) or merged.shape != base.shape:
            found = f"one of {tuple(merged.shape)}" if isinstance(merged, Tensor) else f"a {type(merged).__name__}"
            raise ConfigError(
                f"Merge method {name!r} must return a tensor of shape {tuple(base.shape)} for {parameter!r}, "
                f"not {found}."
            )
        return merged

    return checked


def check_calibration(name: str, options: dict[str, Any], given: bool) -> None:
    """Refuse data that would not be used, and a method without the data it needs."""
    wanted = options_to_learn(name, options)
    if wanted and not given:
        raise ConfigError(_needs_data(name, wanted))
    if given and not learns(name):
        raise ConfigError(f"calibration= is for merge methods that learn from data; {name!r} does not.")
    if given and not wanted:
        raise ConfigError(f'calibration= has nothing to find: no option of {name!r} in RetexConfig.merge is "auto".')


def _needs_data(name: str, wanted: list[str]) -> str:
    return (
        f"Merge method {name!r} finds {' and '.join(wanted)} from data: pass calibration={{task: batches}} to "
        "from_experts, or give the values in RetexConfig.merge."
    )


def _find(name: str, options: dict[str, Any]) -> _Method:
    if name not in _METHODS:
        raise ConfigError(f"RetexConfig.merge must be one of {merge_methods()} or a checkpoint, not {name!r}.")
    method = _METHODS[name]
    allowed = list(_keyword_options(method.function))
    if method.calibrate is not None:
        allowed += [option for option in _keyword_options(method.calibrate) if option not in allowed]
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise ConfigError(f"RetexConfig.merge: method {name!r} has no option {unknown[0]!r}; it takes {allowed}.")
    return method


def _keyword_options(function: Callable) -> dict[str, Any]:
    """Return a function's keyword-only parameters and their defaults."""
    return {
        parameter.name: parameter.default
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }

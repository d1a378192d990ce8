"""A module for tensors that belong to a model but to none of its modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn


class TensorBank(nn.Module):
    """Named groups of tensors that move with the model: `{group: {name: tensor}}`."""

    def __init__(self, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().__init__()
        self._names: dict[tuple[str, str], str] = {}
        for group, tensors in groups.items():
            for name, tensor in tensors.items():
                key = f"tensor_{len(self._names)}"  # buffer names may not hold dots
                self._names[group, name] = key
                self.register_buffer(key, tensor)

    def as_dict(self, groups: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        result: dict[str, dict[str, Tensor]] = {group: {} for group in groups}
        for (group, name), key in self._names.items():
            result[group][name] = self.get_buffer(key)
        return result

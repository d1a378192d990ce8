"""A module for tensors that belong to a model but to none of its modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn


class TensorBank(nn.Module, Mapping[str, dict[str, Tensor]]):
    """Groups of named tensors that move with the model: `bank[group][name]`.

    >>> import torch
    >>> from retex_hf.utils.tensor_bank import TensorBank
    >>> bank = TensorBank({"a": {"bias": torch.zeros(2)}, "b": {}}).to(torch.float16)
    >>> bank["a"]["bias"].dtype, list(bank)
    (torch.float16, ['a', 'b'])
    """

    # A module is equal to itself only; a mapping would compare the tensors.
    __eq__, __hash__ = nn.Module.__eq__, nn.Module.__hash__

    def __init__(self, groups: Mapping[str, Mapping[str, Tensor]] | None = None) -> None:
        super().__init__()
        self._keys: dict[str, dict[str, str]] = {}
        count = 0
        for group, tensors in (groups or {}).items():
            self._keys[group] = {}
            for name, tensor in tensors.items():
                key = f"tensor_{count}"  # buffer names may not hold dots
                self._keys[group][name] = key
                self.register_buffer(key, tensor)
                count += 1

    def __getitem__(self, group: str) -> dict[str, Tensor]:
        return {name: self.get_buffer(key) for name, key in self._keys[group].items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def extra_repr(self) -> str:
        return ", ".join(f"{group}: {len(names)} tensors" for group, names in self._keys.items())

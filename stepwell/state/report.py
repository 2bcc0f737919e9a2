"""What differs between a saved part and the live one."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass
class Report:
    """The differences of one part."""

    missing: list[str] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    mismatched: dict[str, str] = dataclasses.field(default_factory=dict)  # key -> why
    cast: list[str] = dataclasses.field(default_factory=list)
    matched: int = 0  # tensors that fit
    maybe_missing: list[tuple[str, torch.Tensor]] = dataclasses.field(default_factory=list)
    targets: list[torch.Tensor] = dataclasses.field(default_factory=list)  # those that fit

    def settle(self) -> None:
        """A tensor that was not saved is not missing if it is the memory of one that was (a tie)."""
        if not self.maybe_missing:
            return
        filled = {(_address(tensor), tensor.shape) for tensor in self.targets}
        identities = {id(tensor) for tensor in self.targets}
        for name, tensor in self.maybe_missing:
            here = id(tensor) in identities or (_address(tensor) and (_address(tensor), tensor.shape) in filled)
            if not here:
                self.missing.append(name)
        self.maybe_missing.clear()


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0

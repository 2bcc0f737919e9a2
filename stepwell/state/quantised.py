"""Quantised tensors: their packed bytes, and the scales that give them meaning."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from stepwell.errors import StateError
from stepwell.state.providers import Context, register_named

_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_symmetric, torch.per_channel_affine_float_qparams)


class QuantisedProvider:
    """The tree: shape, dtype, scheme, scales and the storage's bytes (packed dtypes hold several values in one)."""

    name = "quantised"

    def to_tree(self, obj: Any, context: Context) -> Any:
        tensor = obj.detach()
        tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
        tree = {"shape": tensor.shape, "dtype": tensor.dtype, "data": _storage(tensor)}
        if tensor.qscheme() in _PER_CHANNEL:
            scales, points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
            return {**tree, "scales": scales, "zero_points": points, "axis": tensor.q_per_channel_axis()}
        if tensor.qscheme() not in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            raise StateError(f"A tensor of scheme {tensor.qscheme()} cannot be saved", key=context.key)
        return {**tree, "scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}

    def from_tree(self, tree: Any, existing: Any, context: Context) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch announces the end of quantised dtypes at each use
            if "scales" in tree:
                tensor = torch._empty_per_channel_affine_quantized(
                    tree["shape"],
                    scales=tree["scales"],
                    zero_points=tree["zero_points"],
                    axis=tree["axis"],
                    dtype=tree["dtype"],
                )
            else:
                tensor = torch._empty_affine_quantized(
                    tree["shape"], scale=tree["scale"], zero_point=tree["zero_point"], dtype=tree["dtype"]
                )
        _storage(tensor).copy_(tree["data"])
        return tensor


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous quantised tensor, as a flat view."""
    per_byte = {torch.quint4x2: 2, torch.quint2x4: 4}.get(tensor.dtype, 1)
    size = -(-tensor.numel() // per_byte) * tensor.itemsize
    offset = tensor.storage_offset() * tensor.itemsize // per_byte
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), offset, (size,), (1,))


register_named(QuantisedProvider())

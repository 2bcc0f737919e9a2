"""CuPy arrays: the same memory as a tensor, by DLPack. CuPy is not imported for those who do not use it."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

from torch.utils.dlpack import from_dlpack

from stepwell.state.nodes import is_leaf, unwrapped
from stepwell.state.providers import Context, register_provider
from stepwell.state.values import Node

if TYPE_CHECKING:
    from stepwell.state.match import Finisher, Matcher


class CupyProvider:
    """The tree is a tensor over the array's memory."""

    name = "cupy"

    def to_tree(self, obj: Any, context: Context) -> Any:
        if any(stride < 0 for stride in obj.strides):  # no tensor can be like that
            obj = obj.copy()
        return from_dlpack(obj)

    def from_tree(self, tree: Any, existing: Any, context: Context) -> Any:
        cupy: Any = sys.modules.get("cupy")
        tensor = tree.detach()
        if cupy is None:
            warnings.warn(
                f"{context.key} was saved as a CuPy array and comes back as a NumPy array: import cupy before loading",
                stacklevel=2,
            )
            return tensor.cpu().numpy()
        return cupy.asarray(tensor.numpy()) if tensor.device.type == "cpu" else cupy.from_dlpack(tensor)

    def match(self, matcher: Matcher, node: Node, target: Any, name: str) -> Finisher:
        """Into the array that is there, if it is like the saved one; else a new one."""
        node = unwrapped(node)
        if not is_leaf(node):
            return matcher.keep(node, target, name, "saved something else, here a CuPy array")
        index, leaf = node[1], matcher.tensors.leaves[node[1]]
        if tuple(target.shape) == leaf.shape and not any(stride < 0 for stride in target.strides):
            tensor = from_dlpack(target)
            if tensor.dtype == leaf.dtype:
                filled = matcher.match(node, tensor, name)

                def finish() -> Any:
                    filled()
                    return target

                return finish
        matcher.report.matched += 1
        matcher.tensors.want(index)
        key = matcher.full(name)
        context = Context(key, matcher.state)
        return lambda: self.from_tree(matcher.tensors.value(index), None, context)


for _place in ("cupy", "cupy._core.core"):  # where the class says that it is, in newer and in older versions
    register_provider(f"{_place}.ndarray", CupyProvider())

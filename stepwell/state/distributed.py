"""DTensors. Without other ranks, a DTensor is its local tensor, and is stored under the same label as a plain one."""

from __future__ import annotations

from typing import Any

from stepwell.errors import StateError
from stepwell.state.providers import Context, register_provider


class DTensorProvider:
    """The tree is the local tensor itself."""

    name = "dtensor"

    def to_tree(self, obj: Any, context: Context) -> Any:
        return self._local(obj, context)

    def live(self, existing: Any, context: Context) -> Any:
        return self._local(existing, context)

    def from_tree(self, tree: Any, existing: Any, context: Context) -> Any:
        return tree if existing is None else existing

    def _local(self, obj: Any, context: Context) -> Any:
        if obj.device_mesh.size() != 1:
            raise StateError(
                f"A DTensor over {obj.device_mesh.size()} ranks cannot be saved by this version",
                key=context.key,
                todo="Save its full_tensor(), or its local tensor inside PerRank(...)",
            )
        return obj.detach().to_local()


register_provider("torch.distributed.tensor.DTensor", DTensorProvider())  # not imported for those who do not use it

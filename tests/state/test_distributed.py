"""DTensors of a world of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.state.memory import Saved


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_dtensors_are_stored_like_plain_tensors_and_filled_in_place(mesh: Any) -> None:
    weight = torch.randn(4, 3)
    saved = Saved({"model": {"w": distribute_tensor(weight, mesh, [Shard(0)])}})
    assert list(saved.labels()) == ["w"]
    assert torch.equal(saved.load()["model"]["w"], weight)
    target: Any = torch.nn.Linear(3, 4, bias=False)
    target.weight = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)]))
    before = target.weight
    for source in (saved, Saved({"model": {"w": weight}})):
        source.restore({"model": target}, rename={"w": "weight"})
        assert target.weight is before and torch.equal(before.to_local(), weight)
        before.to_local().detach().zero_()
    plain = torch.zeros(4, 3)
    saved.restore({"model": {"w": plain}})
    assert torch.equal(plain, weight)

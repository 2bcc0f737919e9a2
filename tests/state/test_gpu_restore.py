"""Restores into GPUs' memory, for which host memory stands: where bytes are read to, and what is copied after that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from stepwell.state import Placement, build
from stepwell.state.whereabouts import gpu_of
from tests.state.memory import Saved, assert_same, fill
from tests.state.standing import Standing, standing


@pytest.fixture
def gpus() -> Iterator[Standing]:
    with standing() as found:
        yield found


def _filled(placement: Placement) -> dict[str, int | None]:
    return {each.label: gpu_of(each.tensor) for each in placement.fills}


def _trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_live_tensors_are_filled_where_they_are(gpus: Standing) -> None:
    saved = Saved({"model": {"a": torch.ones(3), "b": torch.full((2, 2), 2.0), "c": torch.ones(1)}})
    live = {"a": gpus.put(torch.zeros(3), 1), "b": torch.zeros(2, 2), "c": gpus.put(torch.zeros(1))}
    before = [tensor.data_ptr() for tensor in live.values()]
    placement = saved.restore({"model": live})
    assert _filled(placement) == {"a": 1, "b": None, "c": 0} and placement.gpus == [0, 1]
    assert [each.tensor.data_ptr() for each in placement.fills] == before and not gpus.made
    assert torch.equal(live["b"], torch.full((2, 2), 2.0)) and live["a"].sum() == 3


def test_what_is_not_contiguous_there_gets_its_bytes_on_that_gpu(gpus: Standing) -> None:
    saved = Saved({"model": torch.arange(6.0).reshape(2, 3)})
    live = gpus.put(torch.zeros(3, 2)).t()
    gpus.home = 0
    placement = saved.restore({"model": live})
    assert placement.gpus == [0] and [each.data_ptr() for each in gpus.made] == [placement.fills[0].tensor.data_ptr()]
    assert torch.equal(live, torch.arange(6.0).reshape(2, 3)) and live.stride() == (1, 2)


def test_a_cast_needs_no_second_copy_of_all_on_the_gpu(gpus: Standing) -> None:
    saved = Saved({"model": torch.arange(6.0)})
    live = gpus.put(torch.zeros(6, dtype=torch.bfloat16))
    gpus.home = 0
    placement = saved.restore({"model": live})
    assert _filled(placement) == {"model": None} and live.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_state_of_a_new_optimizer_is_made_where_its_parameters_are(gpus: Standing) -> None:
    model, optimizer = _trained()
    saved = Saved({"model": model, "optimizer": optimizer})
    fresh = gpus.put(torch.nn.Linear(4, 3))
    again = torch.optim.AdamW(fresh.parameters())
    gpus.home = 0
    placement = saved.restore({"model": fresh, "optimizer": again})
    on = {label: gpu for label, gpu in _filled(placement).items() if label.startswith("optimizer.state.weight")}
    assert on == {
        "optimizer.state.weight.exp_avg": 0,
        "optimizer.state.weight.exp_avg_sq": 0,
        "optimizer.state.weight.step": None,  # torch keeps it in host memory
    }
    buffers = {each.tensor.data_ptr() for each in placement.fills}
    assert all(state["exp_avg"].data_ptr() in buffers for state in again.state.values())  # not copied again
    assert_same(again.state_dict(), optimizer.state_dict())


def test_new_tensors_are_made_on_the_gpu_when_they_are_asked_for(gpus: Standing) -> None:
    state: dict[str, Any] = {
        "model": {
            "w": torch.ones(3),
            "t": torch.arange(6.0).reshape(2, 3).t(),
            "bits": torch.ones(2, dtype=torch.int8),
        },
        "array": np.arange(5),
        "long": b"x" * 5000,
    }
    saved = Saved(state)
    gpus.home = 2
    placement = build(saved.skeleton)
    assert {gpu for label, gpu in _filled(placement).items() if label in ("w", "t", "bits")} == {2}
    assert {gpu for label, gpu in _filled(placement).items() if label not in ("w", "t", "bits")} == {None}
    assert len(gpus.made) == 3 and placement.gpus == [2]
    assert_same(fill(placement, saved.files), state)


def test_what_was_read_is_dropped_as_it_is_cast() -> None:
    saved = Saved({"model": {f"w{number}": torch.full((100,), float(number)) for number in range(3)}})
    placement = build(saved.skeleton, dtype=torch.float16)
    tensors = placement._finish.__closure__  # type: ignore[union-attr]
    assert tensors is not None
    loaded = fill(placement, saved.files)["model"]
    [decoder] = [cell.cell_contents for cell in tensors if hasattr(cell.cell_contents, "tensors")]
    assert decoder.tensors._fills == {}
    assert [value.tolist() for value in loaded.values()] == [[float(number)] * 100 for number in range(3)]


def test_tensors_that_are_one_memory_are_cast_once() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    saved = Saved({"model": {"w": weight, "same": weight, "flat": weight.view(6)}, "array": weight.numpy()})
    loaded = saved.load(dtype=torch.float16)
    assert loaded["model"]["same"] is loaded["model"]["w"] and loaded["array"].dtype == np.float32
    assert loaded["model"]["flat"].data_ptr() == loaded["model"]["w"].data_ptr()
    assert loaded["model"]["flat"].tolist() == loaded["array"].ravel().tolist() == [0, 1, 2, 3, 4, 5]

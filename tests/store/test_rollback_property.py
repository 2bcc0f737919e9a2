"""Whatever is in a state, and whatever changes after a save: a restore by number gives what a fresh process gets."""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakecuda import FakeCuda
from tests.store.gpubench import Bench, benches, opened


@pytest.fixture(scope="module")
def bench(driver: FakeCuda) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch, benches(driver, patch) as made:
        yield made


PLAIN = st.sampled_from(
    [0, 1, True, 1.0, 0.0, -0.0, None, "a", float("inf"), (1, 2), [1, [2]], {"x": 1}, b"ab", 1 << 70]
)
KINDS = ("tensor", "view", "strided", "module", "optimizer", "nested", "plain", "array", "cpu")


class State:
    """A state with parts of some kinds, and ways to change it."""

    def __init__(self, bench: Bench, kinds: list[str], plain: list[Any], seed: int) -> None:
        torch.manual_seed(seed)
        self.choose, self.plain = random.Random(seed), plain
        base = bench.on.put(torch.randn(40, 50))
        net = torch.nn.Sequential(torch.nn.Linear(20, 60), torch.nn.Linear(60, 3))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        net(torch.randn(2, 20)).sum().backward()
        optimizer.step()
        bench.on.put([net, optimizer])
        made: dict[str, Any] = {
            "tensor": {"t": bench.on.put(torch.randn(3000)), "u": bench.on.put(torch.randn(7).to(torch.bfloat16))},
            "view": {"base": base, "rows": base[3:9], "tied": base},
            "strided": {"s": bench.on.put(torch.randn(30, 40)).t()},
            "module": net,
            "optimizer": optimizer,
            "nested": {"net": torch.nn.Linear(4, 4), "v": copy.deepcopy(plain), "list": [bench.on.put(torch.randn(9))]},
            "plain": copy.deepcopy(plain[0]),
            "array": np.arange(2000.0),
            "cpu": {"ema": torch.randn(5000), "n": copy.deepcopy(plain[-1])},
        }
        self.state = {kind: made[kind] for kind in kinds}

    def change(self) -> None:
        for kind, value in self.state.items():
            if self.choose.random() < 0.5:
                continue
            if kind == "plain":
                self.state[kind] = self.choose.choice(self.plain)
            elif kind == "array":
                value += 1
            elif kind == "optimizer":
                value.param_groups[0]["lr"] = self.choose.choice((0.1, 0.2))
                next(iter(value.state.values()))["exp_avg"].mul_(2)
            else:
                with torch.no_grad():
                    for tensor in _tensors(value):
                        tensor.add_(1)
                if kind == "cpu":
                    value["n"] = self.choose.choice(self.plain)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, torch.nn.Module):
        return list(value.parameters())
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _seen(value: Any) -> Any:
    """What can be compared, down to types and signs."""
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return _seen(value.state_dict())
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.stride(), value.detach().float().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return [(key, _seen(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [_seen(item) for item in value]
    return repr(value)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, unique=True),
    plain=st.lists(PLAIN, min_size=2, max_size=4),
    seed=st.integers(0, 1000),
)
def test_whatever_changes_meanwhile_a_restore_gives_what_was_saved(
    bench: Bench, kinds: list[str], plain: list[Any], seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as store:
        one, seen = State(bench, kinds, plain, seed), {}
        for step in range(1, 6):
            one.change()
            seen[step] = _seen(one.state)
            store.save(step, one.state).wait("nvme")
        for step in one.choose.sample(sorted(seen), 4):
            one.change()
            found = store.restore(one.state, step=step)
            assert found is not None and found.step == step
            assert _seen(one.state) == seen[step], (step, found.sources)

"""Guards: what save() still waits for, which update waits for what, and what makes a save fail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepwell
from stepwell import SaveFailed, guarding
from stepwell.native import Latch
from stepwell.tiers.wrap import Fault
from tests.store.guarded import Stuck, Training, differences, frozen, in_thread, opened
from tests.store.helpers import ALWAYS, disk, host

BIG = 2 << 20  # floats: more than the memory that `Stuck` has


def _sgd(*tensors: torch.Tensor) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(t) if t.dtype.is_floating_point else t for t in tensors], lr=1.0)


def _step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()


def _parameters(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {f"w{i}": p for i, p in enumerate(optimizer.param_groups[0]["params"])}


def _restored(store: stepwell.CheckpointStore, step: int, **like: torch.Tensor) -> dict[str, torch.Tensor]:
    target = {"model": {name: torch.full_like(t, -1.0).detach() for name, t in like.items()}}
    assert store.restore(target, step=step) is not None
    return target["model"]


def test_a_save_returns_before_its_copies_and_the_update_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, optimizer = Stuck(tmp_path, monkeypatch), _sgd(torch.zeros(BIG))
    with opened(stuck.tiers) as store:
        store.guard(optimizer)
        save = store.save(1, {"model": _parameters(optimizer)})
        assert not save.copied.done() and not save.captured.done() and stuck.waits == 0
        _step(optimizer)
        assert stuck.waits == 1
        save.wait()
        assert not _restored(store, 1, **_parameters(optimizer))["w0"].any()
        assert save.cover is None  # nothing of the state is kept alive


def test_what_no_guard_covers_is_copied_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, optimizer = Stuck(tmp_path, monkeypatch, mebibytes=16), _sgd(torch.zeros(4 * BIG))
    ema, mean, count = torch.zeros(400_000), torch.zeros(64), torch.zeros(())
    array, words, strided = np.zeros(500_000), {"n": [1, "two"]}, torch.zeros(64, 64)
    with opened(stuck.tiers) as store:
        store.guard(optimizer)
        beside = {"mean": mean, "count": count, "words": words, "array": array, "t": strided.t(), "ema": ema}
        save = store.save(1, {"beside": beside, "model": _parameters(optimizer)})
        assert save.captured.done() and not save.copied.done()
        expected = frozen(beside)
        for tensor in (ema, mean, count, strided):
            tensor.add_(1)
        array += 1
        words["n"][0] = 2
        stuck.go()
        save.wait()
        found = {"beside": {**{k: torch.ones_like(v) for k, v in beside.items() if isinstance(v, torch.Tensor)},
                            "array": np.ones(500_000), "words": {"n": [0, ""]}}}  # fmt: skip
        store.restore(found)
        assert differences(expected, frozen(found["beside"])) == []


def test_an_update_waits_for_its_own_tensors_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(tmp_path, monkeypatch, mebibytes=8)
    one, other = _sgd(torch.zeros(1 << 18)), _sgd(torch.zeros(BIG))
    with opened(stuck.tiers) as store:
        store.guard(one)
        store.guard(other)
        save = store.save(1, {"a": _parameters(one), "b": _parameters(other)})
        stuck.goes = False
        _step(one)  # at most its own few chunks are waited for, and memory has room for those
        assert not save.copied.done()
        stuck.goes, stuck.waits = True, 0
        _step(other)
        assert stuck.waits == 1
        save.wait()
        assert not _restored_parts(store, a=one, b=other).any()


def _restored_parts(store: stepwell.CheckpointStore, **optimizers: torch.optim.Optimizer) -> torch.Tensor:
    target = {k: {n: torch.ones_like(p).detach() for n, p in _parameters(o).items()} for k, o in optimizers.items()}
    store.restore(target)
    return torch.cat([t for part in target.values() for t in part.values()])


def test_tensors_of_two_guards_are_waited_for_by_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = torch.nn.Parameter(torch.zeros(BIG))
    for step, which in enumerate((0, 1), 1):
        folder = tmp_path / str(which)
        folder.mkdir()
        with monkeypatch.context() as patch:
            stuck, optimizers = Stuck(folder, patch), [torch.optim.SGD([shared], lr=1.0) for _ in range(2)]
            with opened(stuck.tiers) as store:
                for optimizer in optimizers:
                    store.guard(optimizer)
                before = shared.detach().clone()
                save = store.save(step, {"model": {"w": shared}})
                _step(optimizers[which])
                assert stuck.waits == 1
                _step(optimizers[1 - which])
                save.wait()
                assert torch.equal(_restored(store, step, w=shared)["w"], before)


def test_modules_and_tensors_are_announced_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, norm = Stuck(tmp_path, monkeypatch), torch.nn.BatchNorm1d(BIG)
    with opened(stuck.tiers) as store:
        store.guard(norm)  # its parameters: statistics change in the forward
        save = store.save(1, {"weight": {"w": norm.weight}})
        assert not save.captured.done()
        store.before_update()
        assert stuck.waits == 1
        torch.nn.init.zeros_(norm.weight)
        save.wait()
        assert (_restored_as(store, "weight") == 1).all()


def _restored_as(store: stepwell.CheckpointStore, part: str) -> torch.Tensor:
    target = {part: {"w": torch.zeros(BIG)}}
    store.restore(target)
    return target[part]["w"]


@pytest.mark.parametrize("late", [False, True], ids=["found by the update", "found after the copy"])
def test_a_change_that_nobody_announced_fails_the_save_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    stuck, optimizer = Stuck(tmp_path, monkeypatch), _sgd(torch.zeros(BIG))
    with opened(stuck.tiers) as store:
        store.guard(optimizer)
        state = {"model": _parameters(optimizer)}
        save = store.save(1, state)
        with torch.no_grad():
            state["model"]["w0"].add_(1)
        if late:
            stuck.go()
        else:
            _step(optimizer)
        with pytest.raises(SaveFailed, match=r"model\.w0.*before_update|changed after save.*model\.w0"):
            save.wait()
        with pytest.raises(SaveFailed, match="first save"):
            store.save(2, state)
        store.save(3, state).wait()
        assert [c.step for c in store.checkpoints()] == [3]


def test_an_update_waits_only_so_long_then_the_save_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, optimizer = Stuck(tmp_path, monkeypatch), _sgd(torch.zeros(BIG))
    stuck.goes = False
    with opened(stuck.tiers, block_timeout=0.2) as store:
        store.guard(optimizer)
        saves = [store.save(step, {"model": _parameters(optimizer)}) for step in (1, 2)]
        _step(optimizer)  # both together: not so long for each
        assert stuck.waits <= 2
        for save in saves:
            with pytest.raises(SaveFailed, match="an update of guarded tensors blocked for block_timeout"):
                save.wait(timeout=60)
        stuck.go()
        with pytest.raises(SaveFailed, match="first save"):
            store.save(3, {"model": _parameters(optimizer)})
        store.save(4, {"model": _parameters(optimizer)}).wait()
        assert [c.step for c in store.checkpoints()] == [4]


def test_ctrl_c_while_an_update_waits_leaves_the_next_one_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, optimizer = Stuck(tmp_path, monkeypatch), _sgd(torch.zeros(BIG))
    with opened(stuck.tiers) as store:
        store.guard(optimizer)
        save = store.save(1, {"model": _parameters(optimizer)})
        with monkeypatch.context() as patch:
            patch.setattr(Latch, "wait", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                _step(optimizer)
        assert not save.copied.done() and not optimizer.param_groups[0]["params"][0].any()
        _step(optimizer)
        assert stuck.waits == 1
        save.wait()
        assert not _restored(store, 1, **_parameters(optimizer))["w0"].any()


def _interrupted(latch: Latch, timeout: float | None = None) -> bool:
    raise KeyboardInterrupt


def test_a_failed_save_leaves_no_update_waiting(tmp_path: Path, short_pauses: None) -> None:
    optimizer = _sgd(torch.zeros(BIG))
    faulty = disk(tmp_path, [Fault("write", 1, "error", times=ALWAYS)])
    with opened([host(4), faulty], block_timeout=600) as store:
        store.guard(optimizer)
        save = store.save(1, {"model": _parameters(optimizer)})
        _step(optimizer)
        with pytest.raises(SaveFailed):
            save.wait(timeout=60)
        faulty.plan = []
        with pytest.raises(SaveFailed, match="first save"):
            store.save(2, {"model": _parameters(optimizer)})
        store.save(3, {"model": _parameters(optimizer)}).wait()


def test_removed_guards_copy_before_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, optimizer = Stuck(tmp_path, monkeypatch), _sgd(torch.zeros(BIG))
    with opened(stuck.tiers) as store:
        guard = store.guard(optimizer)
        save = store.save(1, {"model": _parameters(optimizer)})
        guard.remove()
        assert stuck.waits == 1 and not optimizer._optimizer_step_pre_hooks
        guard.remove()
        save.wait()
        second = store.save(2, {"model": _parameters(optimizer)})
        assert second.captured.done() and second.cover is None


def test_restore_waits_for_what_another_store_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, elsewhere = _sgd(torch.zeros(BIG)), tmp_path / "elsewhere"
    elsewhere.mkdir()
    state = {"model": _parameters(optimizer)}
    with opened([host(64), disk(elsewhere)]) as other:
        other.save(1, {"model": {"w0": torch.full((BIG,), 7.0)}}).wait()
        stuck = Stuck(tmp_path, monkeypatch)
        with opened(stuck.tiers) as store:
            store.guard(optimizer)
            save = store.save(1, state)
            other.restore(state)
            assert stuck.waits == 1 and (optimizer.param_groups[0]["params"][0] == 7).all()
            save.wait()
            assert not _restored(store, 1, **_parameters(optimizer))["w0"].any()


def test_a_child_that_trains_on_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, optimizer = Stuck(tmp_path, monkeypatch), _sgd(torch.zeros(BIG))
    with opened(stuck.tiers) as store:
        guard = store.guard(optimizer)
        save = store.save(1, {"model": _parameters(optimizer)})
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                optimizer.step()  # no gradients: torch's threads do not come along
                store.before_update()
                guard.remove()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        stuck.go()
        save.wait()


def test_a_store_that_is_dropped_still_holds_updates_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, optimizer = Stuck(tmp_path, monkeypatch), _sgd(torch.zeros(BIG))
    store = opened(stuck.tiers)
    store.guard(optimizer)
    save = store.save(1, {"model": _parameters(optimizer)})
    del store
    _step(optimizer)
    assert stuck.waits == 1
    save.wait()
    _step(optimizer)
    with opened([host(64), disk(tmp_path)]) as again:
        assert not _restored(again, 1, **_parameters(optimizer))["w0"].any()


def test_a_steady_training_is_worked_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, made = Training(torch.optim.AdamW), 0
    fresh: list[torch.Tensor] = []
    work_out = guarding.Guards._work_out

    def counted(*given: Any) -> Any:
        nonlocal made
        made += 1
        return work_out(*given)

    monkeypatch.setattr(guarding.Guards, "_work_out", counted)
    with opened([host(128), disk(tmp_path)]) as store:
        store.guard(training.optimizers[0])
        for step in range(1, 7):
            fresh.append(torch.rand(2000))  # as RNG states are, it is another tensor in each save
            store.save(step, {**training.state, "rng": stepwell.RNG(), "fresh": fresh[-1]}).wait()
            training.train()
            waiting = [lazy for line in store._guards._lazy.values() for lazy in line]
            assert not waiting and len(store._guards._known) <= 2
    assert made == 2  # before and after the first update, which makes the optimizer's state


def test_saves_without_updates_pile_up_nothing(tmp_path: Path) -> None:
    optimizer = _sgd(torch.zeros(1 << 16))
    with opened([host(), disk(tmp_path)]) as store:
        store.guard(optimizer)
        for step in range(1, 20):
            store.save(step, {"model": _parameters(optimizer)}).wait()
        assert sum(map(len, store._guards._lazy.values())) == 1


def test_two_threads_that_update_wait_each_for_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, optimizers = Stuck(tmp_path, monkeypatch), [_sgd(torch.zeros(BIG)) for _ in range(2)]
    with opened(stuck.tiers) as store:
        for optimizer in optimizers:
            store.guard(optimizer)
        save = store.save(1, {"a": _parameters(optimizers[0]), "b": _parameters(optimizers[1])})
        threads = [in_thread(lambda mine=optimizer: _step(mine)) for optimizer in optimizers]  # type: ignore[misc]
        for thread in threads:
            thread.join(60)
        save.wait()
        assert not _restored_parts(store, a=optimizers[0], b=optimizers[1]).any()

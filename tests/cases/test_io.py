"""Cases G1 to G14: io_uring refused, odd sizes, signals, forks, leaks, event loops, imports. Through the public API."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.tiers.base import ChunkIO
from stepwell.tiers.file import FileTier
from tests.cases.helpers import saved, script, shards, through
from tests.mounts import mounted
from tests.resources import comes_back_to, describe_files, in_use
from tests.seccomp import FORBID_URING
from tests.state.memory import assert_same

#: argv: errno, folder. Forbids io_uring_setup in this process, then saves, restores and loads.
UNDER_SECCOMP = (
    FORBID_URING
    + """
import logging
logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
import torch, stepwell
weight = torch.arange(3_000_000)
with stepwell.open(sys.argv[2]) as store:
    [disk] = [tier for tier in store.tiers if tier.info.driver == "file"]
    print(disk.info.detail["engine"])
    store.save(1, {"w": weight}).wait()
    target = {"w": torch.zeros_like(weight)}
    store.restore(target)
    assert torch.equal(target["w"], weight)
assert torch.equal(stepwell.load(sys.argv[2])["w"], weight)
"""
)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_G1_without_io_uring_threads_take_over_and_the_reason_can_be_asked(tmp_path: Path, number: int) -> None:
    """The sysctl: tests/native/test_life.py."""
    done = script(UNDER_SECCOMP, number, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("threads: ")
    reason = done.stdout.removeprefix("threads: ").strip()
    assert errno.errorcode[number] in reason and "seccomp" in reason or reason == "built without liburing"


SIZES = [0, 1, 511, 512, 4095, 4096, 4097, (1 << 20) - 1, (1 << 20) + 1, 3_000_001]


@pytest.mark.parametrize("direct", [None, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_G3_odd_sizes_at_odd_offsets_are_exact(tmp_path: Path, engine: Any, direct: bool | None) -> None:
    state: dict[str, Any] = {"model": {}}
    for size in SIZES:
        memory = torch.randint(0, 255, (size + 8,), dtype=torch.uint8)
        state["model"][f"s{size}"] = memory[3 : 3 + size]  # also the source is aligned to nothing
    with stepwell.open(tiers=[FileTier(tmp_path, name="disk", engine=engine, direct=direct)], run="run") as store:
        store.save(1, state).wait()
        target = {"model": {key: torch.zeros_like(tensor) for key, tensor in state["model"].items()}}
        store.restore(target)
    assert_same(target, state)
    [shard] = shards(tmp_path / "run")
    assert shard.stat().st_size == 4096 + sum(SIZES)  # to the byte: no padding is left at the end


OUT_AFTER = """
import asyncio, os, signal, sys, threading, time, torch, stepwell
from stepwell.tiers.file import FileTier
from stepwell.tiers.wrap import Throttled

def out_after(call):
    sent = []
    def strike():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
    try:
        threading.Timer(0.3, strike).start()
        call()
    except KeyboardInterrupt:
        return time.monotonic() - sent[0]
"""

INTERRUPT = """
tier = Throttled(FileTier(sys.argv[1], name="disk"), 2e6, time.monotonic, asyncio.sleep)
store = stepwell.open(tiers=[tier], run="run")
store.save(1, {"w": torch.full((1000,), 1.0)}).wait()
save = store.save(2, {"w": torch.full((10_000_000,), 2.0)})         # 20 seconds
print(min(out_after(save.wait) for _ in range(3)))
assert not save.done()
os._exit(0)                                                         # as a second Ctrl-C does
"""


def test_G6_ctrl_c_gets_out_of_a_wait_at_once_and_leaves_no_half_commit(tmp_path: Path) -> None:
    """A thousand signals a second during saves and restores: tests/store/test_processes.py."""
    done = script(OUT_AFTER + INTERRUPT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1, "seconds, the best of three: other work on the machine only ever adds to it"
    assert stepwell.load(tmp_path / "run")["w"][0] == 1
    with stepwell.open(tmp_path / "run") as store:
        assert store.restore({"w": torch.zeros(1000)}) is not None
        store.save(3, {"w": torch.full((1000,), 3.0)}).wait()
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [1, 3]


INTERRUPTED_RESTORE = """
tier = Throttled(FileTier(sys.argv[1], name="disk"), 2e6, time.monotonic, asyncio.sleep)
target = {"w": torch.zeros(10_000_000)}
with stepwell.open(tiers=[tier], run="run", mode="r") as store:
    print(min(out_after(lambda: store.restore(target)) for _ in range(3)))  # would take 20 seconds
with stepwell.open(sys.argv[1] + "/run", mode="r") as store:          # again
    store.restore(target)
assert bool((target["w"] == 2).all())
"""


def test_G6_ctrl_c_gets_out_of_a_restore_which_can_be_repeated(tmp_path: Path) -> None:
    saved(tmp_path / "run", {"w": torch.full((10_000_000,), 2.0)})
    done = script(OUT_AFTER + INTERRUPTED_RESTORE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1


def test_G7_completions_out_of_order_reach_the_right_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    sizes = [rng.choice([1, 100, 5000, 70_000, 1_500_000]) for _ in range(60)]
    state = {
        f"part{p}": {f"t{n}": torch.full((size,), 60 * p + n, dtype=torch.int32) for n, size in enumerate(sizes[p::3])}
        for p in range(3)
    }
    run = saved(tmp_path / "run", state)
    read = FileTier.read

    async def shuffled(tier: FileTier, chunks: Sequence[ChunkIO]) -> Any:
        for _ in range(rng.randrange(50)):
            await asyncio.sleep(0)
        return await read(tier, chunks)

    monkeypatch.setattr(FileTier, "read", shuffled)
    target = {part: {key: torch.zeros_like(t) for key, t in tensors.items()} for part, tensors in state.items()}
    with stepwell.open(run, mode="r") as store:
        store.restore(target)
    assert_same(target, state)
    assert_same(stepwell.load(run), state)


def test_G9_more_tensors_than_one_call_of_the_system_takes(tmp_path: Path) -> None:
    """5000 in one batch; lengths beyond 32 bits: tests/native and tests/campaign/large.py."""
    state = {"model": {f"t{n}": torch.full((n % 7 + 1,), n, dtype=torch.int16) for n in range(5000)}}
    assert_same(through(tmp_path / "run", state), state)
    target = {"model": {key: torch.zeros_like(tensor) for key, tensor in state["model"].items()}}
    with stepwell.open(tmp_path / "run", mode="r") as store:
        store.restore(target)
    assert_same(target, state)


def test_G11_waiting_in_a_coroutine_costs_the_same_few_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many small tensors are few large operations, also through `await`."""
    state = {"model": {f"t{n}": torch.full((256,), float(n)) for n in range(5000)}}
    calls: list[int] = []
    write = FileTier.write

    async def counted(tier: FileTier, chunks: Sequence[ChunkIO]) -> Any:
        calls.append(sum(chunk.length for chunk in chunks))
        return await write(tier, chunks)

    monkeypatch.setattr(FileTier, "write", counted)

    async def main() -> None:
        with stepwell.open(tmp_path / "run") as store:
            ticks = 0

            async def tick() -> None:
                nonlocal ticks
                while True:
                    await asyncio.sleep(0)
                    ticks += 1

            ticking = asyncio.ensure_future(tick())
            save = await store.save(1, state)
            assert save.done() and ticks > 0, "other coroutines run while one waits"
            ticking.cancel()

    asyncio.run(main())
    assert sum(calls) >= 5000 * 1024 and len(calls) < 10
    assert_same(stepwell.load(tmp_path / "run"), state)


@pytest.fixture(params=["plain", "direct_io"])
def fuse(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A pass-through file system in user space; with direct_io the kernel caches nothing and refuses shared mmap."""
    behind = tmp_path / "behind"
    behind.mkdir()
    options = ["-o", "direct_io"] if request.param == "direct_io" else []
    with mounted(["bindfs", *options, behind, tmp_path / "point"], tmp_path / "point") as point:
        yield point


def test_G10_a_file_system_in_user_space(fuse: Path) -> None:
    state = {"model": {"w": torch.arange(3_000_000), "v": torch.ones(5)}, "step": 3}
    target = {"model": {"w": torch.zeros(3_000_000, dtype=torch.int64), "v": torch.zeros(5)}, "step": 0}
    with stepwell.open(fuse / "run") as store:
        store.save(1, state).wait()
        store.restore(target)
        assert store.debris() == []
    assert_same(target, state)
    assert_same(stepwell.load(fuse / "run"), state)


@pytest.mark.parametrize("way", ["closed", "dropped"])
def test_G12_stores_leave_no_threads_and_no_files(tmp_path: Path, way: str) -> None:
    """1000 of each: tests/campaign/large.py."""
    saved(tmp_path / "run", {"w": torch.ones(10)})
    with stepwell.open(tmp_path / "run", mode="r") as store:
        store.restore({"w": torch.zeros(10)})
    before = in_use()
    for _ in range(60):
        store = stepwell.open(tmp_path / "run", mode="r")
        store.restore({"w": torch.zeros(10)})
        if way == "closed":
            store.close()
        del store
    assert comes_back_to(before, spare=4), describe_files()


def test_G12_what_a_closed_store_held_in_memory_is_not_looked_for_there(tmp_path: Path) -> None:
    weight = torch.arange(5_000_000)
    store = stepwell.open(tmp_path / "run")
    store.save(1, {"w": weight}).wait()
    store.close()
    for keys in ("*", "w", {"w": slice(0, 5_000_000)}):
        assert torch.equal(stepwell.load(tmp_path / "run", keys=keys)["w"], weight)  # the store object still exists
    with pytest.raises(stepwell.StoreClosed):
        store.restore({"w": weight})


def test_G12_event_loops_leave_nothing(tmp_path: Path) -> None:
    async def once(step: int) -> None:
        await store.save(step, {"w": torch.ones(10)})

    with stepwell.open(tmp_path / "run") as store:
        asyncio.run(once(1))
        before = in_use()
        for step in range(2, 40):
            asyncio.run(once(step))
        assert comes_back_to(before, spare=2), describe_files()


IMPORT = """
import sys, time
import torch, numpy
began = time.process_time()
import stepwell
seconds = time.process_time() - began
import os, threading
assert not torch.cuda.is_initialized()
assert threading.active_count() == 1, threading.enumerate()
assert not any(name.split(".")[0] in ("cupy", "rich", "typer", "triton", "safetensors") for name in sys.modules)
store = stepwell.open(sys.argv[1])
store.save(1, {"w": torch.ones(3), "rng": stepwell.RNG()}).wait()
store.restore({"w": torch.zeros(3)})
store.close()
assert not torch.cuda.is_initialized()
pid = os.fork()
if not pid:
    os._exit(0 if stepwell.load(sys.argv[1], part="w").sum() == 3 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print(seconds)
"""


def test_G14_importing_is_quick_starts_nothing_and_touches_no_gpu(tmp_path: Path) -> None:
    done = script(IMPORT, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2, "seconds of CPU beyond torch; some 0.2 when nothing else runs"


WITHOUT = """
import sys
sys.modules["stepwell.native._engine"] = None
try:
    import stepwell
except ImportError as error:
    print(error)
"""


def test_G14_without_the_native_part_the_message_says_how_to_build_it() -> None:
    done = script(WITHOUT)
    assert done.returncode == 0, done.stderr
    assert "pip install" in done.stdout

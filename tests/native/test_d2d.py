"""PACK and UNPACK against a plain model, on the driver without a GPU and, where there is one, on a real one."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stepwell.native import DeviceEngine, Done, Engine, Job, Latch, Op, PieceMap, Ticket, probe_device
from stepwell.native import _kernels as kernels
from tests.fakecuda import GATHER, MOVE, SCATTER, FakeCuda

Run = Callable[[Engine, list[Job]], list[Done]]
Wait = Callable[[Engine, int], list[Done]]
Bytes = NDArray[np.uint8]
WAIT_S = 60.0
SMALL = 64 << 10  # pieces below move together
#: the kernel that moves all, those that gather and scatter what is small, none
WAYS = {"moves": (GATHER, SCATTER, MOVE), "kernels": (GATHER, SCATTER), "copies": ()}
PROPERTY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


class Device:
    """An engine, and the hand of tests in its device's memory."""

    def __init__(self, engine: DeviceEngine, run: Run) -> None:
        self.engine, self._run, self._held = engine, run, set[int]()

    def room(self, content: Bytes) -> int:
        address = self.engine.allocate(content.size)
        self._held.add(address)
        whole = PieceMap(np.array([0, content.size]), np.array([address], np.uint64))
        job = Job(Op.H2D, address=content.ctypes.data, length=content.size, pieces=whole, keep=content)
        assert self._run(self.engine, [job])[0].result == content.size
        return address

    def content(self, address: int, size: int) -> Bytes:
        found = np.zeros(size, np.uint8)
        whole = PieceMap(np.array([0, size]), np.array([address], np.uint64))
        job = Job(Op.D2H, address=found.ctypes.data, length=size, pieces=whole, keep=found)
        assert self._run(self.engine, [job])[0].result == size
        return found

    def clear(self) -> None:
        for address in self._held:
            self.engine.free(address)
        self._held.clear()


@pytest.fixture(params=[*WAYS, *(pytest.param(f"gpu {how}", marks=pytest.mark.gpu) for how in WAYS)])
def device(request: pytest.FixtureRequest, run: Run) -> Iterator[Device]:
    driver, _, how = request.param.rpartition(" ")
    if not driver:
        if shutil.which("cc") is None:
            pytest.skip("no C compiler, which the driver without a GPU needs")
        engine, functions = request.getfixturevalue("make_device")(), WAYS[how]
    elif not probe_device()[0]:
        pytest.skip(probe_device()[1])
    else:
        engine = DeviceEngine("gpu", 0)
    if driver and how != "copies":
        pytest.importorskip("torch").cuda.init()
        module, names = pytest.importorskip("cupy").RawModule(code=kernels.SOURCE), ["", *kernels.NAMES]
        functions = tuple(module.get_function(names[number]).kernel.ptr for number in WAYS[how])
    if how != "copies":
        engine.use_kernels(*functions)
    device = Device(engine, run)
    yield device
    device.clear()
    if driver:
        assert engine.close()


class Layout:
    """Where the bytes of a shard lie: cut into runs, each anywhere in one stretch of memory, some of them holes."""

    def __init__(self, sizes: list[int], holes: list[bool], seed: int) -> None:
        order = np.random.default_rng(seed).permutation(len(sizes))
        starts = np.zeros(len(sizes), np.int64)
        starts[order] = np.concatenate([[0], np.cumsum(np.array(sizes)[order] + 3)])[:-1]
        self.holes = np.array(holes)
        self.offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.uint64)
        self.starts, self.total, self.memory_bytes = starts, sum(sizes), sum(sizes) + 3 * len(sizes) + 1
        #: of each byte of the shard, its place in that memory; -1: it has none
        self.places = np.concatenate(
            [
                np.full(size, -1) if hole else np.arange(start, start + size)
                for size, hole, start in zip(sizes, holes, starts.tolist(), strict=True)
            ]
        )

    def at(self, address: int) -> PieceMap:
        return PieceMap(self.offsets, np.where(self.holes, 0, self.starts + address).astype(np.uint64))

    def noise(self, seed: int) -> Bytes:
        return np.random.default_rng(seed).integers(0, 256, self.memory_bytes, dtype=np.uint8)


def state_of(items: list[tuple[int, int, bool]], seed: int) -> Layout:
    runs = [(count if size < 3000 else 1 + count % 3, size, hole) for count, size, hole in items]
    sizes = [size for count, size, _ in runs for _ in range(count)]
    return Layout(sizes, [hole for count, _, hole in runs for _ in range(count)], seed)


def slots_of(total: int, size: int, holes: list[bool], seed: int) -> Layout:
    sizes = [min(size, total - at) for at in range(0, total, size)] or [0]
    return Layout(sizes, [holes[index % len(holes)] for index in range(len(sizes))], seed)


sizes = st.one_of(st.integers(0, 300), st.sampled_from([4096, SMALL - 1, SMALL, SMALL + 1]), st.integers(0, 1_200_000))
#: how many pieces, how large each, whether they are holes
states = st.lists(
    st.tuples(st.integers(1, 300), sizes, st.integers(0, 4).map(lambda n: n == 0)), min_size=1, max_size=6
)


@dataclass
class Case:
    """A shard in two memories, its slots, and the bytes of it that a job is about."""

    state: Layout
    other: Layout
    slots: Layout
    start: int
    length: int
    seed: int

    def memories(self) -> list[Bytes]:
        return [layout.noise(self.seed + index) for index, layout in enumerate((self.state, self.slots, self.other))]

    def common(self) -> NDArray[np.intp]:
        """Those that are no holes in the first memory and in the slots."""
        mine = np.arange(self.start, self.start + self.length)
        return mine[(self.state.places[mine] >= 0) & (self.slots.places[mine] >= 0)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    items, seed = draw(states), draw(st.integers(0, 99))
    state = state_of(items, seed)
    holes = draw(st.lists(st.integers(0, 3).map(lambda n: n == 0), min_size=1, max_size=9))
    slots = slots_of(state.total, draw(st.sampled_from([4096, 50_000, SMALL, 1 << 20, 8 << 20])), holes, seed)
    start = draw(st.integers(0, state.total))
    return Case(state, state_of(items, seed + 1), slots, start, draw(st.integers(0, state.total - start)), seed)


@given(case=cases())
@PROPERTY
def test_what_is_packed_and_unpacked_equals_the_model(device: Device, run: Run, case: Case) -> None:
    """Also that nothing else is touched: not the source, no hole, not a byte around the job's."""
    state, other, slots, start, length = case.state, case.other, case.slots, case.start, case.length
    before, between, after = memories = case.memories()
    here, slotted, there = (device.room(memory) for memory in memories)
    common = case.common()

    pack = Job(Op.PACK, length=length, pieces=state.at(here), pieces_offset=start, slots=slots.at(slotted))
    assert run(device.engine, [pack])[0].result == length
    between[slots.places[common]] = before[state.places[common]]
    assert np.array_equal(device.content(slotted, between.size), between)
    assert np.array_equal(device.content(here, before.size), before)

    unpack = Job(Op.UNPACK, length=length, pieces=other.at(there), pieces_offset=start, slots=slots.at(slotted))
    assert run(device.engine, [unpack])[0].result == length
    after[other.places[common]] = before[state.places[common]]
    assert np.array_equal(device.content(there, after.size), after)
    assert np.array_equal(device.content(slotted, between.size), between)
    device.clear()


@given(case=cases())
@PROPERTY
def test_what_crosses_to_slots_and_from_them_equals_the_model(device: Device, run: Run, case: Case) -> None:
    """Slots of host memory, anywhere, in one job each way."""
    start, length, common = case.start, case.length, case.common()
    before, host, after = case.memories()
    here, there, at_host = device.room(before), device.room(after), case.slots.at(host.ctypes.data)
    expected = host.copy()

    down = Job(Op.D2H, length=length, pieces=case.state.at(here), pieces_offset=start, slots=at_host, keep=host)
    assert run(device.engine, [down])[0].result == length
    expected[case.slots.places[common]] = before[case.state.places[common]]
    assert np.array_equal(host, expected) and np.array_equal(device.content(here, before.size), before)

    up = Job(Op.H2D, length=length, pieces=case.other.at(there), pieces_offset=start, slots=at_host, keep=host)
    assert run(device.engine, [up])[0].result == length
    after[case.other.places[common]] = before[case.state.places[common]]
    assert np.array_equal(device.content(there, after.size), after) and np.array_equal(host, expected)
    device.clear()


def test_small_pieces_move_together_within_a_slot(device: Device, run: Run) -> None:
    """240 pieces a kernel, straight to the slot: no memory for a stage. Three small ones are not worth a kernel. Or all
    by the kernel that moves runs, 170 each time."""
    lengths = [1000] * 500 + [SMALL] + [8, 8, 8] + [1 << 20]
    state, slots = Layout(lengths, [False] * len(lengths), 0), slots_of(sum(lengths), 1 << 20, [False], 0)
    content = state.noise(1)
    here, slotted = device.room(content), device.room(slots.noise(2))
    counts = device.engine.statistics()
    pack = Job(Op.PACK, length=state.total, pieces=state.at(here), slots=slots.at(slotted))
    unpack = Job(Op.UNPACK, length=state.total, pieces=state.at(here), slots=slots.at(slotted))
    assert [done.result for done in run(device.engine, [pack, unpack])] == [state.total] * 2
    now = device.engine.statistics()
    assert now.bytes_packed == now.bytes_unpacked == state.total
    assert (now.bytes_fetched, now.bytes_delivered) == (counts.bytes_fetched, counts.bytes_delivered)
    # the second slot's border lies in the last piece
    took = (now.copies - counts.copies, now.kernels - counts.kernels)
    assert took in [(0, 2 * 3), (2 * (1 + 3 + 2), 2 * 3), (2 * (500 + 1 + 3 + 2), 0)]
    assert device.engine.memory_bytes == 0
    assert np.array_equal(device.content(here, content.size), content)


@pytest.mark.parametrize("op", [Op.PACK, Op.UNPACK])
def test_one_job_counts_for_all_chunks_of_a_shard(device: Device, run: Run, op: Op) -> None:
    """Thousands of runs, and a latch that each of thousands of chunks is named for."""
    lengths, chunks = [SMALL] * 100 + [500] * 5000, 5000
    state, slots = Layout(lengths, [False] * len(lengths), 0), slots_of(sum(lengths), 100_000, [False], 1)
    here, slotted = device.room(state.noise(0)), device.room(slots.noise(0))
    latch, other, signal = Latch(chunks + 1), Latch(1), Ticket()
    job = Job(
        op,
        length=state.total,
        pieces=state.at(here),
        slots=slots.at(slotted),
        signal=signal,
        latches=[*[latch] * chunks, other],
    )
    [done] = run(device.engine, [job])
    assert (done.result, done.bad_blocks) == (state.total, 0)
    assert (latch.left, other.left, signal.state) == (1, 0, "done")
    assert np.array_equal(
        device.content(here, state.memory_bytes)[state.places],
        device.content(slotted, slots.memory_bytes)[slots.places],
    )


def test_what_waits_for_a_pack_finds_its_bytes(device: Device, run: Run) -> None:
    """Hundreds of copies to host memory wait for one ticket: that is how packed chunks go down."""
    lengths, slot_bytes = [300, 70_000, 5000] * 300, 64 << 10
    state = Layout(lengths, [False] * len(lengths), 0)
    slots = slots_of(state.total, slot_bytes, [False], 1)
    content = state.noise(7)
    here, slotted = device.room(content), device.room(slots.noise(0))
    host, packed, at_slots = np.zeros(state.total, np.uint8), Ticket(), slots.at(slotted)
    down = [
        Job(
            Op.D2H,
            address=host.ctypes.data + at,
            length=min(slot_bytes, state.total - at),
            pieces=at_slots,
            pieces_offset=at,
            after=packed,
            keep=host,
        )
        for at in range(0, state.total, slot_bytes)
    ]
    assert len(down) > 300
    pack = Job(Op.PACK, length=state.total, pieces=state.at(here), slots=at_slots, signal=packed)
    results = [done.result for done in run(device.engine, [*down, pack])]
    assert results == [job.length for job in (*down, pack)]
    assert np.array_equal(host, content[state.places])


def test_a_cancelled_job_touches_nothing(device: Device, run: Run) -> None:
    """What it waited for has failed; those that wait for it hear of that, and no latch is left behind."""
    content = np.full(SMALL, 1, np.uint8)
    here, slotted = device.room(content), device.room(content * 2)
    whole = Layout([SMALL], [False], 0)
    before, after, latch = Ticket(), Ticket(), Latch(2)
    ops = {Op.PACK: (before, after), Op.UNPACK: (after, None)}
    jobs = [
        Job(
            op,
            length=SMALL,
            pieces=whole.at(here),
            slots=whole.at(slotted),
            after=first,
            signal=then,
            latches=[latch],
        )
        for op, (first, then) in ops.items()
    ]
    before.fire(False)
    assert [done.result for done in run(device.engine, jobs)] == [-errno.ECANCELED] * 2
    assert after.state == "failed" and latch.left == 0
    assert (device.content(here, SMALL) == 1).all() and (device.content(slotted, SMALL) == 2).all()


def test_malformed_jobs_are_refused(device: Device, copier: Engine) -> None:
    """By engines of all kinds, before anything is done."""
    one = PieceMap(np.array([0, 10]), np.array([4096], np.uint64))
    for op in (Op.PACK, Op.UNPACK):
        for job in (Job(op, length=10), Job(op, length=10, pieces=one), Job(op, length=10, slots=one)):
            with pytest.raises(ValueError, match=f"{op.name} needs pieces and slots"):
                device.engine.submit([job])
        with pytest.raises(ValueError, match=f"{op.name} takes no crcs"):
            device.engine.submit([Job(op, length=10, pieces=one, slots=one, crcs=np.zeros(1, np.uint32))])
        with pytest.raises(ValueError, match="not for an engine of kind threads"):
            copier.submit([Job(op, length=10, pieces=one, slots=one)])
    for engine, op in ((copier, Op.SCATTER), (copier, Op.READ), (copier, Op.SYNC)):
        with pytest.raises(ValueError, match=f"{op.name} takes no slots"):
            engine.submit([Job(op, length=10, pieces=one, slots=one)])
    assert device.engine.statistics().jobs_submitted == copier.statistics().jobs_submitted == 0


def test_runs_of_gigabytes_are_cut(make_device: Callable[[], DeviceEngine], fake: FakeCuda, run: Run) -> None:
    """A kernel's lengths have 32 bits. What follows a cut is aligned as what was before it."""
    engine, most = make_device(), (4 << 30) - 4096
    engine.use_kernels(GATHER, SCATTER, MOVE)
    fake.dry()
    lengths = [most, most + 1, 1, (9 << 30) + 5]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64)
    here, there = ((np.arange(4, dtype=np.uint64) << np.uint64(40)) + np.uint64(base) for base in (1 << 45, 1 << 46))
    state, slots = PieceMap(offsets, here), PieceMap(offsets, there)
    job = Job(Op.PACK, length=sum(lengths), pieces=state, slots=slots)
    assert run(engine, [job])[0].result == engine.statistics().bytes_packed == sum(lengths)
    parts = [(0, 0, most), (1, 0, most), (1, most, 1), (2, 0, 1)]
    parts += [(3, 0, most), (3, most, most), (3, 2 * most, (9 << 30) + 5 - 2 * most)]
    assert fake.moved() == [(int(there[run]) + at, int(here[run]) + at, length) for run, at, length in parts]
    assert engine.statistics().kernels == 1


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["gpu moves", "gpu kernels"], indirect=True)
@pytest.mark.parametrize("size", [3000, 1 << 20])
def test_a_real_pack_waits_for_its_mark(device: Device, wait: Wait, size: int) -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(8)]
    lengths = Layout([size] * 8, [False] * 8, 0)
    slotted = device.room(np.zeros(8 * size, np.uint8))
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    for tensor in tensors:
        tensor.fill_(5)
    state = PieceMap(lengths.offsets, np.array([tensor.data_ptr() for tensor in tensors], np.uint64), tensors)
    whole = PieceMap(np.array([0, 8 * size]), np.array([slotted], np.uint64))
    mark, latch = device.engine.mark(torch.cuda.current_stream().cuda_stream), Latch(1)
    device.engine.submit([Job(Op.PACK, length=8 * size, pieces=state, slots=whole, mark=mark, latches=[latch])])
    assert latch.wait(WAIT_S) and device.engine.release(latch, torch.cuda.current_stream().cuda_stream)
    for tensor in tensors:
        tensor.fill_(6)
    assert wait(device.engine, 1)[0].result == 8 * size
    assert (device.content(slotted, 8 * size) == 5).all()

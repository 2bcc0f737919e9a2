"""Memory of a device that is lent, and the functions that free it in the middle of somebody else's allocation."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import threading
import warnings
from collections.abc import Callable

import numpy as np
import pytest

from stepwell.native import (
    TRIP_ALLOC,
    TRIP_FREE,
    DeviceEngine,
    Done,
    Engine,
    Job,
    Op,
    PieceMap,
    probe_device,
    trip_library,
)
from tests.fakecuda import FakeCuda

Run = Callable[[Engine, list[Job]], list[Done]]
MakeDevice = Callable[..., DeviceEngine]
WAIT_S = 60.0
MIB = 1 << 20
ILLEGAL_ADDRESS = 700


class Tripwire:
    """Its functions, found and called as torch does that."""

    def __init__(self) -> None:
        library = ctypes.CDLL(trip_library())
        self._alloc, self._free = getattr(library, TRIP_ALLOC), getattr(library, TRIP_FREE)
        self._alloc.restype = ctypes.c_void_p
        self._alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self._free.restype = None
        self._free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]

    def alloc(self, size: int = 512, device: int = 0) -> int | None:
        address: int | None = self._alloc(size, device, None)
        return address

    def free(self, address: int | None, size: int = 512, device: int = 0) -> None:
        self._free(address, size, device, None)


@pytest.fixture
def wire() -> Tripwire:
    return Tripwire()


def since(gpu: DeviceEngine, before: tuple[int, int]) -> tuple[int, int]:
    trips, trip_bytes = gpu.trips()
    return trips - before[0], trip_bytes - before[1]


def test_a_trip_frees_what_is_lent_and_nothing_else(gpu: DeviceEngine, fake: FakeCuda, wire: Tripwire) -> None:
    before, buffers = gpu.trips(), fake.count("buffers")
    armed = wire.alloc()
    kept, lent, back = gpu.allocate(MIB), [gpu.allocate((1 + i) * MIB) for i in range(200)], gpu.allocate(MIB)
    assert armed and fake.count("buffers") == buffers + 203
    gpu.lend([*lent, back])
    assert gpu.take_back([back]) == [True] and since(gpu, before) == (0, 0)
    wire.free(armed)
    assert since(gpu, before) == (1, sum(1 + i for i in range(200)) * MIB)
    assert fake.count("buffers") == buffers + 2
    assert gpu.take_back([lent[7], kept, back, *lent]) == [False, True, True, *[False] * 200]
    wire.free(wire.alloc())
    assert since(gpu, before) == (2, sum(1 + i for i in range(200)) * MIB)
    for address in (kept, back):
        gpu.free(address)
    assert gpu.last_error == ""


def test_an_address_is_not_given_away_before_its_lender_knows(
    gpu: DeviceEngine, fake: FakeCuda, wire: Tripwire
) -> None:
    """The driver gives out the same addresses again: what is new there must not be taken for what was lent."""
    slots = [gpu.allocate(MIB) for _ in range(8)]
    gpu.lend(slots)
    fake.reuse()
    wire.free(wire.alloc())
    with pytest.raises(OSError, match="memory that was lent was freed there, and who lent it has not been") as caught:
        gpu.allocate(MIB)
    assert caught.value.errno == errno.EADDRINUSE and fake.count("buffers") == 0
    armed = wire.alloc(MIB)  # nobody confuses that with anything
    assert armed in slots and gpu.take_back(slots[:5]) == [False] * 5
    wire.free(armed)
    for address in slots[5:]:
        with pytest.raises(OSError, match="no memory was allocated there"):
            gpu.free(address)
    assert (again := gpu.allocate(MIB)) in slots
    gpu.lend([again])
    assert gpu.take_back([again]) == [True]
    gpu.free(again)


def test_what_is_taken_back_has_its_bytes(gpu: DeviceEngine, fake: FakeCuda, wire: Tripwire, run: Run) -> None:
    content, found = np.arange(MIB, dtype=np.uint32).view(np.uint8), np.zeros(4 * MIB, np.uint8)
    address = gpu.allocate(content.size)
    whole = PieceMap(np.array([0, content.size]), np.array([address], np.uint64))
    run(gpu, [Job(Op.H2D, address=content.ctypes.data, length=content.size, pieces=whole, keep=content)])
    for _ in range(3):
        gpu.lend([address])
        assert gpu.take_back([address]) == [True]
        wire.free(wire.alloc())
    run(gpu, [Job(Op.D2H, address=found.ctypes.data, length=found.size, pieces=whole, keep=found)])
    assert np.array_equal(found, content)
    gpu.free(address)


def test_a_caching_allocator_finds_room(gpu: DeviceEngine, fake: FakeCuda, wire: Tripwire) -> None:
    """What would have failed succeeds at the second attempt."""
    fake.memory(100 * MIB)
    armed, slots = wire.alloc(2 * MIB), [gpu.allocate(40 * MIB), gpu.allocate(40 * MIB)]
    gpu.lend(slots)
    assert armed and wire.alloc(50 * MIB) is None
    wire.free(armed)
    tensor = wire.alloc(90 * MIB)
    assert tensor and gpu.take_back(slots) == [False, False]
    with pytest.raises(OSError, match="OUT_OF_MEMORY"):
        gpu.allocate(40 * MIB)
    wire.free(tensor)


def test_wrong_addresses_are_refused(gpu: DeviceEngine, fake: FakeCuda, wire: Tripwire) -> None:
    """Above all what is gone: the driver may have given its address to somebody else."""
    good, gone, armed = gpu.allocate(MIB), gpu.allocate(MIB), wire.alloc()
    gpu.lend([])
    gpu.lend([gone])
    wire.free(wire.alloc())
    assert armed
    for address in (gone, armed, good + 256, 0):
        with pytest.raises(OSError, match=r"freeing memory of device 0: no memory was allocated there, or it was lent"):
            gpu.free(address)
        with pytest.raises(OSError, match="lending memory of device 0: no memory was allocated there") as caught:
            gpu.lend([good, address])
        assert caught.value.errno == errno.EINVAL
    before, buffers = gpu.trips(), fake.count("buffers")
    wire.free(good)  # it is not the tripwire's
    assert since(gpu, before) == (1, 0) and fake.count("buffers") == buffers
    assert gpu.take_back([good, armed]) == [True, False]
    gpu.free(good)
    wire.free(armed)
    assert fake.count("buffers") == buffers - 2


def test_lent_memory_can_be_freed(gpu: DeviceEngine, fake: FakeCuda, wire: Tripwire) -> None:
    address, before = gpu.allocate(MIB), gpu.trips()
    gpu.lend([address])
    gpu.free(address)
    wire.free(wire.alloc())
    assert since(gpu, before) == (1, 0) and gpu.last_error == ""


def test_memory_that_cannot_be_freed_is_still_held(gpu: DeviceEngine, fake: FakeCuda, wire: Tripwire) -> None:
    """By its owner, who may try again; what a trip cannot free is lost, and not counted."""
    first, second, before = gpu.allocate(MIB), gpu.allocate(MIB), gpu.trips()
    fake.fail("cuMemFree_v2", ILLEGAL_ADDRESS)
    with pytest.raises(OSError, match="freeing memory of device 0: cuMemFree: CUDA_ERROR_ILLEGAL_ADDRESS"):
        gpu.free(first)
    assert gpu.take_back([first]) == [True]
    gpu.free(first)
    armed = wire.alloc()
    gpu.lend([second])
    fake.fail("cuMemFree_v2", ILLEGAL_ADDRESS, nth=2)
    wire.free(armed)
    assert since(gpu, before) == (1, 0) and gpu.take_back([second]) == [False]
    fake.free(second)


def test_an_engine_frees_what_it_has_lent_when_it_is_closed(
    make_device: MakeDevice, fake: FakeCuda, wire: Tripwire
) -> None:
    """Only what it has allocated itself; and blocks of the tripwire live on, with the context that they lie in."""
    buffers = fake.count("buffers")
    first, second = make_device(), make_device()
    mine, other, held, before = first.allocate(MIB), second.allocate(MIB), first.allocate(MIB), second.trips()
    armed = wire.alloc()
    second.lend([mine, other])
    assert first.close() and fake.count("buffers") == buffers + 3
    assert second.take_back([mine, other]) == [False, True] and since(second, before) == (0, 0)
    second.free(held)
    second.free(other)
    assert second.close() and fake.count("contexts") == 1
    assert wire.alloc() is None  # nobody is there to allocate it
    wire.free(armed)
    assert fake.count("buffers") == buffers and fake.count("contexts") == 0


def test_devices_have_tripwires_of_their_own(make_device: MakeDevice, fake: FakeCuda, wire: Tripwire) -> None:
    zero, one = make_device(0), make_device(1)
    lent, before = [zero.allocate(MIB), one.allocate(MIB)], (zero.trips(), one.trips())
    zero.lend(lent[:1])
    one.lend(lent[1:])
    wire.free(wire.alloc(device=1), device=1)
    assert since(zero, before[0]) == (0, 0) and since(one, before[1]) == (1, MIB)
    assert zero.take_back(lent) == [True, False]
    zero.free(lent[0])
    for device in (-1, 2, 64, 1 << 30):  # there is none, or no engine for it
        assert wire.alloc(device=device) is None
        wire.free(None, device=device)
    assert wire.alloc(0) is None and wire.alloc(-1) is None


def test_a_forked_child_frees_nothing(gpu: DeviceEngine, wire: Tripwire, fake: FakeCuda) -> None:
    lent, armed = gpu.allocate(MIB), wire.alloc()
    gpu.lend([lent])
    calls: list[Callable[[], object]] = [lambda: gpu.lend([lent]), lambda: gpu.take_back([lent]), gpu.trips]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what is tested
        child = os.fork()
    if not child:
        refused, driver_calls = 0, fake.count("calls")
        wire.free(armed)
        harmless = wire.alloc() is None and fake.count("calls") == driver_calls
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                refused += "forked" in str(error)
        os._exit(0 if harmless and refused == 3 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert gpu.take_back([lent]) == [True]
    gpu.free(lent)
    wire.free(armed)


def test_lending_races_with_trips(gpu: DeviceEngine, fake: FakeCuda, wire: Tripwire) -> None:
    """Owners lend, take back, free and allocate anew while the wire is tripped: each block is freed once, by one or
    the other, and what was taken back is the owner's own, with its bytes, and never touched by a trip."""
    fake.reuse()
    before, buffers, gone = gpu.trips(), fake.count("buffers"), [0] * 4
    start, over, errors = threading.Barrier(7), threading.Event(), list[BaseException]()

    def fresh(number: int) -> int:
        while True:
            try:
                address = gpu.allocate(4096)
            except OSError as error:
                assert error.errno == errno.EADDRINUSE  # another owner has yet to ask for it
                continue
            ctypes.c_uint64.from_address(address).value = number
            return address

    def own(number: int) -> None:
        rng = random.Random(number)
        slots = [fresh(number) for _ in range(100)]
        start.wait(WAIT_S)
        for _ in range(60):
            some = rng.sample(slots, 40)
            gpu.lend(some)
            ours = dict(zip(some, gpu.take_back(some), strict=True))
            lost = [address for address, back in ours.items() if not back]
            gone[number] += len(lost)
            for address in lost:
                slots.remove(address)
            back = [address for address in some if ours[address]]
            assert all(ctypes.c_uint64.from_address(address).value == number for address in back)
            for address in back[:2]:
                gpu.free(address)
                slots.remove(address)
            slots += [fresh(number) for _ in range(100 - len(slots))]
        assert gpu.take_back(slots) == [True] * 100
        for address in slots:
            gpu.free(address)

    def trip() -> None:
        start.wait(WAIT_S)
        while not over.is_set():
            armed = wire.alloc()
            wire.free(armed)
            assert armed

    def guarded(what: Callable[[], None]) -> None:
        try:
            what()
        except BaseException as error:
            errors.append(error)

    owners = [threading.Thread(target=guarded, args=(lambda number=i: own(number),)) for i in range(4)]
    trippers = [threading.Thread(target=guarded, args=(trip,)) for _ in range(3)]
    for thread in [*owners, *trippers]:
        thread.start()
    for thread in owners:
        thread.join(WAIT_S)
    over.set()
    for thread in trippers:
        thread.join(WAIT_S)
    assert not errors and not any(thread.is_alive() for thread in [*owners, *trippers])
    assert since(gpu, before)[1] == 4096 * sum(gone)
    assert fake.count("buffers") == buffers and gpu.last_error == ""


@pytest.mark.gpu
def test_a_trip_on_a_real_device(wire: Tripwire) -> None:
    works, reason = probe_device()
    if not works:
        pytest.skip(reason)
    with DeviceEngine("gpu", 0) as gpu:
        before, size, count = gpu.trips(), 32 * MIB, 16
        slots, armed = [gpu.allocate(size) for _ in range(count)], wire.alloc(2 * MIB)
        gpu.lend(slots)
        assert gpu.take_back(slots[:1]) == [True]
        held = gpu.memory()[0]
        wire.free(armed, 2 * MIB)
        assert since(gpu, before) == (1, (count - 1) * size)
        assert gpu.memory()[0] >= held + (count - 1) * size
        assert gpu.take_back(slots) == [True, *[False] * (count - 1)]
        gpu.free(slots[0])

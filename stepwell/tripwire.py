"""torch gets memory that a GPU tier only keeps in case, before it would fail for want of it.

Before torch's allocator raises, it frees the blocks that it has cached for pools which nobody uses any more, through
each pool's own allocator, and tries once more. A small block of such a pool is the tripwire: freeing it frees all
memory that is lent (`DeviceEngine.lend`), natively and at once, since the thread that needs it may hold any lock.
`torch.cuda.empty_cache()` does the same.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from typing import Any

from stepwell.native import TRIP_ALLOC, TRIP_FREE, trip_library

log = logging.getLogger("stepwell")

_allocator: Any = None  # used by torch for as long as the process lives
_armed: set[int] = set()
_useless = False  # this torch has no such pools


def arm(gpu: int) -> bool:
    """Sees to it that a tripwire is laid for a GPU; it works once. False if torch is not used with GPUs here yet, or
    this torch has no such pools: then memory goes back only as soon as less is free than should be."""
    global _allocator, _useless
    torch = sys.modules.get("torch")
    if gpu in _armed or _useless or torch is None or not torch.cuda.is_initialized():
        return gpu in _armed
    try:
        _allocator = _allocator or torch.cuda.memory.CUDAPluggableAllocator(trip_library(), TRIP_ALLOC, TRIP_FREE)
        with torch.cuda.device(gpu):
            pool = torch.cuda.MemPool(_allocator.allocator())
            with torch.cuda.use_mem_pool(pool):
                block = torch.empty(1, dtype=torch.uint8, device=f"cuda:{gpu}")
            del block
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))  # its end would give the pool back a second time
            torch._C._cuda_releasePool(gpu, pool.id)
    except Exception as error:  # whatever another torch raises: it is a help, not a need
        log.info("torch will not be given memory of the gpu tier before it fails: %s", error)
        _useless = True
        return False
    _armed.add(gpu)
    return True


def tripped(gpu: int) -> None:
    """It has done its work; another one is laid."""
    _armed.discard(gpu)
    arm(gpu)

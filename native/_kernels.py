"""The kernels that gather small pieces of device memory into a stage, scatter them from there, and move runs of any
length within that memory.

`SOURCE` is CUDA C++ without headers, for any compiler at run time. `GATHER` and `SCATTER` are launched by the engine
with one row of blocks for each piece, which share it; `MOVE` with one block for each unit of a run. All that they work
on comes by value, with the launch: nothing must outlive it.
"""

from __future__ import annotations

from stepwell.native._engine import lib

PIECES_MAX: int = lib.SW_BATCH_PIECES  # of one launch
RUNS_MAX: int = lib.SW_BATCH_RUNS
#: loads that each thread has under way; with 16 KiB for a block of 256 the memory's rate is nearly reached (an H200)
AHEAD = 8
NAMES = GATHER, SCATTER, MOVE = "stepwell_gather", "stepwell_scatter", "stepwell_move"  # as `use_kernels` takes them

#: Both sides' bytes are seldom aligned alike: each row of blocks takes the widest access that both allow, after the few
#: bytes up to its boundary. Each thread has four loads under way.
SOURCE = f"""
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned char u8;

struct batch {{
    u64 addresses[{PIECES_MAX}];
    u32 offsets[{PIECES_MAX}];
    u32 lengths[{PIECES_MAX}];
}};

struct moves {{
    u64 to[{RUNS_MAX}];
    u64 from[{RUNS_MAX}];
    u32 lengths[{RUNS_MAX}];
    u32 ends[{RUNS_MAX}];
    u32 count;
    u32 unit_bytes;
}};

template <typename T> __device__ void copy_as(u8 *to, const u8 *from, u32 length) {{
    const u32 threads = blockDim.x * gridDim.y, thread = blockIdx.y * blockDim.x + threadIdx.x;
    u32 head = (u32)(-(u64)to & (sizeof(T) - 1));
    if (head > length) head = length;
    const u32 count = (length - head) / sizeof(T), tail = head + count * sizeof(T);
    if (thread < head) to[thread] = from[thread];
    const T *source = (const T *)(from + head);
    T *target = (T *)(to + head);
    for (u32 i = thread; i < count; i += {AHEAD} * threads) {{
        T values[{AHEAD}];
#pragma unroll
        for (u32 k = 0; k < {AHEAD}; k++)
            if (i + k * threads < count) values[k] = source[i + k * threads];
#pragma unroll
        for (u32 k = 0; k < {AHEAD}; k++)
            if (i + k * threads < count) target[i + k * threads] = values[k];
    }}
    if (tail + thread < length) to[tail + thread] = from[tail + thread];
}}

__device__ void copy(u8 *to, const u8 *from, u32 length) {{
    const u32 apart = (u32)((u64)to ^ (u64)from) & 15;
    if (!apart) copy_as<uint4>(to, from, length);
    else if (!(apart & 7)) copy_as<u64>(to, from, length);
    else if (!(apart & 3)) copy_as<u32>(to, from, length);
    else if (!(apart & 1)) copy_as<unsigned short>(to, from, length);
    else copy_as<u8>(to, from, length);
}}

extern "C" __global__ void {GATHER}(const batch pieces, u8 *stage) {{
    const u32 piece = blockIdx.x;
    copy(stage + pieces.offsets[piece], (const u8 *)pieces.addresses[piece], pieces.lengths[piece]);
}}

extern "C" __global__ void {SCATTER}(const batch pieces, const u8 *stage) {{
    const u32 piece = blockIdx.x;
    copy((u8 *)pieces.addresses[piece], stage + pieces.offsets[piece], pieces.lengths[piece]);
}}

extern "C" __global__ void {MOVE}(const moves all) {{
    u32 run = 0, last = all.count - 1;
    while (run < last) {{
        const u32 middle = (run + last) / 2;
        if (all.ends[middle] > blockIdx.x) last = middle;
        else run = middle + 1;
    }}
    const u32 unit = blockIdx.x - (run ? all.ends[run - 1] : 0), start = unit * all.unit_bytes;
    const u32 left = all.lengths[run] - start;
    copy((u8 *)all.to[run] + start, (const u8 *)all.from[run] + start, left < all.unit_bytes ? left : all.unit_bytes);
}}
"""

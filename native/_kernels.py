"""The kernels that gather small pieces of device memory into a stage, and scatter them from there.

`SOURCE` is CUDA C++ without headers, for any compiler at run time. Its two functions, `GATHER` and `SCATTER`, are
launched by the engine with one row of blocks for each piece, THREADS threads a block; the blocks of a row share
their piece. All that they work on comes by value, with the launch: nothing must outlive it.
"""

from __future__ import annotations

from stepwell.native._engine import lib

PIECES_MAX: int = lib.SW_BATCH_PIECES  # of one launch
GATHER, SCATTER = "stepwell_gather", "stepwell_scatter"

#: A piece's bytes in memory and in the stage are seldom aligned alike: each row takes the widest access that both
#: allow, after the few bytes up to its boundary. A block takes stretches of 16 KiB, whatever the width.
SOURCE = f"""
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned char u8;

struct batch {{
    u64 addresses[{PIECES_MAX}];
    u32 offsets[{PIECES_MAX}];
    u32 lengths[{PIECES_MAX}];
}};

template <typename T> __device__ void copy_as(u8 *to, const u8 *from, u32 length) {{
    const u32 threads = blockDim.x * gridDim.y, thread = blockIdx.y * blockDim.x + threadIdx.x;
    u32 head = (u32)(-(u64)to & (sizeof(T) - 1));
    if (head > length) head = length;
    const u32 count = (length - head) / sizeof(T), tail = head + count * sizeof(T);
    if (thread < head) to[thread] = from[thread];
    const T *source = (const T *)(from + head);
    T *target = (T *)(to + head);
    for (u32 i = thread; i < count; i += 4 * threads) {{
        T values[4];
#pragma unroll
        for (u32 k = 0; k < 4; k++)
            if (i + k * threads < count) values[k] = source[i + k * threads];
#pragma unroll
        for (u32 k = 0; k < 4; k++)
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
"""

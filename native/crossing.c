/* One job's way between slots and the pieces of a device's memory: which copies and kernels it takes.
 *
 * To and from host memory, large pieces are copied one by one. A copy has a price however small it is, so that
 * small ones cross together: a kernel gathers a stretch of them into a stage, which is one copy away from the
 * slot, or scatters them from there. Kernels have a stream of their own: the next stage is filled while this one
 * is emptied, and a kernel that waits for a busy device does not hold up a copy that is ready.
 *
 * Slots in the device's memory are packed and unpacked on one stream, since nothing waits for a link, and by a
 * kernel that moves many runs of any length at once: the driver takes microseconds to issue each copy, which is
 * longer than some megabytes take. Without it, gathering and scattering work on the slot itself. A copy never takes
 * two runs together, even where they touch: they may lie in two allocations, and the driver refuses a copy across
 * their border.
 */
#include <errno.h>

#include "device.h"

#define STRETCH_PIECES_MIN 4u /* fewer are cheaper one by one than with a kernel and two streams in turn */
#define KERNEL_THREADS 256u
#define KERNEL_PARTS 4u       /* blocks for each piece: 16 KiB for each at most */
#define UNIT_BYTES (16u << 10) /* of a run, for one block: four loads of 16 bytes a thread, all under way at once */
#define MOVE_BYTES_MAX (((uint64_t)1 << 32) - SW_ALIGN_BYTES) /* has 32 bits, and keeps what follows aligned */

typedef struct {
    sw_device *device;
    const sw_job *job;
    bool fetches;  /* from the pieces */
    void *kernel;  /* NULL: there is none */
    void *kernels; /* the stream that it runs on */
    sw_moves *moves; /* for a kernel that moves runs; NULL: that is not it */
    uint64_t memory, start; /* on the host: the address of byte `start` */
} crossing;

static crossing way_of(sw_device *device, const sw_job *job, bool fetches, void *kernels)
{
    void *kernel = (void *)atomic_load(fetches ? &device->gather : &device->scatter);
    return (crossing){.device = device, .job = job, .fetches = fetches, .kernel = kernel, .kernels = kernels};
}

static int copy(const crossing *way, uint64_t address, uint64_t at, uint64_t bytes)
{
    sw_device *device = way->device;
    void *memory = (void *)(uintptr_t)(way->memory + (at - way->start));
    device->copy_count++;
    device->bytes += bytes;
    return way->fetches ? SW_CUDA(device->cuda, cuMemcpyDtoHAsync, memory, address, bytes, device->copies)
                        : SW_CUDA(device->cuda, cuMemcpyHtoDAsync, address, memory, bytes, device->copies);
}

/* The end of the stretch of small pieces that starts at `at`, and how many there are. */
static uint64_t stretch_end(const sw_map *map, uint64_t piece, uint64_t at, uint64_t end, uint64_t *pieces)
{
    uint64_t limit = at + SW_STAGE_BYTES;
    for (*pieces = 0; at < end; ++*pieces) {
        uint64_t address, length = sw_map_run(map, &piece, at, end, &address);
        if (!address || length >= SW_SMALL_BYTES || at + length > limit)
            break;
        at += length;
    }
    return at;
}

static int launch_on(sw_cuda *cuda, void *kernel, void *stream, uint64_t stage, sw_batch *batch, uint32_t count)
{
    void *parameters[] = {batch, &stage};
    return SW_CUDA(cuda, cuLaunchKernel, kernel, count, KERNEL_PARTS, 1, KERNEL_THREADS, 1, 1, 0, stream, parameters,
                   NULL);
}

static int launch(const crossing *way, uint64_t stage, sw_batch *batch, uint32_t count)
{
    sw_device *device = way->device;
    device->kernel_count++;
    device->uses_kernels |= way->kernels == device->kernels;
    return launch_on(device->cuda, way->kernel, way->kernels, stage, batch, count);
}

/* Kernels for the pieces of [at, end), the first byte of which is at `stage` on the other side. */
static int launch_all(const crossing *way, uint64_t stage, uint64_t piece, uint64_t at, uint64_t end)
{
    sw_batch batch;
    uint32_t count = 0;
    int result = 0;
    for (uint64_t start = at; at < end && !result;) {
        uint64_t address, length = sw_map_run(way->job->map, &piece, at, end, &address);
        batch.addresses[count] = address;
        batch.offsets[count] = (uint32_t)(at - start);
        batch.lengths[count++] = (uint32_t)length;
        at += length;
        if (count == SW_BATCH_PIECES || at == end) {
            result = launch(way, stage, &batch, count);
            count = 0;
        }
    }
    return result;
}

static void stage_undo(sw_cuda *cuda, sw_stage *stage)
{
    if (stage->filled)
        (void)cuda->driver.cuEventDestroy(stage->filled);
    if (stage->emptied)
        (void)cuda->driver.cuEventDestroy(stage->emptied);
    if (stage->address)
        (void)cuda->driver.cuMemFree(stage->address);
    *stage = (sw_stage){0};
}

static int stage_make(sw_cuda *cuda, sw_stage *stage)
{
    int result = SW_CUDA(cuda, cuEventCreate, &stage->filled, SW_CUDA_NO_TIMING);
    if (!result)
        result = SW_CUDA(cuda, cuEventCreate, &stage->emptied, SW_CUDA_NO_TIMING);
    if (!result)
        result = SW_CUDA(cuda, cuMemAlloc, &stage->address, SW_STAGE_BYTES);
    if (result)
        stage_undo(cuda, stage);
    return result;
}

/* The stage whose turn it is. NULL: the device has no memory for any, and each piece goes alone. */
static sw_stage *stage_take(sw_device *device)
{
    if (device->stage_count < device->stage_limit) {
        if (!stage_make(device->cuda, &device->stages[device->stage_count]))
            return &device->stages[device->stage_count++];
        if (device->stage_count)
            device->stage_limit = device->stage_count; /* it does with those that it has */
    }
    return device->stage_count ? &device->stages[device->stage_next++ % device->stage_count] : NULL;
}

void sw_device_stages_free(sw_device *device)
{
    while (device->stage_count)
        stage_undo(device->cuda, &device->stages[--device->stage_count]);
}

/* Moves the pieces of [at, end) through a stage: one stream fills it, the other one empties it. */
static int cross_stage(const crossing *way, sw_stage *stage, uint64_t piece, uint64_t at, uint64_t end)
{
    sw_device *device = way->device;
    sw_cuda *cuda = device->cuda;
    void *fills = way->fetches ? device->kernels : device->copies;
    void *empties = way->fetches ? device->copies : device->kernels;
    int result = stage->used ? SW_CUDA(cuda, cuStreamWaitEvent, fills, stage->emptied, 0) : 0;
    if (!result)
        result = way->fetches ? launch_all(way, stage->address, piece, at, end)
                              : copy(way, stage->address, at, end - at);
    if (!result)
        result = SW_CUDA(cuda, cuEventRecord, stage->filled, fills);
    if (!result)
        result = SW_CUDA(cuda, cuStreamWaitEvent, empties, stage->filled, 0);
    if (!result)
        result = way->fetches ? copy(way, stage->address, at, end - at)
                              : launch_all(way, stage->address, piece, at, end);
    if (!result)
        result = SW_CUDA(cuda, cuEventRecord, stage->emptied, empties);
    stage->used |= !result;
    return result;
}

/* Crosses [at, end), which lies in one piece of the host's memory. */
static int cross_run(const crossing *way, uint64_t *piece, uint64_t at, uint64_t end)
{
    const sw_map *map = way->job->map;
    int result = 0;
    while (at < end && !result) {
        uint64_t pieces = 0, stop = way->kernel ? stretch_end(map, *piece, at, end, &pieces) : at;
        sw_stage *stage = pieces >= STRETCH_PIECES_MIN ? stage_take(way->device) : NULL;
        if (stage) {
            result = cross_stage(way, stage, *piece, at, stop);
            at = stop;
            continue;
        }
        do {
            uint64_t address, length = sw_map_run(map, piece, at, end, &address);
            if (address)
                result = copy(way, address, at, length);
            at += length;
        } while (at < stop && !result);
    }
    return result;
}

/* Issues all that the job takes; on an error some of it may be under way. */
int sw_device_cross(sw_device *device, const sw_job *job)
{
    crossing way = way_of(device, job, job->op == SW_D2H, device->kernels);
    uint64_t at = job->map_offset, end = at + job->length, piece = sw_map_find(job->map, at);
    uint64_t slot = job->slots ? sw_map_find(job->slots, at) : 0;
    int result = 0;
    while (at < end && !result) {
        uint64_t length = end - at;
        way.start = at;
        way.memory = job->address;
        if (job->slots)
            length = sw_map_run(job->slots, &slot, at, end, &way.memory);
        if (way.memory)
            result = cross_run(&way, &piece, at, at + length);
        at += length;
    }
    return result;
}

static int launch_moves(const crossing *way)
{
    sw_device *device = way->device;
    void *parameters[] = {way->moves};
    uint32_t units = way->moves->ends[way->moves->count - 1];
    device->kernel_count++;
    int result = SW_CUDA(device->cuda, cuLaunchKernel, way->kernel, units, 1, 1, KERNEL_THREADS, 1, 1, 0,
                         device->copies, parameters, NULL);
    way->moves->count = 0;
    return result;
}

/* Adds a run to those that move together, and launches them when they are as many as can be. */
static int move(const crossing *way, uint64_t to, uint64_t from, uint64_t bytes)
{
    sw_moves *moves = way->moves;
    int result = 0;
    for (uint64_t at = 0; at < bytes && !result;) {
        uint32_t length = (uint32_t)(bytes - at < MOVE_BYTES_MAX ? bytes - at : MOVE_BYTES_MAX);
        uint32_t before = moves->count ? moves->ends[moves->count - 1] : 0;
        moves->to[moves->count] = to + at;
        moves->from[moves->count] = from + at;
        moves->lengths[moves->count] = length;
        moves->ends[moves->count++] = before + (length - 1) / UNIT_BYTES + 1;
        at += length;
        if (moves->count == SW_BATCH_RUNS)
            result = launch_moves(way);
    }
    return result;
}

static int copy_within(const crossing *way, uint64_t to, uint64_t from, uint64_t bytes)
{
    way->device->copy_count++;
    return SW_CUDA(way->device->cuda, cuMemcpyDtoDAsync, to, from, bytes, way->device->copies);
}

/* Moves the pieces of [at, end), all of it in one run of a slot, that starts at `slot`. */
static int pack_run(const crossing *way, uint64_t slot, uint64_t *piece, uint64_t at, uint64_t end)
{
    sw_device *device = way->device;
    int result = 0;
    for (uint64_t start = at; at < end && !result;) {
        uint64_t here = slot + (at - start), pieces = 0;
        uint64_t stop = way->kernel && !way->moves ? stretch_end(way->job->map, *piece, at, end, &pieces) : at;
        if (pieces >= STRETCH_PIECES_MIN) {
            device->bytes += stop - at;
            result = launch_all(way, here, *piece, at, stop);
            at = stop;
            continue;
        }
        uint64_t address, length = sw_map_run(way->job->map, piece, at, end, &address);
        at += length;
        if (!address)
            continue;
        device->bytes += length;
        uint64_t to = way->fetches ? here : address, from = way->fetches ? address : here;
        result = way->moves ? move(way, to, from, length) : copy_within(way, to, from, length);
    }
    return result;
}

/* Issues all that a job between two places of the device's memory takes; on an error some of it may be under way. */
int sw_device_pack(sw_device *device, const sw_job *job)
{
    crossing way = way_of(device, job, job->op == SW_PACK, device->copies);
    sw_moves moves;
    void *kernel = (void *)atomic_load(&device->move);
    if (kernel) {
        moves.count = 0;
        moves.unit_bytes = UNIT_BYTES;
        way.kernel = kernel;
        way.moves = &moves;
    }
    uint64_t at = job->map_offset, end = at + job->length;
    uint64_t piece = sw_map_find(job->map, at), slot = sw_map_find(job->slots, at);
    int result = 0;
    while (at < end && !result) {
        uint64_t address, length = sw_map_run(job->slots, &slot, at, end, &address);
        if (address)
            result = pack_run(&way, address, &piece, at, at + length);
        at += length;
    }
    if (!result && way.moves && moves.count)
        result = launch_moves(&way);
    return result;
}

/* In the order of any stream, by any thread. Larger pieces are copies of their own here, too. */
int sw_cuda_gather(sw_cuda *cuda, const sw_gathering *all, void *stream)
{
    void *kernel = (void *)(uintptr_t)all->kernel;
    sw_batch batch;
    uint64_t to = all->to, first = to;
    uint32_t count = 0;
    int result = 0;
    for (uint64_t at = 0; at < all->count && !result; to += all->sizes[at++]) {
        if (!kernel || all->sizes[at] >= SW_SMALL_BYTES) {
            result = SW_CUDA(cuda, cuMemcpyDtoDAsync, to, all->addresses[at], all->sizes[at], stream);
            continue;
        }
        if (count && (count == SW_BATCH_PIECES || to - first > UINT32_MAX)) {
            result = launch_on(cuda, kernel, stream, first, &batch, count);
            count = 0;
        }
        first = count ? first : to;
        batch.addresses[count] = all->addresses[at];
        batch.offsets[count] = (uint32_t)(to - first);
        batch.lengths[count++] = (uint32_t)all->sizes[at];
    }
    return result || !count ? result : launch_on(cuda, kernel, stream, first, &batch, count);
}

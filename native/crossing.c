/* One job's way between a slot and the pieces of a device's memory: which copies and kernels it takes.
 *
 * Large pieces are copied one by one. A copy has a price however small it is, so that small ones cross
 * together: a kernel gathers a stretch of them into a stage, which is one copy away from the slot, or
 * scatters them from there. Kernels have a stream of their own: the next stage is filled while this one is
 * emptied, and a kernel that waits for a busy device does not hold up a copy that is ready.
 */
#include <errno.h>

#include "device.h"

#define STRETCH_PIECES_MIN 4u /* fewer are cheaper one by one than with a kernel and two streams in turn */
#define KERNEL_THREADS 256u
#define KERNEL_PARTS 4u       /* blocks for each piece: 16 KiB for each at most */

typedef struct {
    sw_device *device;
    const sw_job *job;
    bool fetches;
    void *kernel;
} crossing;

static int copy(const crossing *way, uint64_t address, uint64_t at, uint64_t bytes)
{
    sw_device *device = way->device;
    void *memory = (void *)(uintptr_t)(way->job->address + (at - way->job->map_offset));
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

static int launch(const crossing *way, const sw_stage *stage, sw_batch *batch, uint32_t count)
{
    sw_device *device = way->device;
    uint64_t address = stage->address;
    void *parameters[] = {batch, &address};
    device->kernel_count++;
    device->uses_kernels = true;
    return SW_CUDA(device->cuda, cuLaunchKernel, way->kernel, count, KERNEL_PARTS, 1, KERNEL_THREADS, 1, 1, 0,
                   device->kernels, parameters, NULL);
}

/* Kernels for the pieces of [at, end). */
static int launch_all(const crossing *way, const sw_stage *stage, uint64_t piece, uint64_t at, uint64_t end)
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
        result = way->fetches ? launch_all(way, stage, piece, at, end) : copy(way, stage->address, at, end - at);
    if (!result)
        result = SW_CUDA(cuda, cuEventRecord, stage->filled, fills);
    if (!result)
        result = SW_CUDA(cuda, cuStreamWaitEvent, empties, stage->filled, 0);
    if (!result)
        result = way->fetches ? copy(way, stage->address, at, end - at) : launch_all(way, stage, piece, at, end);
    if (!result)
        result = SW_CUDA(cuda, cuEventRecord, stage->emptied, empties);
    stage->used |= !result;
    return result;
}

/* Issues all that the job takes; on an error some of it may be under way. */
int sw_device_cross(sw_device *device, const sw_job *job)
{
    bool fetches = job->op == SW_D2H;
    crossing way = {device, job, fetches, (void *)atomic_load(fetches ? &device->gather : &device->scatter)};
    uint64_t at = job->map_offset, end = at + job->length, piece = sw_map_find(job->map, at);
    int result = 0;
    while (at < end && !result) {
        uint64_t pieces = 0, stop = way.kernel ? stretch_end(job->map, piece, at, end, &pieces) : at;
        sw_stage *stage = pieces >= STRETCH_PIECES_MIN ? stage_take(device) : NULL;
        if (stage) {
            result = cross_stage(&way, stage, piece, at, stop);
            at = stop;
            continue;
        }
        do {
            uint64_t address, length = sw_map_run(job->map, &piece, at, end, &address);
            if (address)
                result = copy(&way, address, at, length);
            at += length;
        } while (at < stop && !result);
    }
    return result;
}

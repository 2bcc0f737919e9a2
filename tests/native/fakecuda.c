/* The functions of the fake driver. */
#include "fakecuda.h"

#include <stdlib.h>
#include <string.h>

__thread int depth;
static __thread void *current[DEPTH_MAX];
static int contexts[DEVICES];

/* Whether this call fails. Caller holds the lock. */
int fails(const char *name)
{
    counts.calls++;
    if (knobs.off)
        return 4;
    if (!*knobs.failing || (strcmp(knobs.failing, "*") && strcmp(knobs.failing, name)))
        return 0;
    if (--knobs.fail_in > 0 || !knobs.fail_times)
        return 0;
    knobs.fail_times -= knobs.fail_times > 0;
    return knobs.fail_error;
}

/* Whether all, or no byte of it lies in one of these; `inside`: some does. */
bool in_one_piece(const ranges *of, uint64_t address, uint64_t bytes, bool *inside)
{
    *inside = false;
    for (int i = 0; i < of->count; i++) {
        uint64_t start = of->all[i].address, end = start + of->all[i].bytes;
        if (address + bytes <= start || address >= end)
            continue;
        *inside = true;
        return address >= start && address + bytes <= end;
    }
    return true;
}

/* Whether it is in one allocation, or in what stands for a tensor. */
static bool on_device(uint64_t address, uint64_t bytes)
{
    bool inside;
    return in_one_piece(&buffers, address, bytes, &inside) && in_one_piece(&pinned, address, bytes, &inside) && !inside;
}

static int copy_across(stream *stream, void *to, const void *from, size_t bytes, const void *host, const void *device)
{
    bool is_pinned, is_allocated;
    if (!in_one_piece(&buffers, (uint64_t)(uintptr_t)device, bytes, &is_allocated) ||
        !in_one_piece(&pinned, (uint64_t)(uintptr_t)host, bytes, &is_pinned))
        return INVALID_VALUE;
    counts.copies++;
    uint64_t number = put(stream, (operation){.kind = COPY, .to = to, .from = from, .bytes = bytes});
    if (!is_pinned)
        wait_for(stream, number);
    return SUCCESS;
}

EXPORT int cuInit(unsigned flags) { (void)flags; BEGIN(false) END }

EXPORT int cuDeviceGetCount(int *count) { BEGIN(false) *count = DEVICES; END }

EXPORT int cuDeviceGet(int *device, int ordinal)
{
    BEGIN(false)
    *device = ordinal;
    if (ordinal < 0 || ordinal >= DEVICES)
        error = INVALID_DEVICE;
    END
}

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device)
{
    BEGIN(false)
    *context = &contexts[device];
    counts.contexts++;
    END
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; BEGIN(false) counts.contexts--; END }

EXPORT int cuCtxPushCurrent_v2(void *context)
{
    BEGIN(false)
    if (depth == DEPTH_MAX)
        error = INVALID_VALUE;
    else
        current[depth++] = context;
    END
}

EXPORT int cuCtxPopCurrent_v2(void **context) { BEGIN(true) *context = current[--depth]; END }

EXPORT int cuThreadExchangeStreamCaptureMode(int *mode)
{
    static __thread int now;
    BEGIN(false)
    int before = now;
    now = *mode;
    *mode = before;
    END
}

EXPORT int cuStreamCreate(void **handle, unsigned flags)
{
    BEGIN(true)
    *handle = stream_new(ENGINE);
    counts.streams++;
    if (flags != 1)
        error = INVALID_VALUE;
    END
}

EXPORT int cuStreamDestroy_v2(void *handle)
{
    pthread_mutex_lock(&lock);
    int error = fails(__func__);
    counts.streams -= !error;
    pthread_mutex_unlock(&lock);
    if (!error)
        end(handle);
    return error;
}

EXPORT int cuStreamWaitEvent(void *handle, void *awaited, unsigned flags)
{
    (void)flags;
    BEGIN(!handle)
    event *event = awaited;
    (void)put(stream_of(handle), (operation){.kind = WAIT, .event = event, .version = event->recorded});
    END
}

EXPORT int cuStreamIsCapturing(void *handle, int *status) { BEGIN(false) *status = stream_of(handle)->capturing; END }

EXPORT int cuStreamSynchronize(void *handle)
{
    BEGIN(false)
    stream *stream = stream_of(handle);
    wait_for(stream, stream->put);
    END
}

EXPORT int cuEventCreate(void **handle, unsigned flags)
{
    BEGIN(true)
    event *fresh = calloc(1, sizeof *fresh);
    fresh->holders = 1;
    *handle = fresh;
    counts.events++;
    if (flags != 2)
        error = INVALID_VALUE;
    END
}

EXPORT int cuEventDestroy_v2(void *handle) { BEGIN(false) counts.events--; drop(handle); END }

EXPORT int cuEventRecord(void *handle, void *on)
{
    BEGIN(!on)
    event *event = handle;
    (void)put(stream_of(on), (operation){.kind = RECORD, .event = event, .version = ++event->recorded});
    END
}

EXPORT int cuEventQuery(void *handle)
{
    BEGIN(false)
    const event *event = handle;
    error = event->passed < event->recorded ? NOT_READY : SUCCESS;
    END
}

EXPORT int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *on)
{
    BEGIN(true)
    error = copy_across(stream_of(on), to, (const void *)(uintptr_t)from, bytes, to, (const void *)(uintptr_t)from);
    END
}

EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *on)
{
    BEGIN(true)
    error = copy_across(stream_of(on), (void *)(uintptr_t)to, from, bytes, from, (const void *)(uintptr_t)to);
    END
}

EXPORT int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *on)
{
    BEGIN(true)
    if (on_device(to, bytes) && on_device(from, bytes)) {
        counts.copies++;
        (void)put(stream_of(on), (operation){.kind = COPY, .to = (void *)(uintptr_t)to,
                                             .from = (const void *)(uintptr_t)from, .bytes = bytes});
    } else {
        error = INVALID_VALUE;
    }
    END
}

/* Whether a kernel leaves what was allocated. */
static bool astray(const batch *pieces, unsigned count, uint64_t stage)
{
    bool found = false, inside;
    for (unsigned i = 0; i < count && !found; i++)
        found = !in_one_piece(&buffers, stage + pieces->offsets[i], pieces->lengths[i], &inside) ||
                !in_one_piece(&buffers, pieces->addresses[i], pieces->lengths[i], &inside);
    return found;
}

/* Whether units are what the runs come to; each run then goes by the same rules as a copy. */
static bool sound(const moves *moves, unsigned units)
{
    uint32_t end = 0;
    bool good = moves->count && moves->count <= RUNS_MAX && moves->unit_bytes && moves->unit_bytes % 16 == 0;
    for (unsigned i = 0; good && i < moves->count; i++) {
        end += (uint32_t)(((uint64_t)moves->lengths[i] + moves->unit_bytes - 1) / moves->unit_bytes);
        good = moves->lengths[i] && moves->ends[i] == end &&
               (knobs.dry || (on_device(moves->to[i], moves->lengths[i]) && on_device(moves->from[i], moves->lengths[i])));
    }
    return good && units == end;
}

/* The kernel that moves runs. Parameters are taken at the launch. */
static int launch_moves(stream *stream, const moves *told, unsigned units)
{
    if (!sound(told, units))
        return INVALID_VALUE;
    counts.kernels++;
    for (unsigned i = 0; knobs.dry && i < told->count && noted.count < NOTED_MAX; i++)
        memcpy(noted.runs[noted.count++], (uint64_t[]){told->to[i], told->from[i], told->lengths[i]},
               sizeof *noted.runs);
    moves *runs = malloc(sizeof *runs);
    *runs = *told;
    if (knobs.dry)
        runs->count = 0;
    (void)put(stream, (operation){.kind = KERNEL, .value = MOVE, .moves = runs});
    return SUCCESS;
}

EXPORT int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared, void *on, void **parameters, void **extra)
{
    (void)shared, (void)extra;
    BEGIN(true)
    int kernel = (int)(uintptr_t)function;
    if (!grid_x || !grid_y || grid_z != 1 || !block_x || block_x > 1024 || block_y != 1 || block_z != 1) {
        error = INVALID_VALUE;
    } else if (kernel == MOVE) {
        error = grid_y == 1 ? launch_moves(stream_of(on), parameters[0], grid_x) : INVALID_VALUE;
    } else if ((kernel != GATHER && kernel != SCATTER) || grid_x > PIECES_MAX ||
               astray(parameters[0], grid_x, *(uint64_t *)parameters[1])) {
        error = INVALID_VALUE;
    } else {
        counts.kernels++;
        batch *pieces = malloc(sizeof *pieces); /* parameters are taken at the launch */
        *pieces = *(batch *)parameters[0];
        (void)put(stream_of(on), (operation){.kind = KERNEL, .value = kernel, .count = grid_x, .pieces = pieces,
                                             .to = (void *)(uintptr_t) * (uint64_t *)parameters[1]});
    }
    END
}

EXPORT int cuGetErrorName(int error, const char **name)
{
    static const struct {
        int error;
        const char *name;
    } names[] = {{1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {4, "CUDA_ERROR_DEINITIALIZED"},
                 {100, "CUDA_ERROR_NO_DEVICE"}, {101, "CUDA_ERROR_INVALID_DEVICE"}, {201, "CUDA_ERROR_INVALID_CONTEXT"},
                 {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
                 {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"}, {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].error == error) {
            *name = names[i].name;
            return SUCCESS;
        }
    return INVALID_VALUE;
}

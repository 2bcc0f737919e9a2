/* The driver of a GPU: its functions, a device's context, events, pinned memory, and what went wrong. */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device.h"

static const struct {
    int error, number;
} errnos[] = {
    {2, ENOMEM},        /* OUT_OF_MEMORY */
    {4, ESHUTDOWN},     /* DEINITIALIZED: the process is ending */
    {100, ENODEV},      /* NO_DEVICE */
    {101, ENODEV},      /* INVALID_DEVICE */
    {712, EEXIST},      /* HOST_MEMORY_ALREADY_REGISTERED */
    {713, ENOENT},      /* HOST_MEMORY_NOT_REGISTERED */
    {800, EPERM},       /* NOT_PERMITTED */
    {801, EOPNOTSUPP},  /* NOT_SUPPORTED */
    {900, EBUSY},       /* STREAM_CAPTURE_UNSUPPORTED */
    {906, EBUSY},       /* STREAM_CAPTURE_IMPLICIT: of the default stream, while another one is captured */
};

static int number_of(int error)
{
    for (size_t i = 0; i < sizeof errnos / sizeof *errnos; i++)
        if (errnos[i].error == error)
            return -errnos[i].number;
    return error ? -EIO : 0;
}

int sw_cuda_check(sw_cuda *cuda, const char *call, int result)
{
    if (!result)
        return 0;
    pthread_mutex_lock(&cuda->lock);
    cuda->last_error = result;
    cuda->last_call = call;
    pthread_mutex_unlock(&cuda->lock);
    return number_of(result);
}

static void describe(const sw_driver *driver, const char *call, int error, char *text, size_t size)
{
    const char *name = NULL;
    if (driver->cuGetErrorName(error, &name) || !name)
        snprintf(text, size, "%s: CUDA error %d", call, error);
    else
        snprintf(text, size, "%s: %s", call, name);
}

/* The last call that failed and the driver's name of the error; an empty text if none did. */
void sw_cuda_error(sw_cuda *cuda, char *text, size_t size)
{
    pthread_mutex_lock(&cuda->lock);
    int error = cuda->last_error;
    const char *call = cuda->last_call;
    pthread_mutex_unlock(&cuda->lock);
    *text = 0;
    if (error)
        describe(&cuda->driver, call, error, text, size);
}

/* Finds the driver's functions. The library stays loaded: it has threads of its own. */
static int load(const char *library, sw_driver *driver, char *reason, size_t size)
{
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char *why = dlerror();
        snprintf(reason, size, "no NVIDIA driver: %s", why ? why : library);
        return -ENODEV;
    }
#define FIND(name, symbol, parameters)                                        \
    *(void **)&driver->name = dlsym(handle, symbol);                          \
    if (!driver->name) {                                                      \
        snprintf(reason, size, "the driver in %s is too old: it has no %s", library, symbol); \
        return -ENOSYS;                                                       \
    }
    SW_CUDA_FUNCTIONS(FIND)
#undef FIND
    return 0;
}

static int refuse(const sw_driver *driver, const char *call, int error, char *reason, size_t size)
{
    describe(driver, call, error, reason, size);
    return number_of(error);
}

/* How many devices there are, or -errno and why in words. */
int sw_probe_cuda(const char *library, char *reason, size_t size)
{
    sw_driver driver;
    int count = 0, result = load(library, &driver, reason, size);
    if (result)
        return result;
    int error = driver.cuInit(0);
    if (error)
        return refuse(&driver, "cuInit", error, reason, size);
    error = driver.cuDeviceGetCount(&count);
    if (error)
        return refuse(&driver, "cuDeviceGetCount", error, reason, size);
    snprintf(reason, size, count ? "CUDA works here" : "the driver knows no device");
    return count ? count : -ENODEV;
}

/* Of a device's memory, without a context; or -errno and why in words. */
int64_t sw_cuda_total_bytes(const char *library, int ordinal, char *reason, size_t size)
{
    sw_driver driver;
    int device, result = load(library, &driver, reason, size);
    size_t bytes = 0;
    if (result)
        return result;
    const char *call = "cuInit";
    int error = driver.cuInit(0);
    if (!error)
        call = "cuDeviceGet", error = driver.cuDeviceGet(&device, ordinal);
    if (!error)
        call = "cuDeviceTotalMem", error = driver.cuDeviceTotalMem(&bytes, device);
    return error ? refuse(&driver, call, error, reason, size) : (int64_t)bytes;
}

int sw_cuda_new(const char *library, int ordinal, sw_cuda **out, char *reason, size_t size)
{
    sw_cuda *cuda = calloc(1, sizeof *cuda);
    if (!cuda)
        return -ENOMEM;
    const char *call = "cuInit";
    int error = 0, result = load(library, &cuda->driver, reason, size);
    if (!result) {
        cuda->holdings = sw_holdings_make(ordinal);
        error = cuda->driver.cuInit(0);
        if (!error)
            call = "cuDeviceGet", error = cuda->driver.cuDeviceGet(&cuda->device, ordinal);
        if (!error)
            call = "cuDevicePrimaryCtxRetain",
            error = cuda->driver.cuDevicePrimaryCtxRetain(&cuda->context, cuda->device);
        if (error)
            result = refuse(&cuda->driver, call, error, reason, size);
        else if (!cuda->holdings)
            (void)cuda->driver.cuDevicePrimaryCtxRelease(cuda->device), result = -ENOMEM;
    }
    if (result) {
        free(cuda);
        return result;
    }
    cuda->pid = getpid();
    atomic_init(&cuda->holders, 1);
    pthread_mutex_init(&cuda->lock, NULL);
    *out = cuda;
    return 0;
}

void sw_cuda_hold(sw_cuda *cuda)
{
    atomic_fetch_add(&cuda->holders, 1);
}

/* The last one to let go gives everything back. A forked child has nothing of it. */
void sw_cuda_drop(sw_cuda *cuda)
{
    if (cuda->pid != getpid() || atomic_fetch_sub(&cuda->holders, 1) != 1)
        return;
    int mode = SW_CUDA_CAPTURE_RELAXED, entered = !sw_cuda_enter(cuda, &mode);
    while (cuda->free) {
        sw_event *event = cuda->free;
        cuda->free = event->next_free;
        (void)cuda->driver.cuEventDestroy(event->handle);
        free(event);
    }
    if (entered)
        sw_cuda_leave(cuda, mode);
    (void)cuda->driver.cuDevicePrimaryCtxRelease(cuda->device);
    pthread_mutex_destroy(&cuda->lock);
    free(cuda);
}

/* Makes the device this thread's own. Another thread may be capturing a graph, which by default forbids
 * much to all threads, so this one is taken out of that. */
int sw_cuda_enter(sw_cuda *cuda, int *capture_mode)
{
    int result = SW_CUDA(cuda, cuCtxPushCurrent, cuda->context);
    if (result)
        return result;
    *capture_mode = SW_CUDA_CAPTURE_RELAXED;
    result = SW_CUDA(cuda, cuThreadExchangeStreamCaptureMode, capture_mode);
    if (result) {
        void *context;
        (void)cuda->driver.cuCtxPopCurrent(&context);
    }
    return result;
}

void sw_cuda_leave(sw_cuda *cuda, int capture_mode)
{
    void *context;
    (void)cuda->driver.cuThreadExchangeStreamCaptureMode(&capture_mode);
    (void)cuda->driver.cuCtxPopCurrent(&context);
}

/* An event that nobody else holds, to be recorded once. */
int sw_event_take(sw_cuda *cuda, sw_event **out)
{
    pthread_mutex_lock(&cuda->lock);
    sw_event *event = cuda->free;
    if (event)
        cuda->free = event->next_free;
    uint64_t serial = ++cuda->serials;
    pthread_mutex_unlock(&cuda->lock);
    if (!event) {
        event = calloc(1, sizeof *event);
        if (!event)
            return -ENOMEM;
        int result = SW_CUDA(cuda, cuEventCreate, &event->handle, SW_CUDA_NO_TIMING);
        if (result) {
            free(event);
            return result;
        }
        event->cuda = cuda;
    }
    sw_cuda_hold(cuda);
    event->serial = serial;
    atomic_store(&event->holders, 1);
    *out = event;
    return 0;
}

void sw_event_hold(sw_event *event)
{
    atomic_fetch_add(&event->holders, 1);
}

/* No driver call in most cases: whoever collects garbage does this. */
void sw_event_drop(sw_event *event)
{
    sw_cuda *cuda = event->cuda;
    if (cuda->pid != getpid() || atomic_fetch_sub(&event->holders, 1) != 1)
        return;
    pthread_mutex_lock(&cuda->lock);
    event->next_free = cuda->free;
    cuda->free = event;
    pthread_mutex_unlock(&cuda->lock);
    sw_cuda_drop(cuda);
}

/* -EBUSY: the stream is being captured, and what comes after the mark would become part of the graph. */
static int refuse_capture(sw_cuda *cuda, void *stream)
{
    int status = 0, result = SW_CUDA(cuda, cuStreamIsCapturing, stream, &status);
    return result ? result : status ? sw_cuda_check(cuda, "cuStreamIsCapturing", 900) : 0;
}

/* For calls that go past the engine, by any thread; `sw_cuda_leave` ends it. */
int sw_cuda_begin(sw_cuda *cuda, int *mode)
{
    return cuda->pid == getpid() ? sw_cuda_enter(cuda, mode) : -ECHILD;
}

/* An event after all that was put on the caller's stream up to now, and after what is gathered within the device, which
 * is put there first. */
int sw_cuda_mark(sw_cuda *cuda, uint64_t stream, const sw_gathering *first, sw_event **out)
{
    void *handle = (void *)(uintptr_t)stream;
    sw_event *event = NULL;
    int mode, result = sw_cuda_begin(cuda, &mode);
    if (result)
        return result;
    result = refuse_capture(cuda, handle);
    if (!result)
        result = sw_event_take(cuda, &event);
    if (!result && first)
        result = sw_cuda_gather(cuda, first, handle);
    if (!result)
        result = SW_CUDA(cuda, cuEventRecord, event->handle, handle);
    sw_cuda_leave(cuda, mode);
    if (result && event)
        sw_event_drop(event);
    else if (!result)
        *out = event;
    return result;
}

/* What is put on the caller's stream from now on starts after the copies that this context's engine has
 * issued for the latch. 1: there were some, 0: there were none. */
int sw_cuda_release(sw_cuda *cuda, sw_latch *latch, uint64_t stream)
{
    if (cuda->pid != getpid())
        return -ECHILD;
    sw_event *event = sw_latch_event(latch, cuda);
    if (!event)
        return 0;
    void *handle = (void *)(uintptr_t)stream;
    int mode, result = sw_cuda_enter(cuda, &mode);
    if (!result) {
        result = refuse_capture(cuda, handle);
        if (!result)
            result = SW_CUDA(cuda, cuStreamWaitEvent, handle, event->handle, 0);
        sw_cuda_leave(cuda, mode);
    }
    sw_event_drop(event);
    return result ? result : 1;
}

/* Pins memory for all devices. A refusal is an answer: copies work all the same, slower. */
int sw_cuda_pin(sw_cuda *cuda, uint64_t address, uint64_t bytes)
{
    int mode, result = sw_cuda_begin(cuda, &mode);
    if (result)
        return result;
    result = SW_CUDA(cuda, cuMemHostRegister, (void *)(uintptr_t)address, bytes, SW_CUDA_PORTABLE);
    sw_cuda_leave(cuda, mode);
    return result;
}

/* No job may be using the memory. */
int sw_cuda_unpin(sw_cuda *cuda, uint64_t address)
{
    int mode, result = sw_cuda_begin(cuda, &mode);
    if (result)
        return result;
    result = SW_CUDA(cuda, cuMemHostUnregister, (void *)(uintptr_t)address);
    sw_cuda_leave(cuda, mode);
    return result;
}

int sw_cuda_memory(sw_cuda *cuda, uint64_t *free_bytes, uint64_t *total_bytes)
{
    size_t unused, all;
    int mode, result = sw_cuda_begin(cuda, &mode);
    if (result)
        return result;
    result = SW_CUDA(cuda, cuMemGetInfo, &unused, &all);
    sw_cuda_leave(cuda, mode);
    if (!result)
        *free_bytes = unused, *total_bytes = all;
    return result;
}

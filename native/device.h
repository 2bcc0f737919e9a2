/* A GPU through its driver, which is found at run time: nothing of CUDA is needed to build stepwell.
 *
 * A sw_cuda is one device's context as one engine holds it, with the driver's functions and a pool of
 * events. It lives until the engine and everything that holds one of its events have let go of it.
 */
#ifndef STEPWELL_DEVICE_H
#define STEPWELL_DEVICE_H

#include "stepwell.h"

#define SW_CUDA_NOT_READY 600
#define SW_CUDA_NON_BLOCKING 1u    /* a stream that does not wait for the default stream */
#define SW_CUDA_NO_TIMING 2u       /* an event that is cheap to record */
#define SW_CUDA_PORTABLE 1u        /* memory pinned for every device's context */
#define SW_CUDA_CAPTURE_RELAXED 2  /* this thread's calls are none of a capture's business */

/* What is used of the driver, by the names that its library has them under, from CUDA 11 on. */
#define SW_CUDA_FUNCTIONS(F)                                                                          \
    F(cuInit, "cuInit", (unsigned flags))                                                             \
    F(cuDeviceGetCount, "cuDeviceGetCount", (int *count))                                             \
    F(cuDeviceGet, "cuDeviceGet", (int *device, int ordinal))                                         \
    F(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (void **context, int device))             \
    F(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (int device))                        \
    F(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (void *context))                                       \
    F(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (void **context))                                        \
    F(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", (int *mode))            \
    F(cuStreamCreate, "cuStreamCreate", (void **stream, unsigned flags))                              \
    F(cuStreamDestroy, "cuStreamDestroy_v2", (void *stream))                                          \
    F(cuStreamWaitEvent, "cuStreamWaitEvent", (void *stream, void *event, unsigned flags))            \
    F(cuStreamIsCapturing, "cuStreamIsCapturing", (void *stream, int *status))                        \
    F(cuStreamSynchronize, "cuStreamSynchronize", (void *stream))                                     \
    F(cuEventCreate, "cuEventCreate", (void **event, unsigned flags))                                 \
    F(cuEventDestroy, "cuEventDestroy_v2", (void *event))                                             \
    F(cuEventRecord, "cuEventRecord", (void *event, void *stream))                                    \
    F(cuEventQuery, "cuEventQuery", (void *event))                                                    \
    F(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void *to, uint64_t from, size_t bytes, void *stream)) \
    F(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (uint64_t to, const void *from, size_t bytes, void *stream)) \
    F(cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2", (uint64_t to, uint64_t from, size_t bytes, void *stream)) \
    F(cuMemAlloc, "cuMemAlloc_v2", (uint64_t *address, size_t bytes))                                 \
    F(cuMemFree, "cuMemFree_v2", (uint64_t address))                                                  \
    F(cuMemGetInfo, "cuMemGetInfo_v2", (size_t *free_bytes, size_t *total_bytes))                     \
    F(cuDeviceTotalMem, "cuDeviceTotalMem_v2", (size_t *bytes, int device))                           \
    F(cuMemHostRegister, "cuMemHostRegister_v2", (void *address, size_t bytes, unsigned flags))       \
    F(cuMemHostUnregister, "cuMemHostUnregister", (void *address))                                    \
    F(cuLaunchKernel, "cuLaunchKernel",                                                               \
      (void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
       unsigned block_z, unsigned shared_bytes, void *stream, void **parameters, void **extra))       \
    F(cuGetErrorName, "cuGetErrorName", (int error, const char **name))

#define SW_CUDA_FIELD(name, symbol, parameters) int(*name) parameters;
typedef struct {
    SW_CUDA_FUNCTIONS(SW_CUDA_FIELD)
} sw_driver;
#undef SW_CUDA_FIELD

/* An event of the pool: of a flight, of a mark, or held by latches. Recorded once while anybody holds it. */
struct sw_event {
    atomic_int holders;
    uint64_t serial; /* another each time that it leaves the pool */
    void *handle;
    sw_cuda *cuda;
    struct sw_event *next_free;
};

/* What this process holds of a device's memory. */
typedef struct sw_holdings sw_holdings;

struct sw_cuda {
    atomic_int holders;
    pid_t pid;
    int device;
    void *context;
    sw_holdings *holdings;
    struct sw_cuda *next_open; /* among those of open engines; guarded by the lock of the holdings */
    pthread_mutex_t lock; /* of all that follows; no driver call is made under it */
    sw_event *free;
    uint64_t serials;
    int last_error;
    const char *last_call;
    sw_driver driver;
};

/* Calls the driver: 0, or -errno, and then the error is kept for sw_cuda_error. */
#define SW_CUDA(cuda, call, ...) sw_cuda_check(cuda, #call, (cuda)->driver.call(__VA_ARGS__))

/* cuda.c */
int sw_cuda_new(const char *library, int device, sw_cuda **out, char *reason, size_t size);
int sw_cuda_check(sw_cuda *cuda, const char *call, int result);
int sw_cuda_begin(sw_cuda *cuda, int *capture_mode);
int sw_cuda_enter(sw_cuda *cuda, int *capture_mode);
void sw_cuda_leave(sw_cuda *cuda, int capture_mode);
int sw_event_take(sw_cuda *cuda, sw_event **out); /* inside enter and leave */
void sw_event_hold(sw_event *event);

/* holdings.c */
sw_holdings *sw_holdings_make(int ordinal);
void sw_holdings_open(sw_cuda *cuda);
void sw_holdings_close(sw_cuda *cuda);

/* Device memory through which small pieces cross together. Two streams take turns with it. */
typedef struct {
    uint64_t address; /* 0: not made yet */
    void *filled, *emptied;
    bool used;
} sw_stage;

#define SW_STAGES 3u /* one is filled while another one is emptied, and one more for their jitter */
#define SW_STAGE_BYTES ((uint64_t)4 << 20)

/* A job whose copies have been issued. */
typedef struct {
    sw_request request;
    sw_event *event; /* NULL: it has ended already */
    int64_t result;
} sw_flight;

struct sw_device {
    sw_cuda *cuda;
    void *copies, *kernels;              /* streams */
    atomic_uintptr_t gather, scatter, move; /* functions of the device; 0: there is none */
    sw_stage stages[SW_STAGES];
    uint32_t stage_count, stage_limit, stage_next;
    uint64_t marked;                     /* serial of the mark that the streams have waited for last */
    bool uses_kernels;                   /* the stream, for the job that is being issued */
    uint64_t copy_count, kernel_count, bytes; /* of that job */
    sw_flight *flights;                  /* a ring of the engine's depth, oldest at `first` */
    uint32_t first, count;
};

/* What a kernel works on, all of it in its parameters: nothing to keep until it has run. */
typedef struct {
    uint64_t addresses[SW_BATCH_PIECES]; /* of pieces, in the device's memory */
    uint32_t offsets[SW_BATCH_PIECES];   /* in the stage, or in the slot */
    uint32_t lengths[SW_BATCH_PIECES];
} sw_batch;

/* The same for runs of any length from one place of the device's memory to another: a block moves one unit. */
typedef struct {
    uint64_t to[SW_BATCH_RUNS];
    uint64_t from[SW_BATCH_RUNS];
    uint32_t lengths[SW_BATCH_RUNS];
    uint32_t ends[SW_BATCH_RUNS]; /* in units, of this run and those before it */
    uint32_t count;
    uint32_t unit_bytes;
} sw_moves;

/* crossing.c */
int sw_device_cross(sw_device *device, const sw_job *job);
int sw_device_pack(sw_device *device, const sw_job *job);
int sw_cuda_gather(sw_cuda *cuda, const sw_gathering *all, void *stream);
void sw_device_stages_free(sw_device *device);

/* latch.c */
sw_event *sw_latch_event(sw_latch *latch, const sw_cuda *cuda);

#endif

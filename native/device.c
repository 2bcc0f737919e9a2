/* The back end of a device: one thread that issues the copies of jobs, in their order, and finishes each
 * once its event has passed.
 *
 * While copies run it polls: a new job must be issued at once, since a training step may wait for that, and
 * a thread that sleeps in the driver until the oldest copy has ended cannot be woken for it. That copy may
 * have to wait for all that the caller's stream still has to do.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "device.h"

#define POLL_NS_MIN 20000u /* a chunk takes 150 us to cross */
#define POLL_NS_MAX 200000u

/* Both streams wait for the job's mark, if they have not just done so. */
static int wait_for_mark(sw_device *device, const sw_event *mark)
{
    if (!mark || mark->serial == device->marked)
        return 0;
    int result = SW_CUDA(device->cuda, cuStreamWaitEvent, device->copies, mark->handle, 0);
    if (!result)
        result = SW_CUDA(device->cuda, cuStreamWaitEvent, device->kernels, mark->handle, 0);
    if (!result)
        device->marked = mark->serial;
    return result;
}

/* Records the event after all that the job has issued. What a fetch has issued on the other stream its copies
 * have waited for, unless it broke off. */
static int record_end(sw_device *device, sw_event *event, bool joins)
{
    sw_cuda *cuda = device->cuda;
    if (!joins)
        return SW_CUDA(cuda, cuEventRecord, event->handle, device->copies);
    sw_event *copied;
    int result = sw_event_take(cuda, &copied);
    if (result)
        return result;
    result = SW_CUDA(cuda, cuEventRecord, copied->handle, device->copies);
    if (!result)
        result = SW_CUDA(cuda, cuStreamWaitEvent, device->kernels, copied->handle, 0);
    if (!result)
        result = SW_CUDA(cuda, cuEventRecord, event->handle, device->kernels);
    sw_event_drop(copied);
    return result;
}

/* For jobs whose event tells nothing: what is under way may still write to their slots. */
static void finish_streams(sw_device *device)
{
    (void)SW_CUDA(device->cuda, cuStreamSynchronize, device->copies);
    (void)SW_CUDA(device->cuda, cuStreamSynchronize, device->kernels);
}

/* Whether who waits for the job's latches waits for its copies to be issued, not to end: it reads the state. */
static bool fetches(const sw_job *job)
{
    return job->op == SW_D2H || job->op == SW_PACK;
}

/* The copies of a fetch are under way: whoever waits for its latches can go on, on the device after the event. */
static void count_down(sw_task *task, sw_event *event)
{
    while (fetches(&task->job) && task->latches_down < task->job.latch_count) {
        if (sw_latch_issued(task->latches[task->latches_down], event))
            return; /* no memory: it counts when the job has ended */
        task->latches_down++;
    }
}

/* Whether both sides are in the device's memory. */
static bool within(const sw_job *job)
{
    return job->op == SW_PACK || job->op == SW_UNPACK;
}

static uint64_t *bytes_of(sw_statistics *stats, uint32_t op)
{
    switch (op) {
    case SW_D2H:
        return &stats->bytes_fetched;
    case SW_H2D:
        return &stats->bytes_delivered;
    case SW_PACK:
        return &stats->bytes_packed;
    default:
        return &stats->bytes_unpacked;
    }
}

static void issue(sw_engine *engine, const sw_request *request)
{
    sw_device *device = engine->device;
    sw_cuda *cuda = device->cuda;
    const sw_job *job = &request->task->job;
    sw_event *event = NULL;
    device->copy_count = device->kernel_count = device->bytes = 0;
    device->uses_kernels = false;
    int result = sw_event_take(cuda, &event);
    if (!result) {
        result = wait_for_mark(device, job->mark);
        if (!result)
            result = within(job) ? sw_device_pack(device, job) : sw_device_cross(device, job);
        int recorded = record_end(device, event, device->uses_kernels && (job->op == SW_H2D || result));
        if (recorded) {
            finish_streams(device);
            sw_event_drop(event);
            event = NULL;
            result = result ? result : recorded;
        }
    }
    if (event)
        count_down(request->task, event);
    pthread_mutex_lock(&engine->lock);
    engine->stats.copies += device->copy_count;
    engine->stats.kernels += device->kernel_count;
    engine->stats.device_bytes = device->stage_count * SW_STAGE_BYTES;
    *bytes_of(&engine->stats, job->op) += device->bytes;
    pthread_mutex_unlock(&engine->lock);
    device->flights[(device->first + device->count++) % engine->depth] =
        (sw_flight){*request, event, result ? result : (int64_t)job->length};
}

/* Finishes the oldest jobs as far as they have ended; false: none had. */
static bool collect(sw_engine *engine)
{
    sw_device *device = engine->device;
    bool found = false;
    while (device->count) {
        sw_flight *flight = &device->flights[device->first];
        if (flight->event) {
            int state = device->cuda->driver.cuEventQuery(flight->event->handle);
            if (state == SW_CUDA_NOT_READY)
                break;
            int result = sw_cuda_check(device->cuda, "cuEventQuery", state);
            if (result)
                finish_streams(device);
            if (result && flight->result >= 0)
                flight->result = result;
            sw_event_drop(flight->event);
        }
        sw_request request = flight->request;
        int64_t result = flight->result;
        device->first = (device->first + 1) % engine->depth;
        device->count--;
        (void)sw_request_advance(engine, &request, result);
        found = true;
    }
    return found;
}

/* Until there is something to issue, or to look at again; false: nothing will come any more. */
static bool rest(sw_engine *engine, uint64_t poll_ns)
{
    sw_device *device = engine->device;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += (long)poll_ns;
    if (until.tv_nsec >= 1000000000)
        until.tv_sec++, until.tv_nsec -= 1000000000;
    pthread_mutex_lock(&engine->lock);
    bool room = device->count < engine->depth, going = true;
    if (device->count) {
        if (!(engine->ready_head && room))
            (void)pthread_cond_timedwait(&engine->work, &engine->lock, &until);
    } else if (!engine->ready_head && engine->closing) {
        going = false;
    } else if (!engine->ready_head) {
        (void)pthread_cond_wait(&engine->work, &engine->lock);
    }
    pthread_mutex_unlock(&engine->lock);
    return going;
}

static void *device_main(void *argument)
{
    sw_engine *engine = argument;
    sw_device *device = engine->device;
    int mode, entered = !sw_cuda_enter(device->cuda, &mode); /* if not, each job finds out by itself */
    uint64_t poll_ns = POLL_NS_MIN;
    bool going = true;
    while (going) {
        sw_request request;
        pthread_mutex_lock(&engine->lock);
        bool took = device->count < engine->depth && sw_request_take(engine, &request);
        pthread_mutex_unlock(&engine->lock);
        if (took)
            issue(engine, &request);
        if (collect(engine) || took) {
            poll_ns = POLL_NS_MIN;
            continue;
        }
        going = rest(engine, poll_ns);
        poll_ns = poll_ns * 2 < POLL_NS_MAX ? poll_ns * 2 : POLL_NS_MAX;
    }
    if (entered)
        sw_cuda_leave(device->cuda, mode);
    pthread_mutex_lock(&engine->lock);
    engine->threads_alive--;
    pthread_cond_broadcast(&engine->progress);
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

static int make_streams(sw_device *device)
{
    int mode, result = sw_cuda_enter(device->cuda, &mode);
    if (result)
        return result;
    result = SW_CUDA(device->cuda, cuStreamCreate, &device->copies, SW_CUDA_NON_BLOCKING);
    if (!result)
        result = SW_CUDA(device->cuda, cuStreamCreate, &device->kernels, SW_CUDA_NON_BLOCKING);
    sw_cuda_leave(device->cuda, mode);
    return result;
}

/* -errno and why in words, if the device cannot be used. */
int sw_device_start(sw_engine *engine, const sw_options *options)
{
    sw_cuda *cuda;
    int result = sw_cuda_new(options->library, options->device, &cuda, options->reason, options->reason_bytes);
    if (result)
        return result;
    sw_device *device = calloc(1, sizeof *device);
    if (!device) {
        sw_cuda_drop(cuda);
        return -ENOMEM;
    }
    device->cuda = cuda;
    device->stage_limit = SW_STAGES;
    engine->device = device;
    device->flights = calloc(engine->depth, sizeof *device->flights);
    if (!device->flights)
        return -ENOMEM;
    result = make_streams(device);
    if (result) {
        sw_cuda_error(cuda, options->reason, options->reason_bytes);
        return result;
    }
    result = sw_threads_start(engine, 1, device_main);
    if (!result)
        sw_holdings_open(cuda);
    return result;
}

void sw_device_free(sw_engine *engine)
{
    sw_device *device = engine->device;
    int mode, entered = !sw_cuda_enter(device->cuda, &mode);
    sw_device_stages_free(device);
    if (device->copies)
        (void)device->cuda->driver.cuStreamDestroy(device->copies);
    if (device->kernels)
        (void)device->cuda->driver.cuStreamDestroy(device->kernels);
    if (entered)
        sw_cuda_leave(device->cuda, mode);
    sw_holdings_close(device->cuda);
    sw_cuda_drop(device->cuda);
    free(device->flights);
    free(device);
    engine->device = NULL;
}

/* The device's context, for calls that go past the engine; it is held for the caller. NULL: it has none. */
sw_cuda *sw_device_cuda(sw_engine *engine)
{
    if (!engine->device)
        return NULL;
    sw_cuda_hold(engine->device->cuda);
    return engine->device->cuda;
}

/* Functions (CUfunction) of the device that gather, scatter and move; 0: the driver's copies do that. */
void sw_device_kernels(sw_engine *engine, uint64_t gather, uint64_t scatter, uint64_t move)
{
    atomic_store(&engine->device->gather, (uintptr_t)gather);
    atomic_store(&engine->device->scatter, (uintptr_t)scatter);
    atomic_store(&engine->device->move, (uintptr_t)move);
}

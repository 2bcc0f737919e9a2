/* The io_uring back end: one ring, one thread.
 *
 * The thread takes requests up to the depth, submits them in one call and waits for the first to end. An
 * eventfd, read through the ring itself, wakes it for new work, so it waits in one place only.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "stepwell.h"

#ifdef SW_NO_URING
int sw_uring_start(sw_engine *engine)
{
    (void)engine;
    return -ENOSYS;
}

void sw_uring_wake(sw_engine *engine)
{
    (void)engine;
}

void sw_uring_free(sw_engine *engine)
{
    (void)engine;
}

int sw_uring_register(sw_engine *engine, uint64_t address, uint64_t size)
{
    (void)engine, (void)address, (void)size;
    return -EOPNOTSUPP;
}

int sw_uring_unregister(sw_engine *engine, uint64_t address)
{
    (void)engine, (void)address;
    return 0;
}
#else
#include <liburing.h>

#define SLICES_MAX 1024u /* registered buffers, at most 1 GiB each */

typedef struct {
    uint64_t address, size; /* size 0: free */
    uint64_t region;        /* address of the region that it is a slice of */
} slice;

struct sw_uring {
    struct io_uring ring;
    int wake_fd;
    uint64_t wake_value;
    bool wake_armed;
    bool sleeping; /* guarded by the engine's lock: nobody is looking at the queue */
    bool sparse;   /* the kernel keeps a table of SLICES_MAX buffers for us */
    uint32_t in_flight;
    uint32_t slice_count; /* guarded by the engine's lock, as the slices */
    slice slices[SLICES_MAX];
    sw_request *requests, *free;
};

/* Index of the registered slice that holds all of the bytes, or -1. Caller holds the lock. */
static int slice_of(const sw_uring *uring, uint64_t address, uint64_t size)
{
    for (uint32_t i = 0; i < uring->slice_count; i++) {
        const slice *at = &uring->slices[i];
        if (address >= at->address && address - at->address < at->size && size <= at->size - (address - at->address))
            return (int)i;
    }
    return -1;
}

/* Fills a submission entry; there always is one, the ring has more than the depth. Caller holds the lock. */
static void prepare(sw_engine *engine, sw_request *request)
{
    sw_uring *uring = engine->uring;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&uring->ring);
    const sw_job *job = &request->task->job;
    uint64_t at = request->position + request->done, bytes = sw_request_bytes(engine, request);
    uint64_t address = job->address + at, offset = job->offset + at;
    void *memory = (void *)(uintptr_t)address;
    int index = job->op <= SW_WRITE && bytes ? slice_of(uring, address, bytes) : -1;
    if (index >= 0 && !request->fixed) {
        request->fixed = true;
        engine->stats.requests_fixed++;
    }
    if (job->op == SW_SYNC)
        io_uring_prep_fsync(sqe, job->fd, IORING_FSYNC_DATASYNC);
    else if (job->op == SW_FALLOCATE)
        io_uring_prep_fallocate(sqe, job->fd, 0, (off_t)job->offset, (off_t)job->length);
    else if (job->op == SW_READ && index >= 0)
        io_uring_prep_read_fixed(sqe, job->fd, memory, (unsigned)bytes, offset, index);
    else if (job->op == SW_READ)
        io_uring_prep_read(sqe, job->fd, memory, (unsigned)bytes, offset);
    else if (index >= 0)
        io_uring_prep_write_fixed(sqe, job->fd, memory, (unsigned)bytes, offset, index);
    else
        io_uring_prep_write(sqe, job->fd, memory, (unsigned)bytes, offset);
    io_uring_sqe_set_data(sqe, request);
}

/* Fills the ring from the queue; false: the engine is closing and nothing is left to wait for. */
static bool fill(sw_engine *engine)
{
    sw_uring *uring = engine->uring;
    pthread_mutex_lock(&engine->lock);
    while (uring->free && engine->ready_head) {
        sw_request *request = uring->free;
        uring->free = request->next_free;
        sw_request_take(engine, request);
        prepare(engine, request);
        uring->in_flight++;
    }
    uring->sleeping = uring->free != NULL;
    bool going = uring->in_flight || !engine->closing;
    pthread_mutex_unlock(&engine->lock);
    return going;
}

static void collect(sw_engine *engine, sw_request *request, int result)
{
    sw_uring *uring = engine->uring;
    if (sw_request_advance(engine, request, result)) {
        pthread_mutex_lock(&engine->lock);
        prepare(engine, request);
        pthread_mutex_unlock(&engine->lock);
        return;
    }
    request->next_free = uring->free;
    uring->free = request;
    uring->in_flight--;
}

static void submit_and_wait(sw_engine *engine)
{
    sw_uring *uring = engine->uring;
    if (!uring->wake_armed) {
        struct io_uring_sqe *sqe = io_uring_get_sqe(&uring->ring);
        io_uring_prep_read(sqe, uring->wake_fd, &uring->wake_value, sizeof uring->wake_value, 0);
        io_uring_sqe_set_data(sqe, NULL);
        uring->wake_armed = true;
    }
    int result = io_uring_submit_and_wait(&uring->ring, 1);
    if (result >= 0 || result == -EINTR || result == -EAGAIN || result == -EBUSY)
        return; /* what was not taken stays in the ring for the next round */
    pthread_mutex_lock(&engine->lock);
    engine->stats.ring_errno = (uint64_t)-result;
    pthread_mutex_unlock(&engine->lock);
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL); /* jobs cannot be failed while the kernel may own them */
}

static void *uring_main(void *argument)
{
    sw_engine *engine = argument;
    sw_uring *uring = engine->uring;
    while (fill(engine)) {
        submit_and_wait(engine);
        struct io_uring_cqe *cqe;
        while (!io_uring_peek_cqe(&uring->ring, &cqe)) {
            sw_request *request = io_uring_cqe_get_data(cqe);
            int result = cqe->res;
            io_uring_cqe_seen(&uring->ring, cqe);
            if (request)
                collect(engine, request, result);
            else
                uring->wake_armed = false;
        }
    }
    pthread_mutex_lock(&engine->lock);
    engine->threads_alive--;
    pthread_cond_broadcast(&engine->progress);
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

int sw_uring_start(sw_engine *engine)
{
    sw_uring *uring = calloc(1, sizeof *uring);
    if (!uring)
        return -ENOMEM;
    int result = -ENOMEM;
    uring->requests = calloc(engine->depth, sizeof *uring->requests);
    if (!uring->requests)
        goto no_requests;
    for (uint32_t i = 0; i < engine->depth; i++) {
        uring->requests[i].next_free = uring->free;
        uring->free = &uring->requests[i];
    }
    uring->wake_fd = eventfd(0, EFD_CLOEXEC); /* blocking: the ring then waits for it instead of EAGAIN */
    result = -errno;
    if (uring->wake_fd < 0)
        goto no_wake;
    result = io_uring_queue_init(engine->depth + 2, &uring->ring, IORING_SETUP_COOP_TASKRUN);
    if (result == -EINVAL) /* before Linux 5.19 */
        result = io_uring_queue_init(engine->depth + 2, &uring->ring, 0);
    if (result < 0)
        goto no_ring;
    (void)io_uring_ring_dontfork(&uring->ring);
    uring->sparse = !io_uring_register_buffers_sparse(&uring->ring, SLICES_MAX);
    engine->uring = uring;
    return sw_threads_start(engine, 1, uring_main);

no_ring:
    close(uring->wake_fd);
no_wake:
    free(uring->requests);
no_requests:
    free(uring);
    return result;
}

/* Caller holds the engine's lock. */
void sw_uring_wake(sw_engine *engine)
{
    if (!engine->uring->sleeping)
        return;
    engine->uring->sleeping = false;
    uint64_t one = 1;
    ssize_t written = write(engine->uring->wake_fd, &one, sizeof one);
    (void)written; /* an eventfd's counter cannot be full after so few */
}

void sw_uring_free(sw_engine *engine)
{
    io_uring_queue_exit(&engine->uring->ring);
    close(engine->uring->wake_fd);
    free(engine->uring->requests);
    free(engine->uring);
    engine->uring = NULL;
}

/* Makes one slice known to the kernel, then to `prepare`. */
static int register_slice(sw_engine *engine, uint64_t region, uint64_t address, uint64_t size)
{
    sw_uring *uring = engine->uring;
    uint32_t index = 0;
    while (index < uring->slice_count && uring->slices[index].size)
        index++;
    if (index == SLICES_MAX)
        return -ENOSPC;
    struct iovec vector = {(void *)(uintptr_t)address, size};
    __u64 tag = 0;
    int result = io_uring_register_buffers_update_tag(&uring->ring, index, &vector, &tag, 1);
    if (result < 0)
        return result;
    pthread_mutex_lock(&engine->lock);
    uring->slices[index] = (slice){address, size, region};
    if (index == uring->slice_count)
        uring->slice_count++;
    pthread_mutex_unlock(&engine->lock);
    return 0;
}

/* All of the region or nothing. The caller calls this and sw_uring_unregister from one thread at a time. */
int sw_uring_register(sw_engine *engine, uint64_t address, uint64_t size)
{
    if (!engine->uring->sparse)
        return -EOPNOTSUPP;
    for (uint64_t at = 0; at < size; at += SW_SLICE_BYTES) {
        uint64_t left = size - at;
        int result = register_slice(engine, address, address + at, left < SW_SLICE_BYTES ? left : SW_SLICE_BYTES);
        if (result < 0) {
            (void)sw_uring_unregister(engine, address);
            return result;
        }
    }
    return 0;
}

/* No job may be using the region. */
int sw_uring_unregister(sw_engine *engine, uint64_t address)
{
    sw_uring *uring = engine->uring;
    int result = 0;
    for (uint32_t index = 0; index < uring->slice_count; index++) {
        if (!uring->slices[index].size || uring->slices[index].region != address)
            continue;
        pthread_mutex_lock(&engine->lock);
        uring->slices[index] = (slice){0};
        pthread_mutex_unlock(&engine->lock);
        struct iovec none = {NULL, 0};
        __u64 tag = 0;
        int updated = io_uring_register_buffers_update_tag(&uring->ring, index, &none, &tag, 1);
        if (updated < 0)
            result = updated;
    }
    return result;
}
#endif

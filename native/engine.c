/* Engines as their users see them: made, fed, reaped, stopped. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "stepwell.h"

static bool foreign(const sw_engine *engine)
{
    return engine->pid != getpid();
}

static void destroy(sw_engine *engine)
{
    if (engine->uring)
        sw_uring_free(engine);
    if (engine->device)
        sw_device_free(engine);
    if (engine->done_fd >= 0)
        close(engine->done_fd);
    pthread_cond_destroy(&engine->work);
    pthread_cond_destroy(&engine->progress);
    pthread_mutex_destroy(&engine->lock);
    free(engine->threads);
    free(engine);
}

int sw_engine_new(const sw_options *options, sw_engine **out)
{
    if (!options->threads || options->threads > SW_THREADS_MAX || !options->depth || options->depth > SW_DEPTH_MAX ||
        options->request_bytes < SW_ALIGN_BYTES || options->request_bytes > SW_REQUEST_BYTES_MAX ||
        options->request_bytes % SW_ALIGN_BYTES)
        return -EINVAL;
    sw_engine *engine = calloc(1, sizeof *engine);
    if (!engine)
        return -ENOMEM;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->work, &monotonic);
    pthread_cond_init(&engine->progress, &monotonic);
    pthread_condattr_destroy(&monotonic);
    engine->pid = getpid();
    engine->depth = options->depth;
    engine->request_bytes = options->request_bytes;
    strncpy(engine->name, options->name, sizeof engine->name - 1);
    engine->done_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    int result = engine->done_fd < 0 ? -errno : 0;
    if (!result)
        result = options->library ? sw_device_start(engine, options)
                 : options->uring ? sw_uring_start(engine)
                                  : sw_threads_start(engine, options->threads, sw_threads_main);
    if (result) {
        if (engine->thread_count)
            (void)sw_engine_stop(engine, -1);
        destroy(engine);
        return result;
    }
    *out = engine;
    return 0;
}

/* Starts threads that no signal of the process is delivered to. */
int sw_threads_start(sw_engine *engine, uint32_t count, void *(*main)(void *))
{
    engine->threads = calloc(count, sizeof *engine->threads);
    if (!engine->threads)
        return -ENOMEM;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int result = 0;
    while (!result && engine->thread_count < count) {
        pthread_mutex_lock(&engine->lock);
        result = -pthread_create(&engine->threads[engine->thread_count], NULL, main, engine);
        if (!result) {
            pthread_setname_np(engine->threads[engine->thread_count], engine->name);
            engine->thread_count++;
            engine->threads_alive++;
        }
        pthread_mutex_unlock(&engine->lock);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return result;
}

/* Whether each slot that the job goes on to begins a block, which has one checksum. */
static bool slots_begin_blocks(const sw_job *job)
{
    const sw_map *slots = job->slots;
    uint64_t slot = sw_map_find(slots, job->map_offset), end = job->map_offset + job->length;
    while (++slot < slots->count && slots->offsets[slot] < end)
        if (slots->offsets[slot] % SW_BLOCK_BYTES)
            return false;
    return true;
}

static bool valid(const sw_engine *engine, const sw_job *job)
{
    bool copies = job->op == SW_GATHER || job->op == SW_SCATTER, packs = job->op == SW_PACK || job->op == SW_UNPACK;
    bool devices = job->op == SW_D2H || job->op == SW_H2D || packs;
    if (job->op >= SW_OP_COUNT || job->length > (uint64_t)INT64_MAX - SW_ALIGN_BYTES || (copies && engine->uring))
        return false;
    if (devices != (engine->device != NULL) || ((devices || job->op == SW_GATHER) && !job->map))
        return false;
    if (job->slots ? !devices && job->op != SW_GATHER : packs)
        return false;
    if (copies && job->crcs && (job->map_offset % SW_BLOCK_BYTES || (job->slots && !slots_begin_blocks(job))))
        return false;
    return !(job->op == SW_SCATTER && job->crcs && job->length > SW_BITMAP_BLOCKS * SW_BLOCK_BYTES);
}

static sw_task *task_new(sw_engine *engine, const sw_job *job)
{
    size_t latches_bytes = job->latch_count * sizeof *job->latches;
    sw_task *task = calloc(1, sizeof *task + latches_bytes);
    if (!task)
        return NULL;
    task->job = *job;
    if (latches_bytes)
        memcpy(task->latches, job->latches, latches_bytes);
    task->engine = engine;
    task->end = UINT64_MAX;
    task->total = job->length;
    if (job->flags & SW_DIRECT)
        task->total = (job->length + SW_ALIGN_BYTES - 1) & ~(SW_ALIGN_BYTES - 1);
    atomic_init(&task->owners, 1);
    atomic_init(&task->claimed, 0);
    return task;
}

/* Adds the tasks to the engine's books; they can be cancelled by stop from here on. */
static int admit(sw_engine *engine, sw_task *tasks, uint32_t count)
{
    int result = 0;
    pthread_mutex_lock(&engine->lock);
    if (engine->closing)
        result = -ESHUTDOWN;
    else if (engine->unreaped + count > SW_JOBS_MAX)
        result = -EBUSY;
    if (!result) {
        engine->outstanding += count;
        engine->unreaped += count;
        engine->stats.jobs_submitted += count;
        for (sw_task *task = tasks; task; task = task->next) {
            if (!task->job.after)
                continue;
            task->wait_next = engine->waiting;
            if (engine->waiting)
                engine->waiting->wait_prev = task;
            engine->waiting = task;
        }
    }
    pthread_mutex_unlock(&engine->lock);
    return result;
}

static void start(sw_task *task)
{
    if (!task->job.after) {
        atomic_store(&task->claimed, 1);
        sw_task_ready(task);
        return;
    }
    atomic_fetch_add(&task->owners, 1); /* ours: stop may end and reap it at any moment */
    int state = sw_ticket_wait(task->job.after, task);
    if (state != SW_PENDING && !atomic_exchange(&task->claimed, 1)) {
        if (state == SW_DONE)
            sw_task_ready(task);
        else
            sw_task_finish(task, -ECANCELED);
    }
    sw_task_drop(task);
}

/* All jobs or none. -EINVAL: a job is malformed, -ENOMEM, -EBUSY: too many unreaped, -ESHUTDOWN, -ECHILD. */
int sw_engine_submit(sw_engine *engine, const sw_job *jobs, uint32_t count)
{
    if (foreign(engine))
        return -ECHILD;
    for (uint32_t i = 0; i < count; i++)
        if (!valid(engine, &jobs[i]))
            return -EINVAL;
    sw_task *first = NULL, **link = &first;
    int result = 0;
    for (uint32_t i = 0; i < count && !result; i++) {
        *link = task_new(engine, &jobs[i]);
        if (*link)
            link = &(*link)->next;
        else
            result = -ENOMEM;
    }
    if (!result)
        result = admit(engine, first, count);
    while (first) {
        sw_task *task = first;
        first = task->next;
        task->next = NULL;
        if (result)
            sw_task_drop(task);
        else
            start(task);
    }
    return result;
}

/* Up to `max` finished jobs, oldest first. Resets the eventfd once the queue is empty. */
int sw_engine_reap(sw_engine *engine, sw_done *out, uint32_t max)
{
    if (foreign(engine))
        return -ECHILD;
    uint32_t count = 0;
    pthread_mutex_lock(&engine->lock);
    while (count < max && engine->done_head) {
        sw_task *task = engine->done_head;
        engine->done_head = task->next;
        out[count++] = (sw_done){task->job.id, task->result, task->bad_blocks};
        sw_task_drop(task);
    }
    if (!engine->done_head) {
        engine->done_tail = NULL;
        uint64_t value;
        ssize_t got = read(engine->done_fd, &value, sizeof value);
        (void)got;
    }
    engine->unreaped -= count;
    pthread_mutex_unlock(&engine->lock);
    return (int)count;
}

/* Readable while finished jobs wait to be reaped. */
int sw_engine_fileno(sw_engine *engine)
{
    return engine->done_fd;
}

int sw_engine_register(sw_engine *engine, uint64_t address, uint64_t size)
{
    if (foreign(engine))
        return -ECHILD;
    int result = engine->uring ? sw_uring_register(engine, address, size) : -EOPNOTSUPP;
    pthread_mutex_lock(&engine->lock);
    engine->stats.register_errno = (uint64_t)-result;
    pthread_mutex_unlock(&engine->lock);
    return result;
}

int sw_engine_unregister(sw_engine *engine, uint64_t address)
{
    if (foreign(engine))
        return -ECHILD;
    return engine->uring ? sw_uring_unregister(engine, address) : 0;
}

int sw_engine_statistics(sw_engine *engine, sw_statistics *out)
{
    if (foreign(engine))
        return -ECHILD;
    pthread_mutex_lock(&engine->lock);
    *out = engine->stats;
    pthread_mutex_unlock(&engine->lock);
    return 0;
}

/* For tests: cuts every request to bytes_max, and turns every n-th result into -error. Zeros: off. */
int sw_engine_fault(sw_engine *engine, uint64_t bytes_max, uint32_t every, int32_t error)
{
    if (foreign(engine))
        return -ECHILD;
    pthread_mutex_lock(&engine->lock);
    engine->fault_bytes_max = bytes_max;
    engine->fault_every = every;
    engine->fault_error = error;
    engine->fault_count = 0;
    pthread_mutex_unlock(&engine->lock);
    return 0;
}

/* Closes the engine's queues: returns the tasks that never started, to be cancelled. Caller holds the lock. */
static sw_task *shut(sw_engine *engine)
{
    sw_task *cancelled = NULL;
    engine->closing = true;
    for (sw_task *task = engine->ready_head, *next; task; task = next) {
        next = task->next;
        task->queued = false;
        if (task->in_flight) {
            task->error = task->error ? task->error : -ECANCELED;
        } else {
            task->next = cancelled;
            cancelled = task;
        }
    }
    engine->ready_head = engine->ready_tail = NULL;
    for (sw_task *task = engine->waiting, *next; task; task = next) {
        next = task->wait_next;
        if (atomic_exchange(&task->claimed, 1))
            continue; /* its ticket is firing just now; it will find the engine closing */
        task->next = cancelled;
        cancelled = task;
    }
    if (engine->uring)
        sw_uring_wake(engine);
    pthread_cond_broadcast(&engine->work);
    return cancelled;
}

/* Cancels what has not started, waits for what has, ends the threads; negative: wait without end.
 * -ETIMEDOUT: the threads are abandoned and the engine must never be freed. 0: reap what is left, then free. */
int sw_engine_stop(sw_engine *engine, int64_t timeout_ms)
{
    if (foreign(engine))
        return -ECHILD;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += timeout_ms % 1000 * 1000000;
    if (until.tv_nsec >= 1000000000)
        until.tv_sec++, until.tv_nsec -= 1000000000;

    pthread_mutex_lock(&engine->lock);
    sw_task *cancelled = shut(engine);
    pthread_mutex_unlock(&engine->lock);
    while (cancelled) {
        sw_task *task = cancelled;
        cancelled = task->next;
        sw_task_finish(task, -ECANCELED);
    }

    int result = 0;
    pthread_mutex_lock(&engine->lock);
    while (!result && (engine->threads_alive || engine->outstanding))
        result = timeout_ms < 0 ? -pthread_cond_wait(&engine->progress, &engine->lock)
                                : -pthread_cond_timedwait(&engine->progress, &engine->lock, &until);
    pthread_mutex_unlock(&engine->lock);
    for (uint32_t i = 0; i < engine->thread_count; i++)
        result ? pthread_detach(engine->threads[i]) : pthread_join(engine->threads[i], NULL);
    return result;
}

/* Only after sw_engine_stop returned 0. */
int sw_engine_free(sw_engine *engine)
{
    if (foreign(engine))
        return -ECHILD;
    while (engine->done_head) {
        sw_task *task = engine->done_head;
        engine->done_head = task->next;
        sw_task_drop(task);
    }
    destroy(engine);
    return 0;
}

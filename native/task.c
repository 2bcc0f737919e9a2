/* The life of a task, as the back ends share it: ready, cut into requests, finished, released. */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "stepwell.h"

static bool moves_bytes(const sw_task *task)
{
    return task->job.op == SW_READ || task->job.op == SW_WRITE;
}

/* Whether several threads may work on it, each on a request. */
static bool is_cut(const sw_task *task)
{
    return moves_bytes(task) || (task->job.op == SW_GATHER && task->job.slots);
}

void sw_task_drop(sw_task *task)
{
    if (atomic_fetch_sub(&task->owners, 1) == 1)
        free(task);
}

/* Caller holds the engine's lock. */
static void waiting_unlink(sw_task *task)
{
    sw_engine *engine = task->engine;
    if (task->wait_prev)
        task->wait_prev->wait_next = task->wait_next;
    else if (engine->waiting == task)
        engine->waiting = task->wait_next;
    if (task->wait_next)
        task->wait_next->wait_prev = task->wait_prev;
    task->wait_prev = task->wait_next = NULL;
}

/* Puts a claimed task in its engine's queue; false if the engine is closing. */
static bool make_ready(sw_task *task)
{
    sw_engine *engine = task->engine;
    pthread_mutex_lock(&engine->lock);
    waiting_unlink(task);
    bool open = !engine->closing;
    if (open) {
        task->queued = true;
        task->next = NULL;
        if (engine->ready_tail)
            engine->ready_tail->next = task;
        else
            engine->ready_head = task;
        engine->ready_tail = task;
        if (engine->uring)
            sw_uring_wake(engine);
        else
            pthread_cond_signal(&engine->work);
    }
    pthread_mutex_unlock(&engine->lock);
    return open;
}

static bool succeeded(const sw_task *task)
{
    if (task->result < 0)
        return false;
    return task->job.op == SW_SYNC || task->job.op == SW_FALLOCATE || (uint64_t)task->result == task->job.length;
}

/* Hands the task to reap. From here on it may be gone. */
static void publish(sw_task *task, bool ok)
{
    sw_engine *engine = task->engine;
    pthread_mutex_lock(&engine->lock);
    waiting_unlink(task);
    uint64_t *bytes[SW_OP_COUNT] = {&engine->stats.bytes_read, &engine->stats.bytes_written, NULL, NULL,
                                    &engine->stats.bytes_gathered, &engine->stats.bytes_scattered};
    if (task->result > 0 && bytes[task->job.op])
        *bytes[task->job.op] += (uint64_t)task->result;
    engine->stats.bad_blocks += (uint64_t)__builtin_popcountll(task->bad_blocks);
    ++*(ok ? &engine->stats.jobs_done : &engine->stats.jobs_failed);
    task->next = NULL;
    if (engine->done_tail) {
        engine->done_tail->next = task;
    } else {
        engine->done_head = task;
        uint64_t one = 1; /* cannot fail: the counter is read to zero before the queue is empty again */
        ssize_t written = write(engine->done_fd, &one, sizeof one);
        (void)written;
    }
    engine->done_tail = task;
    engine->outstanding--;
    pthread_cond_broadcast(&engine->progress);
    pthread_mutex_unlock(&engine->lock);
}

/* Gives tasks that a ticket held back to their engines. Those to be cancelled are added to `finished`. */
static sw_task *release(sw_task *waiting, bool ok, sw_task *finished)
{
    while (waiting) {
        sw_task *task = waiting;
        waiting = task->ticket_next;
        if (!atomic_exchange(&task->claimed, 1) && !(ok && make_ready(task))) {
            task->result = -ECANCELED;
            task->next = finished;
            finished = task;
        }
        sw_task_drop(task);
    }
    return finished;
}

/* Finishes a list of tasks whose result is set, and all that they cancel in turn. Ticket and latches hear
 * of it before the task can be reaped, because reaping ends the caller's duty to keep them. */
static void finish_all(sw_task *finished)
{
    while (finished) {
        sw_task *task = finished;
        finished = task->next;
        bool ok = succeeded(task);
        sw_task *waiting = task->job.signal ? sw_ticket_take(task->job.signal, ok) : NULL;
        while (task->latches_down < task->job.latch_count)
            sw_latch_down(task->latches[task->latches_down++], 1);
        publish(task, ok);
        finished = release(waiting, ok, finished);
    }
}

void sw_release(sw_task *waiting, bool ok)
{
    finish_all(release(waiting, ok, NULL));
}

void sw_task_finish(sw_task *task, int64_t result)
{
    task->result = result;
    task->next = NULL;
    finish_all(task);
}

/* For a task that waits for nothing, or nothing more, and that the caller has claimed. */
void sw_task_ready(sw_task *task)
{
    if (!make_ready(task))
        sw_task_finish(task, -ECANCELED);
}

/* The next request of the oldest task that has one. Caller holds the lock. A task leaves the queue with
 * its last request, so every task in the queue has something to issue. */
bool sw_request_take(sw_engine *engine, sw_request *request)
{
    sw_task *task = engine->ready_head;
    if (!task)
        return false;
    *request = (sw_request){.task = task, .position = task->issued};
    if (moves_bytes(task)) {
        uint64_t left = task->total - task->issued, wanted = task->job.length - task->issued;
        request->length = left < engine->request_bytes ? left : engine->request_bytes;
        request->need = request->length;
        if (task->job.op == SW_READ && wanted < request->need)
            request->need = wanted;
    } else if (is_cut(task)) {
        uint64_t at = task->job.map_offset + task->issued, slot = sw_map_find(task->job.slots, at), address;
        request->length = sw_map_run(task->job.slots, &slot, at, task->job.map_offset + task->total, &address);
    }
    task->issued += request->length;
    task->in_flight++;
    if (task->issued == task->total || !is_cut(task)) {
        engine->ready_head = task->next;
        if (!task->next)
            engine->ready_tail = NULL;
        task->queued = false;
    }
    engine->stats.requests++;
    if (++engine->stats.requests_in_flight > engine->stats.requests_in_flight_max)
        engine->stats.requests_in_flight_max = engine->stats.requests_in_flight;
    return true;
}

/* Bytes that the next system call of a request may move. */
uint64_t sw_request_bytes(const sw_engine *engine, const sw_request *request)
{
    uint64_t left = request->length - request->done, cut = engine->fault_bytes_max;
    if (!cut || left <= cut)
        return left;
    if (request->task->job.flags & SW_DIRECT)
        cut &= ~(SW_ALIGN_BYTES - 1);
    return cut ? cut : left < SW_ALIGN_BYTES ? left : SW_ALIGN_BYTES;
}

/* Caller holds the lock. */
static void queue_remove(sw_engine *engine, sw_task *task)
{
    sw_task *before = NULL;
    for (sw_task *at = engine->ready_head; at != task; at = at->next)
        before = at;
    if (before)
        before->next = task->next;
    else
        engine->ready_head = task->next;
    if (engine->ready_tail == task)
        engine->ready_tail = before;
    task->queued = false;
}

/* Takes one result into the request; true: it needs another call. */
static bool again(sw_engine *engine, sw_request *request, int64_t result, bool *ended)
{
    sw_task *task = request->task;
    if (result == -EAGAIN || result == -EINTR) {
        ++*(result == -EAGAIN ? &engine->stats.retries_eagain : &engine->stats.retries_eintr);
        if (++request->tries < SW_RETRIES_MAX)
            return true;
    }
    if (result < 0) {
        if (!task->error)
            task->error = result;
        return false;
    }
    if (!moves_bytes(task)) {
        task->result = result;
        return false;
    }
    uint64_t there = request->done + (uint64_t)result;
    bool grew = there > request->seen;
    if (grew)
        request->seen = there;
    if (request->seen >= request->need)
        return false;
    if (!grew) { /* a write that moves nothing and says no error would go on for ever */
        *ended = task->job.op == SW_READ;
        if (!*ended && !task->error)
            task->error = -EIO;
        return false;
    }
    engine->stats.short_transfers++;
    request->tries = 0;
    request->done = task->job.flags & SW_DIRECT ? request->seen & ~(SW_ALIGN_BYTES - 1) : request->seen;
    return true;
}

/* Records what a system call returned. True: issue the rest of the request again. False: the request is
 * over, and the task finished if it was its last. */
bool sw_request_advance(sw_engine *engine, sw_request *request, int64_t result)
{
    sw_task *task = request->task;
    bool ended = false;
    pthread_mutex_lock(&engine->lock);
    if (engine->fault_every && task->job.op < SW_GATHER && ++engine->fault_count % engine->fault_every == 0)
        result = -engine->fault_error;
    if (again(engine, request, result, &ended)) {
        pthread_mutex_unlock(&engine->lock);
        return true;
    }
    if (ended && request->position + request->seen < task->end)
        task->end = request->position + request->seen;
    if (task->queued && (task->error || task->end != UINT64_MAX))
        queue_remove(engine, task);
    task->in_flight--;
    engine->stats.requests_in_flight--;
    bool finished = !task->in_flight && !task->queued;
    pthread_mutex_unlock(&engine->lock);
    if (finished) {
        uint64_t bytes = task->end < task->job.length ? task->end : task->job.length;
        sw_task_finish(task, task->error ? task->error : moves_bytes(task) ? (int64_t)bytes : task->result);
    }
    return false;
}

/* The back end that works everywhere: a few threads, each with one blocking system call at a time. It
 * also is the copier: gather and scatter run here. */
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "stepwell.h"

static int64_t execute(sw_engine *engine, sw_request *request)
{
    sw_task *task = request->task;
    const sw_job *job = &task->job;
    uint64_t at = request->position + request->done;
    void *memory = (void *)(uintptr_t)(job->address + at);
    off_t offset = (off_t)(job->offset + at);
    int64_t result;
    switch (job->op) {
    case SW_READ:
        result = pread(job->fd, memory, sw_request_bytes(engine, request), offset);
        break;
    case SW_WRITE:
        result = pwrite(job->fd, memory, sw_request_bytes(engine, request), offset);
        break;
    case SW_SYNC:
        result = fdatasync(job->fd);
        break;
    case SW_FALLOCATE:
        result = fallocate(job->fd, 0, (off_t)job->offset, (off_t)job->length);
        break;
    case SW_GATHER:
        return sw_gather(job, request->position, job->slots ? request->length : job->length);
    case SW_SCATTER:
        return sw_scatter(job, &task->bad_blocks);
    default:
        return -EINVAL;
    }
    return result < 0 ? -errno : result;
}

void *sw_threads_main(void *argument)
{
    sw_engine *engine = argument;
    sw_request request;
    pthread_mutex_lock(&engine->lock);
    for (;;) {
        if (sw_request_take(engine, &request)) {
            if (engine->ready_head)
                pthread_cond_signal(&engine->work); /* a task has woken one thread, and may have requests for more */
            pthread_mutex_unlock(&engine->lock);
            while (sw_request_advance(engine, &request, execute(engine, &request)))
                continue;
            pthread_mutex_lock(&engine->lock);
        } else if (engine->closing) {
            break;
        } else {
            pthread_cond_wait(&engine->work, &engine->lock);
        }
    }
    engine->threads_alive--;
    pthread_cond_broadcast(&engine->progress);
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

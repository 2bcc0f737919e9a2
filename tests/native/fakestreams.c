/* The streams of the fake driver, and the hand that tests have in them. */
#define _GNU_SOURCE
#include "fakecuda.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
struct knobs knobs;
struct counts counts;
struct noted noted;
static stream *user_default, *streams;

void drop(event *event)
{
    if (!--event->holders)
        free(event);
}

static void copy_pieces(const operation *op)
{
    uint8_t *stage = op->to;
    for (unsigned i = 0; i < op->count; i++) {
        void *piece = (void *)(uintptr_t)op->pieces->addresses[i];
        if (op->value == GATHER)
            memcpy(stage + op->pieces->offsets[i], piece, op->pieces->lengths[i]);
        else
            memcpy(piece, stage + op->pieces->offsets[i], op->pieces->lengths[i]);
    }
}

static void move_runs(const moves *moves)
{
    for (unsigned i = 0; i < moves->count; i++)
        memcpy((void *)(uintptr_t)moves->to[i], (const void *)(uintptr_t)moves->from[i], moves->lengths[i]);
}

/* Does what is not waiting and not recording. Without the lock. */
static void perform(const operation *op, uint64_t slow_ns)
{
    if (op->kind != WRITE && slow_ns)
        nanosleep(&(struct timespec){(time_t)(slow_ns / 1000000000), (long)(slow_ns % 1000000000)}, NULL);
    if (op->kind == COPY)
        memcpy(op->to, op->from, op->bytes);
    else if (op->kind == KERNEL && op->moves)
        move_runs(op->moves);
    else if (op->kind == KERNEL)
        copy_pieces(op);
    else
        memset(op->to, op->value, op->bytes);
}

/* Whether the stream must stand still; takes one of the steps otherwise. Caller holds the lock. */
static bool held(const stream *stream)
{
    if (!(knobs.held & stream->kind))
        return false;
    if (stream->kind == ENGINE && knobs.steps > 0) {
        knobs.steps--;
        return false;
    }
    return true;
}

static void *stream_main(void *argument)
{
    stream *stream = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!stream->head ? !stream->ending : held(stream))
            pthread_cond_wait(&changed, &lock);
        operation *op = stream->head;
        if (!op)
            break;
        if (op->kind == RECORD) {
            if (op->version > op->event->passed)
                op->event->passed = op->version;
        } else if (op->kind == WAIT) {
            while (op->event->passed < op->version)
                pthread_cond_wait(&changed, &lock);
        } else {
            uint64_t slow_ns = knobs.slow_ns;
            pthread_mutex_unlock(&lock);
            perform(op, slow_ns);
            pthread_mutex_lock(&lock);
            counts.under_way -= op->kind != WRITE;
        }
        stream->head = op->next;
        stream->done++;
        if (op->event)
            drop(op->event);
        free(op->pieces);
        free(op->moves);
        free(op);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* Caller holds the lock. */
uint64_t put(stream *stream, operation op)
{
    operation *fresh = malloc(sizeof *fresh);
    *fresh = op;
    counts.under_way += op.kind == COPY || op.kind == KERNEL;
    if (!stream->head)
        stream->head = fresh;
    else
        stream->tail->next = fresh;
    stream->tail = fresh;
    if (fresh->event)
        fresh->event->holders++;
    pthread_cond_broadcast(&changed);
    return ++stream->put;
}

void wait_for(const stream *stream, uint64_t number)
{
    while (stream->done < number)
        pthread_cond_wait(&changed, &lock);
}

stream *stream_new(int kind)
{
    stream *fresh = calloc(1, sizeof *fresh);
    fresh->kind = kind;
    fresh->next = streams;
    streams = fresh;
    pthread_create(&fresh->thread, NULL, stream_main, fresh);
    return fresh;
}

stream *stream_of(void *handle)
{
    if (handle)
        return handle;
    if (!user_default)
        user_default = stream_new(USER);
    return user_default;
}

static bool meet(uint64_t address, uint64_t bytes, uint64_t other, uint64_t other_bytes)
{
    return address < other + other_bytes && other < address + bytes;
}

static bool touches(const operation *op, uint64_t address, uint64_t bytes)
{
    uint64_t to = (uint64_t)(uintptr_t)op->to, from = (uint64_t)(uintptr_t)op->from;
    bool found = meet(address, bytes, to, op->bytes) || meet(address, bytes, from, op->bytes);
    for (unsigned i = 0; op->moves && i < op->moves->count && !found; i++)
        found = meet(address, bytes, op->moves->to[i], op->moves->lengths[i]) ||
                meet(address, bytes, op->moves->from[i], op->moves->lengths[i]);
    for (unsigned i = 0; i < op->count && !found; i++)
        found = meet(address, bytes, op->pieces->addresses[i], op->pieces->lengths[i]) ||
                meet(address, bytes, to + op->pieces->offsets[i], op->pieces->lengths[i]);
    return found;
}

/* Whether some stream has yet to read or to write there. */
bool works_on(uint64_t address, uint64_t bytes)
{
    for (const stream *stream = streams; stream; stream = stream->next)
        for (const operation *op = stream->head; op; op = op->next)
            if (touches(op, address, bytes))
                return true;
    return false;
}

void end(stream *stream)
{
    pthread_mutex_lock(&lock);
    struct stream **link = &streams;
    while (*link != stream)
        link = &(*link)->next;
    *link = stream->next;
    stream->ending = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    pthread_join(stream->thread, NULL);
    free(stream);
}

/* What tests do with it. */

/* Streams of these kinds (1: of engines, 2: the user's) stop before their next operation; the others go on.
 * Held engine streams do `steps` operations more, all together. */
EXPORT void fake_hold(int kinds, int64_t steps)
{
    pthread_mutex_lock(&lock);
    knobs.held = kinds;
    knobs.steps = steps;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

EXPORT void fake_slow_ns(uint64_t each)
{
    pthread_mutex_lock(&lock);
    knobs.slow_ns = each;
    pthread_mutex_unlock(&lock);
}

/* The nth call of `name` ("*": of any) from now on fails, and so do `times` in all (-1: every one). */
EXPORT void fake_fail(const char *name, int64_t nth, int error, int64_t times)
{
    pthread_mutex_lock(&lock);
    strncpy(knobs.failing, name, sizeof knobs.failing - 1);
    knobs.fail_in = nth;
    knobs.fail_error = error;
    knobs.fail_times = times;
    pthread_mutex_unlock(&lock);
}

/* Bytes of the device's memory (0: as many as it has by itself), and those that others hold. */
EXPORT void fake_memory(uint64_t total, uint64_t used)
{
    pthread_mutex_lock(&lock);
    knobs.total = total;
    knobs.used = used;
    pthread_mutex_unlock(&lock);
}

/* From now on runs are noted, not moved: they lie nowhere. */
EXPORT void fake_dry(int dry)
{
    pthread_mutex_lock(&lock);
    knobs.dry = dry;
    noted.count = 0;
    pthread_mutex_unlock(&lock);
}

/* The run with that number among the noted: to, from, bytes. 0: there are not as many. */
EXPORT int fake_moved(uint64_t number, uint64_t *run)
{
    pthread_mutex_lock(&lock);
    int found = number < noted.count;
    if (found)
        memcpy(run, noted.runs[number], sizeof noted.runs[number]);
    pthread_mutex_unlock(&lock);
    return found;
}

/* The process is ending: every call fails. */
EXPORT void fake_off(int off)
{
    pthread_mutex_lock(&lock);
    knobs.off = off;
    pthread_mutex_unlock(&lock);
}

EXPORT int64_t fake_count(const char *what)
{
    const struct {
        const char *name;
        int64_t value;
    } all[] = {{"contexts", counts.contexts}, {"streams", counts.streams}, {"events", counts.events},
               {"buffers", buffers.count},    {"pinned", pinned.count},    {"copies", counts.copies},
               {"kernels", counts.kernels},   {"calls", counts.calls},     {"depth", depth},
               {"under_way", counts.under_way}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!strcmp(all[i].name, what))
            return all[i].value;
    return -1;
}

/* A stream of the user's. */
EXPORT uint64_t fake_stream(void) { return (uint64_t)(uintptr_t)stream_new(USER); }

EXPORT void fake_stream_end(uint64_t handle) { end((stream *)(uintptr_t)handle); }

/* A kernel of the user's: sets bytes, in the stream's order. */
EXPORT void fake_write(uint64_t handle, uint64_t address, int value, uint64_t bytes)
{
    pthread_mutex_lock(&lock);
    (void)put(stream_of((void *)(uintptr_t)handle),
              (operation){.kind = WRITE, .to = (void *)(uintptr_t)address, .value = value, .bytes = bytes});
    pthread_mutex_unlock(&lock);
}

EXPORT void fake_capture(uint64_t handle, int on)
{
    pthread_mutex_lock(&lock);
    stream_of((void *)(uintptr_t)handle)->capturing = on;
    pthread_mutex_unlock(&lock);
}

/* Operations that are on the stream and not done. */
EXPORT uint64_t fake_pending(uint64_t handle)
{
    pthread_mutex_lock(&lock);
    const stream *stream = stream_of((void *)(uintptr_t)handle);
    uint64_t left = stream->put - stream->done;
    pthread_mutex_unlock(&lock);
    return left;
}

EXPORT void fake_finish(uint64_t handle)
{
    pthread_mutex_lock(&lock);
    const stream *stream = stream_of((void *)(uintptr_t)handle);
    wait_for(stream, stream->put);
    pthread_mutex_unlock(&lock);
}

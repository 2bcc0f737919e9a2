/* Latches: what user threads wait at until jobs have come far enough, without Python's event loop.
 *
 * For a copy from a device far enough is: issued. The latch then holds the event that tells when it has
 * ended, one for each engine: copies of one engine run in order, so its latest stands for all.
 */
#include <errno.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "device.h"

typedef struct copies {
    sw_event *event;
    struct copies *next;
} copies;

struct sw_latch {
    pthread_mutex_t lock;
    pthread_cond_t opened;
    pid_t pid;
    uint64_t left;
    copies *copies;
};

/* NULL: out of memory. */
sw_latch *sw_latch_new(uint64_t count)
{
    sw_latch *latch = calloc(1, sizeof *latch);
    if (!latch)
        return NULL;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&latch->lock, NULL);
    pthread_cond_init(&latch->opened, &monotonic);
    pthread_condattr_destroy(&monotonic);
    latch->pid = getpid();
    latch->left = count;
    return latch;
}

/* No job may hold it any more. A forked child only forgets it: the parent may be in it just now. */
void sw_latch_free(sw_latch *latch)
{
    if (latch->pid != getpid())
        return;
    while (latch->copies) {
        copies *at = latch->copies;
        latch->copies = at->next;
        sw_event_drop(at->event);
        free(at);
    }
    pthread_cond_destroy(&latch->opened);
    pthread_mutex_destroy(&latch->lock);
    free(latch);
}

/* Takes the place of the engine's former event. Caller holds the lock. Returns what is to be dropped. */
static sw_event *keep(sw_latch *latch, copies *fresh)
{
    for (copies *at = latch->copies; at; at = at->next) {
        if (at->event->cuda != fresh->event->cuda)
            continue;
        sw_event *former = at->event;
        at->event = fresh->event;
        free(fresh);
        return former;
    }
    fresh->next = latch->copies;
    latch->copies = fresh;
    return NULL;
}

/* Counts down, not below zero. */
void sw_latch_down(sw_latch *latch, uint64_t count)
{
    pthread_mutex_lock(&latch->lock);
    latch->left -= count < latch->left ? count : latch->left;
    if (!latch->left)
        pthread_cond_broadcast(&latch->opened);
    pthread_mutex_unlock(&latch->lock);
}

/* Counts down by one, for copies that end with the event. -ENOMEM: it has not counted, and the event is to be
 * waited for instead. */
int sw_latch_issued(sw_latch *latch, sw_event *event)
{
    copies *fresh = malloc(sizeof *fresh);
    if (!fresh)
        return -ENOMEM;
    *fresh = (copies){.event = event};
    sw_event_hold(event);
    pthread_mutex_lock(&latch->lock);
    sw_event *former = keep(latch, fresh);
    pthread_mutex_unlock(&latch->lock);
    if (former)
        sw_event_drop(former);
    sw_latch_down(latch, 1);
    return 0;
}

/* 1: open; 0: not in that time. Negative: waits without end. */
int sw_latch_wait(sw_latch *latch, int64_t timeout_ns)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    int64_t wait_ns = timeout_ns < 0 ? 0 : timeout_ns;
    until.tv_sec += wait_ns / 1000000000;
    until.tv_nsec += wait_ns % 1000000000;
    if (until.tv_nsec >= 1000000000)
        until.tv_sec++, until.tv_nsec -= 1000000000;
    int result = 0;
    pthread_mutex_lock(&latch->lock);
    while (latch->left && !result)
        result = timeout_ns < 0 ? pthread_cond_wait(&latch->opened, &latch->lock)
                                : pthread_cond_timedwait(&latch->opened, &latch->lock, &until);
    int open = !latch->left;
    pthread_mutex_unlock(&latch->lock);
    return open;
}

uint64_t sw_latch_left(sw_latch *latch)
{
    pthread_mutex_lock(&latch->lock);
    uint64_t left = latch->left;
    pthread_mutex_unlock(&latch->lock);
    return left;
}

/* The event of that context's engine, to be dropped by the caller; NULL: it has issued nothing for the latch. */
sw_event *sw_latch_event(sw_latch *latch, const sw_cuda *cuda)
{
    sw_event *event = NULL;
    pthread_mutex_lock(&latch->lock);
    for (copies *at = latch->copies; at && !event; at = at->next)
        if (at->event->cuda == cuda)
            event = at->event;
    if (event)
        sw_event_hold(event);
    pthread_mutex_unlock(&latch->lock);
    return event;
}

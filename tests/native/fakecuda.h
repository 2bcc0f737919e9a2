/* A driver library without a GPU, for tests: host memory stands for the device's, each stream is a thread
 * with a queue, and time is the test's to hold.
 *
 * Modelled: order within a stream and between streams by events (a wait sees the record that was last when
 * it was put on the stream); copies of pageable memory, which come back only when they are done; copies
 * that cross a border of pinned memory, which are refused; calls that need a current context; captures;
 * calls that fail, once or from then on; what is not given back. Kernels are two, known by their handles.
 * Not modelled: several devices' memories apart, and the default stream's wait for other streams.
 */
#ifndef FAKECUDA_H
#define FAKECUDA_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, NOT_READY = 600, CAPTURING = 900 };
enum { COPY, KERNEL, RECORD, WAIT, WRITE };
enum { ENGINE = 1, USER = 2 };
enum { GATHER = 1, SCATTER = 2, PIECES_MAX = 240, DEVICES = 2, PINNED_MAX = 4096, DEPTH_MAX = 16 };

typedef struct {
    uint64_t addresses[PIECES_MAX];
    uint32_t offsets[PIECES_MAX], lengths[PIECES_MAX];
} batch;

typedef struct event {
    uint64_t recorded, passed; /* versions */
    int holders;               /* its owner, and what is on streams */
} event;

typedef struct operation {
    int kind;
    void *to;
    const void *from;
    size_t bytes;
    int value; /* a byte, or a kernel */
    unsigned count;
    batch *pieces;
    event *event;
    uint64_t version;
    struct operation *next;
} operation;

typedef struct stream {
    pthread_t thread;
    operation *head, *tail;
    uint64_t put, done;
    int kind;
    bool ending, capturing;
} stream;

/* Guards all that follows. */
extern pthread_mutex_t lock;
extern pthread_cond_t changed;
struct knobs {
    int held;       /* kinds of streams that stand still */
    int64_t steps;  /* that held engine streams may do all the same */
    uint64_t slow_ns;
    char failing[64]; /* "": no call, "*": any */
    int64_t fail_in, fail_times;
    int fail_error;
    bool off;
};
extern struct knobs knobs;
struct counts {
    int64_t contexts, streams, events, buffers, copies, kernels, calls, under_way;
};
extern struct counts counts;
extern int pinned_count;
extern __thread int depth; /* contexts that this thread has entered */

/* fakestreams.c; callers hold the lock */
uint64_t put(stream *stream, operation op);
void wait_for(const stream *stream, uint64_t number);
void drop(event *event);
stream *stream_new(int kind);
stream *stream_of(void *handle);
void end(stream *stream); /* without the lock */

#endif

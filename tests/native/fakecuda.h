/* A driver library without a GPU, for tests: host memory stands for the device's, each stream is a thread
 * with a queue, and time is the test's to hold.
 *
 * Modelled: order within a stream and between streams by events (a wait sees the record that was last when
 * it was put on the stream); copies of pageable memory, which come back only when they are done; copies
 * that cross a border of pinned memory, which are refused; calls that need a current context; captures;
 * calls that fail, once or from then on; what is not given back; memory that runs out; copies across the
 * border of what was allocated, which are refused, as are copies within the device of what is pinned, and freeing
 * what is not allocated, or what a stream still works on (a real driver would wait for that). Kernels are three, known
 * by their handles. Memory that was not allocated here stands for tensors.
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
enum { GATHER = 1, SCATTER = 2, MOVE = 3, PIECES_MAX = 240, RUNS_MAX = 170, NOTED_MAX = 64, DEVICES = 2, RANGES_MAX = 4096, DEPTH_MAX = 16 };

typedef struct {
    uint64_t addresses[PIECES_MAX];
    uint32_t offsets[PIECES_MAX], lengths[PIECES_MAX];
} batch;

typedef struct {
    uint64_t to[RUNS_MAX], from[RUNS_MAX];
    uint32_t lengths[RUNS_MAX], ends[RUNS_MAX], count, unit_bytes;
} moves;

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
    moves *moves; /* instead, for the kernel that moves */
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
    struct stream *next; /* of all */
} stream;

typedef struct {
    struct {
        uint64_t address, bytes;
    } all[RANGES_MAX];
    int count;
} ranges;

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
    uint64_t total, used; /* memory: of the device, by others */
    bool dry;             /* runs are noted, not moved */
    bool reuse;           /* what was freed is allocated again */
};
extern struct knobs knobs;
struct counts {
    int64_t contexts, streams, events, copies, kernels, calls, under_way;
};
extern struct counts counts;
extern struct noted {
    uint64_t runs[NOTED_MAX][3];
    unsigned count;
} noted;
extern ranges pinned, buffers;
extern __thread int depth; /* contexts that this thread has entered */

/* How a function of the driver begins and ends. */
#define BEGIN(needs_context)                                        \
    pthread_mutex_lock(&lock);                                      \
    int error = fails(__func__);                                    \
    if (!error && (needs_context) && !depth)                        \
        error = INVALID_CONTEXT;                                    \
    if (error) {                                                    \
        pthread_mutex_unlock(&lock);                                \
        return error;                                               \
    }
#define END                                                         \
    pthread_mutex_unlock(&lock);                                    \
    return error;

/* fakecuda.c; callers hold the lock */
int fails(const char *name);
bool in_one_piece(const ranges *of, uint64_t address, uint64_t bytes, bool *inside);

/* fakestreams.c; callers hold the lock */
uint64_t put(stream *stream, operation op);
void wait_for(const stream *stream, uint64_t number);
void drop(event *event);
stream *stream_new(int kind);
stream *stream_of(void *handle);
bool works_on(uint64_t address, uint64_t bytes);
void end(stream *stream); /* without the lock */

#endif

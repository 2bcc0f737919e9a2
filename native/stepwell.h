/* The native core of stepwell: declarations shared by its C files.
 *
 * Rules: functions return a count or 0, or -errno; results go through one out-pointer; a job's life is
 * submit -> ready -> requests -> finish -> reap, each step in its own function.
 *
 * Locks: of a ticket's, a latch's, a device's, holdings' and an engine's lock never two are held together, and none
 * while a call of the system or of a device's driver runs that could wait.
 */
#ifndef STEPWELL_H
#define STEPWELL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define SW_BLOCK_BYTES ((uint64_t)1 << 20)   /* one checksum each */
#define SW_ALIGN_BYTES ((uint64_t)4096)      /* of direct I/O: offsets, addresses, padded lengths */
#define SW_SLICE_BYTES ((uint64_t)1 << 30)   /* the kernel refuses a larger registered buffer */
#define SW_REQUEST_BYTES_MAX SW_SLICE_BYTES  /* below MAX_RW_COUNT, so one call can move it all */
#define SW_DEPTH_MAX 1024u                   /* far above what any disk gains from */
#define SW_THREADS_MAX 256u
#define SW_JOBS_MAX ((uint64_t)1 << 20)      /* not yet reaped; bounds the memory of the queues */
#define SW_RETRIES_MAX 1000u                 /* EAGAIN or EINTR without a byte moved; then it is an error */
#define SW_BITMAP_BLOCKS 64u                 /* bad_blocks is one bit a block */
#define SW_SMALL_BYTES ((uint64_t)64 << 10)  /* pieces of a device below this cross together */
#define SW_BATCH_PIECES 240u                 /* of one kernel: its parameters, all of a batch, are at most 4 KiB */
#define SW_BATCH_RUNS 170u                   /* the same for a kernel that moves runs */

#if defined(__x86_64__) && !defined(SW_PORTABLE) /* SW_PORTABLE: as other processors are built */
#define SW_X86 1
#endif

#define SW_DIRECT 1

enum sw_op {
    SW_READ,
    SW_WRITE,
    SW_SYNC,
    SW_FALLOCATE,
    SW_GATHER,
    SW_SCATTER,
    SW_D2H, /* these four are all that a device's engine does */
    SW_H2D,
    SW_PACK,
    SW_UNPACK,
    SW_OP_COUNT
};
enum sw_ticket_state { SW_PENDING, SW_DONE, SW_FAILED };

typedef struct sw_engine sw_engine;
typedef struct sw_ticket sw_ticket;
typedef struct sw_latch sw_latch;
typedef struct sw_cuda sw_cuda;
typedef struct sw_event sw_event;

typedef struct {
    uint64_t count;
    const uint64_t *offsets;
    const uint64_t *addresses;
} sw_map;

typedef struct {
    uint64_t id;
    uint32_t op;
    uint32_t flags;
    int32_t fd;
    uint64_t address;
    uint64_t offset;
    uint64_t length;
    const sw_map *map;
    uint64_t map_offset;
    const sw_map *slots; /* of the same bytes: the side that is not `map`; NULL: all of them are at `address` */
    uint32_t *crcs;
    sw_ticket *after;
    sw_ticket *signal;
    sw_event *mark;
    sw_latch *const *latches;
    uint32_t latch_count;
} sw_job;

typedef struct {
    uint64_t id;
    int64_t result;
    uint64_t bad_blocks;
} sw_done;

typedef struct {
    uint64_t jobs_submitted;
    uint64_t jobs_done;
    uint64_t jobs_failed;
    uint64_t bytes_read;
    uint64_t bytes_written;
    uint64_t bytes_gathered;
    uint64_t bytes_scattered;
    uint64_t requests;
    uint64_t requests_fixed;
    uint64_t requests_in_flight;
    uint64_t requests_in_flight_max;
    uint64_t short_transfers;
    uint64_t retries_eagain;
    uint64_t retries_eintr;
    uint64_t bad_blocks;
    uint64_t register_errno;
    uint64_t ring_errno;
    uint64_t bytes_fetched;
    uint64_t bytes_delivered;
    uint64_t bytes_packed;
    uint64_t bytes_unpacked;
    uint64_t copies;
    uint64_t kernels;
    uint64_t device_bytes;
} sw_statistics;

typedef struct {
    const char *name;
    uint32_t uring;
    uint32_t threads;
    uint32_t depth;
    uint64_t request_bytes;
    const char *library; /* of the device's driver; NULL: an engine of this machine */
    int32_t device;
    char *reason; /* in words, why a device cannot be used */
    uint64_t reason_bytes;
} sw_options;

/* A job inside its engine. Two owners may hold it: the engine, and the ticket that it waits for. */
typedef struct sw_task {
    sw_job job;
    sw_engine *engine;
    struct sw_task *next;               /* in the ready queue, the done queue or a local list */
    struct sw_task *wait_prev, *wait_next; /* among the engine's waiting tasks */
    struct sw_task *ticket_next;        /* among the ticket's waiting tasks */
    atomic_int owners;
    atomic_int claimed;                 /* set once, by whoever ends the wait: the ticket or close */
    uint64_t total;                     /* bytes to ask for: length, padded for direct I/O */
    uint64_t issued;                    /* of total */
    uint64_t end;                       /* where the file ended; UINT64_MAX: it did not */
    uint32_t in_flight;
    bool queued;                        /* in the ready queue */
    int64_t error;                      /* first -errno */
    int64_t result;
    uint64_t bad_blocks;
    uint32_t latches_down; /* of job.latches, which are these: */
    sw_latch *latches[];
} sw_task;

/* One system call's worth of a task, and how far it got. */
typedef struct sw_request {
    sw_task *task;
    uint64_t position;  /* in the job */
    uint64_t length;
    uint64_t need;      /* bytes that make it complete: without a read's padding */
    uint64_t done;      /* where to continue; aligned for direct I/O */
    uint64_t seen;      /* most bytes that were there */
    uint32_t tries;
    bool fixed;
    struct sw_request *next_free;
} sw_request;

typedef struct sw_uring sw_uring;
typedef struct sw_device sw_device;

struct sw_engine {
    pthread_mutex_t lock;
    pthread_cond_t work;     /* thread back end: something is ready, or closing */
    pthread_cond_t progress; /* for close: a task or a thread has ended */
    pid_t pid;
    int done_fd;
    bool closing;
    uint32_t depth;
    uint64_t request_bytes;
    char name[16];

    sw_task *ready_head, *ready_tail; /* have something left to issue, oldest first */
    sw_task *done_head, *done_tail;
    sw_task *waiting;
    uint64_t outstanding; /* submitted, not finished */
    uint64_t unreaped;    /* submitted, not reaped */
    sw_statistics stats;

    uint64_t fault_bytes_max; /* tests only: cuts each request; 0: off */
    uint32_t fault_every;     /* tests only: every n-th result becomes fault_error; 0: off */
    int32_t fault_error;
    uint64_t fault_count;

    uint32_t threads_alive;
    uint32_t thread_count;
    pthread_t *threads;
    sw_uring *uring; /* both NULL: thread back end */
    sw_device *device;
};

/* ticket.c */
sw_ticket *sw_ticket_new(void);
void sw_ticket_free(sw_ticket *ticket);
int sw_ticket_state(sw_ticket *ticket);
void sw_ticket_fire(sw_ticket *ticket, int ok);
int sw_ticket_wait(sw_ticket *ticket, sw_task *task);
sw_task *sw_ticket_take(sw_ticket *ticket, bool ok);

/* engine.c */
int sw_engine_new(const sw_options *options, sw_engine **out);
int sw_engine_submit(sw_engine *engine, const sw_job *jobs, uint32_t count);
int sw_engine_reap(sw_engine *engine, sw_done *out, uint32_t max);
int sw_engine_fileno(sw_engine *engine);
int sw_engine_register(sw_engine *engine, uint64_t address, uint64_t size);
int sw_engine_unregister(sw_engine *engine, uint64_t address);
int sw_engine_statistics(sw_engine *engine, sw_statistics *out);
int sw_engine_fault(sw_engine *engine, uint64_t bytes_max, uint32_t every, int32_t error);
int sw_engine_stop(sw_engine *engine, int64_t timeout_ms);
int sw_engine_free(sw_engine *engine);

/* task.c: what the back ends share */
void sw_task_drop(sw_task *task);
void sw_task_ready(sw_task *task);
void sw_task_finish(sw_task *task, int64_t result);
void sw_release(sw_task *waiting, bool ok);
bool sw_request_take(sw_engine *engine, sw_request *request);
bool sw_request_advance(sw_engine *engine, sw_request *request, int64_t result);
uint64_t sw_request_bytes(const sw_engine *engine, const sw_request *request);

/* threads.c */
int sw_threads_start(sw_engine *engine, uint32_t count, void *(*main)(void *)); /* in engine.c, for all */
void *sw_threads_main(void *engine);

/* uring.c */
int sw_uring_start(sw_engine *engine);
void sw_uring_wake(sw_engine *engine);
void sw_uring_free(sw_engine *engine);
int sw_uring_register(sw_engine *engine, uint64_t address, uint64_t size);
int sw_uring_unregister(sw_engine *engine, uint64_t address);

/* device.c */
int sw_device_start(sw_engine *engine, const sw_options *options);
void sw_device_free(sw_engine *engine);
sw_cuda *sw_device_cuda(sw_engine *engine);
void sw_device_kernels(sw_engine *engine, uint64_t gather, uint64_t scatter, uint64_t move);

/* Pieces of a device's memory that are copied one behind the other to one place of it. */
typedef struct {
    uint64_t kernel; /* the function that gathers; 0: each piece is a copy of its own */
    uint64_t to;
    const uint64_t *addresses, *sizes;
    uint64_t count;
} sw_gathering;

/* cuda.c */
int sw_probe_cuda(const char *library, char *reason, size_t size);
int64_t sw_cuda_total_bytes(const char *library, int device, char *reason, size_t size);
void sw_cuda_hold(sw_cuda *cuda);
void sw_cuda_drop(sw_cuda *cuda);
int sw_cuda_mark(sw_cuda *cuda, uint64_t stream, const sw_gathering *first, sw_event **out);
int sw_cuda_release(sw_cuda *cuda, sw_latch *latch, uint64_t stream);
int sw_cuda_pin(sw_cuda *cuda, uint64_t address, uint64_t bytes);
int sw_cuda_unpin(sw_cuda *cuda, uint64_t address);
int sw_cuda_memory(sw_cuda *cuda, uint64_t *free_bytes, uint64_t *total_bytes);
void sw_cuda_error(sw_cuda *cuda, char *text, size_t size);
void sw_event_drop(sw_event *event);

/* holdings.c */
int sw_cuda_allocate(sw_cuda *cuda, uint64_t bytes, uint64_t *address);
int sw_cuda_free(sw_cuda *cuda, uint64_t address);
int sw_cuda_lend(sw_cuda *cuda, const uint64_t *addresses, uint32_t count);
int sw_cuda_take_back(sw_cuda *cuda, const uint64_t *addresses, uint32_t count, uint8_t *ours);
int sw_cuda_trips(sw_cuda *cuda, uint64_t *trips, uint64_t *bytes);

/* latch.c */
sw_latch *sw_latch_new(uint64_t count);
void sw_latch_free(sw_latch *latch);
void sw_latch_down(sw_latch *latch, uint64_t count);
int sw_latch_issued(sw_latch *latch, sw_event *event);
int sw_latch_wait(sw_latch *latch, int64_t timeout_ns);
uint64_t sw_latch_left(sw_latch *latch);

/* probe.c */
int sw_probe_uring(char *reason, size_t size);

/* pieces.c */
uint64_t sw_map_find(const sw_map *map, uint64_t at);
uint64_t sw_map_run(const sw_map *map, uint64_t *piece, uint64_t at, uint64_t end, uint64_t *address);
int64_t sw_gather(const sw_job *job, uint64_t begin, uint64_t length);
int64_t sw_scatter(const sw_job *job, uint64_t *bad_blocks);

/* crc32c.c; `state` is the running value, without the inversions at both ends */
typedef struct {
    const char *name;
    uint32_t (*update)(uint32_t state, const uint8_t *data, size_t size);
    uint32_t (*copy)(uint32_t state, uint8_t *to, const uint8_t *from, size_t size); /* copies, too */
} sw_crc_kind;

uint32_t sw_crc32c(uint32_t crc, const void *data, uint64_t size);
uint32_t sw_crc32c_combine(uint32_t a, uint32_t b, uint64_t size_b);
int sw_crc32c_select(const char *name);
const char *sw_crc32c_name(void);
int sw_crc32c_supported(const char *name);
const sw_crc_kind *sw_crc_kind_now(void);
uint32_t sw_crc_power(uint64_t exponent);

/* copy.c */
void sw_copy(uint8_t *to, const uint8_t *from, size_t size);
void sw_copy_lines(uint8_t *to, const uint8_t *from, size_t size, size_t ahead); /* x86-64 only */
void sw_fence(void);

/* crc32c_x86.c */
extern const sw_crc_kind sw_crc_sse42, sw_crc_avx512;
void sw_crc_x86_init(void);

/* region.c */
int64_t sw_region_new(uint64_t size);
int sw_region_populate(uint64_t address, uint64_t size);
void sw_region_free(uint64_t address, uint64_t size);
int64_t sw_map_new(int fd, uint64_t offset, uint64_t size, int writable);
int sw_map_punch(int fd, uint64_t offset, uint64_t size);
int sw_map_allocate(int fd, uint64_t offset, uint64_t size);
int sw_map_huge(int fd, uint64_t address, uint64_t offset, uint64_t size);
int sw_map_enter(uint64_t address, uint64_t size);
int sw_memory_kind(int fd, uint64_t *page_bytes);
void sw_map_fence(void);

#endif

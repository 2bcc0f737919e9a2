/* Is io_uring there, and if not, why? The kernel says EPERM or ENOSYS for very different reasons, and the
 * remedy differs, so the likely cause is looked up and named. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "stepwell.h"

#ifdef SW_NO_URING
int sw_probe_uring(char *reason, size_t size)
{
    snprintf(reason, size, "built without liburing");
    return -ENOSYS;
}
#else
#include <liburing.h>

static int read_number(const char *path, const char *label, int *out)
{
    FILE *file = fopen(path, "re");
    if (!file)
        return -errno;
    char line[256];
    int result = -ENOENT;
    size_t skip = strlen(label);
    while (result && fgets(line, sizeof line, file))
        if (!strncmp(line, label, skip) && sscanf(line + skip, "%d", out) == 1)
            result = 0;
    fclose(file);
    return result;
}

static int refuse(int error, const char *what, char *reason, size_t size)
{
    int disabled = 0, filter = 0;
    (void)read_number("/proc/sys/kernel/io_uring_disabled", "", &disabled);
    (void)read_number("/proc/self/status", "Seccomp:", &filter);
    const char *seccomp = filter == 2 ? "this process runs under a seccomp filter, which likely forbids it" : NULL;
    if (error == -EPERM && disabled)
        snprintf(reason, size, "%s: EPERM: sysctl kernel.io_uring_disabled is %d", what, disabled);
    else if (error == -EPERM)
        snprintf(reason, size, "%s: EPERM: %s", what, seccomp ? seccomp : "a security module forbids it");
    else if (error == -ENOSYS)
        snprintf(reason, size, "%s: ENOSYS: %s", what, seccomp ? seccomp : "the kernel is too old or built without io_uring");
    else if (error == -ENOMEM)
        snprintf(reason, size, "%s: ENOMEM: the limit of locked memory (ulimit -l) is used up", what);
    else
        snprintf(reason, size, "%s: %s", what, strerror(-error));
    return error;
}

static int missing_operation(struct io_uring *ring)
{
    static const int needed[] = {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED, IORING_OP_WRITE_FIXED,
                                 IORING_OP_FSYNC, IORING_OP_FALLOCATE};
    struct io_uring_probe *probe = io_uring_get_probe_ring(ring);
    if (!probe)
        return -ENOSYS;
    int result = 0;
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (!io_uring_opcode_supported(probe, needed[i]))
            result = needed[i];
    io_uring_free_probe(probe);
    return result;
}

/* 0 if io_uring can be used here, found by using it; else -errno. `reason` tells in words. */
int sw_probe_uring(char *reason, size_t size)
{
    struct io_uring ring;
    int result = io_uring_queue_init(4, &ring, 0);
    if (result < 0)
        return refuse(result, "io_uring_setup", reason, size);
    int missing = missing_operation(&ring);
    if (missing) {
        snprintf(reason, size, "the kernel is too old: io_uring lacks an operation that is needed (%d)", missing);
        result = -ENOSYS;
    } else {
        struct io_uring_cqe *cqe;
        io_uring_prep_nop(io_uring_get_sqe(&ring));
        result = io_uring_submit(&ring);
        if (result >= 0)
            result = io_uring_wait_cqe(&ring, &cqe);
        if (result < 0)
            refuse(result, "io_uring_enter", reason, size);
        else
            snprintf(reason, size, "io_uring works here");
    }
    io_uring_queue_exit(&ring);
    return result < 0 ? result : 0;
}
#endif

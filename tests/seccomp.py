"""For scripts in processes of their own: a seccomp filter, as containers have one."""

#: code for the head of a script: forbids io_uring_setup in this process, with the errno in argv[1]
FORBID_URING = r"""
import ctypes, struct, sys
number = int(sys.argv[1])
setup_call = 425  # the same on all architectures
filter = b"".join(struct.pack("HBBI", *line) for line in [
    (0x20, 0, 0, 0),                    # load the number of the call
    (0x15, 0, 1, setup_call),           # is it io_uring_setup?
    (0x06, 0, 0, 0x00050000 | number),  # fail with errno
    (0x06, 0, 0, 0x7FFF0000),           # allow
])
buffer = ctypes.create_string_buffer(filter)
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(buffer)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0                      # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0  # PR_SET_SECCOMP, filter
"""

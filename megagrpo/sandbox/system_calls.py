"""The system calls that a program may not make: a seccomp filter, installed by `child.py`.

The filter denies calls that escape the sandbox's accounting or widen the kernel's surface:
namespaces and mounts (memory in private file systems), System V and POSIX queues, segments and keys
(memory that is in no process), files of memory (which can be in a socket's queue), larger queues of
sockets, sockets of the families above AF_INET6 (AF_VSOCK reaches the host of a virtual machine
without a network), io_uring, bpf, ptrace and so on. They return EPERM. clone3, whose flags a
filter cannot read, returns ENOSYS, so that libraries use clone. Everything else is allowed.

Filters are programs for the kernel's packet filter: Linux, Documentation/userspace-api/
seccomp_filter.rst. Standard library only, for the reason in `child.py`.
"""

import ctypes
import errno
import os
import struct

_SET_SECCOMP, _MODE_FILTER = 22, 2  # of prctl
_LOAD, _IS, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _THIRD_ARGUMENT = 0, 4, 16, 32  # in struct seccomp_data
_NEW_NAMESPACES = 0x7E020080  # every CLONE_NEW*
_X32 = 0x40000000  # numbers of x86's third interface begin there
_BEYOND_INET6 = 11  # AF_NETLINK, AF_ALG, AF_VSOCK and so on
_SEND_BUFFER, _RECEIVE_BUFFER = 7, 8  # SO_SNDBUF, SO_RCVBUF; their FORCE needs a capability

# machine -> (AUDIT_ARCH_*, numbers of denied calls, numbers of clone, socket, socketpair, setsockopt)
# denied: unshare, setns, mount, umount2, pivot_root, shmget, semget, msgget, mq_open, memfd_create;
# add_key, request_key, keyctl;
# bpf, ptrace, process_vm_readv, process_vm_writev, perf_event_open, userfaultfd
_MACHINES = {
    "x86_64": (
        0xC000003E,
        (272, 308, 165, 166, 155, 29, 64, 68, 240, 319, 248, 249, 250, 321, 101, 310, 311, 298, 323),
        (56, 41, 53, 54),
    ),
    "aarch64": (
        0xC00000B7,
        (97, 268, 40, 39, 41, 194, 190, 186, 180, 279, 217, 218, 219, 280, 117, 270, 271, 241, 282),
        (220, 198, 199, 208),
    ),
}  # fmt: skip
# io_uring_setup, open_tree, move_mount, fsopen, fsmount, mount_setattr, memfd_secret
_ON_ALL_MACHINES = (425, 428, 429, 430, 432, 442, 447)
_CLONE3 = 435


def forbid() -> None:
    """Irrevocably denies the calls to this process and its children; no_new_privs must be set.
    Raises OSError."""
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no filter of system calls is known for {machine}")
    steps = _steps(machine)
    # struct sock_filter and sock_fprog of the kernel
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_SECCOMP, _MODE_FILTER, program, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def _steps(machine: str) -> list[tuple[int, int, int, int]]:
    """Returns the filter: (code, steps to skip if true, if false, value).

    A comparison that holds continues with the next step, else it skips the answer.
    """
    architecture, denied, (clone, socket, pair, option) = _MACHINES[machine]
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IS, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),  # a 32-bit call, whose numbers are others
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_IS, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    denial = _ERRNO | errno.EPERM
    for number in (*denied, *_ON_ALL_MACHINES):
        steps += [(_IS, 0, 1, number), (_RETURN, 0, 0, denial)]
    # denied if the comparison of the argument holds
    for number, argument, comparison, value in (
        (clone, _FIRST_ARGUMENT, _HAS_BITS, _NEW_NAMESPACES),
        (socket, _FIRST_ARGUMENT, _AT_LEAST, _BEYOND_INET6),
        (pair, _FIRST_ARGUMENT, _AT_LEAST, _BEYOND_INET6),
        (option, _THIRD_ARGUMENT, _IS, _SEND_BUFFER),
        (option, _THIRD_ARGUMENT, _IS, _RECEIVE_BUFFER),
    ):
        steps += [(_LOAD, 0, 0, _NUMBER), (_IS, 0, 3, number), (_LOAD, 0, 0, argument)]
        steps += [(comparison, 0, 1, value), (_RETURN, 0, 0, denial)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    return steps

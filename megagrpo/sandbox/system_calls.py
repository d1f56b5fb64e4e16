"""The system calls that a program may not make: a seccomp filter, installed by `child.py`.

The filter denies calls that escape the sandbox's accounting or widen the kernel's surface:
namespaces and mounts (memory in private file systems), System V and POSIX queues, segments and keys
(memory that is in no process), files of memory (which can be in a socket's queue), io_uring, bpf,
ptrace and so on. They return EPERM. clone3, whose flags a filter cannot read, returns ENOSYS, so
that libraries use clone. Everything else is allowed.

Filters are programs for the kernel's packet filter: Linux, Documentation/userspace-api/
seccomp_filter.rst. Standard library only, for the reason in `child.py`.
"""

import ctypes
import errno
import os

_SET_SECCOMP, _MODE_FILTER = 22, 2  # of prctl
_LOAD, _IS, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_NEW_NAMESPACES = 0x7E020080  # every CLONE_NEW*
_X32 = 0x40000000  # numbers of x86's third interface begin there

# machine -> (AUDIT_ARCH_*, numbers of the calls below, clone's)
_MACHINES = {
    "x86_64": (0xC000003E, (272, 308, 165, 166, 155, 29, 64, 68, 240, 319), (248, 249, 250), 56),
    "aarch64": (0xC00000B7, (97, 268, 40, 39, 41, 194, 190, 186, 180, 279), (217, 218, 219), 220),
}
# unshare, setns, mount, umount2, pivot_root, shmget, semget, msgget, mq_open,
# memfd_create; add_key, request_key,
# keyctl; then bpf, ptrace, process_vm_readv, process_vm_writev, perf_event_open, userfaultfd
_TRACING = {"x86_64": (321, 101, 310, 311, 298, 323), "aarch64": (280, 117, 270, 271, 241, 282)}
# io_uring_setup, open_tree, move_mount, fsopen, fsmount, mount_setattr, memfd_secret
_ON_ALL_MACHINES = (425, 428, 429, 430, 432, 442, 447)
_CLONE3 = 435


class _Step(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("steps", ctypes.POINTER(_Step)))


def forbid() -> None:
    """Irrevocably denies the calls to this process and its children; no_new_privs must be set.
    Raises OSError."""
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no filter of system calls is known for {machine}")
    steps = _steps(machine)
    program = _Program(len(steps), (_Step * len(steps))(*steps))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0) < 0:
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def _steps(machine: str) -> list[_Step]:
    """Returns the filter. A comparison that holds continues with the next step, else it skips the
    answer."""
    architecture, spaces, keys, clone = _MACHINES[machine]
    denied = (*spaces, *keys, *_TRACING[machine], *_ON_ALL_MACHINES)
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
    for number in denied:
        steps += [(_IS, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    steps += [
        (_IS, 0, 3, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_HAS_BITS, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return [_Step(*step) for step in steps]

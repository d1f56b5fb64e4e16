"""A container for one Python program that a model wrote, with a separate threat model.

The program is assumed hostile. It may look for its tests and their answers, for keys and files, and
for the network; take all memory, processes and time; signal, outlive or imitate its supervisor.

The sandbox needs Linux 5.12 or later (mount_setattr), as root or with unprivileged user namespaces.
It uses pid, network, IPC, mount and user namespaces, pivot_root, capset, no_new_privs, resource
limits and pidfds, called by ctypes in `child.py`, and a system call filter (`system_calls.py`;
x86-64 and ARM). `sandbox.isolation` tries all of it with a trivial program.

The sandbox prevents the program from reading anything but the interpreter and the system libraries,
writing outside a small private /tmp in memory, using any network (loopback too), seeing or
signaling other processes, and exceeding its limits for time, memory, output, files, open files and
processes. Everything that the program started ends with it, and it ends with the process that
requested it. The tests run in a second sandbox, so the program sees arguments and never an expected
value (`calls.py`).

The sandbox does not stop an attack on the shared kernel through a call that the filter allows,
bursts of memory between two checks, 20 ms apart, or many programs that use all cores at once. It is
not a virtual machine.

Without namespaces it refuses to run (`isolation: required`). With `isolation: off` only the
resource limits hold: the program has the network, can read its user's files and, unless root
started it, can write that user's files and end that user's processes.

The core does not import the sandbox. `grader.py` is grader `code`, and the environment `python`
runs programs here; both are found by name, also by `megagrpo check` and `doctor`.
"""

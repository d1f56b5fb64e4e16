"""A container for one Python program that a model wrote, with its own threat model.

The program is assumed hostile: it may look for its tests and their answers, for keys and files, for
the network; take all memory, processes and time; signal, outlive or imitate its supervisor.

What it rests on: Linux 5.12 or later (mount_setattr), as root or with unprivileged user namespaces;
pid, network, IPC, mount and user namespaces, pivot_root, capset, no_new_privs, resource limits and
pidfds, called by ctypes in `child.py`, and a filter of system calls (`system_calls.py`; x86-64 and
ARM). `sandbox.isolation` tries all of it with a trivial program.

What it stops: reading anything but the interpreter and the system's libraries, writing outside its
own small /tmp in memory, every network (loopback too), signals to and sight of other processes, and
more time, memory, output, files, open files or processes than its limits. Everything that it
started ends with it, and it ends with the process that asked for it. Its tests run in a sandbox of
their own, so it sees arguments and never an expected value (`calls.py`).

What it does not stop: a hole in the kernel, which is shared, behind a call that the filter allows;
bursts of memory between two looks, 20 ms apart; use of this machine's cores by as many
programs as run at once. It is no virtual machine.

Without namespaces it refuses to run (`isolation: required`). With `isolation: off` only the
resource limits hold: the program has the network, reads what its user reads and, unless root
started it, may write that user's files and end that user's processes.

The core does not import it. `grader.py` is grader `code`; the environment `python` runs programs
with it; both, and `megagrpo check` and `doctor`, find it by name.
"""

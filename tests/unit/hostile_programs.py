"""Programs that try to harm, to hang or to cheat, and what becomes of each.
docs/evidence/hostile.md lists them.

Each is graded by its standard output (SCRIPTS: input 1, expected 2) or by calls of its function f
(CALLS: f(1) == 2). Limits are small, so that a program which breaks one costs this machine little.
"""

import json
import os
import re

OPTIONS = {"memory_mb": 192, "output_kb": 64, "disk_mb": 4, "open_files": 16, "processes": 6}
SCRIPTS = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
CALLS = json.dumps({"asserts": ["assert f(1) == 2", "assert abs(f(2) - 3) < 1e-9"]})


def _errno(errno: int) -> str:
    return f"exit code 1: {type(OSError(errno, '')).__name__}: [Errno {errno}] {os.strerror(errno)}"


# errno of a call of libc
_CALL = """import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
"""
# what it does -> (program, what the outcome's detail says)
_OF_SCRIPTS = {
    "right": ("print(int(input()) + 1)", ""),
    "sleeps": ("import time\ntime.sleep(1000)", "time limit"),
    "loops": ("while True: pass", "time limit"),
    "loops, deaf to signals": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        "time limit",
    ),
    "eats memory": ("x = []\nwhile True: x.append(bytearray(2**20))", "exit code 1: MemoryError"),
    "eats memory in many processes": (
        "import os, time\nfor _ in range(4):\n    if os.fork() == 0:\n        x = bytearray(2**20 "
        "* 100)\n"
        "        time.sleep(1000)\ntime.sleep(1000)",
        "memory limit",
    ),
    "eats memory in files of memory": (
        "import os, time\nfor _ in range(4):\n    if os.fork() == 0: break\n"
        "for n in range(11): os.write(os.memfd_create(str(n)), bytes(2**22))\ntime.sleep(1000)",
        _errno(1),
    ),
    "eats memory in processes of a thread": (
        "import os, threading, time\ndef work():\n    for _ in range(4):\n        if os.fork() == 0:\n"
        "            x = bytearray(2**20 * 100)\n            time.sleep(1000)\n    time.sleep(1000)\n"
        "threading.Thread(target=work).start()",
        "memory limit",
    ),
    "eats memory in System V segments": (_CALL + "while True: call('shmget', 0, 2**20, 0o1600)", _errno(1)),
    "eats memory in a file system of its own": (
        _CALL + "call('unshare', 0x10020000)\ncall('mount', b'x', b'/tmp', b'tmpfs', 0, None)",
        _errno(1),
    ),
    "clones itself into a user namespace": (
        # clone3 with CLONE_NEWUSER; its flags are in memory, where no filter sees them
        _CALL + "call('syscall', 435, (ctypes.c_uint64 * 8)(0x10000000), 64)",
        _errno(38),
    ),
    "keeps memory in keys and queues": (
        _CALL + "try: call('mq_open', b'/q', 66, 384, None)\nexcept PermissionError: pass\n"
        "else: raise SystemExit(0)\ncall('msgget', 0, 0o1600)",
        _errno(1),
    ),
    "opens an io_uring": (_CALL + "call('syscall', 425, 8, (ctypes.c_uint8 * 120)())", _errno(1)),
    "keeps memory in a socket's queue": (
        "import socket\nsocket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**22)",
        _errno(1),
    ),
    "reaches the host of a virtual machine": ("import socket\nsocket.socket(40)", _errno(1)),
    "traces its parent": (_CALL + "call('ptrace', 16, os.getppid(), 0, 0)", _errno(1)),
    "prints forever": ("while True: print('x' * 1000)", "output limit"),
    "prints forever to standard error": ("import sys\nwhile True: print('x' * 1000, file=sys.stderr)", "output limit"),
    "closes its output and stays": ("import os, time\nos.close(1); os.close(2)\ntime.sleep(1000)", "time limit"),
    "reads its input forever": ("import sys\nwhile True: sys.stdin.read()", "time limit"),
    "writes a huge file": ("with open('x', 'wb') as f:\n    while True: f.write(bytes(2**20))", _errno(27)),
    "writes many files": ("for i in range(20):\n    with open(str(i), 'wb') as f: f.write(bytes(2**20))", _errno(28)),
    "opens many files": ("x = [open('/dev/null') for _ in range(100)]", _errno(24)),
    "forks without end": (
        "import os\nfirst = os.getpid()\ntry:\n    while True: os.fork()\nexcept OSError:\n"
        "    if os.getpid() != first: os._exit(0)  # several would write their ends into one error "
        "output\n    raise",
        _errno(11),
    ),
    "starts threads without end": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
        "exit code 1: RuntimeError: can't start new thread",
    ),
    "leaves a daemon behind": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: "
        "time.sleep(1000)\n"
        "    os._exit(0)\nprint(2)",
        "",
    ),
    "kills its parent and its group": (
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.killpg(0, signal.SIGKILL)",
        "wrong output",
    ),
    "kills everybody": ("import os\nos.kill(-1, 9)", "exit code 1: ProcessLookupError"),
    "connects to the network": ("import socket\nsocket.create_connection(('192.0.2.1', 80))", _errno(101)),
    "connects to a server of this machine": ("import socket\nsocket.create_connection(('127.0.0.1', 22))", _errno(101)),
    "reads the user's files": ("import os\nprint(open('/etc/passwd').read())", "exit code 1: FileNotFoundError"),
    "writes where the interpreter is": ("import os\nopen(os.__file__, 'a')", "exit code 1: "),
    "becomes root": ("import os\nos.setuid(0)", "exit code 1: "),
}
_OF_CALLS = {
    "leaves before its tests": ("import os\nos._exit(0)", "the program ended with exit code 0"),
    "says that it is done": ("import sys\nprint('passed')\nsys.exit(0)", "the program defines no f"),
    "leaves when called": ("import sys\ndef f(x): sys.exit(0)", "SystemExit: 0"),
    "returns what equals everything": (
        "class Equal:\n    def __eq__(self, other): return True\n    def __sub__(self, other): "
        "return 0\n"
        "def f(x): return Equal()",
        "a wrong result",
    ),
    "changes the builtins": (
        "import builtins\nbuiltins.AssertionError = builtins.abs = abs = lambda *x: 0\ndef f(x): return 7",
        "a wrong result",
    ),
    "looks for the answer in its memory": (
        "import gc\nfound = ' '.join(['assert', 'f(1)']) in repr(gc.get_objects())\ndef f(x): return 2 if found else 0",
        "a wrong result",
    ),
    "answers before it is asked": (
        'import os\nfor fd in range(3, 16):\n    try: os.write(fd, b\'["ok", '
        "null]\\nnull\\nnull\\nnull\\n')\n"
        "    except OSError: pass\ndef f(x): return 0",
        "",
    ),
    "returns without end": ("def f(x): return 'x' * 2**27", ""),
    "hangs when called": ("def f(x):\n    while True: pass", "time limit"),
}
_RIGHT = ("right", "leaves a daemon behind")
# what it does -> (graded by, program, score, detail)
PROGRAMS = {
    name: (tests, program, float(name in _RIGHT), detail)
    for tests, programs in ((SCRIPTS, _OF_SCRIPTS), (CALLS, _OF_CALLS))
    for name, (program, detail) in programs.items()
}


def options(detail: str) -> dict:
    """Grader options: little time for a program that is to run out of it, much for the others, on a busy machine."""
    return OPTIONS | ({"test_s": 0.5, "total_s": 1.0} if detail == "time limit" else {"test_s": 20.0, "total_s": 30.0})


def table() -> str:
    """The list of docs/evidence/hostile.md: programs by outcome."""
    programs: dict[str, list[str]] = {}
    for name, (tests, _, score, detail) in PROGRAMS.items():
        error = re.sub(r"^exit code 1: (\w+: \[Errno \d+\] )?", "", detail) or "an error"
        calls = "" if tests is SCRIPTS else " (calls)"
        programs.setdefault("score 1" if score else error, []).append(name + calls)
    return "\n".join(f"- **{outcome}**: {'; '.join(names)}" for outcome, names in programs.items())

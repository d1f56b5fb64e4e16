"""Programs that try to harm, to hang or to cheat, and what becomes of each. docs/data-and-rewards.md shows this table.

Each is graded by its standard output (SCRIPTS: input 1, expected 2) or by calls of its function f (CALLS: f(1) == 2).
Limits are small, so that a program which breaks one costs this machine little.
"""

import json

OPTIONS = {"memory_mb": 192, "output_kb": 64, "disk_mb": 4, "open_files": 16, "processes": 6}
SCRIPTS = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
CALLS = json.dumps({"asserts": ["assert f(1) == 2", "assert abs(f(2) - 3) < 1e-9"]})

# what it does -> (graded by, program, score, what the outcome's detail says)
PROGRAMS = {
    "right": (SCRIPTS, "print(int(input()) + 1)", 1.0, ""),
    "sleeps": (SCRIPTS, "import time\ntime.sleep(1000)", 0.0, "time limit"),
    "loops": (SCRIPTS, "while True: pass", 0.0, "time limit"),
    "loops, deaf to signals": (
        SCRIPTS,
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        0.0,
        "time limit",
    ),
    "eats memory": (SCRIPTS, "x = []\nwhile True: x.append(bytearray(2**20))", 0.0, "exit code 1: MemoryError"),
    "eats memory in many processes": (
        SCRIPTS,
        "import os, time\nfor _ in range(4):\n    if os.fork() == 0:\n        x = bytearray(2**20 * 100)\n"
        "        time.sleep(1000)\ntime.sleep(1000)",
        0.0,
        "memory limit",
    ),
    "prints forever": (SCRIPTS, "while True: print('x' * 1000)", 0.0, "output limit"),
    "prints forever to standard error": (
        SCRIPTS,
        "import sys\nwhile True: print('x' * 1000, file=sys.stderr)",
        0.0,
        "output limit",
    ),
    "closes its output and stays": (
        SCRIPTS,
        "import os, time\nos.close(1); os.close(2)\ntime.sleep(1000)",
        0.0,
        "time limit",
    ),
    "reads its input forever": (SCRIPTS, "import sys\nwhile True: sys.stdin.read()", 0.0, "time limit"),
    "writes a huge file": (
        SCRIPTS,
        "with open('x', 'wb') as f:\n    while True: f.write(bytes(2**20))",
        0.0,
        "exit code 1: OSError: [Errno 27] File too large",
    ),
    "writes many files": (
        SCRIPTS,
        "for i in range(20):\n    with open(str(i), 'wb') as f: f.write(bytes(2**20))",
        0.0,
        "exit code 1: OSError: [Errno 28] No space left on device",
    ),
    "opens many files": (
        SCRIPTS,
        "x = [open('/dev/null') for _ in range(100)]",
        0.0,
        "exit code 1: OSError: [Errno 24] Too many open files",
    ),
    "forks without end": (
        SCRIPTS,
        "import os\nwhile True: os.fork()",
        0.0,
        "exit code 1: BlockingIOError: [Errno 11] Resource temporarily unavailable",
    ),
    "starts threads without end": (
        SCRIPTS,
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
        0.0,
        "exit code 1: RuntimeError: can't start new thread",
    ),
    "leaves a daemon behind": (
        SCRIPTS,
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)\n"
        "    os._exit(0)\nprint(2)",
        1.0,
        "",
    ),
    "kills its parent and its group": (
        SCRIPTS,
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.killpg(0, signal.SIGKILL)",
        0.0,
        "wrong output",
    ),
    "kills everybody": (SCRIPTS, "import os\nos.kill(-1, 9)", 0.0, "exit code 1: ProcessLookupError"),
    "connects to the network": (
        SCRIPTS,
        "import socket\nsocket.create_connection(('192.0.2.1', 80))",
        0.0,
        "exit code 1: OSError: [Errno 101] Network is unreachable",
    ),
    "connects to a server of this machine": (
        SCRIPTS,
        "import socket\nsocket.create_connection(('127.0.0.1', 22))",
        0.0,
        "exit code 1: OSError: [Errno 101] Network is unreachable",
    ),
    "reads the user's files": (
        SCRIPTS,
        "import os\nprint(open('/etc/passwd').read())",
        0.0,
        "exit code 1: FileNotFoundError",
    ),
    "writes where the interpreter is": (SCRIPTS, "import os\nopen(os.__file__, 'a')", 0.0, "exit code 1: "),
    "becomes root": (SCRIPTS, "import os\nos.setuid(0)", 0.0, "exit code 1: "),
    "leaves before its tests": (CALLS, "import os\nos._exit(0)", 0.0, "the program ended with exit code 0"),
    "says that it is done": (
        CALLS,
        "import sys\nprint('passed')\nsys.exit(0)",
        0.0,
        "NameError: name 'f' is not defined",
    ),
    "leaves when called": (CALLS, "import sys\ndef f(x): sys.exit(0)", 0.0, "SystemExit: 0"),
    "returns what equals everything": (
        CALLS,
        "class Equal:\n    def __eq__(self, other): return True\n    def __sub__(self, other): return 0\n"
        "def f(x): return Equal()",
        0.0,
        "a wrong result",
    ),
    "changes the builtins": (
        CALLS,
        "import builtins\nbuiltins.AssertionError = builtins.abs = abs = lambda *x: 0\ndef f(x): return 7",
        0.0,
        "a wrong result",
    ),
    "looks for the answer in its memory": (
        CALLS,
        "import gc\nfound = ' '.join(['assert', 'f(1)']) in repr(gc.get_objects())\ndef f(x): return 2 if found else 0",
        0.0,
        "a wrong result",
    ),
    "answers before it is asked": (
        CALLS,
        "import os\nfor fd in range(3, 16):\n    try: os.write(fd, b'[\"ok\", null]\\nnull\\nnull\\nnull\\n')\n"
        "    except OSError: pass\ndef f(x): return 0",
        0.0,
        "",
    ),
    "returns without end": (CALLS, "def f(x): return 'x' * 2**27", 0.0, ""),
    "hangs when called": (CALLS, "def f(x):\n    while True: pass", 0.0, "time limit"),
}


def options(detail: str) -> dict:
    """Grader options: little time for a program that is to run out of it, much for the others, on a busy machine."""
    return OPTIONS | ({"test_s": 0.5, "total_s": 1.0} if detail == "time limit" else {"test_s": 20.0, "total_s": 30.0})


def table() -> str:
    """The table of docs/data-and-rewards.md."""
    rows = ["| a program that | score | what its outcome says |", "|---|---|---|"]
    for name, (tests, _, score, detail) in PROGRAMS.items():
        how = "" if tests is SCRIPTS else " (calls)"
        rows.append(f"| {name}{how} | {score:g} | {detail} |")
    return "\n".join(rows)

"""Kills a trainer rank at a named moment when a file asks for it; bench/faults.py makes it a
folder's sitecustomize.py.

It wraps what it finds from outside, so that the package itself has no door for faults.
`die_in_MOMENT_RANK` beside this file asks; it is removed just before the process kills itself, or
the process group whose id is in the file: that dies while the rank goes on with what it does at
that moment.
"""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

FOLDER = Path(__file__).parent
MOMENTS = {  # a function that runs in it -> the moment
    ("megagrpo.actor.step", "objective"): "forward",
    ("megagrpo.actor.megatron_actor", "MegatronActor._reduce_gradients"): "backward",
    ("megagrpo.actor.megatron_actor", "MegatronActor.optimizer_step"): "optimizer",
    ("megagrpo.checkpoint.save", "PendingSave.finish"): "checkpoint",
    ("megagrpo.weights.transports.reshard", "send_batches"): "transfer",
}
TRANSFER_S = 0.02  # that of the tiny model takes longer


def dying(function, moment: str):
    def wrapped(*args, **kwargs):
        asked = FOLDER / f"die_in_{moment}_{os.environ['RANK']}"
        if asked.exists():
            group = asked.read_text()
            asked.unlink()
            if group:
                moment_s = random.uniform(0.0, TRANSFER_S)
                threading.Timer(moment_s, os.killpg, (int(group), signal.SIGKILL)).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return wrapped


def arm() -> None:
    left = dict(MOMENTS)
    while left:  # the modules are imported seconds before they are used
        time.sleep(0.01)
        for (module, name), moment in list(left.items()):
            owner, _, attribute = name.rpartition(".")
            holder = sys.modules.get(module)
            holder = getattr(holder, owner, None) if owner else holder
            if holder is not None and hasattr(holder, attribute):
                setattr(holder, attribute, dying(getattr(holder, attribute), moment))
                del left[module, name]


def begin() -> None:
    threading.Thread(target=arm, daemon=True).start()


if "megagrpo.cpu.ranks" in sys.orig_argv:  # ranks fork from it
    os.register_at_fork(after_in_child=begin)
elif "train" in sys.orig_argv and "RANK" in os.environ:
    begin()

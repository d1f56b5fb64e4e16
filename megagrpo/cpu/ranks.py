"""torchrun for ranks without a GPU: they fork from its process, which has imported the libraries.

CUDA does not survive a fork, so ranks with a GPU import each for itself, ten seconds of a core.
"""

import gc
import os
import signal
import sys
from importlib import import_module

_CLI = "megagrpo.cli"
_USED = ("transformers.models.auto.tokenization_auto", "megagrpo.loop.run")  # by every rank


def main() -> None:
    """Runs torchrun's words, whose program is `python -m megagrpo.cli`."""
    gc.disable()  # until large libraries are imported, which stay
    import_module("megagrpo.actor.host").prepare_host("cpu")
    torchrun = import_module("torch.distributed.run")
    for name in _USED:
        import_module(name)
    gc.enable()
    gc.freeze()
    os.register_at_fork(after_in_child=_handle_signals_as_a_new_process)
    words = sys.argv[1:]
    options = words[: words.index("--no-python")]
    program = [import_module(_CLI).__file__, *words[words.index(_CLI) + 1 :]]
    torchrun.main([*options, "--run-path", "--start-method", "fork", *program])


def _handle_signals_as_a_new_process() -> None:
    """Replaces torchrun's handlers, which raise an exception."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    main()

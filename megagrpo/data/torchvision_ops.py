"""Lets transformers be imported where torchvision is built for another device than torch.

PyPI's torchvision is linked to CUDA. Beside a CPU build of torch its C extension does not load; torchvision then
describes operators that nobody defined, which fails, and with it every model of transformers that looks at images or
videos somewhere: Llama's, for one.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

_kept: list[Any] = []  # operators live as long as the library object that defined them


def define_torchvision_operators() -> None:
    """Defines, without code, the operators that an unloadable torchvision lacks.

    Nothing where it loads or is absent, or where they are defined: an engine's process has a repair of its own. Called
    before transformers is imported. No text model calls these operators.
    """
    import torch

    spec = importlib.util.find_spec("torchvision")  # found, not imported
    extension = Path(spec.origin).parent / "_C.so" if spec is not None and spec.origin else None
    if extension is None or not extension.is_file() or hasattr(torch.ops.torchvision, "nms"):
        return
    try:
        torch.ops.load_library(str(extension))
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)


def torchvision_problem() -> str:
    """Returns why torchvision cannot be imported all the same, with the remedy; "" where it can be or is absent."""
    if importlib.util.find_spec("torchvision") is None:
        return ""
    try:
        importlib.import_module("torchvision")
    except Exception as exc:  # a broken package may raise anything while it is imported
        return (
            f"; torchvision, which transformers imports, cannot be imported ({type(exc).__name__}: {exc}): "
            "`bash launch/install.sh --repair` installs the one that goes with this torch"
        )
    return ""

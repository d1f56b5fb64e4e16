"""Makes transformers importable if torchvision is built for another device than torch.

PyPI's torchvision is linked to CUDA. With a CPU build of torch its C extension does not load;
torchvision then fails at undefined operators, and with it every transformers model that also
imports image or video code, such as Llama.
"""

import importlib.util
from pathlib import Path

_kept: list[object] = []  # operators live as long as the library object that defined them


def define_torchvision_operators() -> None:
    """Declares, without code, the operators that an unloadable torchvision lacks. No text model
    calls them.

    Does nothing if torchvision loads or is absent, or if they are declared. Call it before
    importing transformers; engine processes call it by cpu/engine/sitecustomize.py.
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

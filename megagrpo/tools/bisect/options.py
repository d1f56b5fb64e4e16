"""Options of `megagrpo bisect`, in addition to the experiment."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BisectOptions:
    """Options of the command line; its ranks read them from the run folder."""

    checkpoint: str | None = None  # folder; None: the weights in model.path
    num_prompts: int = 4
    max_new_tokens: int = 32
    own_weights: bool = (
        False  # the engine keeps the weights it loads from model.path; else the trainers publish
    )
    bound: float | None = None  # relative, before the first layer

"""Draws docs/picture.svg: what runs where, and what flows between the parts of a run.

`python bench/readme.py` writes it, and a test compares the two.
"""

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 1000, 540
_INK, _SOFT = "#1f2937", "#4b5563"
_BLUE, _GREEN, _AMBER, _GRAY = "#2563eb", "#15803d", "#b45309", "#64748b"
_TRAINERS = ("leader", "rank 1", "rank 2", "rank 3")  # of a copy of the model
_ENGINES = ("tp 0", "tp 1", "tp 2", "tp 3")
_FILL = {_BLUE: "#eff6ff", _GREEN: "#f0fdf4", _AMBER: "#fffbeb", _GRAY: "#f8fafc"}


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 14,
    color: str = _INK,
    weight: str = "normal",
    anchor: str = "start",
) -> str:
    """Returns one line of text, whose base line begins at (x, y)."""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )


def box(
    x: float, y: float, width: float, height: float, color: str, *, strong: bool = False
) -> str:
    """Returns a rounded rectangle; `strong` fills it with its line's color."""
    fill = color if strong else _FILL[color]
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="{fill}" '
        f'stroke="{color}" stroke-width="1.5"/>'
    )


def arrow(
    start: tuple[float, float], end: tuple[float, float], color: str, *, both: bool = False
) -> str:
    """Returns a straight arrow; `both` gives it a head at each end."""
    name = color.lstrip("#")
    begin = f' marker-start="url(#{name})"' if both else ""
    return (
        f'<line x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1]}" stroke="{color}" '
        f'stroke-width="2.2" marker-end="url(#{name})"{begin}/>'
    )


def ranks(x: float, y: float, name: str, words: Sequence[str], color: str) -> list[str]:
    """Returns the ranks of a copy of the model, or of an engine; a leader is filled."""
    parts = [text(x, y - 8, name, size=13, color=_SOFT)]
    for number, word in enumerate(words):
        leads = word == "leader"
        left = x + 62 * number
        parts.append(box(left, y, 56, 44, color, strong=leads))
        ink = "white" if leads else _INK
        parts.append(text(left + 28, y + 27, word, size=12, color=ink, anchor="middle"))
    return parts


def _trainers() -> list[str]:
    return [
        box(20, 130, 300, 262, _BLUE),
        text(36, 156, "Trainers: Megatron-Core", size=17, color=_BLUE, weight="bold"),
        *ranks(36, 190, "model copy 0", _TRAINERS, _BLUE),
        *ranks(36, 304, "model copy 1", _TRAINERS, _BLUE),
        arrow((292, 226), (292, 312), _BLUE, both=True),
        text(282, 260, "all-reduce: gradients,", size=12, color=_SOFT, anchor="end"),
        text(282, 275, "statistics of each group", size=12, color=_SOFT, anchor="end"),
        text(36, 380, "ranks of a copy: TP x PP x CP, experts by EP", size=12, color=_SOFT),
    ]


def _engines() -> list[str]:
    return [
        box(680, 130, 300, 262, _GREEN),
        text(696, 156, "Engines: SGLang", size=17, color=_GREEN, weight="bold"),
        *ranks(696, 190, "engine 0", _ENGINES, _GREEN),
        *ranks(696, 270, "engine 1", _ENGINES, _GREEN),
        text(696, 346, "a supervisor for each engine starts, watches", size=12, color=_SOFT),
        text(696, 362, "and restarts it, on other nodes through Ray", size=12, color=_SOFT),
        text(696, 378, "engines have their own GPUs, or the trainers'", size=12, color=_SOFT),
    ]


def _between() -> list[str]:
    middle = 500
    rows = (
        (186, "prompts (token ids)", (328, 672), _BLUE),
        (230, "samples: token ids, log-probabilities", (672, 328), _GREEN),
        (304, "new weights, from the rank that has them", (328, 672), _BLUE),
        (348, "digests of the live weights", (672, 328), _GREEN),
    )
    parts = []
    for y, words, (start, end), color in rows:
        parts.append(text(middle, y - 9, words, size=13, anchor="middle"))
        parts.append(arrow((start, y), (end, y), color))
    parts.append(text(middle, 262, "each step", size=12, color=_SOFT, anchor="middle"))
    parts.append(
        text(middle, 378, "if they differ, the run stops", size=12, color=_SOFT, anchor="middle")
    )
    return parts


def _graders() -> list[str]:
    return [
        box(360, 20, 320, 74, _AMBER),
        text(376, 46, "Graders, environments, agents", size=15, color=_AMBER, weight="bold"),
        text(376, 66, "killable processes; a sandbox for programs", size=12, color=_SOFT),
        text(376, 82, "that the model writes; HTTP services", size=12, color=_SOFT),
        arrow((300, 126), (356, 84), _AMBER, both=True),
        text(252, 76, "responses,", size=13, anchor="middle"),
        text(252, 92, "rewards", size=13, anchor="middle"),
    ]


def _files() -> list[str]:
    return [
        box(20, 20, 160, 74, _GRAY),
        text(36, 46, "Model, data", size=15, color=_GRAY, weight="bold"),
        text(36, 66, "Hugging Face folder,", size=12, color=_SOFT),
        text(36, 82, "rows of prompts", size=12, color=_SOFT),
        arrow((90, 98), (90, 126), _GRAY),
        box(20, 452, 300, 70, _GRAY),
        text(36, 478, "Run folder", size=15, color=_GRAY, weight="bold"),
        text(36, 497, "checkpoints, metrics, every sample, logs;", size=12, color=_SOFT),
        text(36, 512, "the same command continues from it", size=12, color=_SOFT),
        arrow((170, 396), (170, 448), _GRAY, both=True),
        text(182, 428, "save, resume", size=13),
        box(360, 452, 620, 70, _GRAY),
        text(376, 478, "Launcher", size=15, color=_GRAY, weight="bold"),
        text(
            376,
            497,
            "one command: on this machine, as a Slurm job, or on each node; starts lost ranks",
            size=12,
            color=_SOFT,
        ),
        text(
            376,
            512,
            "again from the last checkpoint; saves and ends on Ctrl-C, megagrpo stop, or the time limit",
            size=12,
            color=_SOFT,
        ),
        arrow((830, 448), (830, 396), _GRAY),
        text(818, 428, "starts, ends", size=13, anchor="end"),
        arrow((400, 448), (300, 396), _GRAY),
    ]


def svg() -> str:
    """Returns the picture, on white, so that it reads on a dark page too."""
    heads = [
        f'<marker id="{color.lstrip("#")}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6.5" '
        f'markerHeight="6.5" orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10 z" fill="{color}"/></marker>'
        for color in _FILL
    ]
    parts = [*_files(), *_graders(), *_trainers(), *_engines(), *_between()]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="Helvetica, Arial, sans-serif">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="white"/>',
            f"<defs>{''.join(heads)}</defs>",
            *parts,
            "</svg>",
            "",
        ]
    )

r"""Grader `math_dapo`: the line `Answer: ...`, as DAPO grades DAPO-Math-17k (Yu et al. 2025, arXiv
2503.14476).

Both answers are brought into a plain form by the rule of Minerva's paper (Lewkowycz et al. 2022,
arXiv 2206.14858, appendix D), and are equal if the plain forms are the same text. Nothing is
computed: 1/2 is neither 0.5 nor \frac{2}{4}.
"""

import re

_TAIL = 300  # characters of the response that are read
_BOX_TAIL = 100  # of these, where a box may stand
_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_REPLACED = {  # in this order
    "an ": "",
    "a ": "",
    ".$": "$",
    r"\$": "",
    r"\ ": "",
    " ": "",
    "mbox": "text",
    r",\text{and}": ",",
    r"\text{and}": ",",
    r"\text{m}": r"\text{}",
}
_WORDS = """
    square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm
    pounds meters meals edges students childrentickets multiples
"""
_REMOVED = [  # in this order
    *_WORDS.split(),
    *(rf"\text{{{inner}" for inner in ("s}", ".}", "\ns}", "}^2", "}^3", "\n}", "}")),
    *(r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
]
_REWRITTEN = (
    (r".*?\$(.*?)\$.*", r"$\1$"),  # only what stands between the first dollar signs
    *((rf"\\{name}{{(.*?)}}", r"\1") for name in ("text", "textbf", "overline")),
    (r"\\boxed{(.*)}", r"\1"),
    (r"frac([^{])(.)", r"frac{\1}{\2}"),  # \frac12 is \frac{1}{2}
    (r"sqrt([^{])", r"sqrt{\1}"),
)


def grade(text: str, answer: str, box: bool = False) -> float:
    r"""Returns 1.0 if the last `Answer: ...` of the response's last 300 characters is the answer,
    else -1.0.

    box: without such a line, the last `\boxed{}` of the last 100 characters counts, as in verl since 0.9.1.
    """
    lines = _LINE.findall(text[-_TAIL:])
    if box and not lines:
        lines = [_last_box(text[-_BOX_TAIL:])]
    return 1.0 if _plain(["[INVALID]", *lines][-1]) == _plain(answer) else -1.0


def _last_box(text: str) -> str:
    """Returns the content of the last box, [INVALID] if there is none or if it has no end."""
    content = text.rpartition(r"\boxed{")[2] if r"\boxed{" in text else ""
    depth = 1
    for place, sign in enumerate(content):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if depth == 0:
            return content[:place]
    return "[INVALID]"


def _plain(text: str) -> str:
    """Returns the text after the last `=`, without units and white space, with TeX in one
    spelling."""
    text = text.rpartition("=")[2]
    for old, new in (*_REPLACED.items(), *((removed, "") for removed in _REMOVED)):
        text = text.replace(old, new)
    for pattern, spelled in _REWRITTEN:
        text = re.sub(pattern, spelled, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    if digits.isdigit():
        return digits
    return text.strip()

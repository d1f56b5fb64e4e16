"""Gathers the table of layouts x model families while the actor's tests run; `launch/test.sh --full` writes it."""

import re

from bench.common import provenance, write_results

_FAMILY = re.compile("_(tied|raw|air|plain)$")  # checkpoints of one family


class LayoutFigures:
    """Worst figures by (layout, family) over variants and over checkpoints of one family (tied, unscaled routing)."""

    def __init__(self):
        self._worst: dict[tuple[str, str], dict[str, float]] = {}
        self._bit_equal: dict[tuple[str, str], bool] = {}

    def add(self, model: str, layout: str, what: str, result: dict) -> None:
        key = (layout, _FAMILY.sub("", model))
        worst = self._worst.setdefault(key, {})
        found = {
            "gradients_hf" if what.startswith("forward") else "gradients": max(
                result.get("gradients", {}).values(), default=0.0
            )
        }
        found |= {name: result[name] for name in ("logits", "norm", "weights") if name in result}
        for name, value in found.items():
            worst[name] = max(value, worst.get(name, 0.0))
        if "export" in result:
            self._bit_equal[key] = result["export"] and self._bit_equal.get(key, True)

    def write(self, name: str) -> None:
        """bench/results/NAME.json and .md."""
        layouts, families = (list(dict.fromkeys(key[place] for key in self._worst)) for place in (0, 1))
        rows = [
            {"layout": at[0], "family": at[1], **worst, "bit_equal": self._bit_equal[at]}
            for at, worst in self._worst.items()
        ]
        lines = [(layout, *(self._cell(layout, family) for family in families)) for layout in layouts]
        write_results(name, {**provenance(), "rows": rows}, ("layout", *families), lines)

    def _cell(self, layout: str, family: str) -> str:
        worst = self._worst.get((layout, family))
        if worst is None:
            return "no experts"
        against_one = f"{worst['gradients']:.1e}" if worst.get("gradients") else "-"
        return f"{worst['logits']:.1e}, {against_one}, {'bit-equal' if self._bit_equal[layout, family] else 'DIFFERS'}"

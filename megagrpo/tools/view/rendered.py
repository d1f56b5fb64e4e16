"""Markdown and formulas of samples as HTML. The texts are hostile: the page copies only elements and
attributes that it knows from this HTML, and never parses it in itself."""

import html
import re
from contextlib import suppress
from functools import lru_cache
from xml.etree.ElementTree import tostring

from latex2mathml.converter import convert_to_element
from markdown_it import MarkdownIt

_MOST = 500_000  # characters of a text's HTML and formulas
_MOST_BRACKETS = 2_000  # of a text, each of which is searched for the end of a link or formula
_MOST_CELLS = 10_000  # of a text's tables, whose short rows are filled up
# Dollars are no prices: $5 and $6. Bounded, because an end is searched for from every begin.
_FORMULA = re.compile(
    r"(?<!\\)(?:\\\(.{1,1000}?\\\)|\\\[(?:(?!```).){1,1000}?\\\]|\$\$(?:(?!```).){1,1000}?\$\$"
    r"|\$(?![\s$])[^$\n]{1,1000}?(?<![\s\\])\$(?!\d))",
    re.DOTALL,
)
# macros, by which short texts become gigabytes, and what asks the browser for more than a formula
_REFUSED = re.compile(r"\\(?:def|new|renew|provide|Declare|href|style|class)")
# a line ends where the text's does, images are not loaded, and HTML is text
_MARKDOWN = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable("table")
_MARKDOWN.disable("image")


def rendered(text: str, mathml: dict[str, str]) -> str:
    """Returns the HTML of a text, "" if it has no mark or becomes too long, and adds the MathML of
    its formulas; "" for what is no LaTeX. Formulas keep their delimiters, also in code, where they
    are none."""
    if text.count("[") + text.count("\\(") > _MOST_BRACKETS:
        return ""
    found: list[str] = []

    def place(formula: re.Match[str]) -> str:  # which is no Markdown
        found.append(formula[0])
        return f"\ue000{len(found) - 1};"

    marked = _FORMULA.sub(place, text.replace("\ue000", ""))
    lines = marked.splitlines()
    columns = (line.count("|") for line in lines if not line.strip("|:->\t "))
    if len(lines) * max(columns, default=0) > _MOST_CELLS:
        return ""
    page = str(_MARKDOWN.render(marked)).strip()
    plain = html.unescape(page.replace("<br />\n", "\n"))
    if not found and plain in ("", f"<p>{text.strip()}</p>"):
        return ""
    formulas = dict(zip(found, map(_mathml, found), strict=True))
    if len(page) + sum(map(len, formulas.values())) > _MOST:
        return ""
    mathml |= formulas
    # cells of tables; the page's policy allows no style
    page = re.sub('style="text-align:(.*?)"', r'align="\1"', page)
    return re.sub(
        "\ue000(\\d+);",
        lambda place: f'<code class="formula">{html.escape(found[int(place[1])])}</code>',
        page,
    )


@lru_cache(20_000)
def _mathml(formula: str) -> str:
    display = "block" if formula.startswith(("\\[", "$$")) else "inline"
    latex = formula[2:-2] if formula.startswith("\\") else formula.strip("$")
    # a sign of per cent begins no comment, which would hide the rest
    latex = re.sub(r"(?<!\\)%", r"\\%", latex)
    if _REFUSED.search(latex):
        return ""
    with suppress(Exception):  # of every kind, at what is no LaTeX
        element = convert_to_element(latex, display=display)
        for part in element.iter():
            part.text = html.unescape(part.text or "")
        return tostring(element, encoding="unicode", short_empty_elements=False)
    return ""

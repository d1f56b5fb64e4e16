"""Builds the page: template, style, scripts, Plotly and the data in one HTML file that asks nobody for anything."""

import base64
import hashlib
import json
from importlib.resources import files

_SCRIPTS = ("curves.js", "timeline.js", "samples.js", "page.js")


def build_page(data: dict, title: str, live: bool = False) -> str:
    """Returns the HTML that shows `data`, {"runs": [what read_run returns, ...], ...}.

    live: the page may ask the server that it came from for newer data; otherwise its policy lets no request out. Only
    these very scripts run, whatever a response of the model contains.
    """
    from plotly.offline import get_plotlyjs  # loads megabytes

    plotly = get_plotlyjs()
    own = '"use strict";\n' + "\n".join(_part(name) for name in _SCRIPTS)
    assert "</script" not in plotly.lower() + own.lower(), "a script would end too early"
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(f"'sha256-{_hash(text)}'" for text in (plotly, own)),
        "style-src": "'unsafe-inline'",  # Plotly writes style elements
        "img-src": "data: blob:",
        "connect-src": "'self'" if live else "'none'",
    }
    parts = {
        "POLICY": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "TITLE": _escaped(title),
        "STYLE": _part("style.css"),
        "PLOTLY": plotly,
        "DATA": data_text({**data, "live": live}),
        "SCRIPT": own,
    }
    # one pass over the template alone: what is inserted may contain anything
    head, *rest = _part("page.html").split("{{")
    pieces = [head]
    for piece in rest:
        name, _, text = piece.partition("}}")
        pieces += [parts[name], text]
    return "".join(pieces)


def data_text(data: dict) -> str:
    """Returns the data as JSON that may stand inside a script element: without any `<`."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _part(name: str) -> str:
    return (files("megagrpo.view") / "page" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

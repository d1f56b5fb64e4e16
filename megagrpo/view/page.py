"""Builds the page of samples: template, style, script and data in one HTML file that makes no request."""

import base64
import hashlib
import html
import json
from importlib.resources import files


def build_page(data: dict, title: str) -> str:
    """Returns the HTML page of `data`, {"runs": [{"name", "groups", "pieces", "notes"}]}; see `read_samples`.

    Its policy allows only its own script and style, by their hashes, whatever a response of the model contains.
    """
    style, script = _part("style.css"), '"use strict";\n' + _part("samples.js")
    assert "</script" not in script.lower(), "the script would end too early"
    policy = {"default-src": "'none'", "script-src": _source(script), "style-src": _source(style), "img-src": "data:"}
    parts = {
        "POLICY": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "TITLE": html.escape(title),
        "STYLE": style,
        "DATA": json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "SCRIPT": script,
    }
    # one pass over the template: the inserted texts may contain anything, {{ too
    head, *rest = _part("page.html").split("{{")
    pieces = [head]
    for piece in rest:
        name, _, text = piece.partition("}}")
        pieces += [parts[name], text]
    return "".join(pieces)


def _part(name: str) -> str:
    return (files("megagrpo.view") / "page" / name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    """Returns the text's hash as a source of the page's policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

"""The package's source as the tests of its shape read it: each file is parsed once."""

import ast
import gc
import io
import re
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megagrpo"
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


# Every token has one of these at least, so a file has no more tokens than this finds.
PIECE = re.compile(r"\w+|[^\w\s]")


@contextmanager
def no_collection() -> Iterator[None]:
    """Pauses the garbage collector, which would walk millions of nodes again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(), str(path))


@cache
def sources() -> dict[str, ast.Module]:
    """Path inside the package -> syntax tree."""
    files = sorted(PACKAGE.rglob("*.py"))
    with no_collection():
        return {str(path.relative_to(PACKAGE)): parsed(path) for path in files}


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(parsed(path)))


@cache
def all_nodes() -> list[tuple[str, ast.AST]]:
    """(path inside the package, node) of every node of the package."""
    paths = list(sources())
    with no_collection():
        return [(path, node) for path in paths for node in nodes(PACKAGE / path)]


def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(path inside the package, function) of every function and method of the package."""
    return [(path, node) for path, node in all_nodes() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _with_whole_strings(text: str) -> Iterator[tokenize.TokenInfo]:
    """The tokens of a text; an f-string is one, as before Python 3.12."""
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type]
        depth -= name == "FSTRING_END"
        if not depth and name != "FSTRING_END":
            yield token
        depth += name == "FSTRING_START"


@cache
def tokens(path: Path) -> tuple[int, ...]:
    """The line of each code token of a file: without comments, docstrings and line ends."""
    docstrings = {
        node.body[0].lineno
        for node in nodes(path)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    }
    return tuple(
        token.start[0]
        for token in _with_whole_strings(path.read_text())
        if token.type not in NO_CODE and not (token.type == tokenize.STRING and token.start[0] in docstrings)
    )


@cache
def part_of(path: str) -> str:
    """The part of the design that a file belongs to: its folder, or its own name at the top level."""
    return Path(path).parts[0].removesuffix(".py")


@cache
def imports(path: str) -> tuple[str, ...]:
    """Full names of imported modules; `from megagrpo.a import b` counts as megagrpo.a.b. No TYPE_CHECKING blocks."""
    found = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the whole name"
            found.extend(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):  # no import is inside an expression
                visit(child)

    visit(sources()[path])
    return tuple(found)


def is_longer(path: Path, limit: int) -> bool:
    """Tells whether a file has more code tokens than the limit."""
    return len(PIECE.findall(path.read_text())) > limit < len(tokens(path))

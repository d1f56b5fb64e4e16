"""Single functions of installed packages, against which ours are compared."""

import ast
import math
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import pytest
import torch


@cache
def installed_function(package: str, file: str, name: str, constant: str = "") -> Callable:
    """Compiles it alone from its source, with a constant of its module that it reads: the module would import much
    else. Skips without the package."""
    spec = find_spec(package)
    if spec is None:
        pytest.skip("SGLang is not installed")
    path = Path(spec.submodule_search_locations[0]) / file
    tree = ast.parse(path.read_text())
    tree.body = [
        node
        for node in tree.body
        if getattr(node, "name", "") == name or (isinstance(node, ast.Assign) and ast.unparse(node.targets) == constant)
    ]
    found = {"torch": torch, "math": math, "Literal": Literal, "List": list}
    exec(compile(tree, path, "exec"), found)
    return found[name]

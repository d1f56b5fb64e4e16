"""The arguments that a Python script gives TRL's classes, read from its syntax: nothing of it runs."""

import ast
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megagrpo.config.load import Plain
from megagrpo.system.errors import translated

_TRAINER = "GRPOTrainer"
_CONFIGS = ("GRPOConfig", "ModelConfig", "ScriptArguments", "GRPOScriptArguments")
# PEFT's own defaults are not those of TRL's options
_LORA: dict[str, Plain] = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
_OF_LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "task_type": "lora_task_type"}
_KEPT = ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")
_OBJECTS = ("args", "peft_config")  # read where they are made
_OPERATIONS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
}


@dataclass
class Arguments:
    """Keyword arguments that are literals, and the text of the others by their key."""

    given: dict[str, Plain] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)


class _NotPlain(Exception):
    """An expression whose value only a run could tell."""


def trl_arguments(path: Path) -> Arguments:
    """Returns the arguments of GRPOTrainer, GRPOConfig and LoraConfig. Raises ValueError if the
    script has neither of the first two, or is no Python."""
    with translated(f"{path} is no Python", SyntaxError):
        script = _Script(path, ast.parse(path.read_text(encoding="utf-8")))
    found = Arguments()
    calls = list(script.calls())
    if not any(name in (_TRAINER, "GRPOConfig") for name, _ in calls):
        raise ValueError(f"{path}: calls neither GRPOTrainer nor GRPOConfig")
    for name, call in calls:
        prefix = f"{name}(...)"
        if name == "LoraConfig":
            found.given |= {"use_peft": True, **_LORA}
        for key, node in script.keywords(call):
            if name == "LoraConfig" and key is not None:
                key = _OF_LORA.get(key, key if key in _KEPT else f"lora_{key}")
            if key is None:
                found.unread[prefix] = f"**{ast.unparse(node)}"
            elif name == _TRAINER and key in _OBJECTS:
                continue
            else:
                script.put(found, key, node)
    return found


@dataclass
class _Script:
    path: Path
    tree: ast.Module

    def __post_init__(self) -> None:
        self._assigned: dict[str, ast.expr] = {}
        self._imported: dict[str, str] = {}
        self._options: dict[str, ast.expr] = {}  # of an argparse parser -> default
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                names = node.targets[0]
                for name in names.elts if isinstance(names, ast.Tuple) else [names]:
                    # dataset = dataset.map(...) says nothing of where the rows come from
                    if isinstance(name, ast.Name) and not _is_of_itself(name.id, node.value):
                        self._assigned[name.id] = node.value
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
                self._add_option(node)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self._imported |= {
                    each.asname or each.name: f"{node.module}:{each.name}" for each in node.names
                }

    def _add_option(self, call: ast.Call) -> None:
        default = next((each.value for each in call.keywords if each.arg == "default"), None)
        for name in call.args:
            if isinstance(name, ast.Constant) and default is not None:
                self._options[str(name.value).lstrip("-").replace("-", "_")] = default

    def calls(self) -> Iterator[tuple[str, ast.Call]]:
        """Yields the calls of TRL's classes with their names."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).rpartition(".")[2]
                if name in (_TRAINER, "LoraConfig", *_CONFIGS):
                    yield name, node

    def keywords(self, call: ast.Call) -> Iterator[tuple[str | None, ast.expr]]:
        """Yields the keywords of a call, those of a dict behind ** included; None: not known."""
        for keyword in call.keywords:
            inner = keyword.value
            while isinstance(inner, ast.Name) and inner.id in self._assigned:
                inner = self._assigned[inner.id]
            if keyword.arg is not None:
                yield keyword.arg, keyword.value
            elif isinstance(inner, ast.Dict):
                for key, value in zip(inner.keys, inner.values, strict=True):
                    yield (str(key.value) if isinstance(key, ast.Constant) else None), value
            elif isinstance(inner, ast.Call) and ast.unparse(inner.func) == "dict":
                yield from self.keywords(inner)
            else:
                yield None, keyword.value

    def put(self, found: Arguments, key: str, node: ast.expr) -> None:
        """Puts an argument where it belongs."""
        found.unread[key] = ast.unparse(node)
        with suppress(_NotPlain):
            if key == "reward_funcs":
                found.given[key] = [self._function(each) for each in self._listed(node)]
            else:
                found.given[key] = self._plain(node)
            del found.unread[key]

    def _plain(self, node: ast.expr, depth: int = 0) -> Plain:
        if depth > 8:
            raise _NotPlain
        match node:
            case ast.Constant(value=str() | int() | float() | bool() | None as value):
                return value
            case ast.List(elts=elts) | ast.Tuple(elts=elts):
                return [self._plain(each, depth + 1) for each in elts]
            case ast.Dict(keys=keys, values=values) if None not in keys:
                names = [str(self._plain(key, depth + 1)) for key in keys if key is not None]
                plain = [self._plain(value, depth + 1) for value in values]
                return dict(zip(names, plain, strict=True))
            case ast.Name(id=name) if name in self._assigned:
                return self._plain(self._assigned[name], depth + 1)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._plain(ast.BinOp(ast.Constant(0), ast.Sub(), operand), depth + 1)
            case ast.BinOp():
                return self._calculated(node, depth + 1)
            case ast.JoinedStr(values=values):
                return "".join(str(self._plain(each, depth + 1)) for each in values)
            case ast.Attribute(value=ast.Name(id="torch"), attr=dtype):
                return dtype
            case ast.Attribute(value=ast.Name(), attr=option) if option in self._options:
                return self._plain(self._options[option], depth + 1)
            # a split of a data set, a part of an f-string
            case ast.Subscript(value=value) | ast.FormattedValue(value=value):
                return self._plain(value, depth + 1)
            case ast.Call():
                return self._named(node, depth)
        raise _NotPlain

    def _calculated(self, node: ast.BinOp, depth: int) -> Plain:
        left = self._plain(node.left, depth)
        right = self._plain(node.right, depth)
        operation = type(node.op)
        numbers = all(isinstance(side, int | float) for side in (left, right))
        texts = isinstance(left, str) and isinstance(right, str) and operation is ast.Add
        if operation not in _OPERATIONS or not (numbers or texts) or right == 0:
            raise _NotPlain
        return _OPERATIONS[operation](left, right)

    def _named(self, call: ast.Call, depth: int) -> Plain:
        """Returns the name or file behind load_dataset, from_pretrained, or a data set's method."""
        called = ast.unparse(call.func)
        files = next((each.value for each in call.keywords if each.arg == "data_files"), None)
        if called.endswith("load_dataset") and files is not None:
            return self._plain(files, depth + 1)
        if called.endswith(("load_dataset", ".from_pretrained")) and call.args:
            return self._plain(call.args[0], depth + 1)
        methods = (".map", ".filter", ".shuffle", ".select", ".rename_column", ".remove_columns")
        if isinstance(call.func, ast.Attribute) and called.endswith(methods):
            return self._plain(call.func.value, depth + 1)
        raise _NotPlain

    def _listed(self, node: ast.expr) -> list[ast.expr]:
        if isinstance(node, ast.Name) and node.id in self._assigned:
            return self._listed(self._assigned[node.id])
        return node.elts if isinstance(node, ast.List | ast.Tuple) else [node]

    def _function(self, node: ast.expr) -> Plain:
        """Returns a reward function as a grader is named, or its text."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        name = ast.unparse(node)
        imported = self._imported.get(name)
        if imported is not None:
            return name if imported.startswith("trl") else imported
        defined = [each.name for each in self.tree.body if isinstance(each, ast.FunctionDef)]
        return f"{self.path}:{name}" if name in defined and not self._trains() else name

    def _trains(self) -> bool:
        """Returns whether an import of the script would make a trainer."""
        guarded = (ast.FunctionDef, ast.ClassDef, ast.If)
        return any(
            isinstance(node, ast.Call) and ast.unparse(node.func).endswith(_TRAINER)
            for statement in self.tree.body
            if not isinstance(statement, guarded)
            for node in ast.walk(statement)
        )


def _is_of_itself(name: str, value: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(value))

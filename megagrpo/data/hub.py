"""Names on the Hugging Face Hub where an experiment may name folders and files: their snapshots in
huggingface_hub's cache, fetched before anything starts."""

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import cast
from urllib.parse import parse_qsl

import yaml

from megagrpo.config.fields import RULES_LATER, KeyPath
from megagrpo.config.load import Plain
from megagrpo.config.schema import ExperimentConfig
from megagrpo.config.wording import value_at
from megagrpo.system.errors import collected, explained

_NAME = r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?"
_MODEL = re.compile(_NAME)
_DATA = re.compile(_NAME + r"(?:\?(?P<query>[\w.=&-]*))?")
_FILES = re.compile(r"hf://datasets/" + _NAME + r"/(?P<pattern>.+)")
_ENDINGS = (".parquet", ".jsonl", ".json", ".csv", ".jsonl.gz", ".json.gz", ".csv.gz")
_FOLDERS = {"models", "data", "runs", "configs", "checkpoints"}  # not names on the Hub
_DESCRIPTION = ["*.json", "*.txt", "*.model", "*.jinja"]
_WEIGHTS = ["*.safetensors"]
_IGNORED = ["*/*", "consolidated*"]  # other formats of the same weights
# by name: the file patterns by split, and whether it is the default
_Configurations = dict[str, tuple[dict[str, list[str]], bool]]
# the splits that a section reads: the first that exists
_SPLITS = {"data": ("train",), "sft": ("train",), "eval": ("test", "validation")}


def with_local_files(
    config: ExperimentConfig, weights: str, cached_only: bool = False
) -> tuple[ExperimentConfig, list[tuple[KeyPath, str]]]:
    """Returns the experiment with local paths instead of names on the Hub, and (key path, problem)
    for each name that leads nowhere.

    weights: the section, `model` or `sft`, whose model comes with its weights; the others come with
    their description only. cached_only: nothing is fetched. Otherwise files that the cache lacks
    are fetched, according to HF_HUB_OFFLINE, HF_HOME, HF_ENDPOINT and HF_TOKEN.
    """
    values = config.model_dump()
    problems: list[tuple[KeyPath, str]] = []
    for keys in _places(config, values):
        *around, key = map(str, keys)
        section = cast(dict[str, Plain], value_at(values, keys[:-1]))
        names = _as_list(section[key])
        is_served = around[0] in ("teachers", "reward")
        in_full = weights == ("model" if is_served else around[0]) and key != "tokenizer"
        resolve = partial(_local_folder, weights=in_full)
        if key == "path" and around[0] in _SPLITS:
            resolve = partial(_local_files, splits=_SPLITS[around[0]])
        messages: list[str] = []
        with collected(messages):
            paths: list[Plain] = []
            for name in names:
                paths += resolve(name, cached_only=cached_only)
            section[key] = paths[0] if len(paths) == 1 else paths
        problems += [(keys, message) for message in messages]
    if values != config.model_dump():
        config = ExperimentConfig.model_validate(values, context=RULES_LATER)
    return config, problems


def _as_list(names: object) -> list[str]:
    return [names] if isinstance(names, str) else cast(list[str], names)


def _places(config: ExperimentConfig, values: dict[str, Plain]) -> Iterator[KeyPath]:
    """Yields the keys that may hold a name, except for a model that the warm-up makes."""
    keys: list[KeyPath] = [("model", "tokenizer"), ("sft", "model"), ("sft", "path")]
    if values["sft"] is None:
        keys.append(("model", "path"))
    for section in (("data",), ("eval", "data")):
        keys.append((*section, "path"))
        sources = cast(list, value_at(values, (*section, "sources")) or [])
        keys += [(*section, "sources", number, "path") for number in range(len(sources))]
    keys += [(*config.keys_of(name), "path") for name in config.served_models]
    yield from (key for key in keys if value_at(values, key))


def _named(form: re.Pattern[str], path: str, scheme: str) -> re.Match[str] | None:
    """Returns the parts of a name on the Hub; None of another path."""
    is_name = path.startswith("hf://") or is_hub_name(path)
    return form.fullmatch(path.removeprefix(scheme)) if is_name else None


def is_hub_name(path: str) -> bool:
    """Returns whether a path does not exist and looks like the name of a model or data set on the
    Hub."""
    matched = _DATA.fullmatch(path)
    if matched is None or path.endswith(_ENDINGS) or Path(path).exists():
        return False
    first = path.partition("/")[0]
    return first.strip(".") != "" and first not in _FOLDERS and not Path(first).is_dir()


# ---- models ------------------------------------------------------------------------------------


def _local_folder(path: str, weights: bool, cached_only: bool) -> list[str]:
    """Returns the one folder of a model. Raises ValueError."""
    matched = _named(_MODEL, path, "hf://")
    if matched is None:
        return [path]
    patterns = [*_DESCRIPTION, *_WEIGHTS[: int(weights)]]
    folder = _snapshot(matched, "model", patterns, cached_only, ignored=_IGNORED)
    if weights and not any(folder.glob("*.safetensors")):
        raise ValueError(f"{path} has no safetensors files, the only ones that are read")
    return [str(folder)]


# ---- data --------------------------------------------------------------------------------------


def _local_files(path: str, splits: Sequence[str], cached_only: bool) -> list[str]:
    """Returns the files of a `path` of data. Raises ValueError."""
    if matched := _FILES.fullmatch(path):
        patterns = [matched["pattern"]]
        folder = _snapshot(matched, "dataset", patterns, cached_only)
    else:
        matched = _named(_DATA, path, "hf://datasets/")
        if matched is None:
            return [path]
        folder = _snapshot(matched, "dataset", ["README.md"], cached_only)
        patterns = _patterns(path, folder, dict(parse_qsl(matched["query"] or "")), splits)
        folder = _snapshot(matched, "dataset", patterns, cached_only)
    names = (str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.is_file())
    files = [
        str(folder / name)
        for name in names
        if name.endswith(_ENDINGS) and any(_fits(name, pattern) for pattern in patterns)
    ]
    if not files:
        raise ValueError(
            f"{path} has no file called {' or '.join(patterns)}; name one: "
            f"hf://datasets/{matched['repo']}/FILE, which may have * in it"
        )
    return files


def _fits(name: str, pattern: str) -> bool:
    """Returns whether the Hub's pattern names a file: a `*` is inside one folder, and `**/` any
    folders or none."""
    flat = pattern.replace("**/", "")
    inside = fnmatch(name, flat) and name.count("/") == flat.count("/")
    return inside or ("**" in pattern and fnmatch(name, pattern))


def _patterns(
    path: str, folder: Path, asked: Mapping[str, str], splits: Sequence[str]
) -> list[str]:
    """Returns the names of a data set's files, by the configurations that its README lists. Raises
    ValueError if they are ambiguous.

    asked: `config` and `split` in the name.
    """
    unknown = sorted(asked.keys() - {"config", "split"})
    if unknown:
        raise ValueError(f"{path}: {unknown[0]} is unknown; a name may end in ?config=C&split=S")
    if "split" in asked:
        splits = (asked["split"],)
    with explained(f"{path}: the front matter of README.md is not as the Hub expects it"):
        configs = _configurations(folder / "README.md", splits[0])
    name = asked.get("config")
    if not configs:
        return _named_by(splits[0], f"*{name}" if name else "")
    candidates = [name for name, (_, is_default) in configs.items() if is_default] or [*configs]
    if name is None and len(candidates) == 1:
        name = candidates[0]
    base = path.partition("?")[0]
    if name is None or name not in configs:
        choice = f"{base}?config={next(iter(configs))}"
        raise ValueError(f"{path} has the configurations {', '.join(configs)}; write {choice}")
    files, _ = configs[name]
    split = next((split for split in splits if split in files), None)
    if split is None:
        choice = f"{base}?config={name}&split={next(iter(files), '...')}"
        raise ValueError(
            f"{path} has no split {' or '.join(splits)} but {', '.join(files)}; write {choice}"
        )
    return files[split]


def _named_by(split: str, start: str = "") -> list[str]:
    """Returns the patterns of files by their names, as the Hub itself finds them."""
    gaps = ("", "*[!a-zA-Z]")  # no letter beside the split: contest.csv is no test
    ends = ("json*", "csv*", "parquet")
    return [f"{start}{gap}{split}[!a-zA-Z]**{end}" for gap in gaps for end in ends]


def _configurations(readme: Path, split: str) -> _Configurations:
    """Returns the configurations in the front matter of a data set's README. {}: it lists none.

    split: the only one of a configuration that is a folder.
    """
    from huggingface_hub import repocard

    text = readme.read_text("utf-8", errors="replace") if readme.is_file() else ""
    front = repocard.REGEX_YAML_BLOCK.match(text)
    configurations: _Configurations = {}
    for config in (yaml.safe_load(front[2] if front else "") or {}).get("configs") or []:
        files = config.get("data_files") or []
        if isinstance(files, str) or (files and isinstance(files[0], str)):
            files = [{"split": "train", "path": files}]
        name = str(config["config_name"])  # it may be a year
        folder = config.get("data_dir") or ""
        if files or folder:
            patterns = {
                file["split"]: [str(Path(folder, path)) for path in _as_list(file["path"])]
                for file in files
            } or {split: _named_by(split, str(Path(folder, "_"))[:-1])}
            configurations[name] = patterns, config.get("default") or name == "default"
    return configurations


# ---- the cache ---------------------------------------------------------------------------------


def _snapshot(
    name: re.Match[str],
    kind: str,
    patterns: list[str],
    cached_only: bool,
    ignored: list[str] | None = None,
) -> Path:
    """Returns the folder of a repository's files in the cache. Raises ValueError."""
    import httpx
    from huggingface_hub import constants, errors, snapshot_download

    repo = name["repo"]
    try:
        folder = snapshot_download(
            repo,
            repo_type=kind,
            revision=name["revision"],
            allow_patterns=[pattern.replace("**/", "*") for pattern in patterns],
            ignore_patterns=ignored,
            local_files_only=cached_only or constants.HF_HUB_OFFLINE,  # not even to look
        )
    except errors.LocalEntryNotFoundError as exc:
        option = f" --repo-type {kind}" * (kind != "model")
        raise ValueError(
            f"{repo} does not exist here, {constants.HF_HUB_CACHE} (HF_HOME) does not hold it, and "
            f"{constants.ENDPOINT} was not reached; `hf download {repo}{option}` where there is a "
            "network fills that folder"
        ) from exc
    except errors.RepositoryNotFoundError as exc:
        raise ValueError(
            f"{repo} is neither here nor a {kind.replace('dataset', 'data set')} on "
            f"{constants.ENDPOINT} that this user may read (a private or gated one needs HF_TOKEN)"
        ) from exc
    except (OSError, httpx.HTTPError, errors.HFValidationError) as exc:
        raise ValueError(f"{repo}: {' '.join(str(exc).split()):.300}") from exc
    return Path(folder)

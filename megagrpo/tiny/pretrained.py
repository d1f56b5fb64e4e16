"""Makes a Hugging Face folder of a real pretrained model that an installed Python package carries as GGUF."""

import tempfile

import torch

from megagrpo.config.schema import PretrainedConfig
from megagrpo.data.torchvision_ops import define_torchvision_operators
from megagrpo.tiny.package_file import find_gguf, install_hint
from megagrpo.weights.hf_folder import write_hf_folder


def make_pretrained_model(config: PretrainedConfig) -> int:
    """Writes the model in float32 with its tokenizer and chat template; returns the number of parameters.

    The folder `config.path` is whole or absent. Raises ValueError when the package is not there, carries no single
    .gguf file, or when transformers cannot read it. Nothing is downloaded.
    """
    source = find_gguf(config.package)
    define_torchvision_operators()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, local_files_only=True, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    except (ImportError, OSError, ValueError) as exc:
        raise ValueError(
            f"prepare.pretrained: transformers cannot read {source}: {exc}{install_hint(config.package)}"
        ) from exc
    # the end of sequence that the model was trained with; a GGUF's tokenizer may name another
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    model.config.architectures = [type(model).__name__]  # engines choose their model by it, and a GGUF has no such key
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    with tempfile.TemporaryDirectory() as description:
        tokenizer.save_pretrained(description)
        model.config.save_pretrained(description)
        model.generation_config.save_pretrained(description)
        write_hf_folder(config.path, iter([tensors]), like=description, dtype=torch.float32)
    return sum(tensor.numel() for tensor in tensors.values())

"""Records the copy lists of an SGLang engine's ranks, without weights and without other ranks.

SGLang resolves the engine's own command line and builds the model's own class on the meta device,
in a fake process group of the engine's size. Written against sglang 0.5.21.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap, parallel_state
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
from sglang.srt.model_loader.utils import get_model_architecture, set_default_torch_dtype
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
from sglang.srt.server_args import ServerArgs, prepare_server_args
from torch.testing._internal.distributed.fake_pg import FakeStore

from megagrpo.mesh import only_fake_groups
from megagrpo.rollout.service.engine_words import engine_words
from megagrpo.weights.copies.record import Copy, Specs, coverage_problems
from megagrpo.weights.engines.loader import WithDraft, record_engine_model


def record_engine(arguments: list[str], specs: Specs) -> Iterator[list[Copy]]:
    """Yields the copy list of each rank of the engine that this command line starts, as `reshard`
    needs it.

    Raises ValueError for a parameter that the HF tensors do not fill exactly once.
    """
    load_plugins()
    server = prepare_server_args(engine_words(arguments))
    for rank in range(server.tp_size):
        with _pretended_rank(server, rank) as model_config:
            model = _build(model_config)
            if server.speculative_algorithm is not None:
                model = _with_draft(model, server)
            recording, whole = record_engine_model(model, specs, allow_computed=True)
            problems = coverage_problems(recording, dict(model.named_parameters()))
        if problems:
            raise ValueError(
                f"engine rank {rank} has parameters that the HF tensors do not fill:\n"
                + "\n".join(problems)
            )
        yield [*recording.copies, *whole]


def _build(config: ModelConfig) -> torch.nn.Module:
    get_model_architecture(
        config
    )  # imports the models before the meta device: some create real tensors on import
    load = LoadConfig()
    with set_default_torch_dtype(config.dtype), torch.device("meta"):
        return _initialize_model(config, load, _get_quantization_config(config, load))


def _with_draft(model: torch.nn.Module, server: ServerArgs) -> WithDraft:
    """Builds the draft of an engine that speculates, which shares embedding and output layer with
    its model."""
    draft = _build(ModelConfig.from_server_args(server, is_draft_model=True))
    for name in ("model.embed_tokens", "lm_head"):
        draft.get_submodule(name).weight = model.get_submodule(name).weight
    return WithDraft(model, draft)


@contextmanager
def _pretended_rank(server: ServerArgs, rank: int) -> Iterator[ModelConfig]:
    """Initialises SGLang as its scheduler process does before building the model, for a single
    rank."""
    publish(server, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=rank))
    config = ModelConfig.from_server_args(server)
    initialize_moe_config()
    try:
        with only_fake_groups():  # SGLang adds gloo groups to every one
            dist.init_process_group("fake", rank=rank, world_size=server.tp_size, store=FakeStore())
            parallel_state.init_distributed_environment(
                backend="fake",
                world_size=server.tp_size,
                rank=rank,
                local_rank=0,
                distributed_init_method="unused",
            )
            parallel_state.initialize_model_parallel()
        initialize_dp_attention(server_args=server)
        bootstrap.init_layer_runtime(model_config=config)
        yield config
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        reset_context()

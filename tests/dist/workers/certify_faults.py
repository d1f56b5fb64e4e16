"""Plants mistakes that public systems really made: a certificate that cannot fail proves nothing.

Each fault is a context manager around one case of the certificate.
"""

from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from megagrpo.actor import schedule, step
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.actor.routing import tokens as routed_tokens
from megagrpo.actor.routing.tokens import own_places
from megagrpo.algo.loss import count_streams, objective
from megagrpo.batching import microbatch
from megagrpo.batching.microbatch import plan_micro_batches, targets
from megagrpo.cpu import recurrences
from megagrpo.models import build as model
from megagrpo.models.build import build_chunk
from megagrpo.models.kinds.compressed import layer as compressed_layer
from megagrpo.models.kinds.gated_delta.layer import GatedDeltaNet
from megagrpo.models.kinds.grouped_query import layer as grouped_layer
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.kinds.grouped_query.layer import CausalAttention
from megagrpo.models.kinds.grouped_query.norm_over_heads import NormOverHeads
from megagrpo.models.kinds.hashed.layer import HashedRouter
from megagrpo.models.kinds.indexed import layer as indexed_layer
from megagrpo.models.kinds.kda import layer as kda_layer
from megagrpo.models.kinds.latent import layer as latent_layer
from megagrpo.models.kinds.latent.describe import LatentAttention
from megagrpo.models.kinds.mamba2.layer import Mamba2Mixer
from megagrpo.models.kinds.ngrams.layer import NGramRows
from megagrpo.models.kinds.pooled.layer import MeanIndexer
from megagrpo.models.layers import parts as layer_parts
from megagrpo.models.tensors import HfTensors, Shard
from megagrpo.tools.certify import measure


def planted(fault: str | None) -> AbstractContextManager[None]:
    """Actors that are built inside of the block have the fault."""
    return FAULTS[fault]() if fault else nullcontext()


def _after_loading(change: Callable[[MegatronActor], None]) -> AbstractContextManager[None]:
    """Calls `change` with each actor that has loaded its weights."""
    load = measure.load_initial_weights

    def load_and_change(actor, path):
        weights = load(actor, path)
        change(actor)
        return weights

    return patch.multiple(measure, load_initial_weights=load_and_change)


def _experts_not_reduced_over_tp() -> AbstractContextManager[None]:
    """As Megatron's own default at EP 1: expert gradients are summed over data-parallel ranks only."""

    def build_as_released(*args):
        chunk = build_chunk(*args)
        for name, parameter in chunk.named_parameters():
            if ".experts." in name:
                parameter.allreduce = True
        return chunk

    return patch.multiple(model, build_chunk=build_as_released)


def _no_data_parallel_reduction() -> AbstractContextManager[None]:
    """Each rank keeps the gradients of its own samples."""

    def change(actor: MegatronActor) -> None:
        for chunk in actor.model:
            chunk.finish_grad_sync = lambda **_: None

    return _after_loading(change)


@contextmanager
def _mean_of_micro_batch_means() -> Iterator[None]:
    """Every micro-batch is divided by its own tokens; micro-batches and ranks are averaged."""
    count = 1

    def counting_plan(batch, rows, size, layout, mesh, *rest):
        nonlocal count
        micros = plan_micro_batches(batch, rows, size, layout, mesh, *rest)
        count = len(micros) * mesh.dp_size
        return micros

    def local_objective(inputs, algorithm, denominators):
        mask = inputs.loss_mask > 0
        own = replace(denominators, num_tokens=int(mask.sum()), num_sequences=int((inputs.rows.sums(mask) > 0).sum()))
        loss, sums = objective(inputs, algorithm, own)
        return loss / count, sums

    with patch.multiple(step, objective=local_objective), patch.multiple(schedule, plan_micro_batches=counting_plan):
        yield


def _router_differs_between_ranks() -> AbstractContextManager[None]:
    """Routers differ as after a random initialization without a broadcast."""

    def change(actor: MegatronActor) -> None:
        if actor.mesh.rank > 0:
            with torch.no_grad():
                for name, parameter in actor.parameters().items():
                    if name.endswith("router.weight"):
                        noise = torch.Generator().manual_seed(actor.mesh.rank)
                        drawn = torch.randn(parameter.shape, generator=noise)
                        parameter += parameter.std() * drawn.to(parameter.device)

    return _after_loading(change)


def _label_of_local_neighbor() -> AbstractContextManager[None]:
    """Labels shift within this rank's part of a sequence: wrong at the seams of context parallelism."""

    def local_targets(rows, columns, *rest):
        found = targets(rows, columns, *rest)
        neighbor = (found.flat + 1).clamp(max=rows.numel() - 1)
        same_row = rows.flatten()[neighbor] == found.rows
        return replace(found, columns=torch.where(same_row, columns.flatten()[neighbor], found.columns))

    return patch.multiple(microbatch, targets=local_targets)


class _CutTensors(UserDict[str, Tensor]):
    """Tensors of a part, but only this rank's rows of those whose names end so."""

    def __init__(self, whole: HfTensors, shard: Shard, *ends: str):
        self.data, self._shard, self._ends = whole, shard, ends

    def __getitem__(self, name: str) -> Tensor:
        cut = name.endswith(self._ends)
        return self._shard.rows(self.data[name]) if cut else self.data[name]


def _loaded_cut(kind: type, *ends: str) -> AbstractContextManager[None]:
    """Attention of a kind is loaded with this rank's rows of the tensors whose names end so."""
    load = kind.load

    def load_cut(own, attention, hf, shard):
        load(own, attention, _CutTensors(hf, shard, *ends), shard)

    return patch.multiple(kind, load=load_cut)


@contextmanager
def _latent_projections_cut_over_tp() -> Iterator[None]:
    """Latent attention's down projections are cut over ranks, as Megatron's local layers do.

    The gradient of the rotary part of keys is then split where it has to be summed; the loss is right.
    """
    megatrons = vars(model)["ColumnParallelLinear"]  # only actor/ imports Megatron
    with (
        patch.multiple(layer_parts, WholeLinear=megatrons),
        _loaded_cut(LatentAttention, "q_a_proj.weight", "kv_a_proj_with_mqa.weight"),
    ):
        yield


def _state_kept_over_borders() -> AbstractContextManager[None]:
    """State and convolution of a recurrent layer go on from one packed sequence to the next."""
    return patch.multiple(recurrences, _by_row=lambda lengths, function, *tensors: function(*tensors))


def _inner_norm_centered() -> AbstractContextManager[None]:
    """The norm inside gated delta nets multiplies by 1 + weight, as the model's others do."""
    norm = GatedDeltaNet._gated_norm

    def centered(layer, out, gate):
        return norm(layer, out, gate) * (1.0 + layer.norm) / layer.norm

    return patch.multiple(GatedDeltaNet, _gated_norm=centered)


def _gate_behind_norm() -> AbstractContextManager[None]:
    """The norm inside Mamba-2 is taken before its gate, as in gated delta nets."""

    def norm_then_gate(layer, y, gate, weight):
        normed = torch.nn.functional.rms_norm(y.float(), (layer.width,), None, layer.config.layernorm_epsilon)
        return normed * weight.view(-1, layer.width) * torch.nn.functional.silu(gate)

    return patch.multiple(Mamba2Mixer, _normed=norm_then_gate)


def _gradients_not_summed(*modules: str) -> AbstractContextManager[None]:
    """Gradients of projections that ranks hold whole are not summed over the ranks that each see a part of the
    sequence: of those around latent experts, of the narrow ones of Kimi Delta Attention."""

    def unmarked(actor: MegatronActor) -> None:
        for chunk in actor.chunks:
            for name, parameter in chunk.named_parameters():
                if any(module in name for module in modules):
                    parameter.sequence_parallel = False

    return _after_loading(unmarked)


def _tokens_of_first_rank() -> AbstractContextManager[None]:
    """Every tensor-parallel rank looks the experts of the first one's tokens up."""
    routing = HashedRouter.routing

    def of_first(router: HashedRouter, logits: Tensor, padding_mask: Tensor | None = None):
        if router.config.sequence_parallel:
            first = router.tokens.chunk(2, 1)[0]
            router.tokens = torch.cat((first, first), 1)
        return routing(router, logits, padding_mask)

    return patch.multiple(HashedRouter, routing=of_first)


def _windows_of_their_own() -> AbstractContextManager[None]:
    """A key sums both halves of its own four tokens' numbers, none of the four before."""
    return patch.multiple(compressed_layer, _with_window_before=lambda t, none: torch.cat(t.chunk(2, -1), -2))


def _ngrams_over_borders() -> AbstractContextManager[None]:
    """N-grams begin in the sequence before, as if a packed row were one."""
    numbers = NGramRows._numbers
    return patch.multiple(
        NGramRows, _numbers=lambda rows, tokens, start: numbers(rows, tokens, torch.zeros_like(start))
    )


def _blocks_by_first_token() -> AbstractContextManager[None]:
    """An indexer's key of a block is its first token's."""
    pooled = MeanIndexer.pooled

    def of_first(indexer: MeanIndexer, keys: Tensor) -> Tensor:
        ratio = indexer._sizes.ratio
        first = keys[: len(keys) // ratio * ratio : ratio]
        return pooled(indexer, first.repeat_interleave(ratio, 0))

    return patch.multiple(MeanIndexer, pooled=of_first)


def _decays_of_heads() -> AbstractContextManager[None]:
    """All channels of a head decay alike, as in gated delta nets."""
    rule = kda_layer.delta_rule

    def by_head(query, key, value, decay, beta, borders):
        return rule(query, key, value, decay.mean(-1), beta, borders)

    return patch.multiple(kda_layer, delta_rule=by_head)


def _decays_without_bound() -> AbstractContextManager[None]:
    """Decays of Kimi Delta Attention are Kimi-Linear's."""

    def decays(layer, decay: Tensor, rate: Tensor) -> Tensor:
        return -rate * torch.nn.functional.softplus(decay)

    return patch.multiple(kda_layer.KimiDeltaAttention, _decays=decays)


def _pools_of_last_keys() -> AbstractContextManager[None]:
    """An indexer chooses each pool by its last key."""

    def last(indexer, keys: Tensor) -> Tensor:
        return keys.float().chunk(2, -1)[0][indexer._pool - 1 :: indexer._pool]

    return patch.multiple(indexed_layer.Indexer, pooled=last)


def _latent_keys_turned() -> AbstractContextManager[None]:
    """Latent attention turns queries and keys by their positions, as other families' does."""
    return patch.multiple(latent_layer, WithoutPositions=latent_layer.MLASelfAttention)


def _norms_not_centered() -> AbstractContextManager[None]:
    """The model's norms multiply by their weights, as other families' do."""
    return patch.multiple(layer_parts.RmsNorm, forward=torch.nn.RMSNorm.forward)


class _NormOfOwnHeads(NormOverHeads):
    """Has the weight of this rank's heads only."""

    def __init__(self, config, hidden_size, eps, *, heads):
        super().__init__(config, hidden_size, eps, heads=heads // config.tensor_model_parallel_size)
        self.first = 0


@contextmanager
def _head_norms_cut_over_tp() -> Iterator[None]:
    """The norm over all heads is cut over ranks, as its heads are: Megatron adds other heads' gradients to a rank's."""
    with (
        patch.multiple(grouped_layer, NormOverHeads=_NormOfOwnHeads),
        _loaded_cut(GroupedQuery, "q_norm.weight", "k_norm.weight"),
    ):
        yield


def _sinks_of_another_rank() -> AbstractContextManager[None]:
    """Each rank has the sinks of another one's heads."""
    load = GroupedQuery.load

    def load_turned(own, attention, hf, shard):
        sinks = hf["sinks"]
        half = len(sinks) // 2
        turned = torch.cat((sinks[half:], sinks[:half])) if shard.size > 1 else sinks
        load(own, attention, {**_needed(hf), "sinks": turned}, shard)

    return patch.multiple(GroupedQuery, load=load_turned)


def _needed(hf: HfTensors) -> dict[str, Tensor]:
    names = [f"{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias")]
    return {name: hf[name] for name in names}


def _window_one_wider() -> AbstractContextManager[None]:
    """A query sees as many tokens before itself as the window has, itself not counted."""
    init = CausalAttention.__init__

    def wider(module, *args, **options):
        init(module, *args, **options)
        if module.window is not None:
            module.window += 1

    return patch.multiple(CausalAttention, __init__=wider)


def _no_sinks() -> AbstractContextManager[None]:
    """The softmax is over keys alone."""
    attend = grouped_layer.attend_with_sinks
    return patch.multiple(
        grouped_layer, attend_with_sinks=lambda q, k, v, mask, sinks: attend(q, k, v, mask, sinks - torch.inf)
    )


def _experts_of_token_before() -> AbstractContextManager[None]:
    """Each token replays the experts of the token before it: off by one."""

    def places_before(micro):
        rows, columns = own_places(micro)
        return rows, torch.where(columns > 0, columns - 1, columns)

    return patch.multiple(routed_tokens, own_places=places_before)


def _components_counted_on_each_rank() -> AbstractContextManager[None]:
    """A component of the loss is divided by this rank's tokens of it."""

    def of_rank(tokens, rows, reduce):
        return count_streams(tokens, rows, lambda tensor, op: tensor)

    return patch.multiple(step, count_streams=of_rank)


FAULTS = {
    "experts-not-reduced-over-tp": _experts_not_reduced_over_tp,
    "no-data-parallel-reduction": _no_data_parallel_reduction, "mean-of-micro-batch-means": _mean_of_micro_batch_means,
    "label-of-local-neighbor": _label_of_local_neighbor, "router-differs-between-ranks": _router_differs_between_ranks,
    "experts-of-token-before": _experts_of_token_before,
    "latent-projections-cut-over-tp": _latent_projections_cut_over_tp,
    "state-kept-over-borders": _state_kept_over_borders, "inner-norm-centered": _inner_norm_centered,
    "norms-not-centered": _norms_not_centered, "head-norms-cut-over-tp": _head_norms_cut_over_tp,
    "sinks-of-another-rank": _sinks_of_another_rank, "window-one-wider": _window_one_wider, "no-sinks": _no_sinks,
    "gate-behind-norm": _gate_behind_norm,
    "mixing-gradients-not-summed": partial(_gradients_not_summed, ".hc_"),
    "ngrams-over-borders": _ngrams_over_borders, "blocks-by-first-token": _blocks_by_first_token,
    "tokens-of-first-rank": _tokens_of_first_rank, "windows-of-their-own": _windows_of_their_own,
    "latent-gradients-not-summed": partial(_gradients_not_summed, "_latent_proj."),
    "narrow-gradients-not-summed": partial(_gradients_not_summed, "decay_down.", "gate_down."),
    "decays-of-heads": _decays_of_heads, "decays-without-bound": _decays_without_bound,
    "pools-of-last-keys": _pools_of_last_keys, "latent-keys-turned": _latent_keys_turned,
    "components-counted-on-each-rank": _components_counted_on_each_rank,
}  # fmt: skip

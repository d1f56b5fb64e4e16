"""Publishes by every family, trainer layout and engine layout: the engines' parameters against those `disk` gives.

The trainers are Megatron actors on the pool of ranks (tests/dist/workers/pool.py), the engines real ones. The test runs
pairs of these cases, bench/transports.py all of them.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from engine_process import ListedEngines, started_engines

from examples.laptop.model import write_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.config.schema import ActorConfig, ExperimentConfig, OptimizerConfig, ParallelConfig
from megagrpo.models.table import architecture_of
from megagrpo.rollout.control import bearer
from megagrpo.rollout.service.engine_model import as_engines_see_it
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.certify.tiny_model import hf_config, random_tensors
from megagrpo.types import EngineInfo
from megagrpo.weights.exchange import Exchange
from megagrpo.weights.hf_folder import HfFolder
from tests import experiments
from tests.dist.workers.pool import RankPool

DENSE = ("qwen3", "qwen2", "llama")
MOE = (
    "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "moonlight", "qwen3_5_moe_text", "minimax_m2", "glm_moe_dsa",
    "qwen3_next",
)  # fmt: skip
FAMILIES, TIED = DENSE + MOE, ("llama",)
# A name that is no family -> the family, and what its config.json has otherwise. transformers gives the norms of
# latents an epsilon of 1e-6 always, Megatron and SGLang that of config.json, which is 1e-5 in the published Moonlight.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "moonlight": ("deepseek_v3", {"q_lora_rank": None, "rope_scaling": None, "n_group": 1, "topk_group": 1}),
    # as many keys as prompt and response have tokens: a CPU's engines are dense
    "glm_moe_dsa": ("glm_moe_dsa", {"index_topk": 80}),
    "qwen3_5_moe_text": (  # in two layers, of which every fourth would have attention
        "qwen3_5_moe_text",
        {"layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2},
    ),
}
VARIANTS["nemotron_h"] = (
    "nemotron_h",
    {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "moe"], "num_hidden_layers": 6},
)
VARIANTS["qwen3_next"] = ("qwen3_next", VARIANTS["qwen3_5_moe_text"][1])
TRAINERS: dict[str, tuple[int, dict[str, int]]] = {  # ranks, layout
    "1": (1, {}),
    "TP2+SP": (2, {"tp": 2}),
    "PP2": (2, {"pp": 2}),
    "DP2": (2, {}),
    "EP2": (2, {"ep": 2}),
    "TP2xPP2": (4, {"tp": 2, "pp": 2}),
    "TP2xEP2": (4, {"tp": 2, "ep": 2}),  # two replicas of everything but experts, which have two holders each
}
_DP_ATTENTION = {"enable_dp_attention": True, "dp_size": 2}
ENGINES: dict[str, dict[str, Any]] = {  # section `rollout`
    "TP1": {},
    "TP2": {"tp": 2},
    "TP2xEP2": {"tp": 2, "ep": 2},
    "two engines": {"num_engines": 2, "min_healthy_engines": 2},
    "two nodes": {"tp": 2, "nodes_per_engine": 2},
    "DP attention": {"tp": 2, "sglang": _DP_ATTENTION},  # only experts are cut
    "DP attention, EP2": {"tp": 2, "ep": 2, "sglang": _DP_ATTENTION},
}
# (family, engines) -> trainers after whose publishes log-probabilities are compared with
# transformers': an engine start each. Of the families that no other test of real engines has.
COMPUTED = {
    ("deepseek_v3", "TP2"): ("TP2xEP2",),
    ("deepseek_v3", "TP1"): ("1", "TP2xPP2"),
    ("deepseek_v3", "TP2xEP2"): ("PP2", "EP2"),
    ("moonlight", "TP1"): ("TP2+SP",),
    ("moonlight", "TP2"): ("PP2", "EP2"),
    ("qwen3_moe", "DP attention"): ("EP2",),
    ("deepseek_v3", "DP attention, EP2"): ("TP2xPP2",),
    ("glm4_moe", "TP1"): ("DP2", "TP2xEP2"),
    ("glm4_moe", "TP2xEP2"): ("TP2xPP2",),
    ("mixtral", "TP1"): ("TP2+SP",),
    ("mixtral", "TP2"): ("TP2xEP2", "PP2"),
    ("qwen3_5_moe_text", "DP attention"): ("EP2",),
    ("qwen3_5_moe_text", "TP1"): ("1", "TP2xPP2"),
    ("qwen3_5_moe_text", "TP2xEP2"): ("PP2", "EP2"),
    ("minimax_m2", "TP1"): ("1", "TP2xEP2"),
    ("minimax_m2", "TP2xEP2"): ("TP2+SP", "TP2xPP2"),
    ("minimax_m2", "TP2"): ("PP2",),
    ("glm_moe_dsa", "TP1"): ("1", "TP2xPP2"),
    ("glm_moe_dsa", "TP2"): ("TP2xEP2", "PP2"),
    ("glm_moe_dsa", "TP2xEP2"): ("TP2+SP", "EP2"),
    ("qwen3_next", "TP1"): ("1", "TP2xPP2"),
    ("qwen3_next", "TP2"): ("TP2xEP2",),
    ("qwen3_next", "TP2xEP2"): ("PP2", "EP2"),
}
# after a transport's name: weights.delta, and a publish after which a fiftieth has changed
CHANGES = ", changes"
_MOST_MEAN, _MOST = 1e-5, 1e-4  # distance of log-probabilities
_VOCAB = 131  # not divisible: padded vocabularies on both sides
_BUCKET_MB = 0.05  # of some 0.5 MiB: several buckets
_PUBLISH_S = 120.0


@dataclass(frozen=True)
class TransportCase:
    """Who publishes to whom."""

    family: str
    trainers: str
    engines: str

    @property
    def possible(self) -> bool:
        """Only models with experts have expert-parallel layouts."""
        return self.family in MOE or "EP2" not in self.trainers + self.engines


def make_model(folder: Path, family: str) -> Path:
    """A random model of two layers in which no parameter is zero or one throughout: that would hide a mistake."""
    base, otherwise = VARIANTS.get(family, (family, {}))
    sizes = {"hidden_size": 64, "num_layers": 2, "head_dim": 16, "ffn_size": 96, "expert_ffn_size": 48}
    sizes = TinyModelConfig(path=str(folder), family=base, tie_embeddings=family in TIED, **sizes)
    hf = hf_config(sizes) | {"vocab_size": _VOCAB} | otherwise
    generator = torch.Generator().manual_seed(0)
    tensors = random_tensors(architecture_of(hf), generator)
    for tensor in tensors.values():
        if tensor.dim() == 1:  # norms are ones and biases zeros
            tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    for name in (name for name in tensors if name.endswith("A_log")):
        tensors[name] -= 4.0  # states that last
    write_model(folder, hf, tensors, sizes.alphabet)
    return folder


def experiment(model: Path, engines: str, transport: str, dtype: str = "float32") -> ExperimentConfig:
    return experiments.experiment(
        output_dir=str(model.parent),
        model={"path": str(model)},
        rollout={"sglang": {"max_total_tokens": 2000}, "dtype": dtype, **ENGINES[engines]},
        weights={
            "transport": transport.removesuffix(CHANGES),
            "delta": transport.endswith(CHANGES),
            "bucket_mb": _BUCKET_MB,
            "timeout_s": _PUBLISH_S,
        },
        actor={"deadline_s": _PUBLISH_S + 60.0, "device": "cpu"},
    )


@contextmanager
def running_engines(model: Path, engines: str, folder: Path, dtype: str = "float32") -> Iterator[list[EngineInfo]]:
    """All engines of a layout, which start together, from the folder that engines are given."""
    config = experiment(model, engines, "disk", dtype)
    config = as_engines_see_it(config, RunFolder(folder), cuda=False)
    with started_engines(config, folder) as started:
        yield [engine.info for engine in started]


def run_case(
    pool: RankPool, case: TransportCase, model: Path, infos: Sequence[EngineInfo], transports: Sequence[str]
) -> list[dict]:
    """Run one case on engines that run already; returns a row for each transport, see `publish_and_compare`."""
    world, _ = TRAINERS[case.trainers]
    with tempfile.TemporaryDirectory() as folder:
        return pool.run(world, publish_and_compare, case, model, list(infos), tuple(transports), Path(folder))[0]


def run_engine_cases(
    pool: RankPool, cases: Sequence[TransportCase], folder: Path, transports: Sequence[str]
) -> Iterator[dict]:
    """Run cases of one family and one engine layout, whose engines start once; yields their rows."""
    (family,), (engines,) = {case.family for case in cases}, {case.engines for case in cases}
    if possible := [case for case in cases if case.possible]:
        model = folder / family if (folder / family).exists() else make_model(folder / family, family)
        with running_engines(model, engines, folder) as infos:
            for case in possible:
                yield from run_case(pool, case, model, infos, transports)


def run_computed(pool: RankPool, family: str, engines: str, folder: Path, transports: Sequence[str]) -> Iterator[dict]:
    """Yields the rows of COMPUTED's cases of one engine start, with "logprobs": their distance to transformers'."""
    from engine_logprobs import logprob_difference  # imports transformers: in the process that asks engines only

    model = make_model(folder / family, family)
    with running_engines(model, engines, folder) as infos:
        for trainers in COMPUTED[family, engines]:
            for transport in transports:
                (row,) = run_case(pool, TransportCase(family, trainers, engines), model, infos, [transport])
                yield row | {"logprobs": logprob_difference(infos[0].url, model)._asdict()}


def problems_of(row: dict) -> list[str]:
    """What of a row is not as it must be."""
    name = f"{row['family']}, trainers {row['trainers']}, engines {row['engines']}, {row['transport']}"
    report, unchanged = row["report"], row["parameters"] - row["changed"]
    resharded, planned = row["transport"] == "reshard", row["transport"] in ("reshard", "ipc")
    delta = row["transport"].endswith(CHANGES)
    replicas = ENGINES[row["engines"]].get("sglang", {}).get("dp_size", 1)
    distance = row.get("logprobs", {"mean": 0.0, "largest": 0.0, "replicas": replicas})
    found = {
        f"not what disk gives: {', '.join(row['wrong'])}": row["wrong"],
        f"{unchanged} parameters were not changed by other weights": unchanged,
        f"{report['wire_bytes']:.0f} bytes on the wire, not {row['lower_bound']}": resharded
        and report["wire_bytes"] != row["lower_bound"],
        f"{report['changed']:.0f} elements changed, {report['wire_bytes']:.0f} bytes": delta
        and not 0 < report["changed"] * 4 <= report["wire_bytes"] < report["changed"] * 8 + 8 * report["messages"],
        f"{report['staging_bytes']:.0f} bytes staged, more than weights.bucket_mb": planned
        and report["staging_bytes"] > _BUCKET_MB * 2**20,
        f"log-probabilities are {distance} from transformers'": distance["mean"] > _MOST_MEAN
        or distance["largest"] > _MOST,
        f"{distance['replicas']} of {replicas} data-parallel ranks sampled": distance["replicas"] != replicas,
    }
    return [f"{name}: {problem}" for problem, true in found.items() if true]


def publish_and_compare(
    rank: int, case: TransportCase, model: Path, infos: list[EngineInfo], transports: tuple[str, ...], folder: Path
) -> list[dict]:
    """Collective. The weights by disk, then by every transport: others first, whose parameters must all differ.

    A row has the case, the transport, how many parameters of all engine ranks there are, changed by the others, and
    have the checksums of disk; bytes counted and their lower bound. Only rank 0 returns rows.
    """
    from megagrpo.tools.certify.measure import joined  # imports Megatron: in the pool's processes only
    from megagrpo.weights.actor_weights import load_initial_weights

    world, parallel = TRAINERS[case.trainers]
    actor_config = ActorConfig(world_size=world, parallel=ParallelConfig(**parallel), deadline_s=_PUBLISH_S + 60.0)
    settings = {"optimizer": OptimizerConfig(distributed=False), "device": torch.device("cpu")}
    rows = []
    with joined(folder / "store", config=actor_config, model_path=str(model), **settings) as actor:
        weights, wanted = load_initial_weights(actor, str(model)), HfFolder(model)
        others = {name: -tensor for name, tensor in wanted.items()}
        nearly = {name: tensor.clone() for name, tensor in wanted.items()}
        for tensor in nearly.values():
            tensor.view(-1)[::50] += 1

        def publish(exchange: Exchange, version: int, hf: Mapping) -> tuple[dict, dict]:
            actor.load_hf(hf)
            report = exchange.publish(version)
            found = {key: value for info in infos for key, value in checksums(info).items()} if rank == 0 else {}
            if world > 1:
                dist.barrier()
            return report, found

        def exchange_by(transport: str) -> AbstractContextManager[Exchange]:
            config, control = experiment(model, case.engines, transport), ListedEngines(infos)
            return closing(Exchange(config, actor.mesh, weights, control, folder))

        with exchange_by("disk") as exchange:
            _, reference = publish(exchange, 1, wanted)
        for transport in transports:
            with exchange_by(transport) as exchange:
                _, before = publish(exchange, 2, others)
                if transport.endswith(CHANGES):
                    publish(exchange, 3, nearly)
                report, after = publish(exchange, 4, wanted)
                needed = lower_bound(exchange) if rank == 0 else 0
            if rank == 0:
                assert reference and reference.keys() == before.keys() == after.keys()
                wrong = [key for key in reference if after[key] != reference[key]]
                changed = sum(before[key] != reference[key] for key in reference)
                row = {"transport": transport, "report": report, "wrong": wrong, "lower_bound": needed}
                row |= {"parameters": len(reference), "changed": changed, "equal": len(reference) - len(wrong)}
                rows.append(asdict(case) | row)
    return rows


def checksums(info: EngineInfo) -> dict[str, str]:
    """SGLang's own checksum of every live parameter, by "engine, rank: parameter"."""
    headers = bearer(ListedEngines.api_key)
    answer = httpx.post(f"{info.url}/weights_checker", json={"action": "checksum"}, headers=headers, timeout=60)
    return {
        f"{info.id}, rank {rank['parallelism_info'][0]['tp_rank']}: {name}": checksum
        for rank in answer.raise_for_status().json()["ranks"]
        for name, checksum in rank["checksums"].items()
    }


def lower_bound(exchange: Exchange) -> int:
    """Bytes of all elements that the engine ranks' parameters take from HF tensors, each once."""
    fleet = exchange._fleet  # what the engines themselves recorded
    specs = exchange._digests._weights.specs
    parts = (part for engine in fleet.alive for rank in fleet.kinds[engine.kind] for part in rank)
    return sum(part.box.numel * specs[part.hf][1].itemsize for part in parts)

"""A real SGLang engine in FP8 on a CPU: what it holds after a publish, and what it then computes."""

from contextlib import closing
from pathlib import Path

import httpx
import pytest
import torch
from engine_logprobs import logprob_difference
from engine_process import started_engines
from transport_cases import checksums

from examples.laptop.model import write_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.certify.tiny_model import hf_config, random_tensors
from megagrpo.config.schema import ExperimentConfig
from megagrpo.families.table import architecture_of, model_tensors
from megagrpo.mesh import LeaderError, make_mesh
from megagrpo.rollout.control import bearer
from megagrpo.rollout.service.engine_model import as_engines_see_it
from megagrpo.system.run_folder import RunFolder
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.copies.record import record_copies
from megagrpo.weights.exchange import Exchange
from megagrpo.weights.hf_folder import HfFolder
from tests.experiments import experiment
from tests.fp8_checkpoint import quantise_folder

TRANSPORTS = ("reshard", "disk", "broadcast")
_MOST_MEAN = 0.06  # distance of log-probabilities to transformers' in float32: measured 0.02


def make_model(folder: Path) -> Path:
    sizes = {"hidden_size": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "ffn_size": 256}
    config = TinyModelConfig(path=str(folder), family="qwen3_moe", expert_ffn_size=128, **sizes)
    hf = hf_config(config) | {"vocab_size": 131}
    write_model(folder, hf, random_tensors(architecture_of(hf), torch.Generator().manual_seed(0)), config.alphabet)
    return folder


def config_of(model: Path, transport: str) -> ExperimentConfig:
    return experiment(
        output_dir=str(model.parent),
        model={"path": str(model)},
        rollout={"max_total_tokens": 4000, "dtype": "bfloat16", "quantization": "fp8"},
        weights={"transport": transport, "bucket_mb": 0.5, "timeout_s": 200.0},
        actor={"device": "cpu"},
    )


class PlainActor:
    """Parameters that are the HF tensors."""

    def __init__(self, model: Path):
        self.hf = HfFolder(model)
        self.live = {name: torch.zeros(shape) for name, (shape, _) in self.hf.specs.items()}
        fp8 = frozenset(s.name for s in model_tensors(architecture_of(hf_description(model))) if s.in_fp8)
        copies = record_copies(self.load, self.hf.specs, self.live)
        self.weights = ActorWeights(copies, self.hf.specs, lambda: self.live, fp8=fp8)

    def load(self, hf) -> None:
        for name, tensor in self.live.items():
            tensor.copy_(hf[name])


def hf_description(model: Path) -> dict:
    import json

    return json.loads((model / "config.json").read_text())


@pytest.mark.slow
def test_a_publish_gives_what_sglang_makes_of_a_quantised_checkpoint(tmp_path, capsys):
    model = make_model(tmp_path / "model")
    quantise_folder(model, tmp_path / "fp8", tmp_path / "twin", (128, 128))
    engines_see = as_engines_see_it(config_of(model, "disk"), RunFolder(tmp_path / "run"))
    actor, mesh = PlainActor(model), make_mesh(0, 1, torch.device("cpu"), 260.0)
    with started_engines(engines_see, tmp_path) as (engine,):
        url, key = engine.info.url, bearer(engine.api_key)
        body = {"model_path": str(tmp_path / "fp8"), "load_format": "auto", "flush_cache": True}
        httpx.post(f"{url}/update_weights_from_disk", json=body, headers=key, timeout=120).raise_for_status()
        reference = checksums(engine.info)
        for version, transport in enumerate(TRANSPORTS, 1):
            with closing(Exchange(config_of(model, transport), mesh, actor.weights, engine, tmp_path)) as exchange:
                actor.load({name: -tensor for name, tensor in actor.hf.items()})
                exchange.publish(2 * version)
                others = checksums(engine.info)
                actor.load(actor.hf)
                report = exchange.publish(2 * version + 1)
                exchange.verify()
            found = checksums(engine.info)
            wrong = [name for name in reference if found[name] != reference[name]]
            assert not wrong, f"{transport}: {wrong}"
            assert sum(others[name] != reference[name] for name in reference) > len(reference) / 2
            print(transport, {k: round(v, 3) for k, v in report.items()})
        distance = logprob_difference(url, model, 2 * len(TRANSPORTS) + 1)
        print("distance to float32", distance)
        assert 0 < distance.mean < _MOST_MEAN
    assert "float32 -> float8_e4m3fn with float32 scales" in capsys.readouterr().out


@pytest.mark.slow
def test_a_layer_that_the_engine_exempts_stops_the_run_by_its_name(tmp_path, monkeypatch):
    """SGLang leaves out what this variable names, as an exclusion in config.json would."""
    monkeypatch.setenv("SGLANG_FP8_IGNORED_LAYERS", "model.layers.1.self_attn.o_proj")
    model = make_model(tmp_path / "model")
    engines_see = as_engines_see_it(config_of(model, "reshard"), RunFolder(tmp_path / "run"))
    mesh = make_mesh(0, 1, torch.device("cpu"), 260.0)
    with started_engines(engines_see, tmp_path) as (engine,):
        exchange = Exchange(config_of(model, "reshard"), mesh, PlainActor(model).weights, engine, tmp_path)
        with pytest.raises((LeaderError, ValueError), match=r"model.layers.1.self_attn.o_proj.weight: not in FP8"):
            exchange.publish(1)
        exchange.close()

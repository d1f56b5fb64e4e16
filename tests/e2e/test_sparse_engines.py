"""The caches of engines of models with sparse attention: planned, and as SGLang allocates them."""

import json
import os
from pathlib import Path

import pytest
from engine_process import started_engines
from test_exchange import PlainSource, exchange_for, experiment
from transport_cases import make_model

from megagrpo.cpu import engine_settings as stand_ins
from megagrpo.models.folder import Model
from megagrpo.models.table import architecture_of
from megagrpo.rollout.service.engine_command import ServerPlace, engine_environment, engine_python_path
from megagrpo.rollout.service.engine_model import as_engines_see_it
from megagrpo.system.environment import child_environment
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.certify.tiny_model import TinySizes, hf_config
from megagrpo.tools.plan.work import model_work
from tests.experiments import ROOT, python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.verifies("runs", "latents and indexer keys: planned bytes are those of SGLang's own pools"),
]
FAMILY = "glm_moe_dsa"
PUBLISHED = json.loads((ROOT / "configs" / "models" / "GLM-5" / "config.json").read_text())
PAGE, TOKENS = 64, 640
SHARED = {"index_topk_freq": 4, "index_skip_topk_offset": 3}  # as GLM-5.2


def tiny() -> dict:
    """The tiny GLM-5, with heads of an indexer as SGLang's pool takes them."""
    return hf_config(TinySizes(family=FAMILY)) | {"index_head_dim": 128}


@pytest.mark.parametrize(
    "hf",
    [tiny(), PUBLISHED | {"num_hidden_layers": 8}, PUBLISHED | {"num_hidden_layers": 8} | SHARED],
    ids=["tiny", "GLM-5, 8 layers", "as GLM-5.2"],
)
def test_planned_latents_and_indexer_keys_are_what_sglang_allocates(hf):
    place = ServerPlace(0, "127.0.0.1", 20001, "127.0.0.1:20002", False, os.cpu_count())
    environment = engine_environment(experiment(ROOT, "disk", {}), place)
    env = child_environment(environment, engine_python_path(place))
    words = (Path(__file__).with_name("sparse_pool.py"), json.dumps(hf), str(TOKENS))
    latents, keys = json.loads(python(*words, env=env).splitlines()[-1])
    work = model_work(architecture_of(hf))
    assert keys == (TOKENS + PAGE) * work.index_bytes > 0
    assert latents + keys == (TOKENS + PAGE) * work.cache_bytes(8)


def test_planned_latents_are_what_an_engine_allocates(tmp_path):
    """On a CPU it is dense, so that its cache has latents only."""
    model = make_model(tmp_path / "model", FAMILY)
    config = as_engines_see_it(experiment(model, "reshard", {}), RunFolder(tmp_path), cuda=False)
    with started_engines(config, tmp_path, [str(Path(__file__).parent)]) as (engine,):
        exchange = exchange_for(engine, PlainSource(model).load(model), "reshard", tmp_path)
        exchange.publish(1)
        (connection,) = exchange._fleet.alive
        (found,) = connection.ask("bytes", [{"module": "pool_bytes"}])
        exchange.close()
    work = model_work(Model.read(model).arch)
    tokens = stand_ins.SETTINGS["max_total_tokens"] + 1
    of_token = work.cache_bytes(1, width=4) - work.index_bytes
    assert found == {"states": 0, "keys and values": 0, "latents": tokens * of_token}

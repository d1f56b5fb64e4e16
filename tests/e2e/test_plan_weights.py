"""`megagrpo plan-weights` against a real engine: what it would copy is what it copies."""

import json
from pathlib import Path

from megagrpo.check.engine_arguments import resolve_all
from megagrpo.check.hardware import hardware_of
from megagrpo.config.schema import ExperimentConfig
from megagrpo.tools.plan.recordings import record_all
from megagrpo.weights.engines.client import EngineConnection
from megagrpo.weights.wire.clock import Deadline
from megagrpo.weights.wire.mailbox import Mailbox, address_towards


def test_an_engine_copies_what_was_planned_from_its_config_alone(service, tmp_path):
    """Expert parallelism and several ranks are compared by bench/transports.py, which has such
    engines."""
    folder = tmp_path / "description"
    folder.mkdir()
    (folder / "config.json").write_text(
        (Path(service.config.model.path) / "config.json").read_text()
    )
    values = {
        "model": {"path": str(folder)},
        "actor": {"world_size": 2, "parallel": {"tp": 2, "ep": 2}},
    }
    config = ExperimentConfig.model_validate(json.loads(service.config.model_dump_json()) | values)
    (recorded,) = record_all([config])
    assert recorded.distinct == len(recorded.trainers) == 2
    info = service.wait_alive()
    engine = EngineConnection(
        info, 1, Mailbox(address_towards(info.url), 60.0), service.control.api_key, 60.0
    )
    engine.deadline = Deadline(60.0)
    engine.record(recorded.specs, past_loader=True, dummy_start=False)
    engine.close()
    assert engine.slices == recorded.engine
    (on_gpu,) = resolve_all([config], (hardware_of("H100"), 8))
    assert on_gpu["mem_fraction_static"] == config.rollout.mem_fraction
    # SGLang's choices for 80 GB of a Hopper, not for this machine
    assert on_gpu["attention_backend"] == "triton" and on_gpu["chunked_prefill_size"] == 8192

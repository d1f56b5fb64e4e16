"""What `megagrpo plan-weights` says of the cases in transport_cases.py, from their models'
config.json alone."""

from collections.abc import Sequence
from pathlib import Path

from transport_cases import ENGINES, TRAINERS, TransportCase, experiment, make_model

from megagrpo.check.hardware import HARDWARE
from megagrpo.config.schema import ActorConfig, ExperimentConfig, ParallelConfig
from megagrpo.tools.plan.forecast import Forecast, cluster_of, forecast_publish
from megagrpo.tools.plan.recordings import record_all


def plan_cases(cases: Sequence[TransportCase], folder: Path) -> list[Forecast]:
    """The forecast of `reshard` for every case; models are made in `folder`."""
    models = {
        family: make_model(folder / family, family) for family in {case.family for case in cases}
    }
    return planned([_experiment(case, models[case.family]) for case in cases])


def planned(configs: Sequence[ExperimentConfig]) -> list[Forecast]:
    """The forecast of `reshard` for every experiment, on nodes of 8 GPUs."""
    forecasts = []
    for config, recorded in zip(configs, record_all(configs), strict=True):
        cluster = cluster_of(config, config.rollout.num_engines, 8)
        forecasts.append(
            forecast_publish(config, recorded, [cluster], HARDWARE["H100"].rates)[0][0]
        )
    return forecasts


def planning_problems(row: dict, planned: Forecast) -> list[str]:
    """What was counted in a row of bench/transports.py and planned otherwise.

    Bytes in every case; messages and staging not where SGLang, on a CPU only, divides an MLP or an
    expert unevenly over two ranks (its alignment: 96 as 64 and 32): the same elements travel, cut
    elsewhere.
    """
    name = f"{row['family']}, trainers {row['trainers']}, engines {row['engines']}"
    counted = {
        "bytes on the wire": row["report"]["wire_bytes"],
        "messages": row["report"]["messages"],
    }
    said = {"bytes on the wire": planned.wire_bytes, "messages": planned.messages}
    engine = ENGINES[row["engines"]]
    if engine.get("tp", 1) > engine.get("ep", 1):
        del said["messages"]
    problems = [
        f"{name}: {said[what]} {what} planned, {counted[what]:.0f} counted" for what in said
    ]
    problems = [
        text for text, what in zip(problems, said, strict=True) if said[what] != counted[what]
    ]
    staging = max(
        planned.trainer_staging_bytes, planned.engine_staging_bytes
    )  # all engines at once, if they coincide
    if "messages" in said and row["report"]["staging_bytes"] > staging:
        problems.append(
            f"{name}: {row['report']['staging_bytes']:.0f} bytes staged, at most {staging} planned"
        )
    return problems


def _experiment(case: TransportCase, model: Path) -> ExperimentConfig:
    world, parallel = TRAINERS[case.trainers]
    actor = ActorConfig(world_size=world, parallel=ParallelConfig(**parallel))
    return experiment(model, case.engines, "reshard").model_copy(update={"actor": actor})

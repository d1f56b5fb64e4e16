"""One rank of the certificate's tests: jobs.json has cases, algorithms, faults."""

from pathlib import Path

from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.load import load_config
from megagrpo.config.schema import ModelConfig
from megagrpo.tools.certify.cases import Case
from megagrpo.tools.certify.measure import certify_ranks, measure
from tests.dist.workers.certify_faults import planted
from tests.dist.workers.harness import DEVICE, answer


def certified(job: dict, store: Path) -> dict:
    with planted(job.get("fault")):
        if "command" in job:  # what `megagrpo certify` runs on each rank
            certify_ranks(load_config(job["command"], []), DEVICE)
            return {}
        folder, algorithm = Path(job["folder"]), AlgorithmConfig.model_validate(job["algorithm"])
        changes = {"model": ModelConfig(path=str(folder / "model")), "algorithm": algorithm}
        config = load_config(job["config"], job.get("settings", [])).model_copy(update=changes)
        return measure(config, Case(**job["case"]), folder=folder, store=store, device=DEVICE)


def main(folder: Path) -> None:
    answer(folder, certified)

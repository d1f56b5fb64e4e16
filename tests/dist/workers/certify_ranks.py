"""One rank of the certificate's tests: jobs.json has cases, algorithms, faults. usage: certify_ranks.py FOLDER"""

import json
import os
import sys
import warnings
from pathlib import Path

from tests.dist.workers.host import DEVICE  # comes first: it prepares the host for Megatron

# isort: split

from megagrpo.certify.cases import Case
from megagrpo.certify.measure import certify_ranks, measure
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.load import load_config
from megagrpo.config.schema import ModelConfig
from tests.dist.workers.certify_faults import planted


def main(folder: Path) -> None:
    results = []
    for number, job in enumerate(json.loads((folder / "jobs.json").read_text())):
        if "command" in job:  # what `megagrpo certify` runs on each rank
            with planted(job["fault"]):
                certify_ranks(load_config(job["command"], []), DEVICE)
            results.append({})
            continue
        own = Path(job["folder"])
        algorithm = AlgorithmConfig.model_validate(job["algorithm"])
        changes = {"model": ModelConfig(path=str(own / "model")), "algorithm": algorithm}
        config = load_config(job["config"], job.get("settings", [])).model_copy(update=changes)
        print("job", number, job, flush=True)
        store = folder / f"store{number}"
        with planted(job.get("fault")):
            results.append(measure(config, Case(**job["case"]), folder=own, store=store, device=DEVICE))
    if os.environ["RANK"] == "0":
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))

"""Transport `disk`, the reference: every engine reads a checkpoint. It needs no process group."""

import shutil
from collections.abc import Iterator

from torch import Tensor

from megagrpo.weights.blocks import FP8
from megagrpo.weights.engines.fleet import EngineFleet
from megagrpo.weights.hf_folder import write_hf_folder
from megagrpo.weights.transports.gather_plan import gather_to_main, make_gather_plan
from megagrpo.weights.transports.protocol import TrainerWeights, Transport
from megagrpo.weights.wire.clock import PhaseTimer
from megagrpo.weights.wire.moving import Traffic


class DiskTransport(Transport):
    """Writes the gathered weights to `weights.folder`, which rank 0 and every engine must see under
    the same path."""

    past_loader = False

    def __init__(self, weights: TrainerWeights):
        self._weights = weights
        self._plan = make_gather_plan(weights.copies, weights.specs, weights.bucket_bytes)

    def transfer(self, version: int, engines: EngineFleet, timer: PhaseTimer) -> Traffic:
        """Collective. See Transport. Earlier versions are removed from the folder."""
        weights = self._weights
        target = (weights.folder / f"v{version}").resolve()

        def write_and_load(buckets: Iterator[dict[str, Tensor]]) -> None:
            fp8 = any(dtype == FP8 for _, dtype in weights.specs.values())
            write_hf_folder(
                target, timer.waiting(buckets, "gather"), weights.checkpoint, weights.dtype, fp8
            )
            # SGLang loads all files in one call of load_weights, so a tensor may be in any of them.
            # load_format is set, because the default is the format of the engine's start, which may
            # be "dummy".
            body = {"model_path": str(target), "load_format": "auto", "flush_cache": False}
            engines.for_each(lambda engine: engine.post("/update_weights_from_disk", body))
            for old in weights.folder.glob("v*"):
                # other names are copies of a user
                if old.name[1:].isdigit() and old.name != target.name:
                    # NFS keeps a file that an engine still maps: the next publish tries again
                    shutil.rmtree(old, ignore_errors=True)

        action = "disk weights to engines"
        traffic = Traffic()
        gather_to_main(
            self._plan, weights.parameters(), weights.mesh, write_and_load, action, traffic
        )
        return traffic

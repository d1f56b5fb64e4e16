"""One rank's numbers of an actor, on the GPU or, when CUDA is hidden, the CPU. usage: actor_numbers.py FOLDER"""

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from tests.dist.workers.host import DEVICE  # comes first: it prepares the host for Megatron

# isort: split

import torch

from megagrpo.actor import step
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.certify.measure import joined, whole
from megagrpo.config.schema import ActorConfig, OptimizerConfig, TinyModelConfig
from megagrpo.hf_files import HfFolder
from megagrpo.tiny.model import make_tiny_model
from megagrpo.types import Batch
from megagrpo.weights.actor_weights import export_hf, load_initial_weights
from tests.dist.workers.actor_ranks import OPTIMIZER, RICH, batch_of
from tests.dist.workers.samples import VOCAB


def tiny_model(path: Path, **sizes) -> None:
    """A random HF folder; by default with the vocabulary of tests/dist/workers/samples.py."""
    alphabet = "".join(chr(0x10000 + i) for i in range(sizes.pop("vocab", VOCAB) - 4))
    make_tiny_model(TinyModelConfig(path=str(path), alphabet=alphabet, **sizes), seed=0)


def on(batch: Batch, device: torch.device) -> Batch:
    return replace(
        batch, **{name: value.to(device) for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    )


def numbers_job(actor: MegatronActor, job: dict, folder: Path) -> dict:
    """Log-probabilities, loss, gradients and the update of the rich loss, kept in job["then"].

    The exported model is compared with its source.
    """
    weights = load_initial_weights(actor, job["model"])
    batch = on(batch_of(actor.mesh), DEVICE)
    rows = range(len(batch.tokens))
    logprobs = step.token_logprobs(actor, batch, 1.0)
    loss = step.backward(actor, batch, rows, RICH, 1.0, step.denominators_of(actor, batch, rows, RICH, 32))[
        "loss/total"
    ]
    gradients = whole(weights, actor.gradients(), actor.mesh)
    export_hf(folder / "exported", weights, actor.mesh, like=job["model"], dtype=job["dtype"])
    written, source = HfFolder(folder / "exported"), HfFolder(job["model"])
    dtype = getattr(torch, job["dtype"])
    equal = all(torch.equal(written[name].cpu(), source[name].to(dtype).cpu()) for name in source)
    norm = actor.optimizer_step(loss)["optim/grad_norm"]
    state = {"logprobs": logprobs.cpu(), "gradients": {name: g.float().cpu() for name, g in gradients.items()}}
    torch.save({**state, "loss": loss, "norm": norm}, job["then"])
    return {"device": str(DEVICE), "export": equal}


def memory_job(actor: MegatronActor, job: dict, folder: Path) -> dict:
    """Peak of torch's allocator in forward and backward, in bytes, beyond what the actor holds already."""
    load_initial_weights(actor, job["model"])
    generator = torch.Generator().manual_seed(0)
    rows, width = job["sequences"], job["length"]
    inside = torch.ones(rows, width)
    inside[:, 0] = 0.0
    ids, zeros = torch.arange(rows), torch.zeros(rows, width)
    batch = Batch(
        sample_ids=ids,
        group_ids=ids,
        num_groups=rows,
        tokens=torch.randint(0, actor.arch.vocab_size, (rows, width), generator=generator),
        lengths=torch.full((rows,), width),
        prompt_lengths=torch.ones(rows, dtype=torch.int64),
        loss_mask=inside,
        rollout_logprobs=zeros,
        rewards=torch.zeros(rows, dtype=torch.float64),
        valid=torch.ones(rows, dtype=torch.bool),
        truncated=torch.zeros(rows, dtype=torch.bool),
        advantages=inside,
        old_logprobs=zeros,
        ref_logprobs=zeros,
    )
    batch = on(batch, DEVICE)
    denominators = step.denominators_of(actor, batch, range(rows), RICH, width)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step.backward(actor, batch, range(rows), RICH, 1.0, denominators)
    torch.cuda.synchronize()
    return {"peak": torch.cuda.max_memory_allocated() - before, "logits": 4 * rows * width * actor.arch.vocab_size}


JOBS = {"numbers": numbers_job, "memory": memory_job}


def main(folder: Path) -> None:
    results = []
    for number, job in enumerate(json.loads((folder / "jobs.json").read_text())):
        actor_config = ActorConfig(
            dtype=job["dtype"],
            packing=job.get("packing", True),
            micro_batch_tokens=job.get("budget", 64),
            recompute=job.get("recompute", "none"),
            logprob_chunk_tokens=job.get("chunk", 32),
            deadline_s=120.0,
        )
        with joined(
            folder / f"store{number}",
            config=actor_config,
            optimizer=OptimizerConfig(**OPTIMIZER),
            model_path=job["model"],
            device=DEVICE,
        ) as actor:
            results.append(JOBS[job["do"]](actor, job, folder))
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))

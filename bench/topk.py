"""Which form of a KL over the top k of a vocabulary leads to the teacher? Adam on a table of
logits: 32 positions, 2,000 tokens, peaked random teachers.

    python bench/topk.py

Students begin at the teacher, near it and far from it. Writes bench/results/topk.{md,json}
"""

import math
from functools import partial

import torch
from common import provenance, write_results

from megagrpo.algo.loss import candidate_gaps
from megagrpo.config.objective.streams import DistillationConfig

POSITIONS, VOCABULARY, SPREAD, TOP_K, STEPS = 32, 2000, 3.2, 16, 1000
STARTS = ("teacher", "near", "far")
HEADER = (
    "loss",
    "student begins",
    "KL before",
    "after 100 steps",
    "after 1,000",
    "KL of the teacher from it",
    "student's mass on its k",
    "loss of the last step",
)


def of_product(loss: str, policy, teacher, clamp: bool = False):
    options = DistillationConfig(loss=loss, top_k=TOP_K)
    if clamp:
        policy = policy.clamp(min=options.logprob_min)
    return candidate_gaps(policy, teacher, options)


def with_bucket(loss: str, policy, teacher):
    """The same with one more token, which has the mass of all others."""
    least = math.exp(DistillationConfig().logprob_min)

    def closed(logprobs):
        rest = 1 - logprobs.exp().sum(-1, keepdim=True)
        return torch.cat((logprobs, rest.clamp(min=least).log()), -1)

    return of_product(loss, closed(policy), closed(teacher))


def forms() -> dict[str, tuple]:
    """What is compared: whose k tokens, and the loss of a position."""
    found = {}
    for side in ("student", "teacher"):
        loss = f"{side}_topk"
        found[f"`{loss}_sum`"] = side, partial(of_product, f"{loss}_sum")
        found[f"`{loss}`"] = side, partial(of_product, loss)
        found[f"`{loss}`, rest as one bucket"] = side, partial(with_bucket, loss)
        if side == "teacher":
            clamped = partial(of_product, loss, clamp=True)
            found[f"`{loss}`, policy clamped too"] = side, clamped
        found[f"exact KL, {side}'s mean"] = side, None
    return found


def kl(a, b):
    return (a.exp() * (a - b)).sum(1).mean()


def run(side: str, loss, start: str) -> dict:
    generator = torch.Generator().manual_seed(0)

    def drawn():
        return torch.randn(POSITIONS, VOCABULARY, generator=generator)

    teacher, noise = (SPREAD * drawn()).log_softmax(1), drawn()
    logits = {"teacher": teacher, "near": teacher + noise, "far": SPREAD * noise}[start].clone()
    adam = torch.optim.Adam([logits.requires_grad_()], lr=0.01)
    row = {}
    for step in range(STEPS + 1):
        policy = logits.log_softmax(1)
        if loss is not None:
            of_k = policy if side == "student" else teacher
            chosen = of_k.topk(TOP_K, 1).indices
            value = loss(policy.gather(1, chosen), teacher.gather(1, chosen)).mean()
        else:
            value = kl(policy, teacher) if side == "student" else kl(teacher, policy)
        if step in (0, 100, STEPS):
            row |= {f"kl_{step}": kl(policy, teacher).item(), "other": kl(teacher, policy).item()}
            row |= {"mass": policy.topk(TOP_K, 1).values.exp().sum(1).mean().item()}
            row |= {"loss": value.item()}
        adam.zero_grad()
        value.backward()
        adam.step()
    return row


def main() -> None:
    rows = []
    for name, (side, loss) in forms().items():
        for start in STARTS:
            rows.append({"name": name, "start": start, **run(side, loss, start)})
            print(name, start, flush=True)
    names = ("kl_0", "kl_100", f"kl_{STEPS}", "other", "mass", "loss")
    # + 0.0: no -0.00
    lines = [
        (row["name"], row["start"], *(f"{round(row[name], 2) + 0.0:.2f}" for name in names))
        for row in rows
    ]
    write_results("topk", {**provenance(), "rows": rows}, HEADER, lines)


if __name__ == "__main__":
    main()

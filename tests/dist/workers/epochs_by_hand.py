"""The updates of FOLDER/batch.pt by a plain loop on transformers' model, with torch's AdamW.

For run_transformers.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main(folder: Path) -> None:
    given = torch.load(folder / "batch.pt", map_location="cpu")
    batch, clip, temperature = given["batch"], given["clip"], given["temperature"]
    net = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
    adam = torch.optim.AdamW(net.parameters(), lr=given["lr"], betas=(0.9, 0.999), eps=given["eps"], weight_decay=0.0)
    losses, gradients, fractions, old = [], [], [], None
    for groups in [groups for updates in batch["updates"] for groups in updates]:
        logits = net(batch["tokens"]).logits / temperature  # causal: padding at the right is seen by padding alone
        chosen = logits.log_softmax(-1)[:, :-1].gather(2, batch["tokens"][:, 1:, None]).squeeze(2)
        old = chosen.detach() if old is None else old
        rows = torch.isin(batch["group_ids"], torch.tensor(groups))
        mask, advantages = batch["loss_mask"][rows, 1:], batch["advantages"][rows, 1:]
        ratio = (chosen[rows] - old[rows]).exp()
        plain, clipped = ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages
        loss = -(torch.minimum(plain, clipped) * mask).sum() / mask.sum()
        adam.zero_grad()
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append({name: p.grad.clone() for name, p in net.named_parameters()})
        fractions.append(float(((clipped < plain) * mask).sum() / mask.sum()))
        adam.step()
    weights = {name: p.detach() for name, p in net.named_parameters()}
    result = {"losses": losses, "gradients": gradients, "fractions": fractions, "weights": weights}
    torch.save(result, folder / "by_hand.pt")

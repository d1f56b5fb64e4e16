"""Compares chunked log-probabilities + entropy, with backward, with plain autograd over whole
logits: time and memory.

    python bench/head.py [--tokens 2048] [--vocab 151936] [--hidden 1024] [--device cpu|cuda]
    [--dtype float32|bfloat16] [--out FILE]

Each side runs in its own process, in turns; times are the best of the rounds, by the clock and of
all cores together, which other programs disturb less. --out writes FILE.json and FILE.md. Memory is
the peak beyond inputs, outputs and gradients: on a CPU of the process (its largest resident size),
on a GPU of torch's allocator.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import provenance

from megagrpo.algo.logprob import chunked_logprobs

SIDES = ("chunked", "plain")


def plain_logprobs(hidden, weight, targets):
    logp = torch.log_softmax((hidden @ weight.T).float(), -1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(side: str, args) -> dict:
    torch.manual_seed(0)
    dtype, device = getattr(torch, args.dtype), args.device
    hidden = torch.randn(args.tokens, args.hidden, device=device).to(dtype).requires_grad_()
    weight = (
        (torch.randn(args.vocab, args.hidden, device=device) / args.hidden**0.5)
        .to(dtype)
        .requires_grad_()
    )
    targets = torch.randint(0, args.vocab, (args.tokens,), device=device)
    coefficients = torch.randn(2, args.tokens, device=device)
    small = torch.randn(8, 8, device=device)
    (small @ small).sum().item()  # the libraries' own workspaces are not counted
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()  # making the inputs took more than they hold
    before = torch.cuda.memory_allocated() if device == "cuda" else resident_bytes()
    start, start_cpu = time.perf_counter(), time.process_time()
    if side == "chunked":
        logprobs, entropy = chunked_logprobs(hidden, weight, targets, 1.0, args.chunk)
    else:
        logprobs, entropy = plain_logprobs(hidden, weight, targets)
    (logprobs @ coefficients[0] + entropy @ coefficients[1]).backward()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    peak = (
        torch.cuda.max_memory_allocated()
        if device == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    kept = sum(t.numel() * t.element_size() for t in (logprobs, entropy, hidden.grad, weight.grad))
    torch.save(
        [t.detach().float().cpu() for t in (logprobs, entropy, hidden.grad, weight.grad)],
        f"{args.folder}/{side}.pt",
    )
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "extra_bytes": peak - before - kept}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("tokens", 2048),
        ("vocab", 151936),
        ("hidden", 1024),
        ("chunk", 2048),
        ("rounds", 3),
        ("threads", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--folder", default="/tmp")
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.side:
        print(json.dumps(measure(args.side, args)))
        return
    results = {side: [] for side in SIDES}
    for _ in range(args.rounds):
        for side in SIDES:
            command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
            results[side].append(
                json.loads(
                    subprocess.run(command, check=True, capture_output=True, text=True).stdout
                )
            )
    two_matrices = 2 * 4 * args.tokens * args.vocab
    row = {
        "tokens": args.tokens,
        "vocab": args.vocab,
        "hidden": args.hidden,
        "device": args.device,
        "dtype": args.dtype,
    }
    origin = provenance()
    row |= {
        "commit": origin["commit"],
        "date": origin["date"],
        "cores": os.cpu_count(),
        "threads": args.threads,
    }
    for side in SIDES:
        row[f"{side}_s"] = round(min(r["seconds"] for r in results[side]), 3)
        row[f"{side}_cpu_s"] = round(min(r["cpu_seconds"] for r in results[side]), 3)
        row[f"{side}_extra_mib"] = round(max(r["extra_bytes"] for r in results[side]) / 2**20, 1)
    row["time_ratio"] = round(row["chunked_s"] / row["plain_s"], 3)
    row["cpu_time_ratio"] = round(row["chunked_cpu_s"] / row["plain_cpu_s"], 3)
    row["memory_over_two_matrices"] = round(row["chunked_extra_mib"] * 2**20 / two_matrices, 4)
    mine, theirs = (torch.load(f"{args.folder}/{side}.pt") for side in SIDES)
    names = ("logprobs", "entropy", "grad_hidden", "grad_weight")
    for name, a, b in zip(names, mine, theirs, strict=True):
        row[f"{name}_difference"] = float((a - b).abs().max() / b.abs().max())
    print(json.dumps(row, indent=1))
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(row, indent=1) + "\n")
        lines = [f"| {name} | {value} |" for name, value in row.items()]
        title = "# Log-probabilities and entropy with backward: chunked against materialised logits"
        args.out.with_suffix(".md").write_text(
            "\n".join([title, "", "| | |", "|---|---|", *lines]) + "\n"
        )


if __name__ == "__main__":
    main()

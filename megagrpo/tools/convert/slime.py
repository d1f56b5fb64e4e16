"""slime's options that no row says. miles has all of them, and LoRA."""

import re

from megagrpo.config.load import Plain
from megagrpo.tools.convert import rules
from megagrpo.tools.convert.translation import Translation

_SLICED = re.compile(r"(.*)@\[0?:(\d+)\]")


def run(d: Translation) -> None:
    """Puts name, folder and logger."""
    saved = d.text("save").rstrip("/")
    model = d.text("hf-checkpoint").rstrip("/").rpartition("/")[2]
    name = d.text("wandb-group") or saved.rpartition("/")[2] or f"{model}-{d.framework}"
    d.put("name", name, *([] if d.get("wandb-group") else ["save"]))
    d.put("output_dir", saved or f"runs/{name}")


def data(d: Translation) -> None:
    """Puts files, columns and the longest prompt."""
    files = "prompt-data"
    path = d.get(files)
    if sliced := _SLICED.fullmatch(str(path)):
        path = sliced[1]
        d.put("data.limit", int(sliced[2]), files)
    if "@[" in str(path):
        d.lack(files, "a slice that begins later; write the rows into a file")
    else:
        d.put("data.path", path)
    template = "apply-chat-template-kwargs"
    arguments = d.get(template)
    if isinstance(arguments, dict):
        for name, value in arguments.items():
            d.put(f"data.chat_template_args.{name}", value, template)
    elif arguments is not None:
        d.lack(template, "should be one JSON object")
    columns = d.get("multimodal-keys")
    if isinstance(columns, dict):
        d.put("data.images_key", columns.get("image"))
        if others := sorted(columns.keys() - {"image"}):
            d.lack("multimodal-keys", f"images are read, not {', '.join(others)}")
    response = d.translated("sampling.max_response_tokens", 512)
    context = d.number("rollout-max-context-len", default=0) - response
    if limit := d.number("rollout-max-prompt-len", default=0) or max(context, 0):
        d.put("data.max_prompt_tokens", limit)


def evaluation(d: Translation) -> None:
    """Puts files to evaluate on."""
    files = "eval-prompt-data"
    named = d.get(files)
    pairs = named if isinstance(named, list) else ["eval", named]
    if named is None or len(pairs) % 2 or d.number("eval-interval", default=0) < 1:
        return
    sources: list[Plain] = [
        {"source": str(name), "path": path}
        for name, path in zip(pairs[::2], pairs[1::2], strict=True)
    ]
    d.put("eval.data.sources", sources, files)


def batch(d: Translation) -> None:
    """Puts updates of a step, and their warm-up."""
    prompts = d.number("rollout-batch-size")
    samples = prompts * d.number("n-samples-per-prompt")
    size = "global-batch-size"
    steps = "num-steps-per-rollout"
    updates = d.number(steps, default=0)
    each = min(d.number(size, default=samples), samples)
    if updates:
        each = max(samples // updates, 1)
    updates = rules.updates(d, prompts, samples, each, steps if updates else size)
    every = d.real("lr-warmup-fraction") * d.number("num-rollout", default=0)
    if every and not d.get("lr-warmup-iters"):
        d.put("actor.optimizer.warmup_steps", round(every * updates))


def layout(d: Translation) -> None:
    """Puts GPUs of trainers and of engines, and a micro-batch."""
    nodes = "actor-num-nodes"
    each = "actor-num-gpus-per-node"
    world = d.number(nodes) * d.number(each)
    d.put("actor.world_size", world)
    tp = d.number("rollout-num-gpus-per-engine")
    d.put("rollout.tp", tp)
    if d.get("train-backend") == "fsdp":
        rules.put_whole_parameters(d, world, tp, "train-backend")
    _virtual_stages(d)
    response = d.translated("sampling.max_response_tokens", 512)
    longest = d.translated("data.max_prompt_tokens", 1024) + response
    dynamic = d.get("use-dynamic-batch-size")
    tokens = d.number("max-tokens-per-gpu", default=0) if dynamic else 0
    rules.micro_batch(d, longest, tokens, d.number("micro-batch-size"))
    engines = d.number("rollout-num-gpus", default=world)
    if d.get("colocate"):
        keys = ("colocate", each, "rollout-num-gpus", "num-gpus-per-node")
        rules.place(d, world, 0, d.number(each), tp, *keys)
        if engines != world:
            d.lack(keys[2], "colocate gives every trainer's GPU to an engine")
        return
    rules.place(d, world, engines, d.number("num-gpus-per-node"), tp, nodes, "rollout-num-gpus")


def _virtual_stages(d: Translation) -> None:
    each = "num-layers-per-virtual-pipeline-stage"
    layers = d.number("num-layers", default=0)
    stages = d.number("num-virtual-stages-per-pipeline-rank", default=0)
    if d.get(each) is not None and layers:
        stages = layers // (d.translated("actor.parallel.pp") * d.number(each))
    if stages:
        d.put("actor.parallel.vpp", stages)

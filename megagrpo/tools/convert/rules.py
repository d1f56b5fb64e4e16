"""What rules.yaml names that frameworks share."""

from megagrpo.config.load import Plain
from megagrpo.tools.convert.translation import Translation

_TARGETS: dict[str, list[str]] = {  # by Megatron's names
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
}


def adapted_layers(d: Translation) -> None:
    """Puts the layers that have adapters; all linear ones are the default."""
    targets = d.named("actor.lora.targets")
    named = d.get(*targets)
    listed = named.split(",") if isinstance(named, str) else named
    if "actor.lora.rank" in d.values and isinstance(listed, list) and listed != ["all-linear"]:
        names = [str(name).strip() for name in listed]
        layers: list[Plain] = [layer for name in names for layer in _TARGETS.get(name, [name])]
        d.put("actor.lora.targets", layers)


def updates(d: Translation, prompts: int, samples: int, each: int, key: str) -> int:
    """Puts the number of updates of `each` samples in a step, and returns it; 1 if they do not divide
    the step into whole groups."""
    number, rest = divmod(samples, each)
    if rest or not number or prompts % number:
        d.lack(key, f"updates of {each} do not divide the {samples} of a step into whole groups")
        return 1
    d.put("train.num_updates_per_step", number)
    return number


def micro_batch(d: Translation, longest: int, tokens: int, samples: int, *keys: str) -> None:
    """Puts actor.micro_batch_tokens: tokens of a GPU times cp, or samples times the longest
    sample."""
    cp = d.translated("actor.parallel.cp")
    d.put("actor.micro_batch_tokens", max(tokens * cp or samples * longest, longest), *keys)


def put_whole_parameters(d: Translation, world: int, tp: int, *keys: str) -> None:
    """Puts tp for a run that sharded whole parameters over all ranks (FSDP): the engines', as
    far as it divides."""
    cp = d.translated("actor.parallel.cp")
    sizes = (size for size in range(tp, 0, -1) if world % (size * cp) == 0 or size == 1)
    d.put("actor.parallel.tp", next(sizes), *keys)
    d.remarks.append(
        "FSDP shards parameters; Megatron's ranks hold them "
        "whole, so tp is the engines': `megagrpo plan`"
    )


def place(d: Translation, world: int, engines: int, gpus: int, tp: int, *keys: str) -> None:
    """Puts engines of `tp` GPUs. world, engines: GPUs of trainers and of engines, 0 for engines on
    the trainers'; gpus: of a node."""
    because = () if engines else keys
    d.put("rollout.num_engines", max((engines or world) // tp, 1), *because)
    d.put("rollout.nodes_per_engine", max(tp // gpus, 1), *because)
    d.put("cluster.gpus_per_node", gpus, *because)
    if not engines:
        d.put("rollout.colocate", True, *keys)
        d.put("weights.transport", "ipc", *keys)
    if world + engines > gpus:
        d.put("rollout.host", "eth0", *keys)
        if not engines:
            d.remarks.append(f"Start with `megagrpo submit FILE --gpus-per-node {gpus}`.")

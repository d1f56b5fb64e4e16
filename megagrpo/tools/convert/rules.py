"""Rules that several frameworks share."""

from collections.abc import Sequence

from megagrpo.config.load import Plain
from megagrpo.config.objective.estimators import ESTIMATOR_CONFIGS
from megagrpo.tools.convert.translation import Translation

_KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def estimator(d: Translation, key: str, name: str, *more: str) -> bool:
    """Puts the advantage estimator; returns False if there is none of this name."""
    known = [str(variant.model_fields["name"].default) for variant in ESTIMATOR_CONFIGS]
    if name in known:
        d.put("algorithm.advantage.name", name, key, *more)
    elif name == "gae":
        d.lack(key, "gae needs a critic, which is not here; the nearest is grpo")
    else:
        d.lack(key, f"no estimator {name}; there are {', '.join(known)}")
    return name in known


def kl(d: Translation, charged: str, coefficient: Plain, kind: str, clamp: bool = True) -> None:
    """Puts a KL. charged: "loss" or "reward". kind: their estimator. clamp: as verl and ROLL clamp
    k3."""
    plus = "+" if kind.endswith("+") else ""
    name = kind.removesuffix("+")
    name = _KL.get(name, name)
    ours = f"algorithm.kl.{charged}_coef"
    d.put(ours, coefficient)
    d.put("algorithm.kl.estimator", name + plus, *d.theirs(ours))
    if name == "k3" and clamp:
        d.put("algorithm.kl.value_clamp", 10)


def adaptive_kl(d: Translation, target: str, horizon: str) -> None:
    """Puts an adaptive coefficient of the KL."""
    d.put("algorithm.kl.adaptive", {"target": d.get(target), "horizon": d.get(horizon)})


def kl_twice(d: Translation, key: str) -> None:
    """Says that the KL cannot be in the reward and in the loss."""
    d.lack(key, "KL in the reward and in the loss would charge it twice; choose one")


def lora(d: Translation, rank: Sequence[str], alpha: Sequence[str], targets: Sequence[str]) -> None:
    """Puts adapters if their rank is above 0; all linear layers are the default."""
    if d.number(*rank, default=0) < 1:
        return
    d.put("actor.lora.rank", d.number(*rank))
    d.put("actor.lora.alpha", d.real(*alpha, default=32), *alpha)
    named = d.get(*targets)
    listed = named.split(",") if isinstance(named, str) else named
    if isinstance(listed, list) and listed != ["all-linear"]:
        d.put("actor.lora.targets", [str(name).strip() for name in listed])


def trackers(d: Translation, named: Plain, key: str, wandb: dict[str, Plain], known: str) -> None:
    """Puts log.wandb if it is among their loggers. known: others that need nothing."""
    listed = named if isinstance(named, list) else [named]
    if "wandb" in listed:
        d.put("log.wandb", wandb, key, *d.theirs("log.wandb.project"))
    others = [str(one) for one in listed if one not in (None, "", "wandb", *known.split())]
    if others:
        d.lack(key, f"no logger {', '.join(others)}; there are TensorBoard files and log.wandb")


def truncated_sampling(d: Translation, section: str, top_p: str, top_k: str) -> None:
    """Puts top_p and top_k; in training a part of the distribution must be accepted by name."""
    p = d.real(top_p, default=1.0)
    k = d.number(top_k, default=-1)
    k = k if k > 0 else -1
    d.put(f"{section}.top_p", p, top_p)
    d.put(f"{section}.top_k", k, top_k)
    if section == "sampling" and (p < 1 or k > 0):
        d.put("sampling.allow_truncated_distribution", True, top_p, top_k)


def rows(d: Translation, files: str, answer: str, template_args: str) -> None:
    """Puts the files of `data`, whose prompts are chat messages. answer: column of the answers.
    template_args: prefix of the chat template's arguments."""
    d.copy("data.path", files)
    d.put("data.answer_key", answer, files)
    d.put("data.chat_template", True, files)
    for name, value in d.below(template_args).items():
        d.put(f"data.chat_template_args.{name}", value, template_args + name)


def evaluated_as_trained(
    d: Translation, path: str, every: int, num_samples: str, *every_keys: str
) -> bool:
    """Puts `eval` with its own files and the keys of `data`; returns False if nothing is
    evaluated."""
    if every < 1 and path in d.given:
        reason = f"{every_keys[0]} names no steps between evaluations; say eval.data and eval.every"
        d.lack(path, reason)
    if d.get(path) is None or every < 1:
        return False
    d.copy("eval.data.path", path)
    d.put("eval.every", every, *every_keys)
    d.put("eval.num_samples", d.number(num_samples))
    return True


def micro_batch(d: Translation, longest: int, tokens: int, samples: int, *keys: str) -> None:
    """Puts actor.micro_batch_tokens: tokens of a GPU times cp, or samples times the longest
    sample."""
    cp = d.parallel("cp")
    d.put("actor.micro_batch_tokens", max(tokens * cp or samples * longest, longest), *keys)


def whole_parameters_tp(d: Translation, world: int, tp: int) -> int:
    """Returns tp for a run that sharded whole parameters over all ranks (FSDP): the engines', as
    far as it divides."""
    cp = d.parallel("cp")
    return next(size for size in range(tp, 0, -1) if world % (size * cp) == 0 or size == 1)


def balance(d: Translation, key: str) -> None:
    """Says that the loss of Megatron's routers is another one."""
    if d.get(key):
        ours = "actor.router_losses.balance is of single sequences"
        d.lack(key, f"Megatron's is of a micro-batch; {ours}")


def several_nodes(d: Translation, *keys: str) -> None:
    """Puts the interface between nodes, which no key of theirs names."""
    d.put("rollout.host", "eth0", *keys)
    d.remarks.append("rollout.host eth0 is a guess: name your nodes' interface.")


def engines_on_trainers(d: Translation, world: int, gpus: int, tp: int, *keys: str) -> None:
    """Puts engines on the trainers' GPUs. world: GPUs of trainers; gpus: of a node."""
    d.put("rollout.num_engines", max(world // tp, 1), *keys)
    d.put("rollout.nodes_per_engine", max(tp // gpus, 1), *keys)
    d.put("rollout.colocate", True, *keys)
    d.put("weights.transport", "ipc", *keys)
    d.put("cluster.gpus_per_node", gpus, *keys)
    if world > gpus:
        several_nodes(d, *keys)
        d.remarks.append(f"Start with `megagrpo submit FILE --gpus-per-node {gpus}`.")

"""Rules that several frameworks share."""

from megagrpo.config.objective.estimators import ESTIMATOR_CONFIGS
from megagrpo.tools.convert.draft import Translation


def estimator(d: Translation, key: str, name: str, *more: str) -> bool:
    """Puts the advantage estimator; returns False if there is none of this name."""
    known = [str(variant.model_fields["name"].default) for variant in ESTIMATOR_CONFIGS]
    if name not in known:
        nearest = (
            "gae needs a critic, which is not here; the nearest is grpo"
            if name == "gae"
            else ", ".join(known)
        )
        d.lack(key, nearest if name == "gae" else f"no estimator {name}; there are {nearest}")
        return False
    d.put("algorithm.advantage.name", name, key, *more)
    return True


def kl_twice(d: Translation, key: str) -> None:
    """Says that the KL cannot be in the reward and in the loss."""
    d.lack(key, "KL in the reward and in the loss would charge it twice; choose one")


def truncated_sampling(d: Translation, section: str, top_p: str, top_k: str) -> None:
    """Puts top_p and top_k; in training a part of the distribution must be accepted by name."""
    p, k = d.real(top_p, default=1.0), d.number(top_k, default=-1)
    k = k if k > 0 else -1
    d.put(f"{section}.top_p", p, top_p)
    d.put(f"{section}.top_k", k, top_k)
    if section == "sampling" and (p < 1 or k > 0):
        d.put("sampling.allow_truncated_distribution", True, top_p, top_k)


def evaluated_as_trained(
    d: Translation, path: str, every: int, num_samples: str, *every_keys: str
) -> bool:
    """Puts `eval` with its own files and the keys of `data`; returns False if nothing is
    evaluated."""
    if every < 1 and path in d.given:
        d.lack(
            path,
            f"{every_keys[0]} names no steps between evaluations; say eval.data and eval.every",
        )
    if d.get(path) is None or every < 1:
        return False
    d.put("eval.data.path", d.get(path), path)
    d.put("eval.every", every, *every_keys)
    d.put("eval.num_samples", d.number(num_samples), num_samples)
    return True


def micro_batch(d: Translation, longest: int, tokens: int, samples: int, *keys: str) -> None:
    """Puts actor.micro_batch_tokens: tokens of a GPU times cp, or samples times the longest
    sample."""
    cp = int(str(d.values.get("actor.parallel.cp", 1)))
    d.put("actor.micro_batch_tokens", max(tokens * cp or samples * longest, longest), *keys)


def whole_parameters_tp(d: Translation, world: int, tp: int) -> int:
    """Returns tp for a run that sharded whole parameters over all ranks (FSDP): the engines', as
    far as it divides."""
    cp = int(str(d.values.get("actor.parallel.cp", 1)))
    return next(size for size in range(tp, 0, -1) if world % (size * cp) == 0 or size == 1)


def engines_on_trainers(
    d: Translation, world: int, gpus: int, tp: int, key: str, *keys: str
) -> None:
    """Puts engines on the trainers' GPUs. world: GPUs of trainers; gpus: of a node; key: the one
    that shares them."""
    d.put("rollout.num_engines", max(world // tp, 1), *keys)
    d.put("rollout.nodes_per_engine", max(tp // gpus, 1), *keys)
    d.put("rollout.colocate", True, key, *keys)
    d.put("weights.transport", "ipc", key, *keys)
    d.put("cluster.gpus_per_node", gpus, *keys)
    if world > gpus:
        d.put("rollout.host", "eth0", *keys)
        d.remarks.append(f"Start with `megagrpo submit FILE --gpus-per-node {gpus}`.")

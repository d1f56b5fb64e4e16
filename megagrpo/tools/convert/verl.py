"""verl's options that no row says."""

from contextlib import suppress

from megagrpo.config.load import Plain
from megagrpo.tools.convert import rules
from megagrpo.tools.convert.translation import Translation

_A = "actor_rollout_ref.actor."
_R = "actor_rollout_ref.rollout."
_G = "actor_rollout_ref.actor.megatron."
_OVERRIDE = f"{_G}override_transformer_config."


def batches(d: Translation) -> None:
    """Puts the limit of batches of dynamic sampling, which have a step's size here."""
    groups = "algorithm.filter_groups."
    if "algorithm.dynamic_sampling.metric" in d.values:
        prompts = d.number("data.train_batch_size")
        most = d.number(f"{groups}max_num_gen_batches", default=0) or 1000
        most = -(-most * d.number("data.gen_batch_size", default=prompts) // prompts)
        ours = "algorithm.dynamic_sampling.max_num_gen_batches"
        d.put(ours, most, f"{groups}max_num_gen_batches", f"{groups}enable")


def own_reward(d: Translation) -> None:
    """Puts a reward function of the user's."""
    for path in d.named("reward.grader"):
        if path.endswith(".path") and d.get(path) and "data.extra_key" in d.values:
            function = d.get(path.replace(".path", ".name")) or "compute_score"
            d.put("reward.grader", f"{d.text(path)}:{function}")


def mismatch(d: Translation) -> None:
    """Puts weights and rejections for the mismatch of engine and trainer."""
    correction = "algorithm.rollout_correction."
    over = d.get(f"{correction}rollout_is")
    bypass = d.values.get("algorithm.old_logprobs") == "engine"  # then its ratio is the weight
    if over is not None and not bypass:
        low, *band = _limits(d, f"{correction}rollout_is_threshold")
        normalized = d.get(f"{correction}rollout_is_batch_normalize") is True
        weight: dict[str, Plain] = {"name": "tis", "over": over, "cap": low}
        weight["self_normalize"] = normalized
        if band:
            weight = {"name": "icepop", "low": low, "high": band[0]}
        d.put("algorithm.mismatch.weight", weight)
    rule = f"{correction}rollout_rs"
    if d.get(rule) is None:
        return
    judged, _, measure = d.text(rule).removeprefix("seq_").rpartition("_")
    if judged not in ("mean", "sum", "max", "token") or measure not in ("k1", "k2", "k3"):
        d.lack(rule, "one rule such as seq_mean_k1 can be said: algorithm.mismatch.reject")
        return
    low, *band = _limits(d, f"{correction}rollout_rs_threshold")
    most = max([low, *band])
    reject: dict[str, Plain] = {"measure": measure, "over": judged, "high": most}
    if measure == "k1":  # theirs is rollout / old, and one limit is for both sides
        reject |= {"measure": "ratio", "low": 1 / most, "high": 1 / low if band else most}
    d.put("algorithm.mismatch.reject", reject)


def _limits(d: Translation, key: str) -> list[float]:
    """Returns a limit, or a lower and an upper one; 2 for none, and for another value, which is not
    translated."""
    with suppress(ValueError):
        limits = [float(text) for text in (d.text(key) or "2").split("_")]
        if len(limits) < 3 and min(limits) > 0:
            return limits
    d.lack(key, "should be a number above 0, or two as in 0.5_2.0")
    return [2.0]


def batch(d: Translation) -> None:
    """Puts updates of a step, and their warm-up."""
    mini = f"{_A}ppo_mini_batch_size"
    prompts = d.number("data.train_batch_size")
    updates = rules.updates(d, prompts, prompts, d.number(mini), mini)
    total = "trainer.total_training_steps"
    ratio = f"{_A}optim.lr_warmup_steps_ratio"
    warmup = d.real(f"{_A}optim.lr_warmup_steps")
    if warmup < 1 and d.get(total) is not None:
        warmup = d.real(ratio) * d.number(total)
    if warmup > 0:
        d.put("actor.optimizer.warmup_steps", round(warmup * updates))


def optimizer(d: Translation) -> None:
    """Puts the schedule's end, and Adam's betas."""
    optim = f"{_A}optim."
    if d.values.get("actor.optimizer.lr_schedule", "constant") != "constant":
        ratio = d.real(f"{optim}min_lr_ratio") * d.real(f"{optim}lr", default=1e-6)
        d.put("actor.optimizer.min_lr", max(d.real(f"{optim}min_lr"), ratio))
    betas = d.get(f"{optim}betas")
    if isinstance(betas, list) and len(betas) == 2:
        d.put("actor.optimizer.adam_beta2", betas[1])
        if betas[0] != 0.9:
            d.put("actor.optimizer.megatron.adam_beta1", betas[0], f"{optim}betas")


def layout(d: Translation) -> None:
    """Puts GPUs of trainers and of engines, and a micro-batch."""
    nodes = ("trainer.n_gpus_per_node", "trainer.nnodes")
    gpus = d.number(nodes[0])
    world = gpus * d.number(nodes[1])
    engine = f"{_R}tensor_model_parallel_size"
    copies = f"{_R}data_parallel_size"
    tp = d.number(engine) * d.number(copies)
    if tp > d.number(engine):
        d.put("rollout.tp", tp, copies)
    d.put("actor.world_size", world, *nodes)
    named = ("--config-name", "defaults", f"{_A}strategy", "model_engine", f"{_A}model_engine")
    whole = any(key.startswith((_G, f"{_A}engine.")) for key in d.given)
    if whole or any("megatron" in d.text(name) for name in named):
        d.put("actor.parallel.tp", d.number(*d.named("actor.parallel.tp")))
        d.put("actor.recompute", d.get(f"{_OVERRIDE}recompute_granularity") or "none")
    else:
        rules.put_whole_parameters(d, world, tp, engine)
        full = d.get("actor_rollout_ref.model.enable_gradient_checkpointing")
        d.put("actor.recompute", "full" if full else "none")
    longest = d.number("data.max_prompt_length") + d.number("data.max_response_length")
    tokens = samples = 0
    if d.get(f"{_A}use_dynamic_bsz"):
        tokens = d.number(f"{_A}ppo_max_token_len_per_gpu")
    else:
        shared = max(d.number(f"{_A}ppo_micro_batch_size") // world, 1)
        samples = d.number(f"{_A}ppo_micro_batch_size_per_gpu", default=shared)
    rules.micro_batch(d, longest, tokens, samples)
    rules.place(d, world, 0, gpus, tp, "actor_rollout_ref.hybrid_engine", *nodes)

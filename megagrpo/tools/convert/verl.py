"""verl's options that no row says."""

import re
from contextlib import suppress

from megagrpo.config.load import Plain
from megagrpo.tools.convert import rules
from megagrpo.tools.convert.translation import Translation


def batches(d: Translation) -> None:
    """Puts the limit of batches of dynamic sampling, which have a step's size here."""
    if "algorithm.dynamic_sampling.metric" in d.values:
        limit = "algorithm.filter_groups.max_num_gen_batches"
        prompts = d.number("data.train_batch_size")
        most = d.number(limit, default=0) or 1000
        most = -(-most * d.number("data.gen_batch_size", default=prompts) // prompts)
        ours = "algorithm.dynamic_sampling.max_num_gen_batches"
        d.put(ours, most, limit, "algorithm.filter_groups.enable")


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
        weight: dict[str, Plain] = {"name": "tis", "over": over, "cap": low}
        weight["self_normalize"] = d.get(f"{correction}rollout_is_batch_normalize") is True
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
    mini = "actor.ppo_mini_batch_size"
    prompts = d.number("data.train_batch_size")
    updates = rules.updates(d, prompts, prompts, d.number(mini), mini)
    total = "trainer.total_training_steps"
    warmup = d.real("actor.optim.lr_warmup_steps")
    if warmup < 1 and d.get(total) is not None:
        warmup = d.real("actor.optim.lr_warmup_steps_ratio") * d.number(total)
    if warmup > 0:  # steps there, of all passes
        warmup *= updates * d.translated("train.num_epochs_per_step")
        d.put("actor.optimizer.warmup_steps", round(warmup))


def optimizer(d: Translation) -> None:
    """Puts the schedule's end, and Adam's betas."""
    if d.values.get("actor.optimizer.lr_schedule", "constant") != "constant":
        ratio = d.real("actor.optim.min_lr_ratio") * d.real("actor.optim.lr", default=1e-6)
        d.put("actor.optimizer.min_lr", max(d.real("actor.optim.min_lr"), ratio))
    betas = d.get("actor.optim.betas")
    if isinstance(betas, list) and len(betas) == 2:
        d.put("actor.optimizer.adam_beta2", betas[1])
        if betas[0] != 0.9:
            d.put("actor.optimizer.megatron.adam_beta1", betas[0], "actor.optim.betas")


def layout(d: Translation) -> None:
    """Puts GPUs of trainers and of engines, and a micro-batch."""
    gpus = d.number("trainer.n_gpus_per_node")
    world = gpus * d.number("trainer.nnodes")
    engine = "rollout.tensor_model_parallel_size"
    copies = "rollout.data_parallel_size"
    tp = d.number(engine) * d.number(copies)
    d.put("rollout.tp", tp, copies)
    d.put("actor.world_size", world, "trainer.n_gpus_per_node", "trainer.nnodes")
    named = ("--config-name", "defaults", "actor.strategy", "model_engine", "actor.model_engine")
    whole = any(re.match(r"actor_rollout_ref\.actor\.(megatron|engine)\.", key) for key in d.given)
    if whole or any("megatron" in d.text(name) for name in named):
        d.put("actor.parallel.tp", d.number(*d.named("actor.parallel.tp")))
        kept = d.get("actor.megatron.override_transformer_config.recompute_granularity")
        d.put("actor.recompute", kept or "none")
    else:
        rules.put_whole_parameters(d, world, tp, engine)
        full = d.get("model.enable_gradient_checkpointing")
        d.put("actor.recompute", "full" if full else "none")
    longest = d.number("data.max_prompt_length") + d.number("data.max_response_length")
    tokens = samples = 0
    if d.get("actor.use_dynamic_bsz"):
        tokens = d.number("actor.ppo_max_token_len_per_gpu")
    else:
        shared = max(d.number("actor.ppo_micro_batch_size") // world, 1)
        samples = d.number("actor.ppo_micro_batch_size_per_gpu", default=shared)
    rules.micro_batch(d, longest, tokens, samples)
    keys = ("actor_rollout_ref.hybrid_engine", "trainer.n_gpus_per_node", "trainer.nnodes")
    rules.place(d, world, 0, gpus, tp, *keys)

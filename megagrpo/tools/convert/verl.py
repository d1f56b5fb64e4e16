"""verl's options that depend on each other."""

import math

from megagrpo.config.load import Plain
from megagrpo.tools.convert import rules
from megagrpo.tools.convert.translation import Rule, Translation, is_secret

_A = "actor_rollout_ref.actor."
_R = "actor_rollout_ref.rollout."
_M = "actor_rollout_ref.model."
_G = "actor_rollout_ref.actor.megatron."
_OVERRIDE = f"{_G}override_transformer_config."
_OVERLONG = (  # of this version, of verl-recipe's DAPO, and of later ones
    "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.overlong_buffer.",
    "reward.reward_kwargs.overlong_buffer_cfg.",
)
# files of options whose values are foreign_defaults.yaml, or differ from it in nothing that is
# translated
_BASES = ("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer")
_LOSSES = {
    **{name: name for name in ("gspo", "cispo", "gpg", "sapo")},
    "vanilla": "ppo_clip",
    "geo_mean": "gmpo",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
}
_NEVER = 1_000_000  # steps between evaluations, beyond any run's end
_CORRECTION = "algorithm.rollout_correction."
_SOURCES: dict[str, Plain] = {  # as verl's default_compute_score
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo": "math_dapo",
    "math": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "aime*": "math_dapo",
}


def _base(d: Translation) -> None:
    name = "--config-name"
    if d.get(name) is not None and d.text(name).removesuffix(".yaml") not in _BASES:
        d.lack(name, "its file says more; give it as YAML")
    listed = d.get("defaults")
    if isinstance(listed, list):
        others = [one for one in listed if one not in (*_BASES, "_self_")]
        if others:
            reason = f"what {others} says is not known here; write its keys into this file"
            d.lack("defaults", reason)


def _advantage(d: Translation) -> None:
    key = "algorithm.adv_estimator"
    flag = "algorithm.norm_adv_by_std_in_grpo"
    gamma = d.real("algorithm.gamma")
    name = d.text(key).removesuffix("_vectorized")
    if name == "grpo" and not d.get(flag):
        name = "dr_grpo"
    if not rules.estimator(d, key, name):
        return
    if d.number(f"{_R}n") == 1 and name in ("grpo", "dr_grpo", "rloo", "gpg", "opo"):
        d.put("algorithm.advantage.single_sample", "raw", key)
    match name:
        case "grpo_passk":
            d.copy("algorithm.advantage.normalize", flag)
        case "gdpo" if not d.get(flag):
            d.lack(flag, "gdpo divides by the standard deviation")
        case "gpg":
            d.put("algorithm.advantage.alpha", "nonzero_reward", key)
        case "reinforce_plus_plus":
            d.put("algorithm.advantage.gamma", gamma)
        case _ if gamma != 1:
            d.lack("algorithm.gamma", f"{name} gives every token of a response one advantage")


def _kl(d: Translation) -> None:
    in_reward = d.get("algorithm.use_kl_in_reward")
    in_loss = d.get(f"{_A}use_kl_loss")
    control = "algorithm.kl_ctrl."
    in_reward_coef = d.get(f"{control}kl_coef")
    in_loss_coef = d.get(f"{_A}kl_loss_coef")
    if in_reward and in_loss:
        rules.kl_twice(d, "algorithm.use_kl_in_reward")
        return
    if in_reward and in_reward_coef:
        rules.kl(d, "reward", in_reward_coef, d.text("algorithm.kl_penalty"))
    elif in_loss and in_loss_coef:
        rules.kl(d, "loss", in_loss_coef, d.text(f"{_A}kl_loss_type"))
    else:
        return
    if d.get(f"{control}type") == "adaptive":
        rules.adaptive_kl(d, f"{control}target_kl", f"{control}horizon")


def _loss(d: Translation) -> None:
    mode = f"{_A}policy_loss.loss_mode"
    given = d.text(mode)
    name = _LOSSES.get(given)
    if name is None:
        own = "or one of yours: docs/extend.md"
        d.lack(mode, f"no loss {given}; there are {', '.join(_LOSSES)}, {own}")
        return
    d.put("algorithm.loss.name", name, mode)
    if name in ("ppo_clip", "gspo", "gmpo", "cispo"):
        _clip_ratios(d, "clip_ratio_", limit=math.inf if name == "gmpo" else 1.0)
    match name:
        case "ppo_clip":
            d.put("algorithm.loss.dual_clip", d.real(f"{_A}clip_ratio_c"))
        case "gspo":
            d.put("algorithm.loss.clamp", "above", mode)
        case "dppo":
            d.put("algorithm.loss.against", "old", mode)
            d.put("algorithm.loss.divergence", given.removeprefix("dppo_"), mode)
            _clip_ratios(d, "", limit=math.inf)
            d.put("algorithm.loss.ratio_limit", d.real(f"{_A}clip_ratio_c"))
    # verl's gspo, geo_mean and sapo take no other aggregation
    by_sequence = name in ("gspo", "gmpo", "sapo")
    means = d.get(f"{_A}loss_agg_mode")
    d.put("algorithm.aggregation", "seq-mean-token-mean" if by_sequence else means)


def _clip_ratios(d: Translation, to: str, limit: float) -> None:
    """Fields `to`low and `to`high of the loss; the lower is at most `limit`."""
    both = f"{_A}clip_ratio"
    sides = {"low": f"{both}_low", "high": f"{both}_high"}
    for side, key in sides.items():
        # null, and not left out: then verl has a default for the side
        read = both if d.given.get(key, 0) is None else key
        # verl's cispo says 10 for no lower bound
        ratio = min(d.real(read), limit) if side == "low" else d.real(read)
        d.put(f"algorithm.loss.{to}{side}", ratio, read)
    if d.given.get(both) is not None and all(d.get(key) is not None for key in sides.values()):
        d.remarks.append(
            f"verl reads clip_ratio {d.get(both)} only where clip_ratio_low or "
            "clip_ratio_high is null."
        )


def _rewards(d: Translation) -> None:
    for prefix in [prefix for prefix in _OVERLONG if d.get(f"{prefix}enable")]:
        factor = d.real(f"{prefix}penalty_factor", default=1.0)
        overlong: dict[str, Plain] = {"buffer_tokens": d.get(f"{prefix}len"), "factor": factor}
        d.put("algorithm.reward.overlong", overlong)
    groups = "algorithm.filter_groups."
    if d.get(f"{groups}enable"):
        shaped = d.get(f"{groups}metric") == "seq_final_reward"
        # of a batch here; theirs have a size of their own
        prompts = d.number("data.train_batch_size")
        most = d.number(f"{groups}max_num_gen_batches", default=0) or 1000
        most = -(-most * d.number("data.gen_batch_size", default=prompts) // prompts)
        chosen: dict[str, Plain] = {
            "metric": "shaped_reward" if shaped else "reward",
            "max_num_gen_batches": most,
        }
        if d.get(f"{groups}metric") == "acc":
            d.remarks.append(
                "filter_groups.metric acc is the grader's score here, bonuses included."
            )
        d.put("algorithm.dynamic_sampling", chosen)
    for manager in (
        "reward_model.reward_manager",
        "reward.reward_manager.name",
        "reward_manager.name",
    ):
        if d.get(manager) not in (None, "naive", "dapo", "batch", "prime", "gdpo"):
            reason = "no such reward manager; rewards of a whole group are reward.group_grader"
            d.lack(manager, reason)
    custom = "custom_reward_function."
    if d.get("reward_model.enable"):
        reason = "no reward model is served; ask one of yours with reward.grader: http"
        d.lack("reward_model.enable", reason)
    elif (path := d.get(f"{custom}path")) is not None:
        function = d.get(f"{custom}name") or "compute_score"
        d.put("reward.grader", f"{path}:{function}")
        d.put("data.extra_key", "extra_info", f"{custom}path")
        prefix = f"{custom}reward_kwargs."
        for name, value in d.below(prefix).items():
            if is_secret(name):
                d.lack(prefix + name, "a secret; the function should read a variable")
            else:
                d.put(f"reward.args.{name}", value, prefix + name)
    else:
        d.put("data.grader_by_source", _SOURCES, "data.reward_fn_key")


def _mismatch(d: Translation) -> None:
    over = d.get(f"{_CORRECTION}rollout_is")
    if over is not None:
        low, band, high = d.text(f"{_CORRECTION}rollout_is_threshold").partition("_")
        normalized = d.get(f"{_CORRECTION}rollout_is_batch_normalize") is True
        weight: dict[str, Plain] = {"name": "tis", "over": over, "cap": float(low or 2)}
        weight["self_normalize"] = normalized
        if band:
            weight = {"name": "icepop", "low": float(low), "high": float(high)}
        d.put("algorithm.mismatch.weight", weight)
    rule = f"{_CORRECTION}rollout_rs"
    if d.get(rule) is None:
        return
    judged, _, measure = d.text(rule).removeprefix("seq_").rpartition("_")
    if judged not in ("mean", "sum", "max", "token") or measure not in ("k1", "k2", "k3"):
        d.lack(rule, "one rule such as seq_mean_k1 can be said: algorithm.mismatch.reject")
        return
    low, band, high = d.text(f"{_CORRECTION}rollout_rs_threshold").partition("_")
    most = float(high or low or 2)
    reject: dict[str, Plain] = {"measure": measure, "over": judged, "high": most}
    if measure == "k1":  # theirs is rollout / old, and one limit is for both sides
        reject |= {"measure": "ratio", "low": 1 / most, "high": 1 / float(low) if band else most}
    d.put("algorithm.mismatch.reject", reject)


def _data(d: Translation) -> None:
    files = "data.train_files"
    rules.rows(d, files, "reward_model.ground_truth", "data.apply_chat_template_kwargs.")
    if d.number("data.train_max_samples", default=-1) > 0:
        d.copy("data.limit", "data.train_max_samples")
    cut = d.get("data.truncation")
    if cut not in (None, "error") and not d.get("data.filter_overlong_prompts"):
        reason = "prompts longer than data.max_prompt_length are dropped and counted, never cut"
        d.lack("data.truncation", reason)
    kwargs = f"{_R}val_kwargs."
    every = "trainer.test_freq"
    steps = d.number(every)
    if steps < 1 and d.get("trainer.val_before_train") is not False:
        steps = _NEVER
        d.remarks.append("test_freq names no steps: evaluated before the first and after the last.")
    if rules.evaluated_as_trained(d, "data.val_files", steps, f"{kwargs}n", every):
        # do_sample's default is false, too, but then its engines read the temperature alone
        temperature = d.real(f"{kwargs}temperature")
        greedy = d.get(f"{kwargs}do_sample") is False
        d.put("eval.temperature", 0.0 if greedy else temperature)
        rules.truncated_sampling(d, "eval", f"{kwargs}top_p", f"{kwargs}top_k")


def _batch(d: Translation) -> None:
    small = f"{_A}ppo_mini_batch_size"
    prompts = d.number("data.train_batch_size")
    mini = d.number(small)
    d.put("train.num_prompts_per_step", prompts)
    if prompts % mini:
        divides = f"{mini} does not divide train_batch_size {prompts}"
        d.lack(small, f"{divides}: updates of a step have equal sizes")
    else:
        d.put("train.num_updates_per_step", prompts // mini)
    steps = d.get("trainer.total_training_steps")
    if steps is not None:
        d.put("train.num_steps", d.number("trainer.total_training_steps"))
    elif "algorithm.dynamic_sampling" in d.values:
        reason = "a step takes as many prompts as it must; say train.num_steps"
        d.lack("trainer.total_epochs", reason)
    else:
        d.put("train.num_epochs", d.number("trainer.total_epochs"))
    updates = max(prompts // mini, 1)
    ratio = f"{_A}optim.lr_warmup_steps_ratio"
    warmup = d.number(f"{_A}optim.lr_warmup_steps", default=-1)
    if warmup < 1 and d.get(ratio) and steps is not None:
        warmup = round(d.real(ratio) * d.number("trainer.total_training_steps") * updates)
        d.put("actor.optimizer.warmup_steps", warmup)
    elif warmup < 1 and d.get(ratio):
        reason = "how many steps there are depends on the data"
        d.lack(ratio, f"{reason}; say actor.optimizer.warmup_steps, in updates")
    elif warmup > 0:
        d.put("actor.optimizer.warmup_steps", warmup * updates)
    rules.truncated_sampling(d, "sampling", f"{_R}top_p", f"{_R}top_k")


def _optimizer(d: Translation) -> None:
    optim = f"{_A}optim."
    of_peak = d.real(f"{optim}min_lr_ratio") * d.real(f"{optim}lr", default=1e-6)
    if d.values.get("actor.optimizer.lr_schedule", "constant") != "constant":
        d.put("actor.optimizer.min_lr", max(d.real(f"{optim}min_lr"), of_peak))
    betas = d.get(f"{optim}betas")
    if isinstance(betas, list) and len(betas) == 2:
        d.put("actor.optimizer.adam_beta2", betas[1], f"{optim}betas")
        if betas[0] != 0.9:
            d.put("actor.optimizer.megatron.adam_beta1", betas[0], f"{optim}betas")


def _layout(d: Translation) -> None:
    gpus = d.number("trainer.n_gpus_per_node")
    nodes = ("trainer.n_gpus_per_node", "trainer.nnodes")
    world = gpus * d.number("trainer.nnodes")
    engine = f"{_R}tensor_model_parallel_size"
    tp = d.number(engine)
    d.put("actor.world_size", world, *nodes)
    if _is_megatron(d):
        d.put("actor.parallel.tp", d.number(f"{_G}tensor_model_parallel_size"))
        d.put("actor.recompute", d.get(f"{_OVERRIDE}recompute_granularity") or "none")
    else:
        d.put("actor.parallel.tp", rules.whole_parameters_tp(d, world, tp), engine)
        d.remarks.append(
            "FSDP shards parameters; Megatron's ranks hold them whole, so tp is the "
            "engines': `megagrpo plan`"
        )
        full = d.get(f"{_M}enable_gradient_checkpointing")
        d.put("actor.recompute", "full" if full else "none")
    rules.balance(d, f"{_OVERRIDE}moe_aux_loss_coeff")
    if d.get(f"{_OVERRIDE}moe_z_loss_coeff"):
        d.put("actor.router_losses.z", d.real(f"{_OVERRIDE}moe_z_loss_coeff"))
    longest = d.number("data.max_prompt_length") + d.number("data.max_response_length")
    tokens = samples = 0
    if d.get(f"{_A}use_dynamic_bsz"):
        tokens = d.number(f"{_A}ppo_max_token_len_per_gpu")
    else:
        shared = max(d.number(f"{_A}ppo_micro_batch_size") // world, 1)
        samples = d.number(f"{_A}ppo_micro_batch_size_per_gpu", default=shared)
    rules.micro_batch(d, longest, tokens, samples)
    rules.engines_on_trainers(d, world, gpus, tp, "actor_rollout_ref.hybrid_engine", *nodes)
    experts = f"{_R}expert_parallel_size"
    if tp % d.number(experts):
        apart = "engines with attention by data are not offered yet"
        d.lack(experts, f"divides rollout.tp, {tp}; {apart}")
    else:
        d.put("rollout.ep", d.number(experts))
    mode = {"R3": "rollout", "R2": "old"}.get(d.text(f"{_A}router_replay.mode"))
    d.put("actor.routing_replay", mode, *d.theirs("actor.routing_replay"))


def _is_megatron(d: Translation) -> bool:
    bases = f"{d.text('--config-name')} {d.text('defaults')}"
    return "megatron" in bases or d.get(f"{_A}strategy") == "megatron" or bool(d.below(_G))


def _model(d: Translation) -> None:
    for ours in ("actor.dtype", "rollout.dtype"):
        d.put(ours, "bfloat16", *d.theirs("actor.dtype"))
    rules.lora(
        d,
        [f"{_M}lora_rank", f"{_M}lora.rank", f"{_A}lora.rank", f"{_A}lora.r"],
        [f"{_M}lora_alpha", f"{_M}lora.alpha", f"{_A}lora.alpha"],
        [f"{_M}target_modules", f"{_M}lora.target_modules", f"{_A}lora.target_modules"],
    )


def _run(d: Translation) -> None:
    name = d.text("trainer.experiment_name")
    d.put("name", name)
    d.put("output_dir", d.text("trainer.default_local_dir") or f"runs/{name}")
    wandb: dict[str, Plain] = {"project": d.text("trainer.project_name")}
    loggers = "trainer.logger"
    rules.trackers(d, d.get(loggers), loggers, wandb, "console tensorboard")
    saves = "trainer.save_freq"  # by default never: ours saves
    d.put("checkpoint.every", max(d.number(saves), 0) if saves in d.given else None)
    mode = "trainer.resume_mode"
    resume = {"": "auto", "auto": "auto", "disable": "never"}.get(d.text(mode))
    if resume is None:
        d.lack(mode, "auto or disable; another run's checkpoint is checkpoint.load")
    else:
        d.put("checkpoint.resume", resume)


RULES: list[Rule] = [
    _base,
    _run,
    _model,
    _rewards,
    _data,
    _batch,
    _optimizer,
    _advantage,
    _kl,
    _loss,
    _mismatch,
    _layout,
]

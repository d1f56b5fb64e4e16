"""verl's options that depend on each other."""

from megagrpo.config.load import Plain
from megagrpo.tools.convert import rules
from megagrpo.tools.convert.draft import Rule, Translation

_A, _R, _M, _G = (
    f"actor_rollout_ref.{part}." for part in ("actor", "rollout", "model", "actor.megatron")
)
_OVERRIDE = f"{_G}override_transformer_config."
_OVERLONG = (  # of this version, of verl-recipe's DAPO, and of later ones
    "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.overlong_buffer.",
    "reward.reward_kwargs.overlong_buffer_cfg.",
)
# files of options whose values are foreign_defaults.yaml, or differ from it in nothing that is
# translated
_BASES = ("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer")
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
    name, listed = "--config-name", d.get("defaults")
    if d.get(name) is not None and d.text(name).removesuffix(".yaml") not in _BASES:
        d.lack(name, "its file says more; give it as YAML")
    if (
        others := [one for one in listed if one not in (*_BASES, "_self_")]
        if isinstance(listed, list)
        else []
    ):
        d.lack("defaults", f"what {others} says is not known here; write its keys into this file")


def _advantage(d: Translation) -> None:
    key, flag, gamma = (
        "algorithm.adv_estimator",
        "algorithm.norm_adv_by_std_in_grpo",
        "algorithm.gamma",
    )
    name = d.text(key).removesuffix("_vectorized")
    name = "dr_grpo" if name == "grpo" and not d.get(flag) else name
    if not rules.estimator(d, key, name, flag):
        return
    if d.number(f"{_R}n") == 1 and name in ("grpo", "dr_grpo", "rloo", "gpg", "opo"):
        d.put("algorithm.advantage.single_sample", "raw", key)
    if name == "grpo_passk":
        d.put("algorithm.advantage.normalise", d.get(flag), flag)
    elif name == "gpg":
        d.put("algorithm.advantage.alpha", "nonzero_reward", key)
    elif name == "reinforce_plus_plus":
        d.put("algorithm.advantage.gamma", d.real(gamma), gamma)
    elif d.real(gamma) != 1:
        d.lack(gamma, f"{name} gives every token of a response one advantage")


def _kl(d: Translation) -> None:
    in_reward, in_loss = "algorithm.use_kl_in_reward", f"{_A}use_kl_loss"
    if d.get(in_reward) and d.get(in_loss):
        return rules.kl_twice(d, in_reward)
    flag, coef, kind = in_loss, f"{_A}kl_loss_coef", f"{_A}kl_loss_type"
    if d.get(in_reward):
        flag, coef, kind = in_reward, "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"
    if not d.get(flag) or not d.get(coef):
        return None
    plus = "+" if d.text(kind).endswith("+") else ""
    name = d.text(kind).removesuffix("+")
    name = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(name, name)
    d.put(
        "algorithm.kl.reward_coef" if flag == in_reward else "algorithm.kl.loss_coef",
        d.get(coef),
        flag,
        coef,
    )
    d.put("algorithm.kl.estimator", name + plus, kind, flag)
    if name == "k3":
        d.put("algorithm.kl.value_clamp", 10, kind, flag)
    if d.get("algorithm.kl_ctrl.type") == "adaptive":
        keys = [f"algorithm.kl_ctrl.{part}" for part in ("target_kl", "horizon", "type")]
        d.put("algorithm.kl.adaptive", {"target": d.get(keys[0]), "horizon": d.get(keys[1])}, *keys)
    return None


def _loss(d: Translation) -> None:
    mode, both, aggregation = f"{_A}policy_loss.loss_mode", f"{_A}clip_ratio", f"{_A}loss_agg_mode"
    name = d.text(mode).replace("vanilla", "ppo_clip")
    if name not in ("ppo_clip", "gspo", "cispo", "gpg", "sapo"):
        return d.lack(
            mode, f"no loss {name}; there are ppo_clip (vanilla), gspo, cispo, gpg and sapo"
        )
    d.put("algorithm.loss.name", name, mode)
    sides = (
        [f"{both}_{side}" for side in ("low", "high")]
        if name in ("ppo_clip", "gspo", "cispo")
        else []
    )
    for key in sides:
        is_both = (
            d.given.get(key, 0) is None
        )  # null, and not left out: then verl has a default for the side
        ratio = d.real(both if is_both else key)
        ratio = (
            min(ratio, 1.0) if key.endswith("low") else ratio
        )  # verl's cispo says 10 for no lower bound
        d.put(f"algorithm.loss.{key.rpartition('.')[2]}", ratio, both if is_both else key)
    if sides and d.given.get(both) is not None and all(d.get(key) is not None for key in sides):
        d.remarks.append(
            f"verl reads clip_ratio {d.get(both)} only where clip_ratio_low or clip_ratio_high is "
            "null."
        )
    if name == "ppo_clip":
        d.put("algorithm.loss.dual_clip", d.real(f"{_A}clip_ratio_c"), f"{_A}clip_ratio_c")
    elif name == "gspo":
        d.put("algorithm.loss.clamp", "above", mode)
    # verl's gspo and sapo take no other aggregation
    means = "seq-mean-token-mean" if name in ("gspo", "sapo") else d.get(aggregation)
    d.put("algorithm.aggregation", means, aggregation)
    return None


def _rewards(d: Translation) -> None:
    for prefix in [prefix for prefix in _OVERLONG if d.get(f"{prefix}enable")]:
        keys = [f"{prefix}{name}" for name in ("len", "penalty_factor", "enable")]
        overlong: dict[str, Plain] = {
            "buffer_tokens": d.get(keys[0]),
            "factor": d.real(keys[1], default=1.0),
        }
        d.put("algorithm.reward.overlong", overlong, *keys)
    groups, most = "algorithm.filter_groups.", "algorithm.filter_groups.max_num_gen_batches"
    if d.get(f"{groups}enable"):
        metric = "shaped_reward" if d.get(f"{groups}metric") == "seq_final_reward" else "reward"
        chosen: dict[str, Plain] = {
            "metric": metric,
            "max_num_gen_batches": d.number(most, default=0) or 1000,
        }
        d.put("algorithm.dynamic_sampling", chosen, f"{groups}enable", f"{groups}metric", most)
    for manager in (
        "reward_model.reward_manager",
        "reward.reward_manager.name",
        "reward_manager.name",
    ):
        if d.get(manager) not in (None, "naive", "dapo", "batch", "prime"):
            d.lack(
                manager, "no such reward manager; rewards of a whole group are reward.group_grader"
            )
    path, name, prefix = (
        f"custom_reward_function.{part}" for part in ("path", "name", "reward_kwargs.")
    )
    if d.get("reward_model.enable"):
        d.lack(
            "reward_model.enable",
            "no reward model is served; ask one of yours with reward.grader: http",
        )
    elif d.get(path) is not None:
        d.put("reward.grader", f"{d.get(path)}:{d.get(name) or 'compute_score'}", path, name)
        d.put("data.extra_key", "extra_info", path)
        for key in [key for key in d.given if key.startswith(prefix)]:
            d.put(f"reward.args.{key.removeprefix(prefix)}", d.get(key), key)
    else:
        d.put("data.grader_by_source", _SOURCES, "data.reward_fn_key")


def _mismatch(d: Translation) -> None:
    over, threshold, norm = (
        f"{_CORRECTION}rollout_is{part}" for part in ("", "_threshold", "_batch_normalize")
    )
    if d.get(over) is not None:
        low, band, high = d.text(threshold).partition("_")
        weight: dict[str, Plain] = {
            "name": "tis",
            "over": d.get(over),
            "cap": float(low or 2),
            "self_normalise": d.get(norm) is True,
        }
        if band:
            weight = {"name": "icepop", "low": float(low), "high": float(high)}
        d.put("algorithm.mismatch.weight", weight, over, threshold, norm)
    rule, limits = f"{_CORRECTION}rollout_rs", f"{_CORRECTION}rollout_rs_threshold"
    if d.get(rule) is not None:
        judged, _, measure = d.text(rule).removeprefix("seq_").rpartition("_")
        if judged not in ("mean", "sum", "max", "token") or measure not in ("k1", "k2", "k3"):
            return d.lack(
                rule, "one rule such as seq_mean_k1 can be said: algorithm.mismatch.reject"
            )
        low, band, high = d.text(limits).partition("_")
        most = float(high or low or 2)
        reject: dict[str, Plain] = {"measure": measure, "over": judged, "high": most}
        if measure == "k1":  # theirs is rollout / old, and one limit is for both sides
            reject |= {
                "measure": "ratio",
                "low": 1 / most,
                "high": 1 / float(low) if band else most,
            }
        d.put("algorithm.mismatch.reject", reject, rule, limits)
    return None


def _data(d: Translation) -> None:
    files, prefix, longest = (
        "data.train_files",
        "data.apply_chat_template_kwargs.",
        "data.max_prompt_length",
    )
    d.put("data.path", d.get(files), files)
    d.put("data.answer_key", "reward_model.ground_truth", files)
    d.put("data.chat_template", True, files)
    for key in [key for key in d.given if key.startswith(prefix)]:
        d.put(f"data.chat_template_args.{key.removeprefix(prefix)}", d.get(key), key)
    if d.number("data.train_max_samples", default=-1) > 0:
        d.put("data.limit", d.get("data.train_max_samples"), "data.train_max_samples")
    if d.get("data.truncation") not in (None, "error") and not d.get(
        "data.filter_overlong_prompts"
    ):
        d.lack(
            "data.truncation", f"prompts longer than {longest} are dropped and counted, never cut"
        )
    kwargs, every = f"{_R}val_kwargs.", "trainer.test_freq"
    if rules.evaluated_as_trained(d, "data.val_files", d.number(every), f"{kwargs}n", every):
        # do_sample's default is false, too, but then its engines read the temperature alone
        temperature = (
            0.0 if d.get(f"{kwargs}do_sample") is False else d.real(f"{kwargs}temperature")
        )
        d.put("eval.temperature", temperature, f"{kwargs}temperature", f"{kwargs}do_sample")
        rules.truncated_sampling(d, "eval", f"{kwargs}top_p", f"{kwargs}top_k")


def _batch(d: Translation) -> None:
    size, small = "data.train_batch_size", f"{_A}ppo_mini_batch_size"
    prompts, mini = d.number(size), d.number(small)
    d.put("train.num_prompts_per_step", prompts, size)
    if prompts % mini:
        d.lack(
            small,
            f"{mini} does not divide train_batch_size {prompts}: updates of a step have equal sizes",
        )
    else:
        d.put("train.num_updates_per_step", prompts // mini, small)
    total, passes = "trainer.total_training_steps", "trainer.total_epochs"
    if d.get(total) is not None:
        d.put("train.num_steps", d.number(total), total)
    elif "algorithm.dynamic_sampling" in d.values:
        d.lack(passes, "a step takes as many prompts as it must; say train.num_steps")
    else:
        d.put("train.num_epochs", d.number(passes), passes)
    updates, steps, ratio = (
        max(prompts // mini, 1),
        f"{_A}optim.lr_warmup_steps",
        f"{_A}optim.lr_warmup_steps_ratio",
    )
    if d.number(steps, default=-1) > 0:
        d.put("actor.optimizer.warmup_steps", d.number(steps) * updates, steps)
    elif d.get(ratio) and d.get(total) is not None:
        d.put(
            "actor.optimizer.warmup_steps", round(d.real(ratio) * d.number(total) * updates), ratio
        )
    elif d.get(ratio):
        d.lack(
            ratio,
            "how many steps there are depends on the data; say actor.optimizer.warmup_steps, in "
            "updates",
        )
    rules.truncated_sampling(d, "sampling", f"{_R}top_p", f"{_R}top_k")


def _layout(d: Translation) -> None:
    gpus, keys = d.number("trainer.n_gpus_per_node"), ("trainer.n_gpus_per_node", "trainer.nnodes")
    world, engine = gpus * d.number("trainer.nnodes"), f"{_R}tensor_model_parallel_size"
    tp = f"{_G}tensor_model_parallel_size"
    d.put("actor.world_size", world, *keys)
    bases = f"{d.text('--config-name')} {d.text('defaults')}"
    if (
        any(key.startswith(_G) for key in d.given)
        or d.get(f"{_A}strategy") == "megatron"
        or "megatron" in bases
    ):
        d.put("actor.parallel.tp", d.number(tp), tp)
        granularity = f"{_OVERRIDE}recompute_granularity"
        d.put("actor.recompute", d.get(granularity) or "none", granularity)
    else:
        d.put("actor.parallel.tp", rules.whole_parameters_tp(d, world, d.number(engine)), engine)
        d.remarks.append(
            "FSDP shards parameters; Megatron's ranks hold them whole, so tp is the engines': "
            "`megagrpo plan`"
        )
        checkpointing = f"{_M}enable_gradient_checkpointing"
        d.put("actor.recompute", "full" if d.get(checkpointing) else "none", checkpointing)
    balance, z = f"{_OVERRIDE}moe_aux_loss_coeff", f"{_OVERRIDE}moe_z_loss_coeff"
    if d.get(balance):
        d.lack(
            balance,
            "Megatron's is of a micro-batch; actor.router_losses.balance is of single sequences",
        )
    if d.get(z):
        d.put("actor.router_losses.z", d.real(z), z)
    tokens, dynamic = f"{_A}ppo_max_token_len_per_gpu", f"{_A}use_dynamic_bsz"
    each, total = f"{_A}ppo_micro_batch_size_per_gpu", f"{_A}ppo_micro_batch_size"
    longest = d.number("data.max_prompt_length") + d.number("data.max_response_length")
    if d.get(dynamic):
        rules.micro_batch(d, longest, d.number(tokens), 0, dynamic, tokens)
    else:
        rules.micro_batch(
            d,
            longest,
            0,
            d.number(each, default=max(d.number(total) // world, 1)),
            each,
            total,
            dynamic,
        )
    rules.engines_on_trainers(
        d, world, gpus, d.number(engine), "actor_rollout_ref.hybrid_engine", *keys
    )
    experts = f"{_R}expert_parallel_size"
    if d.number(engine) % d.number(experts):
        d.lack(
            experts,
            f"divides rollout.tp, {d.number(engine)}; engines with attention by data are not "
            "offered yet",
        )
    else:
        d.put("rollout.ep", d.number(experts), experts)
    replay = f"{_A}router_replay.mode"
    mode = {"R3": "rollout", "R2": "old"}.get(d.text(replay))
    d.put("actor.routing_replay", mode, replay, f"{_R}enable_rollout_routing_replay")


def _model(d: Translation) -> None:
    kinds = (
        f"{_M}torch_dtype",
        f"{_A}fsdp_config.model_dtype",
        f"{_A}fsdp_config.dtype",
        f"{_R}dtype",
    )
    for ours in ("actor.dtype", "rollout.dtype"):
        d.put(ours, "bfloat16", *kinds)
    rank, alpha, targets = (
        [
            f"{_M}lora_{name}" if name != "target_modules" else f"{_M}{name}",
            f"{_M}lora.{name}",
            f"{_A}lora.{name}",
        ]
        for name in ("rank", "alpha", "target_modules")
    )
    rank.append(f"{_A}lora.r")
    if d.number(*rank, default=0) > 0:
        d.put("actor.lora.rank", d.number(*rank), *rank, f"{_A}lora.enable")
        d.put("actor.lora.alpha", d.real(*alpha), *alpha)
        if isinstance(named := d.get(*targets), list):
            d.put("actor.lora.targets", named, *targets)


def _run(d: Translation) -> None:
    folder, experiment, loggers = (
        "trainer.default_local_dir",
        "trainer.experiment_name",
        d.get("trainer.logger"),
    )
    name = d.text(experiment)
    d.put("name", name, experiment)
    d.put("output_dir", d.text(folder) or f"runs/{name}", folder)
    named = loggers if isinstance(loggers, list) else [loggers]
    if "wandb" in named:
        wandb: dict[str, Plain] = {"project": d.text("trainer.project_name")}
        d.put("log.wandb", wandb, "trainer.logger", "trainer.project_name", experiment)
    if others := [
        str(one) for one in named if one not in ("console", "wandb", "tensorboard", None)
    ]:
        d.lack(
            "trainer.logger",
            f"no logger {', '.join(others)}; there are TensorBoard files and log.wandb",
        )
    d.put("checkpoint.every", max(d.number("trainer.save_freq"), 0), "trainer.save_freq")
    resume = {"": "auto", "auto": "auto", "disable": "never"}.get(d.text("trainer.resume_mode"))
    if resume is None:
        d.lack(
            "trainer.resume_mode", "auto or disable; another run's checkpoint is checkpoint.load"
        )
    else:
        d.put("checkpoint.resume", resume, "trainer.resume_mode")


RULES: list[Rule] = [
    _base,
    _run,
    _model,
    _rewards,
    _data,
    _batch,
    _advantage,
    _kl,
    _loss,
    _mismatch,
    _layout,
]

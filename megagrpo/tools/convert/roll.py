"""ROLL's options (RLVR pipeline) that depend on each other."""

import math
import re

from megagrpo.config.load import Plain
from megagrpo.tools.convert import rules
from megagrpo.tools.convert.draft import Rule, Translation

_T, _I = "actor_train.", "actor_infer."
_TS, _ARGS = f"{_T}strategy_args.strategy_config.", f"{_T}data_args."
_TRAINERS, _ENGINES = f"{_T}device_mapping", f"{_I}device_mapping"
_GRADERS = {
    "MathRuleRewardWorker": "math",
    "MathGRPORewardWorker": "math",
}  # reward workers that are a grader here
_NEAREST = {
    "CodeSandboxRewardWorker": "code, whose tests are a row's answer",
    "LLMJudgeRewardWorker": "judge",
}


def _advantage(d: Translation) -> None:
    """ROLL's grpo normalises by group, clips, subtracts the token KL, and then takes returns to
    go."""
    key, clip, older = "adv_estimator", d.get("reward_clip"), d.get("reward_norm")
    mean, std = d.get("norm_mean_type"), d.get("norm_std_type")
    if older:
        mean, std = (
            None if d.get("reward_scale") else older,
            None if d.get("reward_shift") else older,
        )
    name = d.text(key)
    if name == "grpo":
        size = d.number("num_return_sequences_in_group")
        # the largest of a normalised group is (n - 1) / sqrt(n)
        if not d.get("add_token_level_kl") and d.real("reward_clip", default=size) >= size**0.5:
            d.put("algorithm.advantage.name", "grpo", key, "reward_clip", "gamma")
            return
        name, mean, std = "reinforce", "group", "group"
    if rules.estimator(d, key, name):
        d.put("algorithm.advantage.gamma", d.real("gamma"), "gamma")
        d.put(
            "algorithm.reward.mean",
            mean or "none",
            key,
            "norm_mean_type",
            "reward_norm",
            "reward_shift",
        )
        d.put(
            "algorithm.reward.std",
            std or "none",
            key,
            "norm_std_type",
            "reward_norm",
            "reward_scale",
        )
        d.put("algorithm.reward.clip", clip, "reward_clip")


def _kl(d: Translation) -> None:
    in_loss, in_reward = d.get("use_kl_loss") and d.get("kl_loss_coef"), d.get("add_token_level_kl")
    if in_loss and in_reward:
        rules.kl_twice(d, "add_token_level_kl")
    elif in_loss:
        d.put("algorithm.kl.loss_coef", d.real("kl_loss_coef"), "use_kl_loss", "kl_loss_coef")
        d.put("algorithm.kl.estimator", "k3", "use_kl_loss")
        d.put("algorithm.kl.value_clamp", 10, "use_kl_loss")
    elif in_reward:
        d.put(
            "algorithm.kl.reward_coef", d.real("init_kl_coef"), "add_token_level_kl", "init_kl_coef"
        )
        kind = d.text("kl_penalty")
        d.put(
            "algorithm.kl.estimator",
            {"kl": "k1", "mse": "k2"}.get(kind, kind),
            "kl_penalty",
            "add_token_level_kl",
        )
        if d.get("target_kl") is not None:
            adaptive = {"target": d.get("target_kl"), "horizon": d.get("kl_horizon")}
            d.put("algorithm.kl.adaptive", adaptive, "target_kl", "kl_horizon")


def _loss(d: Translation) -> None:
    keys = ("use_policy_loss_type", f"{_T}pg_variant", "pg_variant", "importance_sampling")
    kind = "PG" if d.get(keys[0]) == "PG" else d.text(keys[1], keys[2]) or "ppo"
    names = {"PG": "gpg", "vanilla": "gpg", "ppo": "ppo_clip", "cispo": "cispo"}
    if kind not in names:
        return d.lack(
            next(key for key in keys if d.get(key)), f"no loss {kind}; there are {', '.join(names)}"
        )
    name = "gspo" if d.get("importance_sampling") == "seq" else names[kind]
    d.put("algorithm.loss.name", name, *keys)
    sides = (
        ("pg_clip_low", "pg_clip_high") if d.get("use_pg_clip_range") else ("pg_clip", "pg_clip")
    )
    for side, key in zip(("low", "high"), sides, strict=True) if name != "gpg" else ():
        # its cispo has bounds of its own
        d.put(
            f"algorithm.loss.clip_ratio_{side}",
            0.1 if name == "cispo" else d.real(key),
            key,
            "use_pg_clip_range",
        )
    if d.get("dual_clip_loss") and name == "ppo_clip":
        d.put("algorithm.loss.dual_clip", 1 + 2 * d.real("pg_clip"), "dual_clip_loss", "pg_clip")
    d.put("algorithm.aggregation", d.get("loss_agg_mode"), "loss_agg_mode")
    return None


def _data(d: Translation) -> None:
    files, tags = f"{_ARGS}file_name", [key for key in d.given if key.endswith(".tag_included")]
    d.put("data.path", d.get(files), files, f"{_ARGS}dataset_dir")
    d.put("data.answer_key", "ground_truth", files)
    d.put("data.chat_template", True, f"{_ARGS}template", "global_template", files)
    if graders := _graders(d):
        d.put("data.source_key", "tag", *tags)
        d.put("data.grader_by_source", graders, *tags)
    shares = {name: share for name, share in d.given.items() if ".domain_interleave_probs." in name}
    if len([share for share in shares.values() if share]) > 1:
        for name in shares:
            d.lack(
                name,
                "a mixture by tags: split the file by tag, and write data.sources with a ratio each",
            )
    kwargs, every = "validation.generating_args.", ("eval_steps", "validation.eval_steps")
    number = f"{kwargs}num_return_sequences"
    if rules.evaluated_as_trained(
        d, "validation.data_args.file_name", d.number(*every, default=0), number, *every
    ):
        d.put("eval.temperature", d.real(f"{kwargs}temperature"), f"{kwargs}temperature")
        rules.truncated_sampling(d, "eval", f"{kwargs}top_p", f"{kwargs}top_k")


def _graders(d: Translation) -> dict[str, Plain]:
    """Returns the grader of every tag of the rows, as ROLL's reward workers choose by it."""
    found: dict[str, Plain] = {}
    for key in [key for key in d.given if re.fullmatch(r"rewards\.\w+\.worker_cls", key)]:
        worker, tags = (
            d.text(key).rpartition(".")[2],
            d.get(key.replace("worker_cls", "tag_included")),
        )
        if worker in _GRADERS:
            found |= {
                str(tag): _GRADERS[worker] for tag in (tags if isinstance(tags, list) else [])
            }
        else:
            d.lack(
                key,
                "no such worker; the nearest grader is "
                f"{_NEAREST.get(worker, 'a function of yours')}",
            )
    return found


def _devices(d: Translation, key: str) -> set[int]:
    """Returns the GPUs of a device mapping, a list or a text such as list(range(0,8))."""
    mapping = d.get(key)
    if isinstance(mapping, list):
        return {int(str(gpu)) for gpu in mapping}
    ranges = re.findall(r"range\(\s*(?:(\d+)\s*,\s*)?(\d+)\s*\)", str(mapping))
    listed = re.findall(r"\[([\d,\s]+)\]", str(mapping))
    named = {int(gpu) for part in listed for gpu in part.split(",")}
    return named | {gpu for start, end in ranges for gpu in range(int(start or 0), int(end))}


def _layout(d: Translation) -> None:
    trainers, engines, gpus = (
        _devices(d, _TRAINERS),
        _devices(d, _ENGINES),
        d.number("num_gpus_per_node"),
    )
    of_engine = [
        f"{_I}strategy_args.strategy_config.tensor_parallel_size",
        f"{_I}num_gpus_per_worker",
    ]
    tp, keys, cut = (
        d.number(*of_engine),
        (_TRAINERS, "num_gpus_per_node"),
        f"{_TS}tensor_model_parallel_size",
    )
    d.put("actor.world_size", len(trainers), *keys)
    fsdp = "fsdp" in d.text(f"{_T}strategy_args.strategy_name")
    d.put(
        "actor.parallel.tp",
        rules.whole_parameters_tp(d, len(trainers), tp) if fsdp else d.number(cut),
        cut,
        *(of_engine if fsdp else []),
    )
    granularity, off = (
        f"{_TS}recompute_granularity",
        f"{_T}model_args.disable_gradient_checkpointing",
    )
    full = "full" if fsdp and not d.get(off) else "none"
    d.put("actor.recompute", d.get(granularity) or full, granularity, off)
    if d.get(f"{_TS}moe_aux_loss_coeff"):
        of_sequences = "actor.router_losses.balance is of single sequences"
        d.lack(f"{_TS}moe_aux_loss_coeff", f"Megatron's is of a micro-batch; {of_sequences}")
    dynamic, tokens = (
        f"{_T}use_dynamic_batching_in_train",
        f"{_T}max_tokens_per_microbatch_in_train",
    )
    longest = d.number("prompt_length") + d.number("response_length")
    each = f"{_T}training_args.per_device_train_batch_size"
    most = d.number(tokens, default=0) if d.get(dynamic) else 0
    rules.micro_batch(d, longest, most, d.number(each), dynamic, tokens, each)
    if trainers == engines:
        rules.engines_on_trainers(d, len(trainers), gpus, tp, _ENGINES, *keys)
        return
    d.put("rollout.num_engines", max(len(engines) // tp, 1), _ENGINES)
    d.put("rollout.nodes_per_engine", max(tp // gpus, 1), *of_engine)
    if both := trainers & engines:
        d.lack(
            _ENGINES,
            f"{len(both)} GPUs train and sample: colocate shares all or none; engines get their own",
        )
    d.put("cluster.gpus_per_node", gpus, "num_gpus_per_node")
    if len(trainers) + len(engines) > gpus:
        d.put("rollout.host", "eth0", _ENGINES)


def _batch(d: Translation) -> None:
    prompts, size = d.number("rollout_batch_size"), d.number("num_return_sequences_in_group")
    cut = [int(str(d.values.get(f"actor.parallel.{name}", 1))) for name in ("tp", "pp", "cp")]
    replicas = max(len(_devices(d, _TRAINERS)) // (cut[0] * cut[1] * cut[2]), 1)
    args = [
        f"{_T}training_args.{name}"
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    ]
    of_update = d.number(args[0]) * d.number(args[1]) * replicas
    updates, rest = divmod(prompts * size, of_update)
    if rest or not updates or prompts % updates:
        d.lack(
            args[1],
            f"{of_update} samples of an update do not divide the {prompts * size} of a step into "
            "whole groups",
        )
    else:
        d.put("train.num_updates_per_step", updates, *args)
    d.put("train.num_prompts_per_step", prompts, "rollout_batch_size")
    d.put("train.num_steps", d.number("max_steps"), "max_steps")
    warmup, ratio = f"{_T}training_args.warmup_steps", f"{_T}training_args.warmup_ratio"
    all_updates = d.number("max_steps") * max(updates, 1) * d.number("ppo_epochs")
    of_ratio = math.ceil(d.real(ratio) * all_updates)  # both count updates
    d.put("actor.optimizer.warmup_steps", d.number(warmup, default=0) or of_ratio, warmup, ratio)
    rules.truncated_sampling(
        d, "sampling", f"{_I}generating_args.top_p", f"{_I}generating_args.top_k"
    )
    if d.get("async_generation_ratio"):
        d.put("rollout.max_staleness", d.number("async_generation_ratio"), "async_generation_ratio")
        d.put("algorithm.mismatch.weight", {"name": "tis"}, "async_generation_ratio")


def _model(d: Translation) -> None:
    kinds: dict[str, Plain] = {"bf16": "bfloat16", "fp32": "float32", "": "bfloat16"}
    for ours, key in (
        ("actor.dtype", f"{_T}model_args.dtype"),
        ("rollout.dtype", f"{_I}model_args.dtype"),
    ):
        d.put(ours, kinds.get(d.text(key), "bfloat16"), key)
        if d.text(key) not in kinds:
            d.lack(key, f"{d.get(key)} is not offered; bfloat16 is")
    rank, alpha, targets = (
        [f"lora_{name}", f"{_T}model_args.lora_{name}"] for name in ("rank", "alpha", "target")
    )
    if d.number(*rank, default=0) > 0:
        d.put("actor.lora.rank", d.number(*rank), *rank)
        d.put("actor.lora.alpha", d.real(*alpha, default=32), *alpha)
        if (named := d.get(*targets)) and named != "all-linear":
            listed = named if isinstance(named, list) else d.text(*targets).split(",")
            d.put("actor.lora.targets", [str(name).strip() for name in listed], *targets)


def _run(d: Translation) -> None:
    name = d.text("exp_name")
    d.put("name", name, "exp_name")
    d.put("output_dir", f"{d.text('output_dir') or 'runs'}/{name}", "output_dir")
    d.put("checkpoint.every", d.number("save_steps"), "save_steps")
    if d.get("resume_from_checkpoint"):
        d.lack("resume_from_checkpoint", "their checkpoints are not read; ours go on by themselves")
    tracker, project = d.text("track_with"), "tracker_kwargs.project"
    if tracker == "wandb":
        d.put("log.wandb", {"project": d.text(project) or name}, "track_with", project)
    elif tracker not in ("", "tensorboard", "stdout", "ml_tracker"):
        d.lack("track_with", f"no tracker {tracker}; there are TensorBoard files and log.wandb")


RULES: list[Rule] = [_run, _model, _data, _layout, _batch, _advantage, _kl, _loss]

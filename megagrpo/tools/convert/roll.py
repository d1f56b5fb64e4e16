"""ROLL's options (RLVR pipeline) that depend on each other."""

import math
import re

from megagrpo.config.load import Plain
from megagrpo.tools.convert import rules
from megagrpo.tools.convert.translation import Rule, Translation

_T = "actor_train."
_I = "actor_infer."
_TS = f"{_T}strategy_args.strategy_config."
_ARGS = f"{_T}data_args."
_TRAINERS = f"{_T}device_mapping"
_ENGINES = f"{_I}device_mapping"
# reward workers that are a grader here
_GRADERS = {"MathRuleRewardWorker": "math", "MathGRPORewardWorker": "math"}
_NEAREST = {
    "CodeSandboxRewardWorker": "code, whose tests are a row's answer",
    "LLMJudgeRewardWorker": "judge",
}
_DTYPES: dict[str, Plain] = {"bf16": "bfloat16", "fp32": "float32", "": "bfloat16"}
_LOSSES = {"PG": "gpg", "vanilla": "gpg", "ppo": "ppo_clip", "cispo": "cispo"}


def _advantage(d: Translation) -> None:
    """ROLL's grpo normalizes by group, clips, subtracts the token KL, and then takes returns to
    go."""
    key = "adv_estimator"
    mean = d.get("norm_mean_type")
    std = d.get("norm_std_type")
    if older := d.get("reward_norm"):
        mean = None if d.get("reward_scale") else older
        std = None if d.get("reward_shift") else older
    name = d.text(key)
    if name == "grpo":
        size = d.number("num_return_sequences_in_group")
        # the largest of a normalized group is (n - 1) / sqrt(n)
        if not d.get("add_token_level_kl") and d.real("reward_clip", default=size) >= size**0.5:
            d.put("algorithm.advantage.name", "grpo", key, "reward_clip", "gamma")
            return
        name = "reinforce"
        mean = std = "group"
    if rules.estimator(d, key, name):
        d.put("algorithm.advantage.gamma", d.real("gamma"))
        for ours, value in {"mean": mean, "std": std}.items():
            theirs = d.theirs(f"algorithm.reward.{ours}")
            d.put(f"algorithm.reward.{ours}", value or "none", key, "reward_norm", *theirs)
        d.copy("algorithm.reward.clip", "reward_clip")


def _kl(d: Translation) -> None:
    in_loss = d.get("use_kl_loss") and d.get("kl_loss_coef")
    in_reward = d.get("add_token_level_kl")
    if in_loss and in_reward:
        rules.kl_twice(d, "add_token_level_kl")
    elif in_loss:
        rules.kl(d, "loss", d.real("kl_loss_coef"), "k3")
    elif in_reward:
        rules.kl(d, "reward", d.real("init_kl_coef"), d.text("kl_penalty"), clamp=False)
        if d.get("target_kl") is not None:
            rules.adaptive_kl(d, "target_kl", "kl_horizon")


def _loss(d: Translation) -> None:
    kinds = ("use_policy_loss_type", f"{_T}pg_variant", "pg_variant", "importance_sampling")
    kind = "PG" if d.get(kinds[0]) == "PG" else d.text(*kinds[1:3]) or "ppo"
    if kind not in _LOSSES:
        said = next(key for key in kinds if d.get(key))
        d.lack(said, f"no loss {kind}; there are {', '.join(_LOSSES)}")
        return
    name = "gspo" if d.get("importance_sampling") == "seq" else _LOSSES[kind]
    d.put("algorithm.loss.name", name)
    for side in ("low", "high") if name != "gpg" else ():
        key = f"pg_clip_{side}" if d.get("use_pg_clip_range") else "pg_clip"
        ratio = 0.1 if name == "cispo" else d.real(key)  # its cispo has bounds of its own
        d.put(f"algorithm.loss.clip_ratio_{side}", ratio, key, "use_pg_clip_range")
    if d.get("dual_clip_loss") and name == "ppo_clip":
        d.put("algorithm.loss.dual_clip", 1 + 2 * d.real("pg_clip"), "pg_clip")
    d.copy("algorithm.aggregation", "loss_agg_mode")


def _data(d: Translation) -> None:
    files = f"{_ARGS}file_name"
    d.put("data.path", d.get(files), files, f"{_ARGS}dataset_dir")
    d.put("data.answer_key", "ground_truth", files)
    d.put("data.chat_template", True, files, *d.theirs("data.chat_template"))
    if graders := _graders(d):
        tags = [key for key in d.given if key.endswith(".tag_included")]
        d.put("data.source_key", "tag", *tags)
        d.put("data.grader_by_source", graders, *tags)
    shares = {name: share for name, share in d.given.items() if ".domain_interleave_probs." in name}
    if len([share for share in shares.values() if share]) > 1:
        split = "split the file by tag, and write data.sources with a ratio each"
        for name in shares:
            d.lack(name, f"a mixture by tags: {split}")
    kwargs = "validation.generating_args."
    every = ("eval_steps", "validation.eval_steps")
    files = "validation.data_args.file_name"
    steps = d.number(*every, default=0)
    if rules.evaluated_as_trained(d, files, steps, f"{kwargs}num_return_sequences", *every):
        d.put("eval.temperature", d.real(f"{kwargs}temperature"))
        rules.truncated_sampling(d, "eval", f"{kwargs}top_p", f"{kwargs}top_k")


def _graders(d: Translation) -> dict[str, Plain]:
    """Returns the grader of every tag of the rows, as ROLL's reward workers choose by it."""
    found: dict[str, Plain] = {}
    for key in [key for key in d.given if re.fullmatch(r"rewards\.\w+\.worker_cls", key)]:
        worker = d.text(key).rpartition(".")[2]
        tags = d.get(key.replace("worker_cls", "tag_included"))
        if worker not in _GRADERS:
            nearest = _NEAREST.get(worker, "a function of yours")
            d.lack(key, f"no such worker; the nearest grader is {nearest}")
        elif isinstance(tags, list):
            found |= {str(tag): _GRADERS[worker] for tag in tags}
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
    trainers = _devices(d, _TRAINERS)
    engines = _devices(d, _ENGINES)
    gpus = d.number("num_gpus_per_node")
    engine = (
        f"{_I}strategy_args.strategy_config.tensor_parallel_size",
        f"{_I}num_gpus_per_worker",
    )
    tp = d.number(*engine)
    d.put("actor.world_size", len(trainers), "num_gpus_per_node")
    granularity = d.get(f"{_TS}recompute_granularity")
    off = d.get(f"{_T}model_args.disable_gradient_checkpointing")
    if "fsdp" in d.text(f"{_T}strategy_args.strategy_name"):
        d.put("actor.parallel.tp", rules.whole_parameters_tp(d, len(trainers), tp), *engine)
        granularity = granularity or ("none" if off else "full")
    else:
        d.put("actor.parallel.tp", d.number(f"{_TS}tensor_model_parallel_size"))
    d.put("actor.recompute", granularity or "none")
    rules.balance(d, f"{_TS}moe_aux_loss_coeff")
    longest = d.number("prompt_length") + d.number("response_length")
    each = f"{_T}training_args.per_device_train_batch_size"
    tokens = 0
    if d.get(f"{_T}use_dynamic_batching_in_train"):
        tokens = d.number(f"{_T}max_tokens_per_microbatch_in_train", default=0)
    rules.micro_batch(d, longest, tokens, d.number(each), each)
    if trainers == engines:
        keys = (_ENGINES, _TRAINERS, "num_gpus_per_node")
        rules.engines_on_trainers(d, len(trainers), gpus, tp, *keys)
        return
    d.put("rollout.num_engines", max(len(engines) // tp, 1))
    d.put("rollout.nodes_per_engine", max(tp // gpus, 1), *engine)
    if both := trainers & engines:
        own = "colocate shares all or none; engines get their own"
        d.lack(_ENGINES, f"{len(both)} GPUs train and sample: {own}")
    d.put("cluster.gpus_per_node", gpus)
    if len(trainers) + len(engines) > gpus:
        rules.several_nodes(d, _ENGINES)


def _batch(d: Translation) -> None:
    args = f"{_T}training_args."
    accumulation = f"{args}gradient_accumulation_steps"
    prompts = d.number("rollout_batch_size")
    samples = prompts * d.number("num_return_sequences_in_group")
    cut = math.prod(map(d.parallel, ("tp", "pp", "cp")))
    replicas = max(len(_devices(d, _TRAINERS)) // cut, 1)
    each = d.number(f"{args}per_device_train_batch_size")
    samples_an_update = each * d.number(accumulation) * replicas
    updates, rest = divmod(samples, samples_an_update)
    if rest or not updates or prompts % updates:
        divide = f"do not divide the {samples} of a step into whole groups"
        d.lack(accumulation, f"{samples_an_update} samples of an update {divide}")
    else:
        d.put("train.num_updates_per_step", updates)
    d.put("train.num_prompts_per_step", prompts)
    steps = d.number("max_steps")
    d.put("train.num_steps", steps)
    all_updates = steps * max(updates, 1) * d.number("ppo_epochs")
    from_ratio = math.ceil(d.real(f"{args}warmup_ratio") * all_updates)  # both count updates
    warmup = d.number(f"{args}warmup_steps", default=0) or from_ratio
    d.put("actor.optimizer.warmup_steps", warmup)
    sampled = f"{_I}generating_args."
    rules.truncated_sampling(d, "sampling", f"{sampled}top_p", f"{sampled}top_k")
    if d.get("async_generation_ratio"):
        d.put("rollout.max_staleness", d.number("async_generation_ratio"))
        d.put("algorithm.mismatch.weight", {"name": "tis"}, "async_generation_ratio")


def _model(d: Translation) -> None:
    keys = {"actor.dtype": f"{_T}model_args.dtype", "rollout.dtype": f"{_I}model_args.dtype"}
    for ours, key in keys.items():
        d.put(ours, _DTYPES.get(d.text(key), "bfloat16"), key)
        if d.text(key) not in _DTYPES:
            d.lack(key, f"{d.get(key)} is not offered; bfloat16 is")
    names = [
        (f"lora_{name}", f"{_T}model_args.lora_{name}") for name in ("rank", "alpha", "target")
    ]
    rules.lora(d, *names)


def _run(d: Translation) -> None:
    name = d.text("exp_name")
    d.put("name", name)
    d.put("output_dir", f"{d.text('output_dir') or 'runs'}/{name}")
    d.put("checkpoint.every", d.number("save_steps"))
    resume = "resume_from_checkpoint"
    if d.get(resume):
        d.lack(resume, "their checkpoints are not read; ours go on by themselves")
    project = d.text("tracker_kwargs.project") or name
    wandb: dict[str, Plain] = {"project": project}
    rules.trackers(d, d.get("track_with"), "track_with", wandb, "tensorboard stdout ml_tracker")


RULES: list[Rule] = [_run, _model, _data, _layout, _batch, _advantage, _kl, _loss]

"""ROLL's options (RLVR pipeline) that no row says."""

import math
import re

from megagrpo.config.load import Plain
from megagrpo.tools.convert import rules
from megagrpo.tools.convert.translation import Translation

_T = "actor_train."
_TS = f"{_T}strategy_args.strategy_config."
_TRAINERS = f"{_T}device_mapping"
_ENGINES = "actor_infer.device_mapping"
# reward workers that are a grader here
_GRADERS = {"MathRuleRewardWorker": "math", "MathGRPORewardWorker": "math"}
_NEAREST = {
    "CodeSandboxRewardWorker": "code, whose tests are a row's answer",
    "LLMJudgeRewardWorker": "judge",
}


def output_folder(d: Translation) -> None:
    """Puts the run's folder inside theirs."""
    d.put("output_dir", f"{d.text('output_dir') or 'runs'}/{d.text('exp_name')}")


def advantage(d: Translation) -> None:
    """ROLL's grpo normalizes by group, clips, subtracts the token KL, and then takes returns to
    go."""
    key = "adv_estimator"
    ours = "algorithm.advantage.name"
    mean = d.get("norm_mean_type")
    std = d.get("norm_std_type")
    if older := d.get("reward_norm"):
        mean = None if d.get("reward_scale") else older
        std = None if d.get("reward_shift") else older
    if d.get(key) == "grpo":
        size = d.number("num_return_sequences_in_group")
        # the largest of a normalized group is (n - 1) / sqrt(n)
        if not d.get("add_token_level_kl") and d.real("reward_clip", default=size) >= size**0.5:
            d.put(ours, "grpo", key, "reward_clip", "gamma")
            return
        d.put(ours, "reinforce", key)
        mean = std = "group"
    else:
        rules.estimator(d)
    if ours in d.values:
        d.put("algorithm.advantage.gamma", d.real("gamma"))
        for name, value in {"mean": mean, "std": std}.items():
            theirs = d.theirs(f"algorithm.reward.{name}")
            d.put(f"algorithm.reward.{name}", value or "none", key, "reward_norm", *theirs)
        d.put("algorithm.reward.clip", d.get("reward_clip"))


def dual_clip(d: Translation) -> None:
    """Puts their constant of the second clip."""
    if d.get("dual_clip_loss") and d.values.get("algorithm.loss.name") == "ppo_clip":
        d.put("algorithm.loss.dual_clip", 1 + 2 * d.real("pg_clip"), "pg_clip")


def graders(d: Translation) -> None:
    """Puts the grader of every tag of the rows, as ROLL's reward workers choose by it."""
    grader_by_tag: dict[str, Plain] = {}
    for key in [key for key in d.given if re.fullmatch(r"rewards\.\w+\.worker_cls", key)]:
        worker = d.text(key).rpartition(".")[2]
        tags = d.get(key.replace("worker_cls", "tag_included"))
        if worker not in _GRADERS:
            nearest = _NEAREST.get(worker, "a function of yours")
            d.lack(key, f"no such worker; the nearest grader is {nearest}")
        elif isinstance(tags, list):
            grader_by_tag |= {str(tag): _GRADERS[worker] for tag in tags}
    if grader_by_tag:
        tag_keys = [key for key in d.given if key.endswith(".tag_included")]
        d.put("data.source_key", "tag", *tag_keys)
        d.put("data.grader_by_source", grader_by_tag, *tag_keys)
    shares = d.theirs("data.sources")
    if len([key for key in shares if d.get(key)]) > 1:
        split = "split the file by tag, and write data.sources with a ratio each"
        for key in shares:
            d.lack(key, f"a mixture by tags: {split}")


def _devices(d: Translation, key: str) -> set[int]:
    """Returns the GPUs of a device mapping, a list or a text such as list(range(0,8))."""
    mapping = d.get(key)
    if isinstance(mapping, list):
        return {int(str(gpu)) for gpu in mapping}
    ranges = re.findall(r"range\(\s*(?:(\d+)\s*,\s*)?(\d+)\s*\)", str(mapping))
    listed = re.findall(r"\[([\d,\s]+)\]", str(mapping))
    named = {int(gpu) for part in listed for gpu in part.split(",")}
    return named | {gpu for start, end in ranges for gpu in range(int(start or 0), int(end))}


def layout(d: Translation) -> None:
    """Puts GPUs of trainers and of engines, and a micro-batch."""
    trainers = _devices(d, _TRAINERS)
    engines = _devices(d, _ENGINES)
    gpus = d.number("num_gpus_per_node")
    tp = d.number(*d.named("rollout.tp"))
    d.put("actor.world_size", len(trainers), "num_gpus_per_node")
    if "fsdp" in d.text(f"{_T}strategy_args.strategy_name"):
        rules.put_whole_parameters(d, len(trainers), tp, *d.theirs("rollout.tp"))
    else:
        d.put("actor.parallel.tp", d.number(f"{_TS}tensor_model_parallel_size"))
    longest = d.number("prompt_length") + d.number("response_length")
    each = f"{_T}training_args.per_device_train_batch_size"
    tokens = 0
    if d.get(f"{_T}use_dynamic_batching_in_train"):
        tokens = d.number(f"{_T}max_tokens_per_microbatch_in_train", default=0)
    rules.micro_batch(d, longest, tokens, d.number(each), each)
    own = 0 if trainers == engines else len(engines)
    rules.place(d, len(trainers), own, gpus, tp, _ENGINES, _TRAINERS, "num_gpus_per_node")
    if own and trainers & engines:
        reason = "colocate shares all or none; engines get their own"
        d.lack(_ENGINES, f"{len(trainers & engines)} GPUs train and sample: {reason}")


def batch(d: Translation) -> None:
    """Puts updates of a step, and their warm-up."""
    args = f"{_T}training_args."
    accumulation = f"{args}gradient_accumulation_steps"
    prompts = d.number("rollout_batch_size")
    samples = prompts * d.number("num_return_sequences_in_group")
    cut = math.prod(map(d.parallel, ("tp", "pp", "cp")))
    replicas = max(len(_devices(d, _TRAINERS)) // cut, 1)
    each = d.number(f"{args}per_device_train_batch_size") * d.number(accumulation) * replicas
    updates = rules.updates(d, prompts, samples, each, accumulation)
    all_updates = d.number("max_steps") * updates * d.number("ppo_epochs")
    from_ratio = math.ceil(d.real(f"{args}warmup_ratio") * all_updates)  # both count updates
    warmup = d.number(f"{args}warmup_steps", default=0) or from_ratio
    d.put("actor.optimizer.warmup_steps", warmup)

"""TRL's GRPOTrainer and GRPOConfig arguments that depend on each other."""

import math
import re

from megagrpo.config.load import Plain
from megagrpo.tools.convert import rules
from megagrpo.tools.convert.translation import Rule, Translation

_LONGEST_PROMPT = 1024  # TRL has no limit: ours, which `megagrpo check` compares with the data
_EPS = 1e-4  # added to the standard deviation, whatever it is of
_TRACKERS = "none tensorboard all"
_REWARDS: dict[Plain, dict[str, Plain]] = {
    "accuracy_reward": {"grader": "math"},
    "think_format_reward": {
        "grader": "format",
        "args": {"pattern": r"(?s)^(?!.*<think>)(.*?)</think>.*$"},
    },
}
_OF_ACCURACY = (
    "accuracy_reward takes the first LaTeX answer that it finds, boxes before others, and leaves "
    "out rows with an",
    "unreadable solution; grader `math` takes the last box alone, and an unreadable solution is an "
    "error.",
)
_AGGREGATIONS = {  # of loss_type
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "cispo": "token-mean",
    "sapo": "seq-mean-token-mean",
}


def _advantage(d: Translation) -> None:
    key = "scale_rewards"
    scale = {"True": "group", "False": "none"}.get(d.text(key), d.text(key))
    name = {"group": "grpo", "none": "dr_grpo", "batch": "reinforce"}.get(scale)
    several = "multi_objective_aggregation"
    if d.get(several) == "normalize_then_sum":  # which reads no scale
        name, scale = "gdpo", "group"
        d.put("algorithm.advantage.whiten_over", "responses", several)
    if name is None:
        d.lack(key, f"no scale {scale}; there are group, batch and none")
        return
    d.put("algorithm.advantage.name", name)
    if scale == "batch":
        d.put("algorithm.reward", {"mean": "group", "std": "batch"}, key)
    elif scale == "group":
        d.put("algorithm.advantage.eps", _EPS, key)


def _loss(d: Translation) -> None:
    kind = d.text("loss_type")
    if kind not in _AGGREGATIONS:
        d.lack("loss_type", f"no loss {kind}; there are {', '.join(_AGGREGATIONS)}")
        return
    name = "gspo" if d.get("importance_sampling_level") == "sequence" else "ppo_clip"
    if kind in ("cispo", "sapo"):
        name = kind
    d.put("algorithm.loss.name", name)
    d.put("algorithm.aggregation", _AGGREGATIONS[kind], "loss_type")
    high = d.real("epsilon_high", "epsilon")
    if name == "cispo":  # an upper bound of the ratio itself
        d.put("algorithm.loss.clip_ratio_high", high - 1)
    elif name != "sapo":
        d.put("algorithm.loss.clip_ratio_low", d.real("epsilon"))
        d.put("algorithm.loss.clip_ratio_high", high, "epsilon")
    d.copy("algorithm.loss.dual_clip", "delta")
    if d.get("beta"):
        rules.kl(d, "loss", d.real("beta"), "k3", clamp=False)


def _mismatch(d: Translation) -> None:
    prefix = "vllm_importance_sampling_"
    highest = f"{prefix}clip_max"
    older = f"{prefix}cap"  # wins over the newer name
    if not d.get(f"{prefix}correction") or not d.get("use_vllm"):
        return
    if highest in d.given and d.get(older, highest) is None:
        d.lack(highest, "a ratio without an upper limit; write algorithm.mismatch with a large one")
    over, _, kind = d.text(f"{prefix}mode").partition("_")
    cap = d.real(older, highest, default=3.0)
    low = d.real(f"{prefix}clip_min")
    weight: dict[str, Plain] = {"name": "tis", "over": over, "cap": cap}
    # outside, the weight is 0; the token, or sequence, stays in the denominators
    if kind == "mask":
        judged = "sum" if over == "sequence" else over
        reject: dict[str, Plain] = {"over": judged, "high": cap, "keep_denominator": True}
        if low:
            reject["low"] = low
        d.put("algorithm.mismatch.reject", reject, *d.theirs("algorithm.mismatch.weight"))
    elif low:
        weight["floor"] = low
    d.put("algorithm.mismatch.weight", weight)


def _processes(d: Translation) -> int:
    """Returns the processes that the launcher starts; if it is not said, as few as an engine
    takes."""
    return max(d.number("num_processes"), d.number("vllm_tensor_parallel_size"))


def _samples(d: Translation) -> tuple[int, int]:
    """Returns the samples of a generation, and of an optimizer update."""
    steps = "gradient_accumulation_steps"
    each = d.number("per_device_train_batch_size") * _processes(d)
    samples = each * d.number("steps_per_generation", steps)
    return d.number("generation_batch_size", default=samples), each * d.number(steps)


def _updates(d: Translation) -> int:
    """Returns the optimizer updates between two generations, which are TRL's steps; ours are the
    generations."""
    samples, update = _samples(d)
    return max(samples // update, 1) * d.number("num_iterations")


def _every(d: Translation, strategy: str, *keys: str) -> int:
    """Returns an interval of updates in generations; 0: never."""
    chosen = d.text(strategy)
    if chosen == "steps":
        return max(d.number(*keys) // _updates(d), 1)
    if chosen not in ("no", "False"):  # YAML reads a bare `no` as false
        reason = f"how many steps that is depends on the data; write steps and {keys[0]}"
        d.lack(strategy, reason)
    return 0


def _batch(d: Translation) -> None:
    each = "per_device_train_batch_size"
    steps = "gradient_accumulation_steps"
    group = d.number("num_generations")
    samples, update = _samples(d)
    if samples % group or samples % update or (samples // group) % (samples // update):
        divide = f"in groups of {group} and updates of {update} do not divide into whole groups"
        d.lack(steps, f"{samples} samples {divide}")
    else:
        d.put("train.num_prompts_per_step", samples // group, each, steps)
        d.put("train.num_updates_per_step", samples // update)
    if d.number("max_steps", default=-1) > 0:
        d.put("train.num_steps", math.ceil(d.number("max_steps") / _updates(d)))
    else:
        d.put("train.num_epochs", d.number("num_train_epochs"))
    warmup = next((key for key in ("warmup_ratio", "warmup_steps") if d.get(key)), "warmup_steps")
    if 0 < d.real(warmup) < 1:  # of all steps
        reason = "how many steps there are depends on the data"
        d.lack(warmup, f"{reason}; say actor.optimizer.warmup_steps")
    else:
        d.put("actor.optimizer.warmup_steps", d.number(warmup, default=0), warmup)
    longest = _LONGEST_PROMPT + d.number("max_completion_length")
    rules.micro_batch(d, longest, 0, d.number(each), each)
    rules.truncated_sampling(d, "sampling", "top_p", "top_k")


def _data(d: Translation) -> None:
    named_by_script = "dataset_name" in d.given
    files = "dataset_name" if named_by_script else "train_dataset"
    rules.rows(d, files, "solution", "chat_template_kwargs.")
    every = _every(d, "eval_strategy", "eval_steps", "logging_steps")
    if every and named_by_script:
        d.lack("eval_strategy", "its dataset_test_split; write it to a file: eval.data.path")
    samples = ("num_generations_eval", "num_generations")
    if rules.evaluated_as_trained(d, "eval_dataset", every, samples[0], "eval_strategy"):
        d.put("eval.num_samples", d.number(*samples), *samples)
        d.put("eval.temperature", d.real("temperature"), "temperature")
        rules.truncated_sampling(d, "eval", "top_p", "top_k")
    _rewards(d)


def _rewards(d: Translation) -> None:
    """Puts the graders; TRL's own form of a function is one here, too."""
    named = d.get("reward_funcs")
    weights = d.get("reward_weights")
    graders: list[Plain] = []
    own = []
    for number, function in enumerate(named if isinstance(named, list) else [named]):
        weight = weights[number] if isinstance(weights, list) else 1.0
        path = re.sub(r"\.(\w+)$", r":\1", str(function)) if ":" not in str(function) else function
        if function in _REWARDS:
            graders.append(_REWARDS[function] | {"weight": weight})
        elif ":" in str(path):
            graders.append({"grader": path, "weight": weight})
        else:
            own.append(str(function))
        if function == "accuracy_reward":
            d.remarks += _OF_ACCURACY
    if own:
        how = "put it into a file of its own, as it is: reward.graders: [{grader: file.py:name}]"
        d.lack("reward_funcs", f"{', '.join(own)}: {how}")
    d.put("reward.graders", graders, "reward_funcs", "reward_weights")


def _run(d: Translation) -> None:
    folder = d.text("output_dir")
    engine = d.number("vllm_tensor_parallel_size")
    world = _processes(d)
    if d.get("num_processes") is None:
        many = "1 process is" if world == 1 else f"{world} processes are"
        d.notes.append(f"num_processes is not named: {many} assumed; say --num-processes N")
    name = folder.rstrip("/").rpartition("/")[2]
    d.put("name", d.text("run_name") or name, "output_dir")
    d.put("output_dir", folder)
    d.put("actor.world_size", world)
    loaded = d.get("dtype", "torch_dtype")
    half = d.get("bf16") or loaded == "bfloat16"
    for ours in ("actor.dtype", "rollout.dtype"):
        d.put(ours, "bfloat16" if half else "float32", "bf16", "dtype", "torch_dtype")
    if d.get("use_peft"):
        rules.lora(d, ["lora_r"], ["lora_alpha"], ["lora_target_modules"])
        if d.real("lora_dropout"):
            d.lack("lora_dropout", "adapters have no dropout; `lora_dropout: 0` says so")
    d.put("actor.recompute", "full" if d.get("gradient_checkpointing") else "none")
    rules.engines_on_trainers(d, world, world, engine, "num_processes")
    d.put("checkpoint.every", _every(d, "save_strategy", "save_steps"))
    reports = d.get("report_to")
    rules.trackers(d, reports, "report_to", {"project": "huggingface"}, _TRACKERS)


RULES: list[Rule] = [_run, _data, _batch, _advantage, _loss, _mismatch]

"""TRL's GRPOTrainer and GRPOConfig arguments that depend on each other."""

import math

from megagrpo.config.load import Plain
from megagrpo.tools.convert import rules
from megagrpo.tools.convert.draft import Rule, Translation

_LONGEST_PROMPT = 1024  # TRL has no limit: ours, which `megagrpo check` compares with the data
_EPS = 1e-4  # added to the standard deviation, whatever it is of
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
    scale = {"True": "group", "False": "none"}.get(d.text("scale_rewards"), d.text("scale_rewards"))
    name = {"group": "grpo", "none": "dr_grpo", "batch": "reinforce"}.get(scale)
    if name is None:
        return d.lack("scale_rewards", f"no scale {scale}; there are group, batch and none")
    d.put("algorithm.advantage.name", name, "scale_rewards")
    if scale == "batch":
        d.put("algorithm.reward", {"mean": "group", "std": "batch", "eps": _EPS}, "scale_rewards")
    elif scale == "group":
        d.put("algorithm.advantage.eps", _EPS, "scale_rewards")
    return None


def _loss(d: Translation) -> None:
    kind, level = d.text("loss_type"), "importance_sampling_level"
    if kind not in _AGGREGATIONS:
        return d.lack("loss_type", f"no loss {kind}; there are {', '.join(_AGGREGATIONS)}")
    name = (
        kind if kind in ("cispo", "sapo") else "gspo" if d.get(level) == "sequence" else "ppo_clip"
    )
    d.put("algorithm.loss.name", name, "loss_type", level)
    d.put("algorithm.aggregation", _AGGREGATIONS[kind], "loss_type")
    if name == "cispo":  # an upper bound of the ratio itself
        d.put(
            "algorithm.loss.clip_ratio_high", d.real("epsilon_high", "epsilon") - 1, "epsilon_high"
        )
    elif name != "sapo":
        d.put("algorithm.loss.clip_ratio_low", d.real("epsilon"), "epsilon")
        d.put(
            "algorithm.loss.clip_ratio_high",
            d.real("epsilon_high", "epsilon"),
            "epsilon_high",
            "epsilon",
        )
    d.put("algorithm.loss.dual_clip", d.get("delta"), "delta")
    if d.get("beta"):
        d.put("algorithm.kl.loss_coef", d.real("beta"), "beta")
        d.put("algorithm.kl.estimator", "k3", "beta")
    return None


def _mismatch(d: Translation) -> None:
    prefix = "vllm_importance_sampling_"
    flag, mode, highest, lowest = (
        f"{prefix}{name}" for name in ("correction", "mode", "clip_max", "clip_min")
    )
    older = f"{prefix}cap"  # wins over the newer name
    if not d.get(flag) or not d.get("use_vllm"):
        return
    if highest in d.given and d.get(older, highest) is None:
        d.lack(highest, "a ratio without an upper limit; write algorithm.mismatch with a large one")
    keys = (flag, mode, older, highest, lowest)
    over, _, kind = d.text(mode).partition("_")
    cap, low = d.real(older, highest, default=3.0), d.real(lowest)
    weight: dict[str, Plain] = {"name": "tis", "over": over, "cap": cap}
    if (
        kind == "mask"
    ):  # outside, the weight is 0; the token, or sequence, stays in the denominators
        judged = "sum" if over == "sequence" else over
        limits: dict[str, Plain] = {"over": judged, "high": cap, "keep_denominator": True}
        d.put("algorithm.mismatch.reject", limits | ({"low": low} if low else {}), *keys)
    elif low:
        weight["floor"] = low
    d.put("algorithm.mismatch.weight", weight, *keys)


def _samples(d: Translation) -> tuple[int, int]:
    """Returns the samples of a generation, and of an optimiser update."""
    each, steps, processes = (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        d.number("num_processes"),
    )
    generations = d.number("steps_per_generation", steps)
    samples = d.number("generation_batch_size", default=d.number(each) * generations * processes)
    return samples, d.number(each) * d.number(steps) * processes


def _updates(d: Translation) -> int:
    """Returns the optimiser updates between two generations, which are TRL's steps; ours are the
    generations."""
    samples, update = _samples(d)
    return max(samples // update, 1) * d.number("num_iterations")


def _every(d: Translation, key: str) -> int:
    """Returns an interval of updates in generations."""
    return max(d.number(key) // _updates(d), 1) if d.get(key) else 0


def _batch(d: Translation) -> None:
    each, steps, group = (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        d.number("num_generations"),
    )
    samples, update = _samples(d)
    keys = ("generation_batch_size", "steps_per_generation", each, steps)
    if samples % group or samples % update or (samples // group) % (samples // update):
        d.lack(
            steps,
            f"{samples} samples in groups of {group} and updates of {update} do not divide into "
            "whole groups",
        )
    else:
        d.put("train.num_prompts_per_step", samples // group, *keys)
        d.put("train.num_updates_per_step", samples // update, *keys)
    if d.number("max_steps", default=-1) > 0:
        d.put("train.num_steps", math.ceil(d.number("max_steps") / _updates(d)), "max_steps")
    else:
        d.put("train.num_epochs", d.number("num_train_epochs"), "num_train_epochs")
    d.put("actor.optimizer.warmup_steps", d.number("warmup_steps", default=0), "warmup_steps")
    if d.get("warmup_ratio"):
        d.lack(
            "warmup_ratio",
            "how many steps there are depends on the data; say actor.optimizer.warmup_steps",
        )
    rules.micro_batch(
        d, _LONGEST_PROMPT + d.number("max_completion_length"), 0, d.number(each), each
    )
    rules.truncated_sampling(d, "sampling", "top_p", "top_k")


def _data(d: Translation) -> None:
    d.put("data.path", d.get("train_dataset"), "train_dataset")
    d.put("data.answer_key", "solution", "train_dataset")
    d.put("data.chat_template", True, "train_dataset")
    for key in [key for key in d.given if key.startswith("chat_template_kwargs.")]:
        d.put(f"data.chat_template_args.{key.partition('.')[2]}", d.get(key), key)
    every = _every(d, "eval_steps")
    samples = ("num_generations_eval", "num_generations")
    if rules.evaluated_as_trained(d, "eval_dataset", every, samples[0], "eval_steps"):
        d.put("eval.num_samples", d.number(*samples), *samples)
        d.put("eval.temperature", d.real("temperature"), "temperature")
        rules.truncated_sampling(d, "eval", "top_p", "top_k")
    named, weights = d.get("reward_funcs"), d.get("reward_weights")
    graders: list[Plain] = []
    for number, function in enumerate(named if isinstance(named, list) else [named]):
        if function in _REWARDS:
            weight = weights[number] if isinstance(weights, list) else 1.0
            graders.append(_REWARDS[function] | {"weight": weight})
            if function == "accuracy_reward":
                d.remarks += _OF_ACCURACY
        else:
            d.lack(
                "reward_funcs",
                f"{function}: write it as grade(text, answer): reward.grader: file.py:grade",
            )
    d.put("reward.graders", graders, "reward_funcs", "reward_weights")


def _run(d: Translation) -> None:
    folder, world = d.text("output_dir"), d.number("num_processes")
    d.put(
        "name",
        d.text("run_name") or folder.rstrip("/").rpartition("/")[2],
        "run_name",
        "output_dir",
    )
    d.put("output_dir", folder, "output_dir")
    d.put("actor.world_size", world, "num_processes")
    for ours in ("actor.dtype", "rollout.dtype"):
        d.put(ours, "bfloat16" if d.get("bf16") else "float32", "bf16")
    d.put(
        "actor.recompute",
        "full" if d.get("gradient_checkpointing") else "none",
        "gradient_checkpointing",
    )
    rules.engines_on_trainers(
        d, world, world, d.number("vllm_tensor_parallel_size"), "num_processes"
    )
    d.put("checkpoint.every", _every(d, "save_steps"), "save_steps")
    reports = d.get("report_to")
    if "wandb" in (reports if isinstance(reports, list) else [reports]):
        d.put("log.wandb", {"project": "huggingface"}, "report_to")


RULES: list[Rule] = [_run, _data, _batch, _advantage, _loss, _mismatch]

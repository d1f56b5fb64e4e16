"""slime's options that depend on each other. miles has all of them, and LoRA."""

import re

from megagrpo.config.load import Plain
from megagrpo.tools.convert import rules
from megagrpo.tools.convert.translation import Rule, Translation

_FILTER = ".dynamic_sampling_filters.check_reward_nonzero_std"
_ICEPOP = "loss.icepop_function"
_BY_DEFAULT = (".sglang_rollout.generate_rollout", ".inference_rollout_common.InferenceRolloutFn")
_GRADERS: dict[str, Plain] = {
    "math": "math",
    "boxed_math": "math",
    "deepscaler": "math",
    "boxed_deepscaler": "math",
    "dapo": "math_dapo",
}
_PATH = "--rollout-function-path"
_TARGETS: dict[str, list[Plain]] = {  # by Megatron's names
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
}
_SLICED = re.compile(r"(.*)@\[0?:(\d+)\]")


def _run(d: Translation) -> None:
    saved = d.text("--save").rstrip("/")
    model = d.text("--hf-checkpoint").rstrip("/").rpartition("/")[2]
    name = d.text("--wandb-group") or saved.rpartition("/")[2] or f"{model}-{d.framework}"
    d.put("name", name, "--wandb-group", *([] if d.get("--wandb-group") else ["--save"]))
    d.put("output_dir", saved or f"runs/{name}", "--save")
    if d.get("--use-wandb"):
        d.put("log.wandb", {"project": d.text("--wandb-project")})


def _model(d: Translation) -> None:
    for ours in ("actor.dtype", "rollout.dtype"):
        d.put(ours, "bfloat16", "--bf16")
    path = "--hf-checkpoint"
    if re.search(r"[-_]fp8(?:[-_]|$)", d.text(path).rstrip("/"), re.IGNORECASE):
        d.put("rollout.quantization", "fp8", path)
    elif re.search(r"[-_]int4(?:[-_]|$)", d.text(path).rstrip("/"), re.IGNORECASE):
        d.lack(path, "engines hold bfloat16, or FP8 in blocks: name the model in bfloat16")
    rules.lora(d, ["--lora-rank"], ["--lora-alpha"], ["--target-modules"])
    if isinstance(targets := d.values.get("actor.lora.targets"), list):
        named = (name for target in targets for name in _TARGETS.get(str(target), [target]))
        d.values["actor.lora.targets"] = list(named)
    if d.get("--mtp-num-layers"):
        d.put("actor.draft", {"train": bool(d.get("--enable-mtp-training"))})
    by = "--sglang-speculative-algorithm"
    if d.get(by) in ("EAGLE", "NEXTN"):
        d.put("rollout.draft_tokens", d.number("--sglang-speculative-num-steps"), by)
        if "actor.draft" not in d.values:
            d.put("actor.draft", {"train": False}, by)
    elif d.get(by):
        d.lack(by, f"no draft by {d.get(by)}; the model's own is actor.draft: {{}}")


def _data(d: Translation) -> None:
    files = "--prompt-data"
    sliced = _SLICED.fullmatch(d.text(files))
    if sliced is not None:
        d.put("data.path", sliced[1], files)
        d.put("data.limit", int(sliced[2]), files)
    else:
        d.copy("data.path", files)
    if "@[" in d.text(files) and sliced is None:
        d.lack(files, "a slice that begins later; write the rows into a file")
    if d.get("--apply-chat-template"):
        d.put("data.tools_key", d.get("--tool-key"), "--tool-key")
    arguments = d.get("--apply-chat-template-kwargs")
    for name, value in (arguments if isinstance(arguments, dict) else {}).items():
        d.put(f"data.chat_template_args.{name}", value, "--apply-chat-template-kwargs")
    columns = d.get("--multimodal-keys")
    if isinstance(columns, dict):
        d.put("data.images_key", columns.get("image"), "--multimodal-keys")
        if others := sorted(columns.keys() - {"image"}):
            d.lack("--multimodal-keys", f"images are read, not {', '.join(others)}")
    longest = d.number("--rollout-max-response-len", default=512)
    context = d.number("--rollout-max-context-len", default=0)
    prompt = d.number("--rollout-max-prompt-len", default=0)
    limit = prompt or max(context - longest, 0)
    if limit:
        d.put("data.max_prompt_tokens", limit)
    else:
        d.remarks.append(
            "slime drops no prompt; longer than data.max_prompt_tokens is dropped here"
        )
    for ours in ("stop", "stop_token_ids"):
        key = f"--rollout-{ours.replace('_', '-')}"
        if (value := d.get(key)) is not None:
            d.put(f"sampling.{ours}", value if isinstance(value, list) else [value], key)
    rules.truncated_sampling(d, "sampling", "--rollout-top-p", "--rollout-top-k")


def _evaluation(d: Translation) -> None:
    files = "--eval-prompt-data"
    every = "--eval-interval"
    named = d.get(files)
    pairs = named if isinstance(named, list) else ["eval", named]
    if named is None or len(pairs) % 2 or d.number(every, default=0) < 1:
        return
    sources: list[Plain] = [
        {"source": str(name), "path": path}
        for name, path in zip(pairs[::2], pairs[1::2], strict=True)
    ]
    d.put("eval.data.sources", sources, files)
    d.put("eval.every", d.number(every))
    for ours in ("prompt", "answer"):
        key = f"--eval-{'input' if ours == 'prompt' else 'label'}-key"
        if d.get(key) is not None:
            d.put(f"eval.data.{ours}_key", d.get(key))
    d.put("eval.num_samples", d.number("--n-samples-per-eval-prompt"))
    d.put("eval.temperature", d.real("--eval-temperature", "--rollout-temperature", default=1.0))
    longest = "--eval-max-response-len"
    if d.get(longest) is not None:
        d.put("eval.max_response_tokens", d.number(longest))
    top_p = "--eval-top-p" if d.get("--eval-top-p") is not None else "--rollout-top-p"
    top_k = "--eval-top-k" if d.get("--eval-top-k") is not None else "--rollout-top-k"
    rules.truncated_sampling(d, "eval", top_p, top_k)


def _rewards(d: Translation) -> None:
    kind = d.text("--rm-type")
    own = d.get("--custom-rm-path")
    if own is not None:
        write = "write it as grade(text, answer) and name it in reward.grader: file.py:grade"
        d.lack("--custom-rm-path", f"{own}(args, sample): {write}")
    elif kind in _GRADERS:
        d.put("reward.grader", _GRADERS[kind], "--rm-type")
    elif kind == "remote_rm":
        d.lack("--rm-type", "its requests are of one response; the nearest is reward.grader: http")
    elif kind:
        d.lack("--rm-type", f"no grader {kind}; there are {', '.join(_GRADERS)}, and your own")
    if kind.endswith("deepscaler") and own is None:
        d.remarks.append(
            "deepscaler gives 0 without </think>; grader math reads the whole response"
        )
    if d.get("--reward-key") not in (None, "score") and kind == "dapo":
        d.lack("--reward-key", "math_dapo gives 1 and -1: algorithm.reward.scale and shift")
    elif d.get("--reward-key") is not None and kind != "dapo":
        d.lack("--reward-key", "a grader of your own returns a number, or a dict with score")
    if d.get("--group-rm"):
        d.lack("--group-rm", "rewards of a whole group are reward.group_grader")


def _functions(d: Translation) -> None:
    """Names programs of one's own that sample, but for those that slime has anyway."""
    for key in (_PATH, "--custom-generate-function-path", "--eval-function-path"):
        path = d.text(key)
        if not path or path.endswith(_BY_DEFAULT) or (key, _ahead(d)) == (_PATH, "fully"):
            continue
        if "sft_rollout" in path:
            d.lack(key, "supervised fine-tuning is `megagrpo sft`")
        else:
            nearest = "sampling.environment, or sampling.agent for a program with a chat endpoint"
            d.lack(key, f"{path}: write it as a {nearest}")


def _ahead(d: Translation) -> str:
    """Returns "fully" for a sampler that runs ahead without end, "step" for one step ahead, or
    "sync"."""
    if "fully_async" in d.text(_PATH) or d.get("--fully-async"):
        return "fully"
    return "step" if d.get("train_async.py") else "sync"


def _batch(d: Translation) -> None:
    prompts = d.number("--rollout-batch-size", default=64)
    samples = prompts * d.number("--n-samples-per-prompt")
    size = "--global-batch-size"
    steps = "--num-steps-per-rollout"
    updates = d.number(steps, default=0)
    if not updates and d.get(size) is None:
        d.lack(size, "Megatron's default depends on the ranks; say train.num_updates_per_step")
    of_size = max(samples // d.number(size, default=samples), 1)
    updates = updates or of_size
    if samples % updates or prompts % updates:
        divide = f"{updates} updates do not divide {prompts} prompts into whole groups"
        d.lack(steps if d.get(steps) is not None else size, divide)
        updates = 1
    d.put("train.num_prompts_per_step", prompts)
    d.put("train.num_updates_per_step", updates)
    if d.get("--num-rollout") is not None:
        d.put("train.num_steps", d.number("--num-rollout"))
    elif d.get("--num-epoch") is not None:
        d.put("train.num_epochs", d.number("--num-epoch"))
    path = "--dynamic-sampling-filter-path"
    if d.text(path).endswith(_FILTER):
        d.put("algorithm.dynamic_sampling", {"metric": "reward", "max_num_gen_batches": 1000}, path)
    elif "with_fallback" in d.text(path):
        d.lack(path, "no group is kept that says nothing; algorithm.dynamic_sampling asks for more")
    elif d.get(path) is not None:
        d.lack(path, f"{d.get(path)}: algorithm.dynamic_sampling drops groups of equal rewards")
    fraction = d.real("--lr-warmup-fraction")
    if d.get("--lr-warmup-iters"):
        d.put("actor.optimizer.warmup_steps", d.number("--lr-warmup-iters"), "--lr-warmup-iters")
    elif fraction and d.get("--num-rollout") is not None:
        every = d.number("--num-rollout") * updates
        d.put("actor.optimizer.warmup_steps", round(fraction * every), "--lr-warmup-fraction")
    elif fraction:
        reason = "how many steps there are depends on the data; say actor.optimizer.warmup_steps"
        d.lack("--lr-warmup-fraction", reason)
    if d.values.get("actor.optimizer.lr_schedule", "constant") != "constant":
        d.put("actor.optimizer.min_lr", d.real("--min-lr"))


def _advantage(d: Translation) -> None:
    key = "--advantage-estimator"
    name = d.text(key)
    if name in ("grpo", "gspo", "cispo"):
        if d.get("--disable-rewards-normalization"):
            name = "reinforce"
        else:
            name = "dr_grpo" if d.get("--disable-grpo-std-normalization") else "grpo"
    if not rules.estimator(d, key, name.replace("ppo", "gae")):
        return
    if name == "reinforce_plus_plus":
        d.put("algorithm.advantage.gamma", d.real("--gamma"))
    elif not name.startswith("reinforce_plus_plus"):
        whitened = "--normalize-advantages"
        d.put("algorithm.whiten_advantages", bool(d.get(whitened)), whitened)


def _loss(d: Translation) -> None:
    name = d.text("--advantage-estimator")
    name = name if name in ("gspo", "cispo") else "ppo_clip"
    d.put("algorithm.loss.name", name, "--advantage-estimator")
    low = d.real("--eps-clip")
    d.put("algorithm.loss.clip_ratio_low", min(low, 1.0), "--eps-clip")
    high = d.real("--eps-clip-high", "--eps-clip")
    d.put("algorithm.loss.clip_ratio_high", high, "--eps-clip-high")
    if name == "ppo_clip":
        d.copy("algorithm.loss.dual_clip", "--eps-clip-c")
    by_token = "--calculate-per-token-loss"
    means = "token-mean" if d.get(by_token) else "seq-mean-token-mean"
    d.put("algorithm.aggregation", means, by_token)


def _kl(d: Translation) -> None:
    in_loss = d.real("--kl-loss-coef") if d.get("--use-kl-loss") else 0.0
    in_reward = d.real("--kl-coef")
    kind = d.text("--kl-loss-type")
    clamped = kind == "low_var_kl"
    if in_loss and d.get("--use-unbiased-kl"):
        rules.kl(d, "loss", in_loss, "k3+" if clamped else f"{kind}+", clamp=clamped)
        d.put("algorithm.kl.importance", True, "--use-unbiased-kl")
    elif in_loss:
        rules.kl(d, "loss", in_loss, kind, clamp=clamped)
    elif in_reward and d.text("--advantage-estimator").startswith("reinforce"):
        rules.kl(d, "reward", in_reward, kind, clamp=clamped)


def _mismatch(d: Translation) -> None:
    function = "--custom-tis-function-path"
    ahead = _ahead(d)
    weight: dict[str, Plain] | None = None
    if d.get("--use-tis") and d.text(function).endswith(_ICEPOP):
        weight = {"name": "icepop", "low": d.real("--tis-clip-low"), "high": d.real("--tis-clip")}
    elif d.get("--use-tis"):
        weight = {"name": "tis", "cap": d.real("--tis-clip"), "floor": d.real("--tis-clip-low")}
        if d.get(function) is not None:
            nearest = "algorithm.mismatch has weights and rejections"
            d.lack(function, f"{d.get(function)}: {nearest}")
    elif ahead != "sync":
        weight = {"name": "tis"}
        d.remarks.append("Samples of older weights need a correction here: algorithm.mismatch.")
    if weight is not None:
        d.put("algorithm.mismatch.weight", weight, "--use-tis")
    replayed = "--use-rollout-routing-replay"
    mode = "old" if d.get("--use-routing-replay") else None
    d.put("actor.routing_replay", "rollout" if d.get(replayed) else mode, replayed)
    if ahead == "sync":
        return
    steps = d.number("--max-weight-staleness", default=1)
    if "algorithm.dynamic_sampling" in d.values:
        steps = max(steps, 2)
    d.put("rollout.max_staleness", steps, "train_async.py", "--fully-async", _PATH)


def _layout(d: Translation) -> None:
    nodes = "--actor-num-nodes"
    each = "--actor-num-gpus-per-node"
    world = d.number(nodes) * d.number(each)
    d.put("actor.world_size", world, nodes, each)
    tp = d.number("--rollout-num-gpus-per-engine")
    d.put("rollout.tp", tp)
    if d.get("--train-backend") == "fsdp":
        d.put("actor.parallel.tp", rules.whole_parameters_tp(d, world, tp), "--train-backend")
        d.remarks.append("FSDP shards parameters; Megatron's ranks hold them whole: tp is engines'")
    _virtual_stages(d)
    rules.balance(d, "--moe-aux-loss-coeff")
    if d.get("--moe-z-loss-coeff"):
        d.put("actor.router_losses.z", d.real("--moe-z-loss-coeff"))
    if d.get("--moe-router-bias-update-rate"):
        d.put("actor.router_bias_update", d.real("--moe-router-bias-update-rate"))
    longest = int(str(d.values.get("data.max_prompt_tokens", 1024)))
    longest += d.number("--rollout-max-response-len", default=512)
    dynamic = d.get("--use-dynamic-batch-size")
    tokens = d.number("--max-tokens-per-gpu", default=0) if dynamic else 0
    rules.micro_batch(d, longest, tokens, d.number("--micro-batch-size"))
    chunk = d.number("--log-probs-chunk-size", default=-1)
    if chunk > 0:
        d.put("actor.logprob_chunk_tokens", chunk)
    experts = d.number("--sglang-ep-size", "--sglang-expert-parallel-size", default=1)
    if tp % experts == 0:
        d.put("rollout.ep", experts)
    engines = d.number("--rollout-num-gpus", default=world)
    if d.get("--colocate"):
        keys = ("--colocate", each, "--rollout-num-gpus", "--num-gpus-per-node")
        rules.engines_on_trainers(d, world, d.number(each), tp, *keys)
        if engines != world:
            d.lack(keys[2], "colocate gives every trainer's GPU to an engine")
        return
    gpus = d.number("--num-gpus-per-node")
    d.put("rollout.num_engines", max(engines // tp, 1))
    d.put("rollout.nodes_per_engine", max(tp // gpus, 1), "--rollout-num-gpus-per-engine")
    d.put("cluster.gpus_per_node", gpus)
    transport = "--update-weight-transport"
    if d.get(transport) == "disk" and d.get("--update-weight-mode") != "delta":
        d.put("weights.transport", "disk", transport)
    if world + engines > gpus:
        rules.several_nodes(d, nodes, "--rollout-num-gpus")


def _virtual_stages(d: Translation) -> None:
    each = "--num-layers-per-virtual-pipeline-stage"
    layers = d.number("--num-layers", default=0)
    stages = d.number("--num-virtual-stages-per-pipeline-rank", default=0)
    if d.get(each) is not None and layers:
        stages = layers // (d.parallel("pp") * d.number(each))
    elif d.get(each) is not None:
        d.lack(each, "the number of layers is not known here: write actor.parallel.vpp")
    if stages:
        d.put("actor.parallel.vpp", stages)


_LIBRARIES = ("actor.megatron.*", "actor.optimizer.megatron.*", "actor.ddp.*", "rollout.sglang.*")


def _libraries(d: Translation) -> None:
    """Puts options that Megatron and SGLang call so, with `_` for `-`."""
    for section in _LIBRARIES:
        for key in d.theirs(section):
            name = key.removeprefix("--sglang-").removeprefix("--").replace("-", "_")
            name = {"overlap_p2p_communication": "overlap_p2p_comm"}.get(name, name)
            value = d.get(key)
            if name == "recompute_modules" and isinstance(value, str):
                value = [value]
            d.put(section.replace("*", name), value, key)


RULES: list[Rule] = [
    _run,
    _model,
    _data,
    _evaluation,
    _rewards,
    _functions,
    _batch,
    _advantage,
    _loss,
    _kl,
    _mismatch,
    _layout,
    _libraries,
]

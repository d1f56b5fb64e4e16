"""Scripts of slime and miles as ours: what each option becomes, and what is named as lost."""

import shlex

import pytest

from megagrpo.check.problems import preflight
from megagrpo.cli import main
from megagrpo.config.schema import ExperimentConfig
from megagrpo.tools.convert.command import draft_of, translate
from megagrpo.tools.convert.reading import Source, options
from megagrpo.tools.convert.shell import trainer_command
from tests.experiments import read_experiment
from tests.unit.test_convert import becomes as at
from tests.unit.test_convert import lost, source

SCRIPT = """#!/bin/bash
pkill -9 sglang; ray stop --force; set -ex
LINKS=$(nvidia-smi topo -m 2>/dev/null | wc -l)
if [ "$LINKS" -gt 0 ]; then NVLS=1; else NVLS=0; fi
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${HERE}/models/tiny-moe.sh"
PATHS=(--hf-checkpoint ~/models/tiny-moe --load /c/tiny_slime/ --save /c/tiny_slime/ --save-interval 20)
SAMPLES=(
   --prompt-data /d/train.jsonl --input-key question --label-key label --apply-chat-template --rollout-shuffle
   --rm-type math   # of the rows' label
   --num-rollout 300 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 64
   --rollout-max-response-len 4096 --rollout-temperature 0.9 --balance-data
)
LEARNER=(
   --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --expert-model-parallel-size 2
   --num-layers-per-virtual-pipeline-stage 2 --recompute-granularity full --recompute-method uniform
   --use-dynamic-batch-size --max-tokens-per-gpu 9216 --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28
   --optimizer adam --lr 2e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --optimizer-cpu-offload
   --attention-dropout 0.0 --attention-backend flash
)
ENGINES=(--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 --sglang-cuda-graph-bs 1 2 $(seq 4 4 12))
ray job submit --runtime-env-json="{\\"NVLS\\": \\"${NVLS}\\"}" -- python3 TRAIN \\
   --actor-num-nodes 2 --actor-num-gpus-per-node 8 ${MODEL_ARGS[@]} ${PATHS[@]} ${SAMPLES[@]} ${LEARNER[@]} \\
   ${ENGINES[@]} MORE
"""
MODEL = """
layers=8; freq=(); for ((i=0; i<layers; i++)); do freq+=(1); done
printf -v FREQ "[%s]" "$(IFS=', '; echo "${freq[*]}")"
MODEL_ARGS=(--num-layers $layers --hidden-size 64 --num-experts 4 --moe-layer-freq "$FREQ" --moe-aux-loss-coeff 0
            --moe-token-dispatcher-type alltoall)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slime")
    (folder / "models").mkdir()
    source(folder, MODEL, "models/tiny-moe.sh")
    return source(folder, SCRIPT.replace("TRAIN", "train.py").replace("MORE", "--colocate"))


@pytest.fixture(scope="module")
def words(script):
    return trainer_command(script, r"\S*train\.py", "")[0][1:-1]


def slime(words, more="--colocate", framework="slime", train="train.py"):
    return draft_of(framework, Source(options([train, *words, *shlex.split(more)])))


def test_slimes_script_whole(script):
    draft = translate("slime", script)
    decided = 'taken as false, because nothing runs: [ "$LINKS" -gt 0 ] (line 4)'
    variables = "variables of its processes are not translated: NVLS"
    loop = "taken as false, because nothing runs: for ((i=0; i<layers; i++)); do freq+=(1); done (tiny-moe.sh)"
    printf = 'expanded to nothing: printf -v FREQ "[%s]" "$(IFS=\', \'; echo "${freq[*]}")" (tiny-moe.sh)'
    notes = [decided, loop, variables, f"{printf}, in --moe-layer-freq"]
    assert (lost(draft), draft.problems, draft.notes) == ({}, [], notes)
    config = ExperimentConfig.model_validate(draft.nested())
    assert (config.name, config.output_dir) == ("tiny_slime", "/c/tiny_slime")
    assert (config.data.prompt_key, config.data.answer_key) == ("question", "label")
    assert config.data.chat_template and config.reward.grader == "math"
    train = config.train
    assert (train.num_steps, train.num_prompts_per_step, train.group_size) == (300, 32, 8)
    assert train.num_updates_per_step == 4, "32 x 8 samples in updates of 64"
    actor = config.actor
    p = actor.parallel
    assert (actor.world_size, p.tp, p.pp, p.ep, p.vpp) == (16, 2, 2, 2, 2)
    assert (actor.micro_batch_tokens, actor.dtype, actor.recompute) == (9216, "bfloat16", "full")
    assert actor.megatron == {"attention_backend": "flash", "moe_token_dispatcher_type": "alltoall"}
    assert actor.optimizer.megatron == {"adam_beta1": 0.9, "optimizer_cpu_offload": True}
    assert (actor.optimizer.lr, actor.optimizer.weight_decay) == (2e-6, 0.1)
    rollout = config.rollout
    assert (rollout.num_engines, rollout.tp, rollout.colocate, rollout.host) == (8, 2, True, "eth0")
    assert rollout.sglang == {"cuda_graph_bs_decode": [1, 2, 4, 8, 12]} and rollout.mem_fraction == 0.7
    algorithm = config.algorithm
    assert (algorithm.loss.clip_ratio_low, algorithm.loss.clip_ratio_high) == (0.2, 0.28)
    assert (algorithm.aggregation, algorithm.kl.loss_coef) == ("seq-mean-token-mean", 0)
    assert "slime drops no prompt" in draft.yaml("")


KL = "--use-kl-loss --kl-loss-coef 0.01"
EVAL = "--eval-interval 5 --n-samples-per-eval-prompt 16"


@pytest.mark.parametrize(
    ("more", "becomes"),
    [
        ("--advantage-estimator gspo --eps-clip 4e-4", {
            "algorithm.loss.name": "gspo", "algorithm.advantage.name": "grpo", "algorithm.loss.clip_ratio_low": 4e-4}),
        ("--advantage-estimator cispo --eps-clip 1.0 --eps-clip-high 4.0", {
            "algorithm.loss.name": "cispo", "algorithm.loss.clip_ratio_high": 4.0, "algorithm.loss.dual_clip": None}),
        ("--disable-grpo-std-normalization --calculate-per-token-loss --eps-clip-c 3.0", {
            "algorithm.advantage.name": "dr_grpo", "algorithm.aggregation": "token-mean",
            "algorithm.loss.dual_clip": 3.0}),
        ("--disable-rewards-normalization --normalize-advantages", {
            "algorithm.advantage.name": "reinforce", "algorithm.whiten_advantages": True}),
        ("--advantage-estimator reinforce_plus_plus --normalize-advantages --gamma 0.9 --kl-coef 0.01", {
            "algorithm.advantage.gamma": 0.9, "algorithm.whiten_advantages": None, "algorithm.kl.reward_coef": 0.01,
            "algorithm.kl.estimator": "k1"}),
        ("--kl-coef 0.01", {"algorithm.kl.reward_coef": None}),
        (f"{KL} --kl-loss-type low_var_kl", {
            "algorithm.kl.loss_coef": 0.01, "algorithm.kl.estimator": "k3", "algorithm.kl.value_clamp": 10}),
        (f"{KL} --kl-loss-type k3 --use-unbiased-kl", {
            "algorithm.kl.estimator": "k3+", "algorithm.kl.importance": True, "algorithm.kl.value_clamp": None}),
        (f"{KL} --kl-loss-type k2 --use-unbiased-kl --ref-update-interval 5", {
            "algorithm.kl.estimator": "k3+", "algorithm.kl.reference_every": 5}),
        ("--use-rollout-logprobs", {"algorithm.old_logprobs": "engine"}),
        ("--ddp-bucket-size 1000 --use-precision-aware-optimizer --main-grads-dtype bf16", {
            "actor.ddp": {"bucket_size": 1000}, "actor.optimizer.megatron.main_grads_dtype": "bfloat16"}),
        ("--use-tis --tis-clip 5 --tis-clip-low 0.1", {
            "algorithm.mismatch.weight": {"name": "tis", "cap": 5, "floor": 0.1}}),
        ("--use-tis --tis-clip-low 0.5 --custom-tis-function-path slime.backends.megatron_utils.loss.icepop_function", {
            "algorithm.mismatch.weight": {"name": "icepop", "low": 0.5, "high": 2.0}}),
        ("--sglang-enable-dp-attention --sglang-dp-size 2", {
            "rollout.sglang.enable_dp_attention": True, "rollout.sglang.dp_size": 2}),
        ("--metadata-key extra", {"data.extra_key": "extra"}),
        ("--rm-type ''", {
            "data.source_key": "metadata.rm_type", "data.grader_by_source": {
                "math": "math", "boxed_math": "math", "deepscaler": "math", "boxed_deepscaler": "math",
                "dapo": "math_dapo"}}),
        ("--use-routing-replay", {"actor.routing_replay": "old"}),
        ("--use-rollout-routing-replay", {"actor.routing_replay": "rollout"}),
        ("--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std", {
            "algorithm.dynamic_sampling": {"metric": "reward", "max_num_gen_batches": 1000}}),
        ("--num-steps-per-rollout 2", {"train.num_updates_per_step": 2}),
        ("--lr-warmup-iters 10 --lr-decay-style cosine --min-lr 1e-7", {
            "actor.optimizer.warmup_steps": 10, "actor.optimizer.lr_schedule": "cosine",
            "actor.optimizer.min_lr": 1e-7}),
        ("--lr-warmup-fraction 0.1", {"actor.optimizer.warmup_steps": 120}),
        (f"{EVAL} --eval-prompt-data aime /d/aime.jsonl math /d/math.jsonl --eval-top-p 0.7", {
            "eval.data.sources": [{"source": "aime", "path": "/d/aime.jsonl"},
                                  {"source": "math", "path": "/d/math.jsonl"}],
            "eval.every": 5, "eval.temperature": 0.9, "eval.top_p": 0.7, "eval.num_samples": 16}),
        (f"{EVAL} --eval-prompt-data aime /d/aime.jsonl --skip-eval-before-train", {"eval.before_first_step": False}),
        ("--prompt-data /d/train.jsonl@[0:100]", {"data.path": "/d/train.jsonl", "data.limit": 100}),
        ("--rollout-stop-token-ids 7 --rollout-stop a b", {
            "sampling.stop_token_ids": [7], "sampling.stop": ["a", "b"]}),
        ("--apply-chat-template-kwargs '{\"enable_thinking\": false}'", {
            "data.chat_template_args.enable_thinking": False}),
        ("--save-hf /x/{rollout_id}", {"checkpoint.hf_every": 1}),
        ("--hf-checkpoint /m/Qwen3-30B-A3B-FP8", {"rollout.quantization": "fp8"}),
        ("--rollout-max-context-len 6000", {"data.max_prompt_tokens": 1904}),
        ("--mtp-num-layers 1 --enable-mtp-training --sglang-speculative-algorithm EAGLE "
         "--sglang-speculative-num-steps 2 --sglang-speculative-num-draft-tokens 3", {
            "actor.draft": {"train": True}, "rollout.draft_tokens": 2}),
        ("--moe-aux-loss-coeff 0 --moe-router-bias-update-rate 0.001", {"actor.router_bias_update": 0.001}),
        ("--use-wandb --wandb-project p --wandb-group g --wandb-key abc", {
            "log.wandb": {"project": "p"}, "name": "g"}),
        ("--micro-batch-size 2 --rollout-max-prompt-len 904", {"actor.micro_batch_tokens": 9216}),
    ],
)  # fmt: skip
def test_what_slimes_options_become(words, more, becomes):
    draft = slime(words, f"--colocate {more}")
    assert {key: at(draft, key) for key in becomes} == becomes
    assert (lost(draft), draft.problems) == ({}, [])


@pytest.mark.parametrize(
    ("train", "more", "becomes"),
    [
        ("train.py", "", {"weights.transport": None, "rollout.max_staleness": None}),
        ("train_async.py", "--partial-rollout --qkv-format thd", {"rollout.max_staleness": 1, "actor.packing": True}),
        ("train_async.py", "", {
            "rollout.max_staleness": 1, "algorithm.mismatch.weight": {"name": "tis"}}),
        ("train_async.py", "--rollout-function-path fully_async_rollout.generate_rollout_fully_async", {
            "rollout.max_staleness": 1}),
        ("train_async.py", "--use-rollout-logprobs", {
            "rollout.max_staleness": 1, "algorithm.old_logprobs": "engine", "algorithm.mismatch.weight": None}),
        ("train_async.py", "--fully-async --max-weight-staleness 3", {"rollout.max_staleness": 3}),
        ("train_async.py", "--dynamic-sampling-filter-path f.dynamic_sampling_filters.check_reward_nonzero_std", {
            "rollout.max_staleness": 2}),
        ("train.py", "--update-weight-transport disk", {"weights.transport": "disk"}),
        ("train.py", "--update-weight-mode delta --update-weight-transport disk", {
            "weights.delta": True, "weights.transport": None}),
    ],
)  # fmt: skip
def test_engines_on_gpus_of_their_own(words, train, more, becomes):
    draft = slime(words, f"--rollout-num-gpus 8 {more}", "miles", train)
    becomes |= {"rollout.num_engines": 4, "rollout.colocate": None, "rollout.host": "eth0"}
    assert {key: at(draft, key) for key in becomes} == becomes
    assert (lost(draft), draft.problems) == ({}, [])
    assert "rollout.host eth0 is a guess: name your nodes' interface." in draft.remarks


@pytest.mark.parametrize(
    ("more", "key", "reason"),
    [
        ("--advantage-estimator ppo", "--advantage-estimator", "gae needs a critic"),
        ("--custom-rm-path mine.rm", "--custom-rm-path", "mine.rm(args, sample): write it as grade(text, answer)"),
        ("--rm-type ifbench", "--rm-type", "no grader ifbench; there are math,"),
        ("--rm-type '' --metadata-key extra", "--metadata-key", "data.source_key: extra.rm_type, with data.grader_by"),
        ("--rm-type remote_rm --rm-url http://a", "--rm-type", "reward.grader: http"),
        ("--custom-generate-function-path a.b", "--custom-generate-function-path", "a.b: write it as a sampling.env"),
        ("--dynamic-sampling-filter-path a.b", "--dynamic-sampling-filter-path", "a.b: algorithm.dynamic_sampling"),
        ("--use-tis --custom-tis-function-path a.b", "--custom-tis-function-path", "a.b: algorithm.mismatch"),
        ("--rollout-function-path slime.rollout.sft_rollout.f", "--rollout-function-path", "`megagrpo sft`"),
        ("--custom-advantage-function-path a.b", "--custom-advantage-function-path", "a function of one's own"),
        ("--attention-dropout 0.1", "--attention-dropout", "there is no dropout"),
        ("--custom-generate-function-path fully_async.f", "--custom-generate-function-path", "sampling.environment"),
        ("--eval-function-path my.sft_rollout.f", "--eval-function-path", "`megagrpo sft`"),
        ("--optimizer muon", "--optimizer", "the optimizer is AdamW"),
        ("--hf-checkpoint /m/x-int4", "--hf-checkpoint", "name the model in bfloat16"),
        ("--global-batch-size 48", "--global-batch-size", "do not divide the 256 of a step into whole groups"),
        ("--prompt-data a.jsonl@[5:9]", "--prompt-data", "write the rows into a file"),
        ("--advantage-estimator gspo --eps-clip-c 3", "--eps-clip-c", "no dual clip of whole responses"),
        ("--eval-interval 5 --eval-prompt-data nq b.parquet@[0:9]", "--eval-prompt-data", "write its rows into a file"),
        ("--moe-expert-capacity-factor 1.0", "--moe-expert-capacity-factor", "engines drop no token"),
        ("--sglang-schedule-policy lpm --sglang-config x", "--sglang-config", "every engine is like the others"),
        ("--num-rollout ten", "--num-rollout", "should be a number"),
        ("--partial-rollout", "--partial-rollout", "only with rollout.max_staleness above 0"),
        ("--apply-chat-template-kwargs {a: 1, b: 2}", "--apply-chat-template-kwargs", "one JSON object"),
        ("--of-a-plugin 1", "--of-a-plugin", "no such key in docs/reference/names.md"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_is_named(words, more, key, reason):
    found = lost(slime(words, f"--colocate {more}"))
    assert found.keys() == {key} and reason in found[key]


def test_experts_that_do_not_divide_an_engine_are_refused_as_in_an_experiment(words):
    assert "tp 2 is not a multiple of ep 4" in slime(words, "--colocate --sglang-ep-size 4").problems[0]


def test_words_stay_texts_unless_they_are_numbers_switches_or_objects():
    words = [*shlex.split("train.py --lr 1e-6 --colocate --n 8 --use-x true --kwargs '{\"a\": 1}' --flag"), "--stop=~"]
    read = {"train.py": True, "--lr": 1e-6, "--colocate": True, "--n": 8, "--use-x": True, "--kwargs": {"a": 1}}
    assert options(words) == read | {"--flag": True, "--stop": "~"}
    words = shlex.split("train.py --rollout-stop '[/INST]' '###' 7 --save '/ckpt/run #3' --wandb-group 007 --x '- a' ~")
    stops = ["[/INST]", "###", "7"]
    named = {"--save": "/ckpt/run #3", "--wandb-group": "007", "--x": ["- a", "~"]}
    assert options(words) == {"train.py": True, "--rollout-stop": stops} | named
    stop = ["--rollout-stop", "[/INST]", "###", "--colocate"]
    draft = draft_of("slime", Source(options(["train.py", *stop])))
    assert draft.nested()["sampling"]["stop"] == ["[/INST]", "###"]


def test_miles_has_adapters(words):
    more = "--colocate --lora-rank 16 --target-modules linear_qkv,linear_proj --lora-dropout 0.0"
    draft = slime(words, f"{more} --megatron-to-hf-mode bridge", "miles")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert draft.nested()["actor"]["lora"] == {"rank": 16, "alpha": 16, "targets": targets}
    needs_other_layers = {"--optimizer-cpu-offload", "--attention-backend"}
    assert set(lost(draft)) == needs_other_layers, "adapters are in Megatron's own"
    assert "--lora-rank" in lost(slime(words, more))


def test_the_file_loads_and_check_finds_nothing_but_missing_files(script, tmp_path, capsys):
    out = tmp_path / "mine.yaml"
    assert main(["convert", "slime", str(script), "-o", str(out)]) == 0
    assert capsys.readouterr().err.startswith(f"{script}: ")
    config = read_experiment(out)
    assert all("does not exist" in problem for problem in preflight(config))

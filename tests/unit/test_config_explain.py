"""What `megagrpo check` says: the layout, the sizes, every clash with the model, and what it loads as trainers do."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from examples.laptop.model import make_tiny_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.check.problems import check_against_model, layout_problems, preflight
from megagrpo.check.rules.inputs import is_made
from megagrpo.check.rules.model import before_start
from megagrpo.check.rules.subject import Subject, broken
from megagrpo.config.load import PRESETS as PRESET_FOLDER
from megagrpo.config.load import ConfigError, load_config
from megagrpo.config.schema import ActorConfig, ParallelConfig
from megagrpo.models.folder import Model
from megagrpo.models.table import read_description
from megagrpo.system.environment import child_environment
from megagrpo.tools.certify.tiny_model import hf_config
from megagrpo.tools.check.loading import try_loading
from megagrpo.tools.explain import explain
from megagrpo.tools.plan.checkpoint_cost import rank_coordinates
from tests.experiments import QUICKSTART, ROOT, python

BIG = read_description(ROOT / "configs" / "models" / "Qwen3-235B-A22B" / "config.json")
DENSE = hf_config(TinyModelConfig(path="x", family="qwen3"))
MOE = hf_config(TinyModelConfig(path="x", family="qwen3_moe"))


@pytest.mark.parametrize(
    "tp, cp, pp, ep, etp, world", [(2, 2, 2, 4, 1, 16), (4, 1, 1, 2, 2, 8), (1, 1, 1, 2, 1, 2), (2, 1, 4, 8, 1, 64)]
)
def test_coordinates_of_ranks_are_megatrons(tp, cp, pp, ep, etp, world):
    from megatron.core.parallel_state import RankGenerator

    order, layout = "tp-cp-ep-dp-pp", ParallelConfig(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
    dense = RankGenerator(tp=tp, ep=1, dp=world // (tp * cp * pp), pp=pp, cp=cp, order=order)
    expert = RankGenerator(tp=etp, ep=ep, dp=world // (etp * ep * pp), pp=pp, cp=1, order=order)
    coordinates = [rank_coordinates(r, world, layout) for r in range(world)]
    axes = [*((dense, axis, axis) for axis in ("dp", "tp", "pp", "cp")), (expert, "ep", "ep"), (expert, "dp", "edp")]
    for generator, axis, name in axes:
        for group in generator.get_ranks(axis):
            assert [coordinates[rank][name] for rank in group] == list(range(len(group))), (axis, group)


@pytest.mark.parametrize(
    "hf, overrides, said",
    [
        (DENSE, ["actor.world_size=8", "actor.parallel.tp=8"], "parallel.tp = 8 .* num_attention_heads = 4"),
        (BIG, ["actor.world_size=3", "actor.parallel.tp=3"], "parallel.tp = 3 .* num_key_value_heads = 4"),
        (DENSE, ["actor.world_size=3", "actor.parallel.pp=3"], "pp x vpp = 3 .* num_hidden_layers = 4"),
        (DENSE, ["actor.world_size=2", "actor.parallel={pp: 2, vpp: 4}"], "pp x vpp = 8 .* num_hidden_layers = 4"),
        (MOE, ["actor.world_size=3", "actor.parallel.ep=3"], "ep = 3 .* num_experts = 8; it may be 2 or 4"),
        (DENSE, ["actor.world_size=2", "actor.parallel={tp: 2, etp: 2}"], "etp = 2, but a qwen3 model has no experts"),
        (MOE, ["actor.world_size=4", "actor.parallel={tp: 2, ep: 2, etp: 2}"], "etp = 2 on a CPU, .*take ep 1"),
        (DENSE, ["actor.parallel.ep=2"], "actor.parallel.ep = 2, but a qwen3 model has no experts"),
        (MOE, ["rollout.tp=3"], "rollout.tp = 3 .* num_attention_heads = 4; tp may be 1 or 2 or 4"),
        (BIG, ["rollout={tp: 6, ep: 3}"], "rollout.tp = 6 does not divide .* num_key_value_heads = 4"),
        (BIG, ["rollout={tp: 6, ep: 3}"], "rollout.ep = 3 .* num_experts = 128; tp may be 1 or"),
        (DENSE, ["rollout={tp: 2, ep: 2}"], "rollout.ep = 2, but a qwen3 model has no experts"),
        (MOE, ["sampling.max_response_tokens=2048"], "^data: up to 2056 tokens, but the model has 2048 positions"),
        (
            MOE,
            ["sampling.max_response_tokens=2036", "sampling.environment={function: calculator}"],
            r"^data: up to 2051 tokens \(7 are SGLang's\), but the model has 2048 positions",
        ),
        (
            MOE,
            ["sampling.max_response_tokens=2038", "rollout.draft_tokens=2"],
            r"^data: up to 2049 tokens \(3 are SGLang's\), but the model has 2048 positions",
        ),
        (MOE, ["eval.max_response_tokens=4000"], "^eval.data: up to 4008 tokens, but the model has 2048 positions"),
        (MOE, ["rollout.sglang.max_total_tokens=10"], "^data: up to 16 tokens, but an engine's cache holds 10"),
        (
            MOE,
            ["rollout.sglang.context_length=8"],
            "^data: up to 16 tokens, but an engine's context is 8 .rollout.sglang.context_length",
        ),
        (
            MOE,
            ["rollout.sglang.context_length=2049"],
            "context_length 2049 is more than the 2048 positions of the model",
        ),
        (
            MOE,
            ["sampling.max_response_tokens=2", "data.max_prompt_tokens=2042"],
            r"^data: up to 2049 tokens \(5 are SGLang's\), but the model has 2048 positions",
        ),
        (MOE, ["sampling.stop_token_ids=[1, 1000000]"], "stop_token_ids: 1000000 is no token"),
        (
            MOE,
            ["algorithm.distillation={loss: student_topk, top_k: 33}", "teachers.t.path=t"],
            "top_k 33 is more than the 32 tokens",
        ),
        (MOE, ["rollout={tp: 2, ep: 2}", "actor.device=cuda"], "float32 on GPUs: torch's experts"),
        (
            MOE,
            ["rollout={tp: 2, ep: 2, dtype: float32}", "actor={device: auto, dtype: bfloat16}"],
            "float32 on GPUs: torch's experts",
        ),
        *(
            (
                hf_config(TinyModelConfig(path="x", family=family)),
                ["rollout={sglang: {moe_runner_backend: flashinfer_cutlass}}"],
                f"flashinfer_cutlass with a {family} model",
            )
            for family in ("gpt_oss", "deepseek_v4", "glm5_next")
        ),
        *(
            (
                hf_config(TinyModelConfig(path="x", family=family)),
                [f"actor={{device: cuda, dtype: bfloat16, megatron: {{attention_backend: {backend}}}}}"],
                f"attention_backend {backend}: Transformer Engine would find no kernel .* of a {family} model",
            )
            for family, backend in (("qwen3", "local"), ("gpt_oss", "flash"))
        ),
        ({"model_type": "gpt2"}, [], "'gpt2' is not supported; supported: llama, qwen2, qwen3, qwen3_moe"),
    ],
)
def test_clashes_with_the_model_are_named_with_their_numbers(hf, overrides, said):
    found = check_against_model(load_config(QUICKSTART, ["actor.parallel={}", *overrides]), hf)
    assert any(re.search(said, problem) for problem in found), found


def test_a_tokenizer_clashes_by_its_largest_token_id():
    clashes = [broken(before_start(Subject.of(load_config(QUICKSTART), MOE, largest))) for largest in (25, 32)]
    assert clashes[0] == [] and "token id 32, but the model only 32 embeddings" in clashes[1][0]


def test_preflight_finds_missing_files_a_wrong_grader_and_a_foreign_tokenizer(prepared):
    assert preflight(load_config(QUICKSTART)) == []
    other = QUICKSTART.with_stem("calculator")
    found = preflight(load_config(other, ["sft=null", "reward={grader: exakt}"]))
    assert [p.split(":")[0] for p in found[:3]] == ["model.path", "data.path", "eval.data.path"]
    assert "did you mean 'exact'" in found[3] and len(found) == 4
    rows = [{"prompt": "1", "answer": "1", "by": grader} for grader in ("exact", "exakt")]
    Path("lines.jsonl").write_text("\n".join(map(json.dumps, rows)))
    by_row = ["data.path=lines.jsonl", "data.grader_key=by", "checkpoint.load=nowhere", "eval=null"]
    found = preflight(load_config(QUICKSTART, by_row))
    assert found[0] == "checkpoint.load: nowhere does not exist" and len(found) == 2
    assert "'exakt' is unknown; did you mean 'exact'" in found[1]
    for load, said in (("like/a_name", "like/a_name does not exist"), (".", ". is no finished checkpoint")):
        [problem] = preflight(load_config(QUICKSTART, [f"checkpoint.load={load}"]))
        assert problem.startswith(f"checkpoint.load: {said}")
    Path("lines.jsonl").write_text(json.dumps(rows[0] | {"answer": '{"tests": []}', "by": "code"}))
    found = preflight(load_config(QUICKSTART, [*by_row[:2], "eval=null", "reward.timeout_s=8"]))
    assert any("reward.timeout_s 8 must be some seconds above grader code's total_s 8" in text for text in found)
    alphabet = "".join(map(chr, range(33, 93)))
    make_tiny_model(TinyModelConfig(path="other", alphabet=alphabet), seed=0)
    found = preflight(load_config(QUICKSTART, ["model.tokenizer=other"]))
    assert found == ["model.tokenizer has token id 63, but the model only 32 embeddings (vocab_size)"]
    Path("other/config.json").write_text("{")
    with pytest.raises(ValueError, match=r"other/config\.json: not a model description"):
        preflight(load_config(QUICKSTART, ["model.path=other"]))


def test_preflight_finds_a_checkpoint_of_another_layout_and_one_that_is_not_to_be_resumed(prepared, monkeypatch):
    config = load_config(QUICKSTART)
    folder = Path(config.output_dir) / "checkpoints" / "step_000003"
    folder.mkdir(parents=True)
    state = {"layout": config.actor.layout, "reshardable": False}
    for change, problems in (({}, 0), ({"layout": {"ranks": 4, "tp": 2}}, 1), ({"reshardable": True}, 0)):
        state |= change
        (folder / "state.json").write_text(json.dumps(state))
        found = preflight(config)
        assert len(found) == problems and all("by its own layout alone (ranks 4, tp 2)" in text for text in found)
    never = load_config(QUICKSTART, ["checkpoint.resume=never"])
    [problem] = preflight(never)
    assert problem == f"checkpoint.resume is never, but {folder} is there; name another output_dir"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert preflight(never) == [], "a job that was requeued"


def test_explain_says_what_a_step_is(prepared):
    train = "train={num_steps: 5, num_prompts_per_step: 12, group_size: 4, num_updates_per_step: 2}"
    later = "eval.before_first_step=false"
    text = explain(
        load_config(QUICKSTART, ["actor.world_size=8", "actor.parallel={tp: 2, pp: 2, ep: 2}", train, later])
    )
    for said in (
        "8 trainer ranks = tp 2 x cp 1 x dp 2 x pp 2; experts: etp 1 x ep 2 x dp 2 x pp 2; sequence parallel",
        "12 prompts x 4 samples = 48 samples",
        "updates    2 of 6 prompts = 24 samples",
        "the run    10 optimizer updates, 240 samples",
        "no problems found",
        "greedy: every 15 steps, last",
    ):
        assert said in text, text
    layout = text.partition("\na step")[0]
    gpus = [line.split() for line in layout.splitlines() if re.match(r"  \d", line)]
    assert [words[3] for words in gpus[:8]] == list("01234567")
    assert gpus[7][:4] == ["0", "7", "-", "7"] and gpus[8][2:5] == ["0", "rank", "0"]
    assert "nodes      1 for trainers" in layout


def test_explain_counts_the_steps_of_epochs_and_the_updates_of_passes(prepared):
    for name, count in (("a.jsonl", 20), ("b.jsonl", 13)):
        Path(name).write_text('{"prompt": "1+1=", "answer": 2}\n' * count)
    train = "train={num_epochs: 2, num_prompts_per_step: 12, group_size: 4, num_updates_per_step: 2}"
    settings = [train, "train.num_epochs_per_step=3", "data.path=[a.jsonl, b.jsonl]"]
    text = explain(load_config(QUICKSTART, settings))
    assert "quickstart: 6 steps into" in text, "66 prompts, 12 a step"
    assert "updates    2 of 6 prompts = 24 samples, 3 passes: 6 updates" in text
    assert "the run    36 optimizer updates, 288 samples" in text and "no problems found" in text
    Path("b.jsonl").unlink()
    text = explain(load_config(QUICKSTART, settings))
    assert "data.path: b.jsonl does not exist" in text and "its length is known when the prompts are there" in text


def test_explaining_starts_nothing_and_loads_no_torch(prepared):
    code = f"""
import json, sys
from megagrpo.config.load import load_config, PRESETS as PRESET_FOLDER
from megagrpo.tools.explain import explain
explain(load_config({str(QUICKSTART)!r}, ["actor.megatron.apply_rope_fusion=false", "rollout.sglang.page_size=64"]))
print(json.dumps(sorted({{"torch", "transformers", "megatron", "ray", "sglang"}} & set(sys.modules))))
"""
    assert json.loads(python("-c", code)) == []


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESET_FOLDER.glob("*.yaml")))
def test_every_preset_fits_the_quickstart(prepared, preset):
    """As bench/presets.py runs it: the experiment's own algorithm section makes room for the preset."""
    text, found = re.subn(r"(?m)^algorithm:\n(?: .*\n)+", f"preset: {preset}\n", QUICKSTART.read_text())
    if preset == "gdpo":
        text = text.replace("grader: exact,", "graders: [{grader: exact}, {grader: format}],")
    (prepared / "e.yaml").write_text(text)
    config = load_config(prepared / "e.yaml")
    assert found == 1 and preflight(config) == [] and config.algorithm.advice == []
    assert config.algorithm.formula in explain(config)


TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% "
    "endif %}"
    "{{ m['content'] }}{% endfor %}="
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trial") / "model"
    make_tiny_model(TinyModelConfig(path=str(folder), family="llama", num_layers=1), seed=0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def experiment(folder: Path, model: Path, **data) -> Path:
    rows = [{"prompt": "12+3", "answer": "15"}, {"prompt": "1", "answer": "1"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(folder / "rows.jsonl"), "chat_template": True, "max_prompt_tokens": 2} | data
    text = {"name": "trial", "output_dir": str(folder / "run"), "model": {"path": str(model)}, "data": data}
    (folder / "trial.yaml").write_text(yaml.safe_dump(text))
    return folder / "trial.yaml"


def test_a_sound_experiment_is_loaded_as_far_as_it_goes(tmp_path, model):
    config = load_config(experiment(tmp_path, model))
    trial = try_loading(config)
    assert trial.problems == [] == preflight(config)
    # a first row above max_prompt_tokens is dropped by a run: no problem
    assert trial.loaded == [
        f"the tokenizer of {model}",
        f"every row of {tmp_path / 'rows.jsonl'}: 2 rows, at most 5 tokens, by the chat template; "
        "1 longer than max_prompt_tokens (2): dropped",
    ]
    text = explain(config, trial)
    assert text.startswith("no problems found\n")
    assert "not tried: the model's weights, the engines" in text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"system_prompt": "Answer."}, "rows.jsonl:1: the chat template refuses this prompt: TemplateError: no system"),
        ({"prompt_template": "Say {prompt}"}, "rows.jsonl:1: the tokenizer does not know every character"),
    ],
)
def test_a_first_row_that_the_trainers_would_refuse(tmp_path, model, data, said):
    config = load_config(experiment(tmp_path, model, **data))
    trial = try_loading(config)
    assert preflight(config) == [] and said in trial.problems[0]
    assert [f":{row}: " in problem for row, problem in enumerate(trial.problems, 1)] == [True] * 2
    assert "PROBLEMS (2)" in explain(config, trial)


def test_a_tokenizer_without_a_template_is_one_problem(tmp_path, model):
    """Not one of each row, nor of the turns of an environment besides."""
    bare = shutil.copytree(model, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    turns = "sampling.environment={function: calculator, rewards: false}"
    for settings in ([], [turns]):
        config = load_config(experiment(tmp_path, bare), settings)
        assert try_loading(config).problems == ["data.chat_template is true, but the tokenizer has no chat template"]


@pytest.mark.parametrize(
    ("player", "said"),
    [
        (
            "environment={function: python, args: {run: 1}}",
            r"sampling: args do not fit 'python': .* did you mean 'run_s'",
        ),
        ("environment={function: python, args: {seed: 1}}", "multiple values for argument 'seed'"),
        ("agent={function: harbor, args: {rows: 1}}", "sampling: args do not fit 'harbor'"),
        ("agent={function: harbor, args: {row: 1}}", "sampling: args do not fit 'harbor'"),
    ],
)
def test_arguments_that_what_plays_rollouts_does_not_take(prepared, player, said):
    [problem] = preflight(load_config(QUICKSTART, [f"sampling.{player}"]))
    assert re.search(said, problem)


def test_what_plays_rollouts_is_cut_before_a_step_is():
    """Unless a limit is said, which the rules judge."""
    for player, longest in (("agent", 600), ("environment", 30)):
        given = [f"sampling.{player}.function=a:b"]
        for settings, limit_s in (
            ([], longest),
            (["rollout.step_timeout_s=20"], 10),
            (["rollout.step_timeout_s=20", f"sampling.{player}.timeout_s=7"], 7),
        ):
            found = getattr(load_config(QUICKSTART, [*given, *settings]).sampling, player)
            assert found.timeout_s == limit_s
    # the step's limit alone is wrong
    with pytest.raises(ConfigError, match="1 problem"):
        load_config(QUICKSTART, [*given, "rollout.step_timeout_s=-1"])


def test_what_is_not_there_yet_is_not_tried(tmp_path, model):
    path = experiment(tmp_path, model)
    sft = "sft={model: " + str(model) + ", path: " + str(tmp_path / "rows.jsonl") + "}"
    config = load_config(path, [f"model.path={tmp_path / 'later'}", sft])
    assert preflight(config) == [], "the warm-up writes model.path"
    assert is_made(config, str(tmp_path / "later")) and not is_made(config, str(tmp_path / "other"))
    trial = try_loading(config)
    assert trial.problems == [] and trial.loaded[0] == f"the tokenizer of {model}"
    assert "not there yet: made by megagrpo sft" in explain(config, trial)
    config = load_config(path, [f"model.path={tmp_path / 'made'}", "sft={model: made, path: rows.jsonl}"])
    trial = try_loading(config)
    assert trial.problems == [] and trial.loaded == []
    assert (
        "tokenizer, chat template, rows and graders" in trial.not_tried[0]
        and "made is not there yet" in trial.not_tried[0]
    )


def test_a_broken_torchvision_is_a_problem_with_its_remedy(tmp_path, model):
    """One that only lacks its operators, as on CPUs, is put right: see the tests above."""
    broken = tmp_path / "path" / "torchvision"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('built for another torch')\n")
    program = """
import sys
from megagrpo.tools.check.loading import try_loading
from megagrpo.config.load import ConfigError, load_config
print(*try_loading(load_config(sys.argv[1])).problems, sep="\\n")
"""
    environment = child_environment(python_path=[str(broken.parent)])
    said = python("-c", program, experiment(tmp_path, model), env=environment)
    assert said.startswith(f"{model}: no tokenizer can be loaded from here")
    assert "built for another torch" in said and "`bash launch/install.sh --repair`" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("num_layers", "sizes", "stages"),
    [
        (4, {}, [4]),
        (4, {"pp": 2}, [2, 2]),
        (5, {"pp": 2, "last_stage_layers": 3}, [2, 3]),
        (5, {"pp": 2, "first_stage_layers": 2, "last_stage_layers": 3}, [2, 3]),
        (94, {"pp": 8, "first_stage_layers": 11, "last_stage_layers": 11}, [11, *[12] * 6, 11]),
        (10, {"pp": 3, "vpp": 2, "first_stage_layers": 2}, [2, 4, 4]),
    ],
)
def test_layers_of_stages(num_layers, sizes, stages):
    assert ParallelConfig(**sizes).stage_layers(num_layers) == stages


@pytest.mark.parametrize(
    ("num_layers", "sizes", "message"),
    [
        (5, {"pp": 1, "first_stage_layers": 3}, "first_stage_layers 3 needs pp > 1"),
        (5, {}, "num_hidden_layers = 5 cannot be cut into 2 equal stages"),
        (5, {"first_stage_layers": 5}, "5 less first_stage_layers and last_stage_layers, 5 together, cannot"),
        (3, {"first_stage_layers": 4}, "4 together, cannot be cut into 1 equal"),
        (6, {"first_stage_layers": 3, "last_stage_layers": 2}, "5 together, cannot be cut into 0 equal stages"),
        (6, {"vpp": 2, "first_stage_layers": 3}, "a stage of 3 layers does not divide into vpp = 2 virtual stages"),
    ],
)
def test_what_cannot_be_cut_is_said(num_layers, sizes, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**{"pp": 2} | sizes).stage_layers(num_layers)


@pytest.mark.parametrize(
    ("model", "sizes", "ends"),
    [
        ("DeepSeek-V3-0324", {"pp": 8}, (7, 6)),
        ("DeepSeek-V3-0324", {"pp": 16}, (3, 2)),
        ("DeepSeek-V3-0324", {"pp": 8, "first_stage_layers": 9}, (7, 6)),
        ("Qwen3-235B-A22B", {"pp": 8}, (11, 11)),
        ("Qwen3-235B-A22B", {"pp": 8, "vpp": 2}, (12, 10)),
        ("DeepSeek-V3-0324", {"pp": 8, "vpp": 2}, None),
    ],
)
def test_the_message_names_stages_that_are_accepted(model, sizes, ends):
    arch = Model.read(ROOT / "configs" / "models" / model).arch

    def problems(**more: int) -> list[str]:
        config = ActorConfig(world_size=sizes["pp"], parallel=ParallelConfig(**sizes | more), dtype="bfloat16")
        return [text for text in layout_problems(arch, config) if "num_hidden_layers" in text]

    (said,) = problems()
    named = re.search(r"actor.parallel.first_stage_layers: (\d+) and last_stage_layers: (\d+)", said)
    assert ends == (named and tuple(map(int, named.groups()))), said
    if ends:
        assert problems(first_stage_layers=ends[0], last_stage_layers=ends[1]) == []

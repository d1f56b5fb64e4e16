"""Judges whose engines the run starts: refusals, places, memory, and their requests over real HTTP."""

from contextlib import closing
from pathlib import Path

import pytest
from fake_service import FakeService, running
from sampling import experiment, prompt_set, sampled, source_of

from megagrpo.check.problems import preflight
from megagrpo.check.rules.placement import place
from megagrpo.check.rules.subject import Nodes
from megagrpo.config.load import ConfigError
from megagrpo.mesh import LeaderError
from megagrpo.rewards.pool import RewardPool
from megagrpo.rollout.service.engine_command import ServerPlace, engine_environment
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.bisect.command import experiment_of
from megagrpo.tools.explain import explain
from megagrpo.tools.one_engine import with_one_engine
from megagrpo.tools.plan.fitting import served_memory, served_misfits
from megagrpo.types import RolloutGroup
from tests.experiments import ROOT, placement_problems, read_experiment

MODELS = ROOT / "configs" / "models"
MINIMAL = "name: t\noutput_dir: o\nmodel: {path: m}\ndata: {path: d.jsonl}\n"
URL = "url: 'http://h/'"
TWO = (
    "{grader: judge, name: a, args: {prompt_file: p, path: j}}, {grader: judge, name: b, args: {prompt_file: p, path: j"
)


def judged(args: str) -> str:
    return f"reward: {{grader: judge, args: {{prompt_file: p, {args}}}}}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (judged(""), "args of grader judge: a teacher or a judge has a path or a url, one of them"),
        (judged(f"path: j, {URL}"), "has a path or a url, one of them"),
        (judged("path: j, api_key_env: KEY"), "api_key_env without url: engines that this run starts have"),
        (judged("path: j, tp: 4, ep: 3"), "tp 4 is not a multiple of ep 3"),
        (judged("path: j, timeout_s: 9.0, model: m"), "model, timeout_s with path: requests to the run's engines have"),
        (judged("path: j, gpus: 3"), "gpus: Extra inputs are not permitted"),
        (judged(URL), "url without model; write the name"),
        (judged(f"{URL}, model: m, tp: 2"), "tp with url: the run starts no engines for it; remove it"),
        (
            judged("path: j") + "\nrollout: {colocate: true}\nweights: {transport: ipc}",
            "reward.args.path under rollout.colocate: the trainers' GPUs have no room",
        ),
        (f"reward: {{graders: [{TWO}, tp: 2}}}}]}}", "graders: b asks the engines of the first judge with its path"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, text, said):
    file = tmp_path / "e.yaml"
    file.write_text(MINIMAL + text)
    with pytest.raises(ConfigError) as error:
        read_experiment(file)
    assert said in str(error.value) and str(error.value).startswith(f"{file}: 1 problem"), str(error.value)


def with_judges(tmp_path: Path, *judges: dict, **sections):
    """Of judges by their args; several are graders of the names 0, 1, ..."""
    (tmp_path / "p").write_text("Is {response} right?")
    shared = {"prompt_file": str(tmp_path / "p")}
    entries = [{"grader": "judge", "args": shared | args} for args in judges]
    several = {"graders": [entry | {"name": f"{i}"} for i, entry in enumerate(entries)]}
    return experiment(reward=entries[0] if len(entries) == 1 else several, **sections)


def test_a_judge_has_engines_with_settings_of_their_own(tmp_path):
    config = with_judges(tmp_path, {"path": "j", "tp": 2}, rollout={"tp": 4, "max_running_requests": 7})
    theirs = config.for_model("judge-judge")
    assert (theirs.model.path, theirs.rollout.tp, theirs.rollout.num_engines) == ("j", 2, 1)
    assert theirs.rollout.load_format == "model" and theirs.rollout.max_running_requests == 7
    assert list(config.engine_sizes) == ["", "judge-judge"] and list(theirs.engine_sizes) == [""]
    server = ServerPlace(0, "127.0.0.1", 1, "", cuda=True, num_cores=1)
    env = engine_environment(theirs, server)
    assert "MEGAGRPO_SCORES_AT" not in env, "it samples as SGLang does"
    assert env["SGLANG_JIT_DEEPGEMM_FAST_WARMUP"] == "1", "its files may be FP8"
    assert "SGLANG_JIT_DEEPGEMM_FAST_WARMUP" not in engine_environment(config, server)


def test_judges_fill_the_rest_of_the_engines_nodes_and_share_those_of_a_path(tmp_path):
    args = [{"path": "j", "tp": 4, "num_engines": 2}, {"path": "k", "tp": 8}, {"path": "j"}]
    judges = [*args, {"url": "http://h/", "model": "m"}, {"url": "http://h/", "model": "m"}]
    config = with_judges(tmp_path, *judges, actor={"world_size": 8}, rollout={"tp": 4, "host": "eth0"})
    found = place(config, Nodes(8))
    assert found.names == ("0", "judge-0 0", "judge-0 1", "judge-1 0")
    assert [sorted({gpu.node for gpu in engine}) for engine in found.engines] == [[1], [1], [2], [3]]
    assert config.num_gpus == 28 and config.num_servers == 4
    (problem,) = placement_problems(config, Nodes(8, 1, 1))
    assert "1 rollout nodes" in problem and "it may be 3 to 4" in problem


def test_the_folder_of_a_judge_is_judged_before_a_start(tmp_path):
    moe = str(MODELS / "Qwen3-30B-A3B")
    config = with_judges(tmp_path, {"path": "nowhere"}, {"path": moe, "tp": 3}, {"path": moe})
    said = [text for text in preflight(config) if "reward.graders" in text]
    assert said[0].startswith("reward.graders.0.args.path: nowhere does not exist")
    assert said[1].startswith("reward.graders.1.args.tp = 3 does not divide")
    long = {"sglang": {"context_length": 2**20}}
    said = preflight(with_judges(tmp_path, {"path": moe}, rollout=long))
    assert any("context_length 1048576 is more than the 40960 positions of reward.args.path" in text for text in said)
    assert not any("tokenizer" in text or "embeddings" in text for text in said), "it has its own tokens"
    replicas = {"tp": 4, "sglang": {"enable_dp_attention": True, "dp_size": 4}}
    said = preflight(with_judges(tmp_path, {"path": moe}, rollout=replicas))
    own = "reward.args: rollout.sglang.dp_size = 4 does not divide reward.args.tp = 1"
    assert any(text.startswith(own) for text in said)


def test_a_plan_counts_the_memory_of_a_judge(tmp_path):
    large = {"path": str(MODELS / "Qwen3-30B-A3B")}
    bf16 = {"actor": {"dtype": "bfloat16"}, "rollout": {"dtype": "bfloat16"}}
    ((name, side),) = served_memory(with_judges(tmp_path, large, **bf16))
    assert name == "judge-judge" and side.parts["weights"] == pytest.approx(61.1e9, rel=0.01)
    huge = {"path": str(MODELS / "Qwen3-235B-A22B"), "tp": 2}
    assert served_misfits(with_judges(tmp_path, large, **bf16)) == []
    assert served_misfits(with_judges(tmp_path, huge, **bf16))[0].startswith("reward.args: ")


def test_a_check_names_the_engines_of_a_judge(tmp_path):
    text = explain(with_judges(tmp_path, {"path": "j", "num_engines": 2}, {"url": "http://h/", "model": "m"}))
    assert "judge-0: j, 2 engine(s) of tp 1, ep 1" in text and "judge-1: elsewhere, http://h/" in text


def test_one_engine_is_tried_with_the_judge_and_bisected_without(tmp_path):
    config = with_judges(tmp_path, {"path": "j"})
    tried = with_one_engine(config, RunFolder(tmp_path), own_weights=False)
    assert list(tried.engine_sizes) == ["", "judge-judge"]
    assert list(experiment_of(config, False, RunFolder(tmp_path)).engine_sizes) == [""]


def groups_of(service: FakeService, config) -> list[RolloutGroup]:
    with (
        running(service),
        RewardPool(config.reward) as pool,
        closing(source_of(service.control, config, pool)) as source,
    ):
        return sampled(source, 0, prompt_set().prompts[:2], 0)


@pytest.mark.parametrize("problem", [None, 500])
def test_responses_are_graded_by_the_engines_with_the_key_of_the_run(tmp_path, problem):
    service = FakeService(judges=("judge-judge",), judge_script=[problem] if problem else [])
    groups = groups_of(service, with_judges(tmp_path, {"path": "j", "body": {"top_p": 0.5}}))
    assert [outcome.value for group in groups for outcome in group.outcomes] == [0.5] * 4
    assert service.keys == {"key"} and len(service.judged) == 4 + bool(problem)
    texts = {sample.text for group in groups for sample in group.samples}
    settings = {"model": "default", "temperature": 0.0, "max_tokens": 1024, "top_p": 0.5}
    for body in service.judged:
        (message,) = body.pop("messages")
        assert body == settings and message["content"] in {f"Is {text} right?" for text in texts}


def test_judges_with_one_path_ask_the_same_engines(tmp_path):
    service = FakeService(judges=("judge-0",))
    groups = groups_of(service, with_judges(tmp_path, {"path": "j"}, {"path": "j"}))
    assert [outcome.value for group in groups for outcome in group.outcomes] == [1.0] * 4
    assert len(service.judged) == 8


def test_a_reply_that_an_engine_refuses_or_cuts_is_an_error(tmp_path):
    service = FakeService(judges=("judge-judge",), judge_script=[400, "length"])
    groups = groups_of(service, with_judges(tmp_path, {"path": "j"}))
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    said = sorted(outcome.detail for outcome in outcomes if not outcome.ok)
    assert len(said) == 2 and "/v1/chat/completions refused a request: on purpose" in said[1]
    assert said[0] == "grader judge at j: its reply was cut at args.max_tokens 1024; raise that"


def test_a_step_waits_for_an_engine_of_the_judge_and_names_it(tmp_path):
    config = with_judges(tmp_path, {"path": "j"}, rollout={"step_timeout_s": 1.0})
    said = (
        r"they wait for .*the grader.*; judge-judge: \d+ retries, the last because of: no engine of judge-judge is up"
    )
    with pytest.raises(LeaderError, match=said):
        groups_of(FakeService(), config)

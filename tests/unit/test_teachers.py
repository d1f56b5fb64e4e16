"""Teachers: refusals, places, rows that name them, and scores of responses over real HTTP."""

import json
from contextlib import closing
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from fake_service import FakeService, running
from sampling import evaluated, experiment, prompt_set, sampled, source_of

from examples.laptop.recipe import TinyModelConfig
from megagrpo.check.problems import preflight
from megagrpo.check.rules.placement import place
from megagrpo.check.rules.subject import Nodes
from megagrpo.checkpoint.groups import read_groups, write_groups
from megagrpo.config.data import DataConfig
from megagrpo.config.load import ConfigError, dump_config
from megagrpo.data.rows import read_rows
from megagrpo.mesh import LeaderError
from megagrpo.models.stored.files import INDEX
from megagrpo.monitor.metrics import Metrics
from megagrpo.rollout.admission import AdmissionQueue
from megagrpo.rollout.control import ServiceStatus
from megagrpo.rollout.generation import SamplingParams
from megagrpo.rollout.served_models import Teachers, mixture
from megagrpo.rollout.service.engine_command import ServerPlace, engine_environment
from megagrpo.system import environment
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.certify.tiny_model import hf_config
from megagrpo.tools.one_engine import with_one_engine
from megagrpo.types import EngineInfo, TeacherScores
from tests.experiments import ROOT, placement_problems, read_experiment

URL = "http://somewhere:30000"
TWO = {"math": {"path": "m1"}, "code": {"path": "m2"}}
DISTILLED = "algorithm: {distillation: {}}"
MINIMAL = "name: t\noutput_dir: o\nmodel: {path: m}\ndata: {path: d.jsonl}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("teachers: {math: {}}\n" + DISTILLED, "teachers.math: a teacher or a judge has a path or a url"),
        ("teachers: {math: {path: a, url: http://b}}\n" + DISTILLED, "a path or a url, one of them"),
        ("teachers: {math: {url: b}}\n" + DISTILLED, "url 'b' should look like"),
        ("teachers: {math: {path: a, api_key_env: KEY}}\n" + DISTILLED, "api_key_env without url"),
        ("teachers: {math: {path: a, tp: 4, ep: 3}}\n" + DISTILLED, "tp 4 is not a multiple of ep 3"),
        ("teachers: {math: {path: a, gpus: 3}}\n" + DISTILLED, "teachers.math.gpus = 3: unknown key"),
        ("teachers: {Math-1: {path: a}}\n" + DISTILLED, "teachers: Math-1: names are part of"),
        ("teachers: {math: {path: a}}", "nothing learns from their scores"),
        (DISTILLED, "algorithm.distillation without teachers"),
        ("teachers: {math: {path: a}, code: {path: b}}\n" + DISTILLED, "no data.teacher_key says"),
        (
            "teachers: {math: {path: a}}\nrollout: {colocate: true}\nweights: {transport: ipc}\n" + DISTILLED,
            "teachers.math.path under rollout.colocate",
        ),
        (
            f"teachers: {{math: {{url: '{URL}'}}}}\nsampling: {{temperature: 0.7}}\n" + DISTILLED,
            "teachers math with sampling.temperature 0.7: SGLang scores at temperature 1",
        ),
        (
            f"teachers: {{math: {{url: '{URL}'}}}}\nalgorithm: {{distillation: {{loss: student_topk}}}}",
            "with distillation.loss student_topk: SGLang scores one list",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, text, said):
    file = tmp_path / "e.yaml"
    file.write_text(MINIMAL + text)
    with pytest.raises(ConfigError, match=said) as error:
        read_experiment(file)
    assert str(error.value).startswith(f"{file}: 1 problem"), str(error.value)


def test_a_server_elsewhere_gets_its_own_key_and_never_that_of_the_run(monkeypatch):
    monkeypatch.setenv(environment.API_KEY, "of the run")
    for named, sent in ({}, ""), ({"api_key_env": "KEY_OF_TEACHER"}, "of the teacher"):
        monkeypatch.setenv("KEY_OF_TEACHER", "of the teacher")
        with running(FakeService()) as elsewhere, running(FakeService()) as service:
            config = distilled({"math": {"url": elsewhere.url, **named}})
            with closing(source_of(service.control, config)) as source:
                sampled(source, 0, prompt_set().batch(0, 1, 0), 0)
            assert elsewhere.keys == {sent} and elsewhere.scored and service.keys == {"key"}
    monkeypatch.delenv("KEY_OF_TEACHER")
    with pytest.raises(ValueError, match="teachers.math: environment variable KEY_OF_TEACHER .* is not set here"):
        Teachers(config, 1, service.control)


def of_loss(loss: str, top_k: int) -> dict:
    """The section of distillation; reverse_kl has no top_k."""
    return {"loss": loss} | ({} if loss == "reverse_kl" else {"top_k": top_k})


def distilled(teachers: dict, loss: str = "reverse_kl", **sections):
    sections["data"] = {"path": "d"} | ({"teacher_key": "by"} if len(teachers) > 1 else {})
    sections["algorithm"] = {"distillation": of_loss(loss, 2)}
    return experiment(teachers=teachers, **sections)


def test_engines_of_teachers_have_settings_of_their_own():
    rollout = {"tp": 4, "num_engines": 2, "max_running_requests": 7}
    config = distilled(
        {"math": {"path": "m1", "tp": 2}, "code": {"url": URL}},
        rollout=rollout | {"min_healthy_engines": 2},
        actor={"draft": {"train": False}, "routing_replay": "rollout"},
        sampling={"temperature": 1.0},
    )
    theirs = config.for_model("teacher-math")
    assert (theirs.model.path, theirs.rollout.tp, theirs.rollout.num_engines) == ("m1", 2, 1)
    assert theirs.rollout.load_format == "model" and theirs.rollout.max_running_requests == 7
    assert theirs.actor.draft is None and theirs.actor.routing_replay is None
    assert list(config.engine_sizes) == ["", "teacher-math"] and config.num_servers == 3
    place = ServerPlace(0, "127.0.0.1", 1, "", cuda=True, num_cores=1, scores=True)
    assert engine_environment(theirs, place)["MEGAGRPO_SCORES_AT"] == "1.0"
    assert "MEGAGRPO_SCORES_AT" not in engine_environment(config, replace(place, scores=False))


def test_teachers_fill_the_rest_of_the_engines_nodes():
    teachers = {"math": {"path": "m1", "tp": 4}, "code": {"path": "m2", "tp": 16, "nodes_per_engine": 2}}
    rollout = {"tp": 4, "num_engines": 3, "host": "eth0"}
    config = distilled(teachers, actor={"world_size": 8}, rollout=rollout)
    found = place(config, Nodes(8))
    assert found.names == ("0", "1", "2", "teacher-math 0", "teacher-code 0")
    nodes = [sorted({gpu.node for gpu in engine}) for engine in found.engines]
    assert nodes == [[1], [1], [2], [2], [3, 4]] and found.rollout_nodes == 4
    gpus = [gpu for engine in found.engines for gpu in engine]
    assert len(set(gpus)) == len(gpus) == 32 and config.num_gpus == 40
    few = placement_problems(config, Nodes(8, 1, 3))
    assert "3 rollout nodes" in few[0] and "it may be 4 to 6" in few[0]
    wide = placement_problems(distilled({"math": {"path": "m1", "tp": 16}}, actor={"world_size": 8}), Nodes(8))[0]
    assert "an engine has 16 ranks a node" in wide and wide.endswith("raise its nodes_per_engine")
    small = distilled({"math": {"path": "m1"}}, actor={"world_size": 1})
    assert [gpu.number for (gpu,) in place(small, Nodes(3)).engines] == [1, 2]
    (problem,) = placement_problems(small, Nodes(2, 1, 0))
    assert "2 engine ranks (rollout.num_engines x tp, with those of teachers and judges)" in problem


ROWS = [
    ("math", (("math", 1.0),)),
    ({"math": 3, "code": 1}, (("math", 0.75), ("code", 0.25))),
    ('{"code": 0.5}', (("code", 1.0),)),
    ({"math": 2.0, "code": None}, (("math", 1.0),)),
    ("", ()),
    (None, ()),
]


def test_rows_name_their_teachers(tmp_path):
    file = tmp_path / "d.jsonl"
    rows = [{"prompt": "p", "answer": "a", "by": value} for value, _ in ROWS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(path=str(file), teacher_key="by")
    assert [row.teachers for row in read_rows(data)] == [expected for _, expected in ROWS]
    bad = [{"math": -1}, ["math"], 3, {"math": "much"}, "{"]
    rows = [{"prompt": "p", "answer": "a", "by": value} for value in bad]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems: list[str] = []
    assert read_rows(data, problems) == []
    assert [problem.split(": ")[0] for problem in problems] == [f"{file}:{i + 1}" for i in range(5)]


def test_rows_that_name_unknown_teachers_are_refused_by_their_lines(tmp_path):
    file = tmp_path / "d.jsonl"
    values = ["math", {"math": 1, "code": 1}, "physics"]
    rows = [{"prompt": "p", "answer": "a", "by": value} for value in values]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = distilled(TWO, "teacher_topk")
    config = config.model_copy(update={"data": DataConfig(path=str(file), teacher_key="by")})
    said = [problem for problem in preflight(config) if str(file) in problem]
    assert said[0].startswith(f"{file}:2: teachers math, code with distillation.loss teacher_topk")
    assert said[1] == f"{file}:3: teacher 'physics' is not among teachers (math, code)"
    assert len(said) == 2


def test_the_tokenizer_of_a_teacher_is_the_models(tmp_path):
    def folder(name: str, vocab: dict, size: int = 8) -> str:
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"model_type": "other", "vocab_size": size}))
        tokenizer = {"model": {"vocab": vocab}, "added_tokens": [{"content": "<eos>", "id": 2}]}
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
        return str(path)

    ids = {"a": 0, "b": 1}
    teachers = {
        "same": {"path": folder("same", ids, size=64)},  # embeddings may be padded
        "turned": {"path": folder("turned", {"a": 1, "b": 0})},
        "more": {"path": folder("more", ids | {"c": 3})},
        "small": {"path": folder("small", ids, size=2)},
        "unpadded": {"path": folder("unpadded", ids, size=7)},
        "cut": {"path": folder("cut", ids)},
        "missing": {"path": str(tmp_path / "missing")},
    }
    (tmp_path / "cut" / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "model-2.safetensors"}}))
    config = distilled(teachers)
    model = config.model.model_copy(update={"path": folder("model", ids)})
    said = preflight(config.model_copy(update={"model": model}))
    found = {name: [text for text in said if f"teachers.{name}.path" in text] for name in teachers}
    assert found["same"] == [] and all(len(found[name]) == 1 for name in list(teachers)[1:])
    assert "another tokenizer" in found["turned"][0] and "differs in 'a'" in found["turned"][0]
    assert "differs in 'c'" in found["more"][0]
    assert "2 embeddings (vocab_size)" in found["small"][0] and "token id 2" in found["small"][0]
    assert "has 7 embeddings (vocab_size), and the policy 8" in found["unpadded"][0]
    assert "the download is incomplete" in found["cut"][0]
    assert "does not exist" in found["missing"][0]


@pytest.mark.parametrize("sglang, limit", [({}, None), ({"max_total_tokens": 999}, 992), ({"context_length": 64}, 57)])
def test_a_teacher_reads_no_more_than_its_engine_holds(tmp_path, sglang, limit):
    (tmp_path / "config.json").write_text(json.dumps(hf_config(TinyModelConfig(path="x"))))
    config = distilled({"math": {"path": str(tmp_path)}})
    model = config.model.model_copy(update={"path": str(tmp_path)})
    sampling = config.sampling.model_copy(update={"max_response_tokens": 1000})
    rollout = config.rollout.model_copy(update={"sglang": sglang})
    said = preflight(config.model_copy(update={"model": model, "sampling": sampling, "rollout": rollout}))
    found = [text for text in said if "scores up to" in text]
    assert len(found) == (limit is not None) and all(f"scores up to {limit} tokens" in text for text in found)


def test_a_status_of_an_older_service_has_no_teachers():
    engine = EngineInfo("engine-0", "", "ready", 1, 1, 0, 1, "")
    status = ServiceStatus(None, (engine, replace(engine, id="teacher-m-0", model="teacher-m")))
    text = msgspec.json.encode(status)
    found = msgspec.json.decode(text, type=ServiceStatus)
    assert [e.id for e in found.engines_of("")] == ["engine-0"]
    assert [e.id for e in found.engines_of("teacher-m")] == ["teacher-m-0"]
    plain = msgspec.json.decode(text.replace(b'"model":"teacher-m"', b'"x":1'), type=ServiceStatus)
    assert len(plain.engines_of("")) == 2


def test_a_mixture_is_one_of_probabilities():
    a = TeacherScores(np.log([0.5, 0.1]), [[1, 2]] * 2, np.log([[0.5, 0.2]] * 2))
    b = TeacherScores(np.log([0.25, 0.9]), [[1, 2]] * 2, np.log([[0.1, 0.3]] * 2))
    mixed = mixture([0.2, 0.8], [a, b])
    assert np.allclose(np.exp(mixed.logprobs), [0.3, 0.74], atol=1e-6)
    assert np.allclose(np.exp(mixed.top_logprobs), [[0.18, 0.28]] * 2, atol=1e-6)
    assert mixed.top_ids.tolist() == [[1, 2]] * 2
    far = TeacherScores([-300.0], None, None)
    assert np.allclose(mixture([0.5, 0.5], [far, far]).logprobs, -300.0)


def groups_of(service: FakeService, config, prompts=None, metrics=None):
    service.teachers = tuple(config.teachers)
    with running(service), closing(source_of(service.control, config)) as source:
        prompts = prompts or prompt_set().prompts[:2]
        groups = sampled(source, 0, prompts, 0)
        held_out = evaluated(source, prompts, 0, SamplingParams.of(config.sampling), 1)
        source.add_metrics(metrics or Metrics())
    assert all(sample.teacher is None for group in held_out for sample in group.samples)
    return groups


@pytest.mark.parametrize("loss", ["reverse_kl", "student_topk", "teacher_topk"])
def test_responses_come_with_scores_of_the_only_teacher(loss):
    service, metrics = FakeService(), Metrics()
    groups = groups_of(service, distilled({"math": {"path": "m1"}}, loss), metrics=metrics)
    samples = [sample for group in groups for sample in group.samples]
    assert len(samples) == len(service.scored) == 4
    for sample in samples:
        assert np.allclose(sample.teacher.logprobs, -sample.token_ids / 100)
        assert (sample.teacher.top_ids is None) == (loss == "reverse_kl")
        if loss != "reverse_kl":
            pairs = [[token, token + 1] for token in sample.token_ids]
            assert sample.teacher.top_ids.tolist() == pairs
        if loss == "student_topk":
            assert np.allclose(sample.teacher.top_logprobs, -np.array(pairs) / 100)
    for body in service.scored:
        assert body["logprob_start_len"] == 1 and len(body["input_ids"]) == 6
        assert body["sampling_params"]["max_new_tokens"] == 0
    asked = {body.get("top_logprobs_num") for body in service.requests}
    assert asked == ({2, None} if loss == "student_topk" else {None}), "an evaluation needs none"
    found = metrics.reduced(lambda tensor, kind: tensor)
    assert found["teachers/tokens"] == 16 and found["teachers/retries"] == 0
    assert 0 < found["teachers/score_s_mean"] <= found["teachers/score_s_sum"]


def test_rows_go_to_their_teachers():
    service = FakeService()
    first, second = prompt_set().prompts[:2]
    both = (("math", 0.5), ("code", 0.5))
    prompts = [replace(first, teachers=both), second]
    groups = groups_of(service, distilled(TWO), prompts)
    assert len(service.scored) == 4, "two samples of the first prompt, by both"
    assert all(np.allclose(s.teacher.logprobs, -s.token_ids / 100) for s in groups[0].samples)
    assert all(sample.teacher is None for sample in groups[1].samples), "its row names none"


SHORT = {"input_token_logprobs": [[None, 1, None]]}
NOTHING = {"input_token_logprobs": [[None, 1, None], *[[None, 1, None]] * 4]}
ABORTED = {"finish_reason": {"type": "abort", "message": "ending"}}


@pytest.mark.parametrize("problem", [500, "drop", SHORT, NOTHING, ABORTED, b"<html>"], ids=str)
def test_a_bad_score_is_asked_for_again(problem):
    service, metrics = FakeService(score_script=[problem]), Metrics()
    groups = groups_of(service, distilled({"math": {"path": "m1"}}), metrics=metrics)
    assert all(sample.teacher is not None for group in groups for sample in group.samples)
    assert len(service.scored) == 5
    assert metrics.reduced(lambda tensor, kind: tensor)["teachers/retries"] == 1


def test_a_step_without_scores_fails_and_names_the_teacher():
    service = FakeService(score_script=[500] * 99)
    config = distilled({"math": {"path": "m1"}}, rollout={"step_timeout_s": 1.0})
    said = r"wait for .*its teachers.*; teacher-math: \d+ retries, the last because of: .*status 500"
    with pytest.raises(LeaderError, match=said):
        groups_of(service, config)


def test_groups_of_an_earlier_start_are_used_if_they_have_the_scores_that_are_needed():
    config = distilled({"math": {"path": "m1"}}, "student_topk")
    scored, *_ = groups_of(FakeService(), config)
    bare = replace(scored, samples=tuple(replace(s, teacher=None) for s in scored.samples))
    assert scored.is_scored(*config.scoring) and not bare.is_scored(*config.scoring)
    assert not scored.is_scored(*distilled({"math": {"path": "m1"}}).scoring), "other candidates"
    other = distilled({"math": {"path": "m1"}}, "teacher_topk")
    assert not scored.is_scored(*other.scoring), "candidates of the other side"
    assert bare.is_scored(*experiment().scoring) and not scored.is_scored(*experiment().scoring)
    by_column = distilled(TWO, "student_topk").scoring
    named = replace(bare.prompt, teachers=(("code", 1.0),))
    assert bare.is_scored(*by_column) and not replace(bare, prompt=named).is_scored(*by_column)


def test_groups_keep_scores_and_teachers(tmp_path):
    both = (("math", 0.5), ("code", 0.5))
    (group,) = groups_of(
        FakeService(),
        distilled(TWO, "student_topk"),
        [replace(prompt_set().prompts[0], teachers=both, demonstration=[7, 7, 2], weights={"rl": 0.5})],
    )
    write_groups(tmp_path / "groups.npz", [group])
    assert read_groups(tmp_path / "groups.npz") == [group]
    assert group.samples[0].teacher.top_ids.shape == (4, 2)


def test_one_engine_alone_has_nothing_of_teachers_and_streams(tmp_path):
    """What `try` and `bisect` hand to a service reads as an experiment."""
    data = {"path": "d", "teacher_key": "by", "weight_key": "w", "demonstration_key": "shown"}
    streams = [{"component": "cross_entropy", "written_by": ["data"]}]
    config = experiment(
        data=data, teachers={"math": {"path": "m1"}}, algorithm={"distillation": {}, "streams": streams}
    )
    alone = with_one_engine(config, RunFolder(tmp_path), own_weights=False)
    dump_config(alone, tmp_path / "config.yaml")
    read = read_experiment(str(tmp_path / "config.yaml"), [])
    assert read.teachers == {} and read.algorithm.components == ()


def test_one_engine_of_the_models_own_weights_has_no_copy_in_fp8(tmp_path):
    config = read_experiment(str(ROOT / "configs/glm45_355b_fp8.yaml"), [])
    assert config.rollout.sglang["moe_a2a_backend"] == "deepep"
    alone = with_one_engine(config, RunFolder(tmp_path), own_weights=True)
    dump_config(alone, tmp_path / "config.yaml")
    read = read_experiment(str(tmp_path / "config.yaml"), [])
    assert (read.rollout.load_format, read.rollout.quantization) == ("model", None)


def test_limits_of_requests_are_a_share_of_the_engines_that_answer():
    queue = AdmissionQueue()
    engine = EngineInfo("t", "", "ready", None, 0, 0, 0, "", cache_tokens=1000, model="teacher-t")
    queue.share([engine, replace(engine, cache_tokens=3000)], at_once=9, num_leaders=2)
    assert queue.limit == 9 and queue.tokens == pytest.approx(1.1 * 2000)
    queue.share([replace(engine, cache_tokens=None)], at_once=1, num_leaders=2)
    assert queue.limit == 1
    gone = replace(engine, state="dead")  # has used up its restarts
    queue.share([engine, gone, gone], at_once=8, num_leaders=1)
    assert queue.limit == 8 and queue.tokens == pytest.approx(1.1 * 1000)
    queue.share([gone], at_once=8, num_leaders=1)  # which is about to restart
    assert queue.limit == 8

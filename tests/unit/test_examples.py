"""Every file in configs/ fits its model; docs/examples.md quotes of the published ones what their files say."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from megagrpo.check.problems import check_against_model
from megagrpo.check.rules.subject import longest_samples, model_description
from megagrpo.config.load import load_config
from megagrpo.config.schema import ExperimentConfig
from megagrpo.models.table import architecture_of
from megagrpo.tools.explain import explain
from megagrpo.tools.job_request import Request, misfits, nodes_of
from megagrpo.tools.plan.command import placed_plan, report
from megagrpo.tools.plan.fitting import with_model
from megagrpo.tools.submit import submit
from tests.experiments import ROOT, placement_problems, python

pytestmark = pytest.mark.verifies(
    "runs", "published examples fit their models; each layout's last trainer rank is built"
)

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
MODELS = ROOT / "configs" / "models"
LARGE = {
    *("qwen3_30b_a3b", "qwen3_235b_a22b", "qwen3_235b_a22b_8k"),
    *("glm45_355b", "glm45_air_106b", "glm5_744b", "kimi_k2_1t", "deepseek_v3_671b"),
    *("qwen3_vl_30b_a3b", "qwen3_vl_235b_a22b", "qwen35_397b_a17b"),
    *("minimax_m2_230b", "kimi_k25_1t", "gpt_oss_120b", "nemotron3_super_120b"),
    *("deepseek_v4_flash_284b", "deepseek_v4_pro_1600b", "nemotron3_ultra_550b"),
    *("glm53_flash_313b", "qwen38_flash_next_176b"),
}
# not published elsewhere; nor are those of examples/laptop
ONE_NODE = {"qwen3_30b_a3b_one_node", "moonlight_16b_a3b_one_node", "glm47_flash_30b_one_node"}
AGENTS = {"qwen3_30b_swe", "qwen3_235b_search"}
LARGE |= {f"{name}_fp8" for name in ("qwen3_235b_a22b", "glm45_355b", "deepseek_v3_671b", "kimi_k2_1t")}
OURS = {"gsm8k", *LARGE, *ONE_NODE, *AGENTS} - {"deepseek_v3_671b"}
LAPTOP = {path.stem for path in (ROOT / "examples" / "laptop").glob("*.yaml")}
GPUS = 8  # of a node
BUILD = """
import sys
from megagrpo.actor.host import prepare_host
prepare_host()
from megagrpo.config.load import load_config
from megagrpo.models.folder import Model
from tests.pretended_world import record_trainer_rank
from pathlib import Path
for path, model in zip(sys.argv[1::2], map(Path, sys.argv[2::2])):
    actor, arch = load_config(path).actor.model_copy(update={"lora": None}), Model.read(model).arch
    place, copies = record_trainer_rank(arch, actor, actor.world_size - 1)
    names = {copy.hf for copy in copies}  # some families' begin with layers.
    layers = {name.partition("layers.")[2].split(".")[0] for name in names if "layers." in name}
    print(path, len(layers), bool({"lm_head.weight", "head.weight"} & names), *place.values())
"""


def described(path: Path) -> ExperimentConfig:
    """The experiment, its model replaced by the description of the same name in configs/models."""
    config = load_config(path)
    folder = MODELS / Path(config.model.path).name
    return load_config(path, [f"model.path={folder}"]) if folder.is_dir() else config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_experiment_fits_its_model_and_is_explained(path):
    config = described(path)
    hf = model_description(config)
    assert (hf is None) == (path.stem in {"gsm8k", *LAPTOP}), "described in configs/models"
    text = explain(config)
    if hf is not None:
        arch = architecture_of(hf)
        replays = "old" if arch.experts and arch.experts.unreported else "rollout"
        replayable = arch.is_moe and arch.family != "deepseek_v4"
        assert config.actor.routing_replay == (replays if replayable else None)
        assert check_against_model(config, hf) == [] and config.algorithm.advice == []
        assert " on a GPU, in " in text and "a save for" in text
        unreplayed = config.model_copy(update={"actor": config.actor.model_copy(update={"routing_replay": None})})
        warned = "ADVICE   set actor.routing_replay: rollout" in explain(unreplayed)
        assert warned == (config.actor.routing_replay == "rollout")
    one_screen = explain(config, everything=False)
    assert one_screen.count("\n") < 45 and "handed over" not in one_screen


@cache
def rows(columns: int) -> dict[str, list[str]]:
    """The rows of docs/examples.md's table of so many columns: name of the experiment -> the cells that quote it."""
    page = (ROOT / "docs" / "examples.md").read_text()
    lines = re.findall(r"^\|.*\|$", page, re.MULTILINE)
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    named = [(row, re.fullmatch(r"`configs/(\w+)\.yaml`", row[1])) for row in found if len(row) == columns]
    return {name[1]: row[2:] for row, name in named if name}


PUBLISHED = rows(3)


def submitted(name: str) -> tuple[ExperimentConfig, Request]:
    """An experiment and the request in its file's head, which fits it."""
    path = ROOT / "configs" / f"{name}.yaml"
    (line,) = re.findall(r"^# (megagrpo submit .*)$", path.read_text(), re.MULTILINE)
    *_, file, _, trainers, _, samplers, _, gpus, _, time = line.split()
    config, request = (load_config(path), Request("one-job", int(trainers), int(samplers), int(gpus), time))
    assert file == f"configs/{name}.yaml" and misfits(config, request) == []
    return config, request


@pytest.mark.parametrize("name", sorted(LARGE))
def test_a_large_experiment_stays_inside_nodes_and_is_submitted_as_its_head_says(name):
    config, request = submitted(name)
    parallel = config.actor.parallel
    assert GPUS % parallel.tp == 0
    if GPUS % (parallel.ep * parallel.etp):  # all-to-all between nodes, because one has no room for a stage's experts
        inside = load_config(ROOT / "configs" / f"{name}.yaml", [f"actor.parallel.ep={GPUS}"])
        assert any("trainers do not fit" in problem for problem in placed_plan(with_model(inside)).problems)
    assert config.rollout.tp // config.rollout.nodes_per_engine <= GPUS == request.gpus_per_node
    assert config.actor.micro_batch_tokens >= longest_samples(config)["data"]
    assert (config.rollout.quantization == "fp8") == name.endswith("_fp8")
    shorter = name.endswith("_8k") or "_vl_" in name
    assert longest_samples(config)["data"] == 2048 + (8192 if shorter else 32768)
    assert placement_problems(config, nodes_of(request)) == []
    assert rows(5)[name] == [
        f"{config.train.num_prompts_per_step} x {config.train.group_size}",
        f"{request.trainer_nodes}: tp {parallel.tp} pp {parallel.pp} ep {parallel.ep}",
        f"{request.rollout_nodes}: {config.rollout.num_engines} of tp {config.rollout.tp}",
    ]


@pytest.mark.parametrize("name", sorted(AGENTS))
def test_an_experiment_with_an_agent_is_submitted_as_its_head_says(name):
    config, request = submitted(name)
    parallel = config.actor.parallel
    assert config.sampling.agent is not None and config.rollout.prefix_cache == "by_version"
    # Qwen3's templates drop the thoughts of earlier turns, which enable_thinking false only empties
    assert config.sampling.agent.history == "last" or config.model.path.endswith("-Instruct-2507")
    assert config.actor.micro_batch_tokens >= longest_samples(config)["data"]
    cut = f"cp {parallel.cp}" if parallel.cp > 1 else f"pp {parallel.pp}"
    assert rows(6)[name] == [
        f"{config.train.num_prompts_per_step} x {config.train.group_size}",
        f"{longest_samples(config)['data']:,} tokens, {config.sampling.agent.max_turns} turns",
        f"{request.trainer_nodes}: tp {parallel.tp} {cut} ep {parallel.ep}",
        f"{request.rollout_nodes}: {config.rollout.num_engines} of tp {config.rollout.tp}",
    ]


@pytest.mark.parametrize("name", sorted(ONE_NODE))
def test_a_mixture_of_experts_fits_one_node(name):
    config = described(ROOT / "configs" / f"{name}.yaml")
    parallel, rollout = config.actor.parallel, config.rollout
    assert config.actor.world_size == rollout.num_engines * rollout.tp == GPUS and rollout.colocate
    of_trainers = f"8 ranks: tp {parallel.tp} ep {parallel.ep}"
    sizes = f"{config.train.num_prompts_per_step} x {config.train.group_size}"
    assert rows(5)[name] == [sizes, of_trainers, f"{rollout.num_engines} of tp {rollout.tp}"]
    (fullest,) = re.findall(r"at most +([\d.]+) GB on a GPU", explain(config))
    assert float(fullest) < 80


def clashes(config: ExperimentConfig) -> list[str]:
    """What `check` prints of ranks without a place and of memory."""
    return without_files(
        re.findall(r"^  (.*)$", explain(config).partition("PROBLEMS")[2].partition("\n\n")[0], re.MULTILINE)
    )


def without_files(problems: list[str]) -> list[str]:
    """Those that are not of a file which is not made yet, or not seen from a test's folder."""
    pattern = r"does not exist|importing \S+ failed: FileNotFoundError|is no program that this"
    return [problem for problem in problems if not re.search(pattern, problem)]


CHANGES = ([], ["rollout.host=lo"], ["cluster.gpus_per_node=3"], ["actor.recompute=none"])
# as they are, and in turn in forms that have no place on the nodes or no room in their memory; two in all forms
CHANGED = [
    (path, change)
    for number, path in enumerate(CONFIGS)
    for place, change in enumerate(CHANGES)
    if not change or path.stem in ("qwen3_235b_a22b", "kimi_k2_1t") or number % 3 == place - 1
]


@pytest.mark.parametrize(("path", "change"), CHANGED, ids=lambda value: value.stem if isinstance(value, Path) else None)
def test_check_plan_and_submit_say_the_same(path, change):
    config = load_config(path, change)
    of_check = clashes(config)
    try:
        submit(config, [], Request(), dry_run=True)
        refused = ""
    except ValueError as exc:
        refused = str(exc)
    of_submit = without_files([line.strip() for line in refused.splitlines()[1:]])
    assert of_submit == of_check and (change or not of_check)
    if model_description(with_model(config)) is not None:
        plan = placed_plan(with_model(config))
        text = "\n".join(report(plan))
        of_plan = [line.strip() for line in text.partition("DOES NOT FIT\n")[2].splitlines()]
        assert [line for line in of_plan if not line.startswith("--search")] == of_check
        assert list(plan.problems) == of_check


def quoted(config: ExperimentConfig) -> list[str]:
    """What the table says of an experiment."""
    rollout = config.rollout
    sampling = "shared" if rollout.colocate else f"+ {rollout.num_engines * rollout.tp}"
    return [f"{config.actor.world_size} {sampling}"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_page_quotes_what_the_file_says(name):
    assert set(PUBLISHED) == {path.stem for path in CONFIGS} - OURS - LAPTOP
    assert PUBLISHED[name] == quoted(load_config(ROOT / "configs" / f"{name}.yaml"))


def test_the_last_rank_of_every_example_is_built():
    """Megatron's own modules without memory, in a pretended world: one of each model and layout."""
    distinct = {}
    for path in (ROOT / "configs" / f"{name}.yaml" for name in [*PUBLISHED, *sorted(LARGE - set(PUBLISHED))]):
        config = described(path)
        layout = json.dumps([config.actor.layout, config.actor.recompute, Path(config.model.path).name])
        distinct[layout] = (str(path), config.model.path)
    printed = python("-c", BUILD, *(word for pair in distinct.values() for word in pair))
    built = [line.split() for line in printed.splitlines()]
    assert [line[0] for line in built] == [path for path, _ in distinct.values()]
    for path, layers, head, tp, pp, ep in built:
        config = described(Path(path))
        parallel, arch = config.actor.parallel, architecture_of(model_description(config))
        assert (int(tp), int(pp), int(ep)) == (parallel.tp - 1, parallel.pp - 1, parallel.ep - 1)
        assert int(layers) == parallel.stage_layers(arch.num_layers)[-1]
        assert (head == "True") == (not arch.tied)


def test_the_memory_by_model_size_is_what_check_says():
    """Rows of docs/choosing.md: experiment, overrides, a trainer's GB and an engine's."""
    page = (ROOT / "docs" / "choosing.md").read_text()
    rows = re.findall(r"^\|[^|]*\| `(configs/\w+\.yaml)`([^|]*)\|[^|]*\| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) >= 10
    for name, others, trainer, engine in rows:
        folder = MODELS / Path(load_config(ROOT / name).model.path).name
        text = explain(load_config(ROOT / name, [f"model.path={folder}", *re.findall(r"`([\w.]+=\w+)`", others)]))
        said = re.search(r"at most  ([\d.]+) GB on a GPU(?s:.*) rank holds about ([\d.]+) GB of weights, before", text)
        assert said and said.groups() == (trainer, engine), (name, said and said.groups())

"""The certificate passes what is right, for any algorithm section, and finds every planted fault."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest

from megagrpo.config.load import dump_config, load_config
from megagrpo.config.schema import ExperimentConfig, ParallelConfig
from megagrpo.tools.certify import command
from megagrpo.tools.certify.cases import LAYOUTS, NEIGHBOR, REFERENCE, SMALL_BUDGET, Case
from megagrpo.tools.certify.certificate import LARGEST, LEAST, bounds_of, errors_of, failures
from megagrpo.tools.certify.synthetic import make_models
from megagrpo.tools.certify.tiny_model import TinySizes, hf_config
from tests.dist.bounds import within
from tests.dist.workers.launch import run_ranks
from tests.dist.workers.pool import RankPool

pytestmark = pytest.mark.timeout(900)
CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
ABOVE = 10 * LARGEST * LEAST["gradient"]  # every bound
ALGORITHMS = {
    "grpo, k3 in the loss, entropy": {
        "kl": {"loss_coef": 0.1},
        "entropy_coef": 0.01,
        "aggregation": "seq-mean-token-mean",
    },
    "dr_grpo, exact KL": {
        "advantage": {"name": "dr_grpo"},
        "aggregation": "seq-mean-token-sum-norm",
        "kl": {"loss_coef": 0.1, "estimator": "full"},
    },
    "gspo, token TIS, rejection": {
        "loss": {"name": "gspo", "clip_ratio_low": 0.02, "clip_ratio_high": 0.03},
        "mismatch": {"weight": {"name": "tis"}, "reject": {"high": 1.02}},
    },
    "reinforce++, KL in the reward": {
        "advantage": {"name": "reinforce_plus_plus"},
        "kl": {"reward_coef": 0.1, "estimator": "k1"},
    },
    "remax, cispo": {
        "advantage": {"name": "remax"},
        "loss": {"name": "cispo"},
        "aggregation": "seq-mean-token-sum",
        "kl": {"reward_coef": 0.1, "estimator": "k1"},
    },
    "reinforce, as ROLL's grpo": {
        "advantage": {"name": "reinforce"},
        "reward": {"mean": "group", "std": "group", "clip": 0.8},
        "kl": {"reward_coef": 0.1, "estimator": "k1"},
        "advantage_clip": 2.0,
    },
}
ALGORITHMS["maxrl, dppo"] = {
    "advantage": {"name": "maxrl"},
    "loss": {"name": "dppo", "divergence": "kl", "low": 0.001, "high": 0.001},
}
ALGORITHMS["gmpo"] = {
    "loss": {"name": "gmpo", "clip_ratio_low": 0.02, "clip_ratio_high": 0.02},
    "aggregation": "seq-mean-token-mean",
}
ALGORITHMS["clip_cov"] = {"loss": {"name": "clip_cov", "fraction": 0.2, "low": 0.05, "high": 1.0}}
ALGORITHMS["kl_cov"] = {"loss": {"name": "kl_cov", "fraction": 0.2}, "advantage": {"name": "optimal_token_baseline"}}
ALGORITHMS["streams, student's top-k"] = {
    "distillation": {"loss": "student_topk", "top_k": 5, "logprob_min": -6.0},
    "streams": [
        {"component": "rl", "weight": 0.5},
        {"component": "cross_entropy", "weight": 0.3, "written_by": ["tool", "data"]},
        {"component": "reference_kl", "weight": 0.2, "written_by": ["policy", "data"]},
    ],
}
ALGORITHMS["distillation alone, rejection"] = {
    "distillation": {"loss_max": 2.0},
    "streams": [{"component": "rl", "weight": 0.0}],
    "mismatch": {"weight": {"name": "tis"}, "reject": {"high": 1.02}},
}
OWN = Path(__file__).parents[1] / "own_algorithm.py"
ALGORITHMS["a user's own"] = {
    "loss": {"name": f"{OWN}:gmpo", "args": {"clip": 0.02}},
    "advantage": {"name": f"{OWN}:mad"},
    "aggregation": "seq-mean-token-mean",
}
FIRST = next(iter(ALGORITHMS))
# two passes of two updates each, after the update whose gradients are compared
SETTINGS = {"gspo, token TIS, rejection": ["train.num_epochs_per_step=2", "train.num_updates_per_step=2"]}
# fault -> a layout that it spoils
SPOILED = {
    "experts-not-reduced-over-tp": "TP2+SP",
    "no-data-parallel-reduction": "DP2",
    "mean-of-micro-batch-means": "DP2",
    "label-of-local-neighbor": "CP2",
    "router-differs-between-ranks": "EP2",
}


def described(folder: Path, family: str = "qwen3_moe") -> list[str]:
    """Settings that name a model of which there is only config.json: the certificate makes its own tensors."""
    moe = {} if family in ("qwen3", "qwen3_moe") else {"experts_per_token": 4}
    (folder / "real").mkdir(parents=True)
    (folder / "real" / "config.json").write_text(json.dumps(hf_config(TinySizes(family=family, **moe))))
    return [f"model.path={folder / 'real'}", "sft=null"]


def case(layout: str, fault: str | None = None, **options) -> dict:
    """The part of a job that a case makes: a Case's fields, and the planted fault."""
    ranks, parallel = LAYOUTS[layout]
    of_case = Case(layout, ranks, parallel, packing=True, budget=SMALL_BUDGET, **options)
    return {"fault": fault, "case": asdict(of_case)}


@pytest.fixture(scope="module")
def subject(tmp_path_factory) -> Callable[..., dict]:
    """Returns what the jobs of one subject share; its tiny model and what one rank computes are made at first use."""

    @cache
    def make(*settings: str, algorithm=FIRST, family="qwen3_moe", config="quickstart") -> dict:
        folder = tmp_path_factory.mktemp(family)
        make_models(folder, load_config(str(CONFIG), described(folder, family)), ParallelConfig(), 0)
        common = {"config": str(CONFIG.with_stem(config)), "folder": str(folder), "algorithm": ALGORITHMS[algorithm]}
        common["settings"] = list(settings)
        return with_bounds(folder, common)

    return make


def with_bounds(folder: Path, common: dict, pool: RankPool | None = None) -> dict:
    """What the jobs of one subject share; what one rank computes is in the folder then."""
    alone = [common | {"case": asdict(case)} for case in (REFERENCE, NEIGHBOR)]
    _, neighbor = run_ranks(1, folder / "one", alone, "certify_ranks.py", pool)
    return common | {"bounds": bounds_of(neighbor)}


def measured(folder: Path, jobs: list[dict], pool: RankPool | None = None) -> tuple[list[dict], list[list[str]]]:
    """Figures and failures of jobs on two ranks; of a planted fault what is ten times above its bound."""
    results = run_ranks(2, folder / f"two{len(jobs)}", jobs, "certify_ranks.py", pool)
    found = []
    for job, result in zip(jobs, results, strict=True):
        bounds = job["bounds"]
        if job["fault"]:
            found.append(failures(result, {what: 10 * bound for what, bound in bounds.items()}))
        else:
            found.append(failures(result, bounds))
            for what, error in errors_of(result).items():
                within(what, error, bounds[what])
    return results, found


def test_every_fault_is_found_and_nothing_else(subject, tmp_path: Path):
    right = [case(layout) for layout in ("DP2", "TP2+SP", "CP2", "EP2")]
    wrong = [case(layout, fault) for fault, layout in SPOILED.items()]
    results, found = measured(tmp_path, [subject() | each for each in right + wrong])
    assert found[: len(right)] == [[]] * len(right)
    for what, problems in zip(wrong, found[len(right) :], strict=True):
        assert any("gradient of" in problem for problem in problems), (what["fault"], problems)
    experts = results[len(right)]
    assert experts["loss_error"] < 1e-6, "a loss that agrees proves nothing"
    spoiled = {name for name, value in experts["gradients"].items() if value > ABOVE}
    assert spoiled and all(".experts." in name for name in spoiled)


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [2, 3])
def test_other_algorithms_are_certified_too(subject, tmp_path: Path, layouts: int):
    """Each algorithm in so many of three layouts, in turn."""
    cases = [case("DP2"), case("TP2+SP"), case("PP2", recompute="full")]
    jobs = [
        subject(*SETTINGS.get(name, []), algorithm=name) | each
        for number, name in enumerate(ALGORITHMS)
        for place, each in enumerate(cases)
        if (number + place) % 3 < layouts
    ]
    results, found = measured(tmp_path, jobs)
    assert found == [[]] * len(jobs)
    for result in results:
        assert result["grad_norm"] > 1e-3 and len(result["gradients"]) > 20, "there was something to compare"


def test_losses_that_choose_tokens_are_certified(subject, tmp_path: Path):
    jobs = [subject(algorithm=name) | case(layout) for name, layout in {"clip_cov": "DP2", "kl_cov": "TP2+SP"}.items()]
    _, found = measured(tmp_path, jobs)
    assert found == [[]] * len(jobs)


def test_components_of_the_loss_are_certified(subject, tmp_path: Path):
    """Tokens of the policy, of a tool and of demonstrations, with a teacher's scores of candidates;
    and a component divided by one rank's tokens."""
    common = subject(algorithm="streams, student's top-k")
    wrong = case("DP2", "components-counted-on-each-rank")
    jobs = [common | each for each in (case("DP2"), case("TP2+SP"), case("CP2"), wrong)]
    _, found = measured(tmp_path, jobs)
    assert found[:3] == [[]] * 3
    assert any("gradient of" in problem for problem in found[3])


@pytest.mark.slow
def test_components_of_the_loss_are_certified_in_every_layout(subject, tmp_path: Path):
    names = [name for name in ALGORITHMS if "streams" in name or "distillation" in name]
    layouts = [name for name, (ranks, _) in LAYOUTS.items() if ranks == 2]
    jobs = [subject(algorithm=name) | case(layout) for name in names for layout in layouts]
    _, found = measured(tmp_path, jobs)
    assert found == [[]] * 2 * len(layouts)


@pytest.mark.parametrize(
    ("source", "more"), [("rollout", []), pytest.param("old", ["train.num_epochs_per_step=2"], marks=pytest.mark.slow)]
)
def test_replayed_experts_are_certified(subject, tmp_path: Path, source: str, more: list[str]):
    """Of the engine: drawn at random, so that routers left to themselves would differ; and one token off."""
    common = subject(f"actor.routing_replay={source}", *more)
    cases = [case("DP2"), case("TP2+SP", recompute="full"), case("PP2xVPP2"), case("CP2"), case("EP2")]
    wrong = [case("CP2", "experts-of-token-before")] if source == "rollout" else []
    _, found = measured(tmp_path, [common | each for each in cases + wrong])
    assert found[: len(cases)] == [[]] * len(cases)
    assert all(any("gradient of" in problem for problem in problems) for problems in found[len(cases) :])


@pytest.mark.slow
def test_adapters_are_certified(subject, tmp_path: Path):
    """Their gradients and updates, with the model without them as reference."""
    cases = [case("DP2", distributed=True), case("TP2+SP", recompute="full"), case("CP2"), case("EP2")]
    results, found = measured(tmp_path, [subject(config="quickstart_lora") | each for each in cases])
    assert found == [[]] * len(cases)
    for result in results[1:]:
        assert result["gradients"] and all(".lora_" in name for name in result["gradients"])


def test_latent_attention_is_certified_and_its_fault_found(subject, tmp_path: Path):
    cases = [case("TP2+SP"), case("PP2xVPP2", recompute="full"), case("TP2+SP", "latent-projections-cut-over-tp")]
    results, found = measured(tmp_path, [subject(family="deepseek_v3") | each for each in cases])
    assert found[:2] == [[], []]
    assert results[2]["loss_error"] < 1e-6, "a loss that agrees proves nothing"
    # half of the heads' part is missing in every layer: a large share of the gradient, no rounding of a right one
    spoiled = [ratio for name, ratio in results[2]["gradients"].items() if name.endswith("kv_a_proj_with_mqa.weight")]
    assert len(spoiled) == 4 and min(spoiled) > 1e-2, spoiled
    assert any("gradient of" in problem for problem in found[2])
    assert len(results[0]["gradients"]) > 100 and "router" not in str(results[0]["gradients"].keys())


TWO_RANKS = ("TP2+SP", "CP2", "PP2xVPP2", "TP2xEP2")


def certified(folder: Path, subject: dict, faults: Mapping[str, str], layouts: Sequence[str] = TWO_RANKS) -> list[dict]:
    """Asserts that each layout is right and that each mistake, planted in its layout, is found in gradients; returns
    what was measured."""
    jobs = [*map(case, layouts), *(case(layout, fault) for fault, layout in faults.items())]
    results, found = measured(folder, [subject | each for each in jobs])
    assert found[: len(layouts)] == [[]] * len(layouts), dict(zip(layouts, found, strict=False))
    for fault, problems in zip(faults, found[len(layouts) :], strict=True):
        assert any("gradient of" in problem for problem in problems), fault
    return results


@pytest.mark.slow
def test_gated_delta_nets_are_certified_and_their_faults_found(subject, tmp_path: Path):
    faults = dict.fromkeys(("state-kept-over-borders", "inner-norm-centered", "norms-not-centered"), "DP2")
    certified(tmp_path, subject(family="qwen3_5_moe_text"), faults, ("TP2+SP",))


@pytest.mark.slow
@pytest.mark.verifies(
    "actor",
    "Nemotron-3's Mamba-2 layers and latent experts equal transformers; a state kept over a packed border, a gate "
    "behind the norm and gradients that ranks do not add are found",
    "dist/test_actor_families.py",
)
def test_mamba_layers_and_latent_experts_are_certified_and_their_faults_found(subject, tmp_path: Path):
    faults = {"state-kept-over-borders": "DP2", "gate-behind-norm": "DP2", "latent-gradients-not-summed": "TP2xEP2"}
    certified(tmp_path, subject(family="nemotron_h"), faults, ("TP2+SP", "CP2", "PP2", "TP2xEP2"))


@pytest.mark.slow
@pytest.mark.verifies(
    "actor",
    "Kimi-Linear's Kimi Delta Attention and latent attention without positions equal the published equations in "
    "float64; a state kept over a packed border, one decay a head, turned keys and gradients that ranks do not add "
    "are found",
    "dist/test_actor_families.py",
)
def test_kimi_delta_attention_is_certified_and_its_faults_found(subject, tmp_path: Path):
    faults = {"state-kept-over-borders": "DP2", "decays-of-heads": "DP2", "latent-keys-turned": "CP2"}
    faults |= {"narrow-gradients-not-summed": "TP2+SP"}
    results = certified(tmp_path, subject(family="kimi_linear"), faults)
    unsummed = {name for name, ratio in results[-1]["gradients"].items() if ratio > ABOVE}
    assert unsummed and all(name.endswith(("f_a_proj.weight", "g_a_proj.weight")) for name in unsummed)


def test_norms_over_all_heads_are_certified_and_their_fault_found(subject, tmp_path: Path):
    cases = [case("TP2+SP"), case("TP2+SP", "head-norms-cut-over-tp")]
    results, found = measured(tmp_path, [subject(family="minimax_m2") | each for each in cases])
    assert found[0] == []
    assert results[1]["loss_error"] < 1e-6, "a loss that agrees proves nothing"
    spoiled = {name for name, ratio in results[1]["gradients"].items() if ratio > ABOVE}
    assert len(spoiled) == 8 and all(name[:-7].endswith(("q_norm", "k_norm")) for name in spoiled)
    assert min(results[1]["gradients"][name] for name in spoiled) > 0.1, "not a rounding"


@pytest.mark.slow
@pytest.mark.verifies(
    "actor",
    "gpt-oss is certified: sinks, windows, experts with biases; three planted mistakes are found",
    "dist/test_actor_families.py",
)
def test_sinks_and_windows_are_certified_and_their_faults_found(subject, tmp_path: Path):
    faults = {"sinks-of-another-rank": "TP2+SP", "window-one-wider": "CP2", "no-sinks": "DP2"}
    certified(tmp_path, subject(family="gpt_oss"), faults)


@pytest.mark.verifies(
    "actor",
    "DeepSeek-V4 is certified: residual streams, compressed attention, tables of experts; three planted mistakes",
)
def test_streams_and_tables_are_certified_and_their_faults_found(subject, tmp_path: Path):
    faults = {"tokens-of-first-rank": "TP2+SP", "mixing-gradients-not-summed": "TP2xEP2", "windows-of-their-own": "CP2"}
    certified(tmp_path, subject(family="deepseek_v4"), faults)


@pytest.mark.slow
@pytest.mark.verifies(
    "actor",
    "Qwen3.8-Flash-Next equals SGLang's equations in float64: gated residual streams, attention over chosen blocks of "
    "keys, embeddings of n-grams; n-grams over a packed border, blocks chosen by their first token and gradients that "
    "ranks do not add are found",
    "dist/test_actor_families.py",
)
def test_gated_streams_and_ngrams_are_certified_and_their_faults_found(subject, tmp_path: Path):
    faults = {"ngrams-over-borders": "DP2", "blocks-by-first-token": "CP2", "mixing-gradients-not-summed": "TP2xEP2"}
    certified(tmp_path, subject(family="qwen4_exp"), faults)


@pytest.mark.slow
@pytest.mark.verifies(
    "actor",
    "GLM-5.3-Flash equals SGLang's equations in float64; it is certified: bounded decays, pools of keys, the mean of "
    "residual streams; four planted mistakes",
    "dist/test_actor_families.py",
)
def test_pools_and_bounded_decays_are_certified_and_their_faults_found(subject, tmp_path: Path):
    faults = {"state-kept-over-borders": "DP2", "decays-without-bound": "DP2", "pools-of-last-keys": "CP2"}
    faults |= {"mixing-gradients-not-summed": "TP2xEP2"}
    certified(tmp_path, subject(family="glm5_next"), faults)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["mixtral", "glm4_moe", "deepseek_v3", "kimi_k2", "minimax_m2", "qwen3_5_moe", "qwen3_next"]
)
def test_large_families_are_certified(subject, tmp_path: Path, family: str):
    """Every layout of two ranks, and the faults of every family."""
    layouts = [name for name, (ranks, _) in LAYOUTS.items() if ranks == 2]
    cases = [*map(case, layouts), *(case(layout, fault) for fault, layout in SPOILED.items())]
    _, found = measured(tmp_path, [subject(family=family) | each for each in cases])
    right, wrong = found[: len(layouts)], found[len(layouts) :]
    assert right == [[]] * len(layouts), dict(zip(layouts, right, strict=True))
    assert all(wrong), dict(zip(SPOILED, wrong, strict=True))


def certify(folder: Path, *arguments: str, family: str = "qwen3_moe") -> subprocess.CompletedProcess:
    """`megagrpo certify` of the quickstart with a model of `family`, in folder/run."""
    settings = [f"output_dir={folder / 'run'}", *described(folder, family)]
    words = [*arguments, *(word for setting in settings for word in ("--set", setting))]
    command = [sys.executable, "-m", "megagrpo.cli", "certify", str(CONFIG), *words]
    return subprocess.run(command, cwd=CONFIG.parents[1], capture_output=True, text=True)


@pytest.mark.slow
def test_the_command_fails_above_the_bound_and_reports(tmp_path: Path, monkeypatch, capsys):
    """The ranks of two processes are the pool's, with a fault; those of one compute the reference without it."""

    def ranks_of_pool(config: ExperimentConfig, name: str, words: list[str]) -> int:
        file = config.run_folder.config
        dump_config(config, file)
        assert not words and name == "certify" and load_config(file) == config
        fault = "no-data-parallel-reduction" if config.actor.world_size > 1 else None
        planted = {"command": str(file), "fault": fault}
        run_ranks(config.actor.world_size, file.parent / "jobs", [planted], "certify_ranks.py")
        return 0

    monkeypatch.setattr(command, "train_ranks", ranks_of_pool)
    folder = tmp_path / "run"
    config = load_config(str(CONFIG), [f"output_dir={folder}", *described(tmp_path)])
    status = command.certify(config, ranks=2, only=["DP2"])
    printed = capsys.readouterr()
    assert status == 1
    report = json.loads((folder / "certify" / "report.json").read_text())
    assert not report["passed"] and report["not_run"]["TP2xPP2"] == "needs 4 ranks, 2 were given"
    failed = [(case["case"]["layout"], bool(case["failures"])) for case in report["cases"]]
    alone = [("1 rank", False)] * 8
    alone.insert(1, (NEIGHBOR.layout, False))
    assert failed == alone + [("DP2", True)] * 9
    assert "FAILED" in printed.out and (folder / "certify" / "report.md").read_text() in printed.out
    assert "above the bound" in printed.err


@pytest.mark.parametrize(("status", "ends"), [(1, 2), (130, 130)])
def test_ranks_that_fail_are_no_verdict(tmp_path: Path, monkeypatch, status: int, ends: int):
    monkeypatch.setattr(command, "train_ranks", lambda *_: status)
    config = load_config(str(CONFIG), [f"output_dir={tmp_path / 'run'}", *described(tmp_path)])
    assert command.certify(config, ranks=1) == ends, "1 is a layout that differs"


@pytest.mark.parametrize("ranks", ["1", pytest.param("4", marks=pytest.mark.slow)])
def test_the_command_passes_what_is_right(tmp_path: Path, ranks: str):
    done, folder = certify(tmp_path, "--ranks", ranks), tmp_path / "run" / "certify"
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout and (folder / "report.md").read_text() in done.stdout
    report = json.loads((folder / "report.json").read_text())
    assert report["passed"] and (ranks == "1" or not report["not_run"])

"""Does `run` run what `check` accepts? Draws settings over the schema, checks them, runs some.

    python bench/fuzz.py [--draws 2000] [--runs 60] [--seed 0] [--minutes 60] [--folder FOLDER]

A draw is one to nine values for keys of the schema, within their bounds and choices or, in every
second draw, not; it is laid over the tests' tiny experiment. Each goes through `megagrpo check`, in
this process, whose questions to Megatron-Core and SGLang are answered by one process each that
stays, as do graders' processes. Draws that check accepts and that fit this machine are run: one or
two steps, one rank or two, `megagrpo run` as a process of its own. Broken promises are a traceback
of check, a problem that names neither key nor file, and a run that fails after check accepted it;
each is minimized by leaving settings out as long as it stays broken, a run only while time is left.
What has time limits in seconds gets generous ones: they are the machine's matter. Writes
bench/results/fuzz.{json,md}, beside what other seeds have found.
"""

import argparse
import contextlib
import io
import json
import os
import random
import re
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args, get_origin

from common import RESULTS, ROOT, provenance, write_results
from pydantic_core import PydanticUndefined

sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from run_megagrpo import Job, prepared, write_experiment

from megagrpo import cli
from megagrpo.check import libraries
from megagrpo.config.fields import Section, all_paths, members, sections
from megagrpo.config.load import load_config
from megagrpo.config.reward import RewardConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.rewards.pool import RewardPool
from megagrpo.tools.check import trial_texts
from megagrpo.tools.plan import libraries as all_libraries

RUN_LIMIT_S = 1200.0
BASE: dict[str, dict] = {
    "train": {"num_steps": 1, "num_prompts_per_step": 4, "group_size": 4},
    "actor": {"world_size": 1, "parallel": {"ep": 1}, "deadline_s": 1200},
    "rollout": {"start_timeout_s": 600, "step_timeout_s": 600, "max_running_requests": 64},
    "weights": {"timeout_s": 900},
}
# sections that are none by default, and what they need
OPENED: dict[str, object] = {
    "eval": {"data": {"path": "data/eval.jsonl"}},
    "sampling.environment": {"function": "graders_of_tests:SaysItAgain", "rewards": False},
    "sampling.agent": {"command": ["true"]},
    "algorithm.kl.adaptive": {"target": 0.1, "horizon": 10000},
    "algorithm.mismatch.weight": {"name": "tis"},
    "algorithm.mismatch.reject": {"high": 2.0},
    "algorithm.dynamic_sampling": {"max_num_gen_batches": 20},
    "algorithm.reward.overlong": {},
    "actor.lora": {},
    "actor.router_losses": {"balance": 0.001},
    "actor.draft": {},
    "actor.vision": {},
    "sft": {"path": "data/sft.jsonl", "model": "model"},
}
# right values that types and bounds do not tell; None: never set
SPECIAL: dict[str, list[object] | None] = {
    "name": ["fuzz"],
    "output_dir": None,
    "model": None,
    "data.path": ["data/train.jsonl", ["data/train.jsonl"]],
    "data.sources": [[{"source": "a", "path": "data/train.jsonl", "ratio": 1.0}]],
    "data.prompt_template": ["{prompt}", "Solve {prompt}"],
    "eval.data": None,
    "sft.path": None,
    "sft.model": None,
    "log.wandb": None,
    "checkpoint.load": None,
    "rollout.host": ["127.0.0.1", "0.0.0.0"],
    "reward.grader": ["exact", "graders_of_tests:low_digits"],
    "reward.group_grader": ["rank", "distinct"],
    "sampling.stop": [["1"], ["12", "-"]],
    "sampling.stop_token_ids": [[1], [3, 4]],
    "sampling.environment.function": None,
    "sampling.environment.args": [{}],
    "sampling.agent.function": None,
    "sampling.agent.command": [["true"]],
    "algorithm.dynamic_sampling.max_num_gen_batches": [20],
    "log.dump_steps": [[1], [1, 2]],
    "log.alarms": [[], ["entropy_left"]],
    "actor.lora.targets": [["q_proj"], ["gate_proj", "up_proj"], ["o_proj", "down_proj"]],
    "actor.ddp": [{"overlap_grad_reduce": True}, {"bucket_size": 20000}, {"pad_buckets_for_high_nccl_busbw": True}],
    "actor.optimizer.megatron": [
        {"adam_beta1": 0.8}, {"adam_eps": 1e-6}, {"optimizer_cpu_offload": True},
        {"use_precision_aware_optimizer": True}, {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True},
    ],
    "actor.megatron": [
        {"moe_permute_fusion": True}, {"attention_backend": "unfused"},
        {"moe_token_dispatcher_type": "allgather"},
        {"moe_router_dtype": "fp64"}, {"recompute_modules": ["core_attn"]}, {"apply_rope_fusion": True},
        {"gradient_accumulation_fusion": True}, {"deallocate_pipeline_outputs": True}, {"fp8": "hybrid"},
        {"overlap_p2p_comm": True},
    ],
    "rollout.sglang": [
        {"page_size": 1}, {"page_size": 16}, {"chunked_prefill_size": -1}, {"chunked_prefill_size": 64},
        {"max_total_tokens": 512}, {"context_length": 64}, {"schedule_policy": "lpm"}, {"max_prefill_tokens": 64},
        {"schedule_conservativeness": 0.3}, {"disable_radix_cache": True}, {"stream_interval": 4},
        {"kv_cache_dtype": "fp8_e4m3"}, {"enable_hierarchical_cache": True, "hicache_ratio": 1.5},
    ],
}  # fmt: skip
WRONG = ["", "nope", -1, 0, 2.5, 2**63, 1e300, True, None, [], {}, [-1], ["nope"], {"nope": 1}]
SECONDS = [300.0, 600.0, 601.5]  # of keys that end in _s
_OFFERED: dict[object, list[object]] = {int: [1, 2, 3, 4, 8], float: [0.001, 0.1, 0.5, 1.0, 2.0]}


def leaves(model: type[Section], prefix: str = "") -> Iterator[tuple[str, list[object]]]:
    """Yields every key below a section with right values for it."""
    for name, field in model.model_fields.items():
        path = prefix + name
        kinds = members(field.annotation)
        if path in SPECIAL:
            if SPECIAL[path] is not None:
                yield path, SPECIAL[path]
        elif inner := sections(kinds):
            if path in OPENED:
                yield path, [OPENED[path], None]
            if len(inner) > 1:
                yield (
                    f"{path}.name",
                    [v for s in inner for v in get_args(s.model_fields["name"].annotation)],
                )
            for section in inner:
                yield from (
                    leaf for leaf in leaves(section, f"{path}.") if leaf[0] != f"{path}.name"
                )
        else:
            values = [value for kind in kinds for value in _values(kind, name, field.default)]
            bounds = {
                key: getattr(item, key)
                for item in field.metadata
                for key in ("ge", "gt", "le", "lt")
                if hasattr(item, key)
            }
            yield path, [value for value in values if _within(value, bounds)] or [field.default]


def _values(kind: object, name: str, default: object) -> list[object]:
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if kind is bool:
        return [True, False]
    if kind in _OFFERED:
        return SECONDS if name.endswith("_s") else [*_OFFERED[kind], default]
    return [None] if kind is type(None) else []


def _within(value: object, bounds: dict) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return True
    return (
        value >= bounds.get("ge", value)
        and value <= bounds.get("le", value)
        and not ("gt" in bounds and value <= bounds["gt"])
        and not ("lt" in bounds and value >= bounds["lt"])
    )


RIGHT: dict[str, list[object]] = {}  # key -> values; variants of a section share keys
for _path, _found in leaves(ExperimentConfig):
    _found = [value for value in _found if value is not PydanticUndefined]
    RIGHT.setdefault(_path, []).extend(_found or ["text"])
KEYS = list(RIGHT)


def draw(rng: random.Random, odd: bool) -> list[str]:
    """Returns settings as `--set` takes them; odd: some of the values are wrong."""
    words = []
    for path in rng.sample(KEYS, rng.randint(1, 9)):
        for around, opened in OPENED.items():
            if path.startswith(f"{around}.") and rng.random() < 0.9:
                words.append(f"{around}={json.dumps(opened)}")
        wrong = odd and rng.random() < 0.3
        words.append(f"{path}={json.dumps(rng.choice(WRONG if wrong else RIGHT[path]))}")
    return list(dict.fromkeys(words))


def fits(config: ExperimentConfig) -> bool:
    """Returns whether two cores run it in about a minute."""
    train, rollout = config.train, config.rollout
    return (
        config.actor.world_size <= 2
        and rollout.num_engines == rollout.tp == 1
        and train.num_prompts_per_step * train.group_size <= 64
        and train.steps(8) <= 4
        and train.num_updates_per_step * train.num_epochs_per_step <= 8
        and config.sampling.max_response_tokens <= 64
        and config.sampling.agent is None
        # a random model gets no two rewards of the other graders
        and (config.algorithm.dynamic_sampling is None or "low_digits" in str(config.reward))
        and config.actor.device != "cuda"
        and not (
            config.actor.device == "auto" and "bfloat16" in (config.actor.dtype, rollout.dtype)
        )
    )


# ---- checks ------------------------------------------------------------------------------------


class Asked:
    """megagrpo.tools.plan.libraries in a process that stays, with an engine's environment or not."""

    def __init__(self, environment: dict[str, str] | None):
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--answer"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment and {**environment, "PYTHONPATH": f"{environment.get('PYTHONPATH', '')}:{ROOT}"},
        )  # fmt: skip

    def __call__(self, job: object) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        said = json.loads(self.process.stdout.readline())
        if isinstance(said, list):
            raise ValueError(f"the library's process ends:\n{said[0]}")
        return said


@contextlib.contextmanager
def pool_of(config: RewardConfig, kept: dict[str, RewardPool]) -> Iterator[RewardPool]:
    """Keeps the processes of the last graders for the next draw, which mostly has the same."""
    key = config.model_dump_json()
    if key not in kept:
        for pool in kept.values():
            pool.close()
        kept.clear()
        kept[key] = RewardPool(config)
    yield kept[key]


def answer() -> None:
    """The other side: answers a job a line until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    for line in sys.stdin:
        sys.stdin, out = io.StringIO(line), io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                all_libraries.main()
        except Exception:  # as a process of its own would end
            print(json.dumps([traceback.format_exc()]), file=answers, flush=True)
        else:
            print(json.dumps(out.getvalue()), file=answers, flush=True)


def checked(experiment: Path, settings: Sequence[str]) -> tuple[str, str]:
    """Returns "accepted", "refused", "traceback" or "no key", and what check says."""
    words = [word for text in settings for word in ("--set", text)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main(["check", str(experiment), *words])
        except Exception:
            return "traceback", traceback.format_exc()[-2000:]
    if status == 0:
        return "accepted", ""
    said = out.getvalue().partition("PROBLEMS")[2].partition("\n\n")[0] or err.getvalue()
    problems = [line for line in said.splitlines()[1:] if line.startswith("  ") and line.strip()]
    unnamed = [line for line in problems if not _names_a_key(line)]
    return ("refused" if problems and not unnamed else "no key"), said


_PATHS = [path for path in all_paths(ExperimentConfig) if "." in path]


def _names_a_key(line: str) -> bool:
    """A place in the experiment, a key by its path, or a row of a file of data, or more of these."""
    return bool(re.search(r"--set |\.yaml:\d+|\.jsonl|more rows like these", line)) or any(
        path in line for path in _PATHS
    )


def minimized(settings: list[str], broken: Callable[[list[str]], bool]) -> list[str]:
    """Leaves settings out, one after the other, as long as the rest is broken."""
    for text in list(settings):
        rest = [other for other in settings if other != text]
        if rest and broken(rest):
            settings = rest
    return settings


# ---- runs --------------------------------------------------------------------------------------


def run(experiment: Path, settings: Sequence[str], folder: Path) -> tuple[int, float, str]:
    """`megagrpo run` into `folder`, which must not be there; returns status, seconds, last lines."""
    words = [word for text in (*settings, f"output_dir={folder}") for word in ("--set", text)]
    start = time.monotonic()
    try:
        done = Job("run", experiment, *words).finish(RUN_LIMIT_S)
        status, said = done.status, done.stderr
    except AssertionError as exc:
        status, said = -1, str(exc)
    return status, time.monotonic() - start, "\n".join(said.strip().splitlines()[-6:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=120.0, help="no run starts after these")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "fuzz")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    end = time.monotonic() + 60 * args.minutes
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    prepared(folder)
    experiment = write_experiment(folder / "fuzz", **BASE)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = f"{folder}:{ROOT}"  # graders, also for their processes
    plain = load_config(experiment)
    asked = {"megatron": Asked(None), "sglang": Asked(libraries.as_engine(plain))}
    in_a_process = libraries.answer_of

    def answered(module: str, job: list | dict, environment: dict, problem: str) -> str:
        if isinstance(job, dict):  # of an engine for GPUs, which are pretended once a process
            return in_a_process(module, job, environment, problem)
        return asked[job[0]](job)

    libraries.answer_of = all_libraries.answer_of = answered
    pools: dict[str, RewardPool] = {}
    trial_texts.RewardPool = lambda config: pool_of(config, pools)
    rng = random.Random(args.seed)
    counts = dict.fromkeys(("accepted", "refused", "traceback", "no key"), 0)
    broken, runnable = [], []
    started = time.monotonic()
    for number in range(args.draws):
        settings = draw(rng, odd=number % 2 == 1)
        verdict, said = checked(experiment, settings)
        counts[verdict] += 1
        if verdict in ("traceback", "no key"):
            least = minimized(
                settings, lambda rest, kind=verdict: checked(experiment, rest)[0] == kind
            )
            broken.append(
                {"what": verdict, "settings": least, "said": checked(experiment, least)[1]}
            )
            print(f"== {verdict}: {least}\n{broken[-1]['said']}", flush=True)
        if verdict == "accepted" and fits(load_config(experiment, settings)):
            runnable.append(settings)
        if number % 100 == 99:
            print(f"{number + 1} draws, {time.monotonic() - started:.0f} s: {counts}", flush=True)
    checks_s = time.monotonic() - started
    ended = []
    # the draws with the most settings first: as many pairs as the time allows
    for settings in sorted(runnable, key=len, reverse=True)[: args.runs]:
        if time.monotonic() > end:
            break
        status, seconds, said = run(experiment, settings, folder / f"run_{len(ended):03}")
        ended.append({"settings": settings, "status": status, "seconds": seconds, "said": said})
        print(f"run {len(ended)}: status {status}, {seconds:.0f} s: {settings}", flush=True)
        if status:
            print(said, flush=True)
            numbers = iter(range(1, 100))

            def fails(rest: list[str], of: int = len(ended), numbers: Iterator = numbers) -> bool:
                at = folder / f"run_{of:03}_less_{next(numbers)}"
                return time.monotonic() < end and run(experiment, rest, at)[0] != 0

            least = minimized(settings, fails)
            broken.append({"what": f"run ended with {status}", "settings": least, "said": said})
        _write(args, counts, checks_s, ended, broken)
    _write(args, counts, checks_s, ended, broken)
    for pool in pools.values():
        pool.close()
    for process in asked.values():
        process.process.stdin.close()
        process.process.wait()


def _write(
    args: argparse.Namespace, counts: dict, checks_s: float, ended: list[dict], broken: list[dict]
) -> None:
    """Beside what other seeds have found."""
    file = RESULTS / "fuzz.json"
    seeds = json.loads(file.read_text())["seeds"] if file.exists() else {}
    seeds[str(args.seed)] = {
        "counts": counts, "checks_s": checks_s, "runs": ended, "broken": broken,
    }  # fmt: skip
    rows = [
        _row(f"seed {seed}", [one]) for seed, one in sorted(seeds.items(), key=lambda s: int(s[0]))
    ]
    rows.append(_row("all", list(seeds.values())))
    for one in seeds.values():
        rows += [
            (f"broken: {item['what']}", f"`{' '.join(item['settings'])}`", *[""] * 5)
            for item in one["broken"]
        ]
    write_results("fuzz", {**provenance(), "seeds": seeds}, HEADER, rows)


HEADER = (
    "", "draws checked", "accepted", "refused, each problem with a key or a file",
    "tracebacks of check, problems without a key", "accepted and run", "of those, failed",
)  # fmt: skip


def _row(name: str, seeds: list[dict]) -> tuple[str, ...]:
    def total(*kinds: str) -> int:
        return sum(one["counts"][kind] for one in seeds for kind in kinds)

    runs = [run for one in seeds for run in one["runs"]]
    return (
        name,
        f"{total('accepted', 'refused', 'traceback', 'no key'):,}, "
        f"{sum(one['checks_s'] for one in seeds):,.0f} s",
        f"{total('accepted'):,}",
        f"{total('refused'):,}",
        str(total("traceback", "no key")),
        f"{len(runs)}, {sum(run['seconds'] for run in runs) / 60:.0f} min",
        str(sum(run["status"] != 0 for run in runs)),
    )


if __name__ == "__main__":
    answer() if "--answer" in sys.argv else main()

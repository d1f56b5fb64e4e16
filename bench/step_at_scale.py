"""What does a step of the shipped large experiments cost its leader, in seconds of CPU and in memory?

    python bench/step_at_scale.py [--cases 671B ...] [--scale 0.1] [--label after] [--name step_at_scale]

The leader is the real one: sampler, selection, graders' dispatch, environments, batching, statistics,
record, checkpoint of groups, over real HTTP. Played are the engines (one process that answers prepared
ids and log-probabilities, drawn once, as SGLang 0.5.21 writes them: a million tokens a second), the
actor (its log-probabilities are the engines'), the grader (the length of the text) and the environment
(1,400 characters a turn).
The service is the real endpoint with engines that no supervisor started.

Every case is a leader's share of a shipped experiment; --scale takes that part of its prompts, and
--tokens shorter responses. CPU seconds are of the leader's process alone, in a process of its own:
`loop` the thread that samples, `threads` those that it hands work to, `grading` the thread of graders,
`waiting` the main thread meanwhile, for a step of 20 minutes. Memory is the growth of the resident set
during a phase since before the step, in multiples of the tokens' own 8 bytes. `hold` is the longest
callback of the sampling loop: CPU, and wall, which other programs lengthen.

Writes bench/results/NAME.{json,md}, and NAME_engines for the cases of many engines; rows of other
labels stay.
"""

import argparse
import asyncio
import base64
import gc
import json
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from asyncio.events import Handle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from common import RESULTS, ROOT, provenance, write_results

sys.path.insert(0, str(ROOT))
KEY, STEP_S, GOAL_TOKENS, BYTES = "of a bench", 20 * 60.0, 2**26, 8
SPECIAL = ("<unk>", "<bos>", "<eos>")
PROMPT_TOKENS = 512
QUEUE = 4096  # connections that wait to be accepted; more than the kernel allows count as that
RATE = 1e6  # tokens a second of all engines, twenty times those of 671B
VARIANTS = 4  # of a prepared answer


@dataclass(frozen=True)
class Case:
    """A leader's share of a shipped experiment."""

    config: str
    model: str
    prompts: int
    group: int
    tokens: int  # of a response; of a turn
    turns: int = 1
    engines: int = 8
    experts: bool = False
    hold_s: float = 0.0  # before an engine answers


CASES = {
    "671B, 512 x 4 of 32k, dp 1": Case("deepseek_v3_671b", "DeepSeek-V3-0324", 512, 4, 32768),
    "235B, 256 x 16 of 32k, dp 4": Case("qwen3_235b_a22b", "Qwen3-235B-A22B", 64, 16, 32768),
    "agents of 235B, 30 turns, 128k, dp 4": Case(
        "qwen3_235b_search", "Qwen3-235B-A22B", 32, 8, 2900, turns=30
    ),
    "30B, 128 x 16 of 32k, dp 64": Case("qwen3_30b_a3b", "Qwen3-30B-A3B", 2, 16, 32768, engines=64),
    "671B with its engines' experts, a 64th": Case(
        "deepseek_v3_671b", "DeepSeek-V3-0324", 8, 4, 32768, experts=True
    ),
    "a response of 256k": Case("deepseek_v3_671b", "DeepSeek-V3-0324", 1, 2, 262144),
    "1,000 engines, 10,000 in flight": Case(
        "qwen3_235b_a22b", "Qwen3-235B-A22B", 625, 16, 512, engines=1000, hold_s=30.0
    ),
}  # fmt: skip
PHASES = ("loop", "threads", "grading", "batching", "statistics", "recording", "checkpoint")
MEMORY = ("sampling", "batching", "statistics", "recording", "checkpoint")
HEADER = (
    "experiment", "", "M tokens", *(f"{phase} s" for phase in PHASES), "waiting s", "all s", "all s for 67 M",
    "M tokens a second and core", *(f"{phase} x bytes" for phase in MEMORY), "hold ms, CPU", "hold ms, wall",
)  # fmt: skip
OF_ENGINES = (
    "engines", "", "requests in flight", "first request s", "all requests s", "CPU of a request ms", "status s",
    "bookkeeping of a publish s",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="beginnings of their names")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the prompts")
    parser.add_argument("--tokens", type=int, help="most tokens of a response or turn")
    parser.add_argument(
        "--text", action="store_true", help="engines answer in JSON, as servers elsewhere do"
    )
    parser.add_argument("--label", default="now", help="of these rows, such as before and after")
    parser.add_argument("--name", default="step_at_scale", help="of the files")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the files")
    parser.add_argument("--played", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--leader", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.played is not None:
        play(**args.played)
    elif args.leader is not None:
        lead(**args.leader)
    else:
        measure(args)


def measure(args: argparse.Namespace) -> None:
    """Measures the cases that were asked for, one after the other."""
    rows = []
    for name, case in CASES.items():
        if any(name.startswith(wanted) for wanted in args.cases):
            rows.append(
                {"case": name, "label": args.label} | measured(scaled(case, args), args.text)
            )
            print(json.dumps(rows[-1]), flush=True)
    write(args.name, HEADER, line, [row for row in rows if "in_flight" not in row], args.folder)
    many = [row for row in rows if "in_flight" in row]
    write(f"{args.name}_engines", OF_ENGINES, line_of_engines, many, args.folder)


def scaled(case: Case, args: argparse.Namespace) -> Case:
    """The case with that part of its prompts and engines."""
    tokens = min(case.tokens, args.tokens or case.tokens)
    part = {key: max(1, round(getattr(case, key) * args.scale)) for key in ("prompts", "engines")}
    return replace(case, tokens=tokens, hold_s=case.hold_s * min(args.scale, 1.0), **part)


def measured(case: Case, text: bool) -> dict:
    """What the leader's process printed last. text: engines answer in JSON."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        job = {"case": asdict(case), "folder": folder}
        played = subprocess.Popen(
            [sys.executable, __file__, "--played", json.dumps(job | {"text": text})],
            stdout=subprocess.PIPE,
        )
        stack.callback(played.wait)
        stack.callback(played.kill)
        assert played.stdout is not None
        job["url"] = played.stdout.readline().decode().strip()
        assert job["url"], "the played engines did not start"
        words = [sys.executable, "-W", "ignore", __file__, "--leader", json.dumps(job)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])


def write(
    name: str, header: tuple, make: Callable[[dict], list[str]], new: list[dict], to: Path
) -> None:
    """Writes the rows, beside those of other labels that are already there."""
    if not new:
        return
    file = to / f"{name}.json"
    old = json.loads(file.read_text())["rows"] if file.exists() else []
    known = {(row["case"], row["label"]) for row in new}
    rows = [row for row in old if (row["case"], row["label"]) not in known]
    origin = provenance()
    rows += [row | {"commit": origin["commit"]} for row in new]
    order = list(CASES)
    rows.sort(key=lambda row: (order.index(row["case"]), row["label"] != "before"))
    data = origin | {"load": os.getloadavg(), "rows": rows}
    write_results(name, data, header, [make(row) for row in rows], to)


def line(row: dict) -> list[str]:
    cpu, memory = row["cpu"], row["memory"]
    total = sum(cpu[phase] for phase in PHASES)
    return [
        row["case"],
        f"{row['label']} ({row['commit']})",
        f"{row['tokens'] / 1e6:.2f}",
        *(f"{cpu[phase]:.2f}" for phase in PHASES),
        f"{row['waiting']:.1f}",
        f"{total:.1f}",
        f"{total * GOAL_TOKENS / row['tokens']:.1f}",
        f"{row['tokens'] / total / 1e6:.2f}",
        *(f"{memory[phase] / row['tokens'] / BYTES:.1f}" for phase in MEMORY),
        *(f"{1e3 * value:.0f}" for value in row["hold"]),
    ]


def line_of_engines(row: dict) -> list[str]:
    cpu_s = row["cpu"]["loop"] + row["cpu"]["threads"]
    return [
        str(row["engines"]),
        f"{row['label']} ({row['commit']})",
        str(row["in_flight"]),
        f"{row['first_s']:.2f}",
        f"{row['last_s']:.1f}",
        f"{1e3 * cpu_s / row['requests']:.2f}",
        f"{row['status_s']:.3f}",
        f"{row['publish_s']:.2f}",
    ]


# The played engines, and the service.


def prepared(length: int, experts: tuple[int, int, int] | None, seed: int, reason: str) -> dict:
    """An answer of /generate as SGLang 0.5.21 makes it. experts: layers, experts, k."""
    chance = np.random.default_rng(seed)
    ids = len(SPECIAL) + 256 + (VOCABULARY * chance.power(0.35, length)).astype(np.int64)
    logprobs = np.log(chance.power(4.0, length)).astype(np.float32)
    logprobs[chance.random(length) < 0.2] *= np.float32(1e-5)  # certain tokens
    pairs = [
        [value, token, None] for value, token in zip(logprobs.tolist(), ids.tolist(), strict=True)
    ]
    meta = {
        "id": f"{seed:032x}",
        "finish_reason": {"type": reason, "length": length},
        "prompt_tokens": PROMPT_TOKENS,
        "weight_version": "0",
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": pairs,
        "output_token_logprobs_length": length,
        "reasoning_tokens": 0,
        "completion_tokens": length,
        "cached_tokens": 0,
        "weight_versions": [{"version": "0", "start": 0, "end": length}],
        "e2e_latency": 100.5,
    }
    if experts is not None:
        layers, number, k = experts
        tokens = PROMPT_TOKENS + length - 1
        first = chance.integers(0, number, (tokens, layers, 1), np.int32)
        chosen = (first + 7 * np.arange(k, dtype=np.int32)) % number
        meta["routed_experts"] = base64.b64encode(chosen.tobytes()).decode()
    text = "".join(WORDS[token] for token in ids.tolist())
    return {"text": text, "output_ids": ids.tolist(), "meta_info": meta}


def play(case: dict, folder: str, text: bool) -> None:
    """Serves engines and their service until it is killed; prints the service's URL."""
    import aiohttp
    import orjson
    from aiohttp import web

    from megagrpo.models.folder import Model
    from megagrpo.rollout.answer_arrays import pack_answer
    from megagrpo.rollout.service import server
    from megagrpo.rollout.service.node import ThisMachine
    from megagrpo.rollout.service.supervisor import SupervisedEngine
    from megagrpo.system.processes import raise_file_limit
    from megagrpo.system.run_folder import RunFolder

    raise_file_limit()
    of = Case(**case)
    config = experiment(of, folder)
    arch = Model.of(config).arch
    experts = (arch.num_layers, arch.experts.count, arch.experts.per_token) if of.experts else None
    reason = "stop" if of.turns > 1 else "length"
    write = orjson.dumps if text else pack_answer
    bodies = [write(prepared(of.tokens, experts, seed, reason)) for seed in range(VARIANTS)]
    times: list[float] = []
    open_now = most_open = 0
    free_at = 0.0

    async def generate(request: web.Request) -> web.Response:
        nonlocal open_now, most_open, free_at
        times.append(time.time())
        open_now += 1
        most_open = max(most_open, open_now)
        await request.read()
        free_at = max(free_at, time.monotonic()) + of.tokens / RATE
        await asyncio.sleep(max(free_at - time.monotonic(), of.hold_s))
        open_now -= 1
        return web.Response(body=bodies[len(times) % VARIANTS])

    async def seen(request: web.Request) -> web.Response:
        found = {"times": times[:], "in_flight": most_open}
        times.clear()
        return web.json_response(found)

    async def serve() -> None:
        service = server._Service(
            config, RunFolder(Path(folder)), machines=ThisMachine(["0"]), api_key=KEY
        )
        service._http = aiohttp.ClientSession()
        engines = web.Application(client_max_size=2**28)
        engines.add_routes([web.post("/generate", generate), web.get("/seen", seen)])
        urls = []
        for app, host in ((engines, "0.0.0.0"), (service._application(), "127.0.0.1")):
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            # asyncio accepts `backlog` connections before it handles the first one
            listening = socket.create_server((host, 0), backlog=QUEUE)
            await web.SockSite(runner, listening, backlog=16).start()
            listening.listen(QUEUE)
            urls.append(listening.getsockname()[1])
        for index in range(of.engines):
            engine = SupervisedEngine(
                index, config, machines=ThisMachine(["0"]), api_key=KEY, log_dir=Path(folder),
                may_start=asyncio.Event(),
            )  # fmt: skip
            engine.url = f"http://127.1.{index // 250}.{index % 250 + 1}:{urls[0]}"
            engine.state, engine.incarnation = "stale", 1
            engine.mark_ready(1, 0)
            service._engines[engine.id] = engine
        print(f"http://127.0.0.1:{urls[1]} http://127.0.0.1:{urls[0]}", flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


# The leader.


VOCABULARY = 128_000


def _words() -> list[str]:
    """No two alike; a token of text has 4 to 5 characters, as in English."""
    chance = random.Random(0)
    made: dict[str, None] = {}
    while len(made) < VOCABULARY:
        letters = chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(3, 5))
        made[" " * chance.randint(0, 1) + "".join(letters)] = None
    return [*SPECIAL, *map(chr, range(256)), *made]


WORDS = _words()


def tokenizer():
    """A byte-level tokenizer of random words, as large as those of the models."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    words = [
        *SPECIAL,
        *letters.values(),
        *(w.replace(" ", "Ġ") for w in WORDS[len(SPECIAL) + 256 :]),
    ]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>", pad_token="<eos>"
    )  # fmt: skip


def experiment(case: Case, folder: str):
    """The shipped experiment, with the paths and the numbers of the case."""
    from megagrpo.config.load import load_config

    sets = [
        f"model.path={ROOT}/configs/models/{case.model}",
        f"output_dir={folder}",
        f"train.num_prompts_per_step={case.prompts}",
        f"train.group_size={case.group}",
        "train.num_updates_per_step=1",
        "rollout.num_engines=1",
        "rollout.min_healthy_engines=1",
        "rollout.host=127.0.0.1",
        "rollout.max_staleness=0",
        f"rollout.max_running_requests={max(64, case.prompts * case.group // case.engines + 1)}",
        f"sampling.max_response_tokens={131072 if case.turns > 1 else case.tokens}",
        f"actor.routing_replay={'rollout' if case.experts else 'null'}",
    ]
    if case.turns > 1:
        args = {"turns": case.turns}
        environment = {"function": "step_at_scale:Talk", "args": args, "max_turns": case.turns}
        sets += [
            "sampling.agent=null",
            f"sampling.environment={json.dumps(environment | {'workers': 2})}",
        ]
        sets += ["data.chat_template=false", "data.chat_template_args={}", "algorithm.mismatch={}"]
        sets += ["rollout.prefix_cache=flush"]
    else:
        sets += ["reward.grader=step_at_scale:length", "reward.workers=2", "eval=null"]
        sets += ["algorithm.reward={}"]
    return load_config(ROOT / "configs" / f"{case.config}.yaml", sets)


def length(text: str, answer: str) -> float:
    """The played grader."""
    return len(text) % 97 / 97


class Talk:
    """The played environment."""

    def __init__(self, row: dict, seed: int, turns: int):
        self._left = turns

    def reset(self) -> None:
        """Leaves the prompt of the data."""

    def step(self, text: str) -> tuple[str, float, bool]:
        """Returns what it says, a reward, and whether the rollout is over."""
        self._left -= 1
        return "x" * 1400, len(text) % 97 / 97, not self._left


class Holds:
    """The longest callback of each thread's event loop, in seconds of CPU and of wall."""

    def __init__(self) -> None:
        self.longest: dict[int, list[float]] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        plain = Handle._run

        def timed(handle: Handle) -> None:
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            plain(handle)
            took = (time.thread_time() - cpu_s, time.perf_counter() - wall_s)
            of_thread = self.longest.setdefault(threading.get_ident(), [0.0, 0.0])
            of_thread[:] = map(max, of_thread, took)

        Handle._run = timed
        try:
            yield
        finally:
            Handle._run = plain


def cpu_of(thread: threading.Thread | None) -> float:
    """Seconds of CPU of a thread that runs."""
    assert thread is not None and thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def resident(what: str) -> int:
    """Bytes: VmRSS now, or VmHWM, the most since the last `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(text.split()[1]) * 1024 for text in lines if text.startswith(what))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def lead(case: dict, folder: str, url: str) -> None:
    """Makes one step, after one of a single group, and prints what it took as JSON."""
    import httpx
    import torch

    from megagrpo.algo.advantage import with_advantages
    from megagrpo.batching.batch import build_batch
    from megagrpo.batching.updates import plan_updates
    from megagrpo.checkpoint.groups import write_groups
    from megagrpo.data.prompts import PromptSet
    from megagrpo.data.texts import decoder
    from megagrpo.mesh import make_mesh
    from megagrpo.models.folder import Model
    from megagrpo.monitor.metrics import Metrics
    from megagrpo.monitor.rollout_log import RolloutLog
    from megagrpo.rewards.pool import RewardPool
    from megagrpo.rollout.agents.make import make_answering
    from megagrpo.rollout.batches import Batches, BatchPlan, SamplingJob
    from megagrpo.rollout.control import ServiceControl
    from megagrpo.rollout.group_metrics import group_metrics
    from megagrpo.rollout.sampler import Sampler
    from megagrpo.rollout.source import RolloutSource
    from megagrpo.system.processes import raise_file_limit
    from megagrpo.types import AlgoState, Prompt, RolloutGroup, TrainState

    raise_file_limit()
    torch.set_num_threads(1)
    of = Case(**case)
    config = experiment(of, folder)
    model = Model.of(config)
    words = tokenizer()
    mesh = make_mesh(0, 1, torch.device("cpu"), 60.0)
    service, engines = url.split()
    control = ServiceControl(service, KEY)
    chance = np.random.default_rng(1)
    prompts = [
        Prompt(i, "a question", chance.integers(300, 100_000, PROMPT_TOKENS), "an answer")
        for i in range(of.prompts + 1)
    ]
    decode = decoder(words, model, config.sampling.skip_special_tokens)
    holds = Holds()
    cpu: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    memory: dict[str, float] = {}
    with ExitStack() as stack:
        pool = stack.enter_context(RewardPool(config.reward, preload=not config.sampling.rewarding))
        answering = make_answering(config, words)
        stack.callback(answering.close)
        sampler = Sampler(config, 1, control, pool, decode, answering)
        sampler.arch = model.arch if of.experts else None
        taken = PromptSet(tuple(prompts[: of.prompts]), 0, False)
        source = RolloutSource(control, sampler, Batches(config, mesh, taken))

        def finished(plan: BatchPlan) -> list[RolloutGroup]:
            batch = source.begin(plan)
            assert not source.wait([batch], 0)
            return source.take(batch)

        stack.callback(source.close)
        record = stack.enter_context(closing(RolloutLog(config.run_folder, 0, decode)))
        # imports, and starts processes
        warm = finished(BatchPlan(SamplingJob.training(config, 0, 0), prompts[:1], of.prompts))
        updates = (((0,),),)
        build_batch(warm, updates, mesh, model.arch)
        record.write(1, warm)
        del warm
        httpx.get(f"{engines}/seen")
        sampling = source._background._thread
        gc.collect()
        gc.freeze()  # as a run does
        base = resident("VmRSS")

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            forget_peak()
            before = time.process_time()
            yield
            cpu[name] = time.process_time() - before
            memory[name] = resident("VmHWM") - base

        with_loops = [sampling] + ([pool._loop._thread] if pool._loop._thread else [])
        main_s = time.thread_time()
        of_loops = list(map(cpu_of, with_loops))
        began, started = time.time(), time.perf_counter()
        metrics, state = Metrics(), TrainState()
        with phase("sampling"), holds.watched():
            step = source.begin_step(state)
            while plan := step.wanted():
                step.add(finished(plan))
            source.end_step(step, metrics)
            step.finish()
        wall_s = time.perf_counter() - started
        of_loops = [
            cpu_of(thread) - spent for thread, spent in zip(with_loops, of_loops, strict=True)
        ]
        main_s = time.thread_time() - main_s
        cpu |= dict(zip(("loop", "grading"), of_loops, strict=False))
        cpu["threads"] = cpu.pop("sampling") - sum(of_loops) - main_s
        seen = httpx.get(f"{engines}/seen").json()
        groups = step.groups
        tokens = sum(len(sample.token_ids) for group in groups for sample in group.samples)
        with phase("checkpoint"):  # of groups sampled ahead
            write_groups(Path(folder) / "groups", groups)
        with phase("batching"):
            updates = plan_updates(config.train, config.seed, 0)
            batch = build_batch(groups, updates, mesh, model.arch)
            step.forget_values()
        with phase("statistics"):
            group_metrics(metrics, groups, config, taken.sources, mesh)
            played = batch.rollout_logprobs
            batch = replace(batch, old_logprobs=played, ref_logprobs=played)
            most = config.sampling.max_response_tokens
            batch, _, _ = with_advantages(batch, config.algorithm, mesh.reduce, AlgoState(), most)
        del batch, played
        with phase("recording"):
            record.write(1, groups)
            record.flush()
        found = {
            "tokens": tokens,
            "requests": len(seen["times"]),
            "cpu": cpu,
            "waiting": main_s / wall_s * STEP_S,
            "wall": wall_s,
            "memory": memory,
            "hold": holds.longest[sampling.ident],
        }
        if of.hold_s:
            began_status = time.perf_counter()
            control.status()
            found |= {
                "engines": of.engines,
                "in_flight": seen["in_flight"],
                "first_s": min(seen["times"]) - began,
                "last_s": max(seen["times"]) - began,
                "status_s": time.perf_counter() - began_status,
                "publish_s": publish_s(control),
            }
    found["children_s"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    print(json.dumps(found))


def publish_s(control) -> float:
    """Seconds of what a publish asks of the service, as EngineFleet does it."""
    began = time.perf_counter()
    engines = {engine.id: 1 for engine in control.engines()}
    assert not control.report("update", engines) and not control.report("ready", engines, 0)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

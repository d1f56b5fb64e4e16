"""What do 1,000 engines cost trainers in a publish? Before and after, in CPU seconds and bytes.

    git worktree add --detach /somewhere COMMIT
    python bench/many_engines.py --before /somewhere [--engines 1000] [--repeats 3]

Runs the same calls in both trees, alternately, each in a process of its own, and writes the medians of
CPU seconds and their ratio into bench/results/many_engines.md. Engines are played: they have states and
copy lists, no models. The model is Qwen3-235B's experts, of --layers layers, on 128 trainer ranks (tp 4,
pp 8, ep 8); engines have tp 8 and ep 8. Parts:

- connections: one client for each engine
- reports: a publish's reports to the real control endpoint, in another process
- copy lists: rank 0 reads what the ranks of every engine have recorded
- plans of rank 0, and of another rank: made at the first publish, with the messages to engines
- turns: one rank with a link to every second engine starts three batches on each of them, in their order
- first request, a request to each: from a step's begin until an engine has got one, and until all have;
  the engines answer none. The JSON has the seconds of wall, too.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace

KEY, TP, STAGES, EXPERTS, HIDDEN, WIDTH = "of a bench", 8, 8, 128, 4096, 1536
FIRST, EACH, TURNS = "first request", "a request to each", "turns"
PARTS = (
    "connections",
    "reports",
    "copy lists",
    "plans of rank 0",
    "plans of rank 77",
    TURNS,
    FIRST,
    EACH,
)
HEADER = ("part", "engines", "before, CPU s", "after, CPU s", "ratio", "before, MB", "after, MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="the tree of the earlier commit")
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default="many_engines", help="of the files")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.engines))
    elif args.part:
        print(json.dumps(measured(args.part, args.engines, args.layers)))
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    from common import ROOT, provenance, write_results

    rows = []
    for part in args.parts:
        sides: dict[str, list[dict]] = {"before": [], "after": []}
        for _ in range(args.repeats):
            for side, tree in (("before", args.before), ("after", ROOT)):
                words = [sys.executable, "-W", "ignore", __file__, "--part", part]
                words += ["--engines", str(args.engines), "--layers", str(args.layers)]
                environment = os.environ | {"PYTHONPATH": str(tree)}
                done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=True)
                sides[side].append(json.loads(done.stdout.splitlines()[-1]))
                print(part, side, sides[side][-1], flush=True)
        seconds, size = (
            [statistics.median(row[key] for row in sides[side]) for side in sides]
            for key in ("cpu_s", "bytes")
        )
        rows.append({"part": part, "seconds": seconds, "bytes": size, "sides": sides})
    before = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=args.before, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    lines = [
        [
            row["part"],
            str(args.engines),
            *(f"{value:.2f}" for value in row["seconds"]),
            f"{row['seconds'][0] / row['seconds'][1]:.0f}",
            *(f"{value / 1e6:.0f}" for value in row["bytes"]),
        ]
        for row in rows
    ]
    data = provenance() | {"before": before, "layers": args.layers, "rows": rows}
    data["machine"] += f"; before: {before}; {args.layers} layers; medians of {args.repeats}"
    write_results(args.name, data, HEADER, lines)


def measured(part: str, engines: int, layers: int) -> dict[str, float]:
    """CPU seconds of this process, and the growth of its resident set."""
    work = prepared(part, engines, layers)
    began = time.perf_counter()
    before, resident = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kept = work()
    took = time.process_time() - before
    wall_s = time.perf_counter() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident
    if callable(kept):
        kept()
    return {"cpu_s": took, "wall_s": wall_s, "bytes": grown * 1024}


def prepared(part: str, engines: int, layers: int) -> Callable[[], object]:
    match part:
        case "connections":
            return connections(engines)
        case "reports":
            return reports(engines)
        case "copy lists":
            return copy_lists(engines, layers)
        case "turns":
            return turns(engines // 2)
        case "first request" | "a request to each":
            return first_requests(engines, part)
        case _:
            return plans(engines, layers, int(part.split()[-1]))


def connections(engines: int) -> Callable[[], object]:
    from megagrpo.weights.engines.client import EngineConnection

    mailbox = SimpleNamespace(access=("127.0.0.1", 1, "a secret"))
    infos = [
        SimpleNamespace(id=f"engine-{i}", url=f"http://h{i}:1", incarnation=1)
        for i in range(engines)
    ]
    return lambda: [EngineConnection(info, TP, mailbox, KEY, 60.0) for info in infos]


# The control endpoint.


async def serve(engines: int) -> None:
    from aiohttp import web

    from megagrpo.config.load import load_config
    from megagrpo.rollout.service import server
    from megagrpo.rollout.service.node import ThisMachine
    from megagrpo.rollout.service.supervisor import SupervisedEngine
    from megagrpo.system.run_folder import RunFolder

    root = Path(server.__file__).parents[3]
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            root / "configs" / "quickstart.yaml", [f"output_dir={folder}", "rollout.host=127.0.0.1"]
        )
        service = server._Service(
            config, RunFolder(Path(folder)), machines=ThisMachine(["0"]), api_key=KEY
        )
        service._http = None
        played = await serve_requests(engines)
        for index in range(engines):
            engine = SupervisedEngine(
                index, config, machines=ThisMachine(["0"]), api_key=KEY, log_dir=Path(folder),
                may_start=asyncio.Event(),
            )  # fmt: skip
            engine.url = f"http://127.1.{index // 250}.{index % 250 + 1}:{played}"
            engine.state, engine.incarnation = "stale", 1
            engine.mark_ready(1, 0)
            service._engines[engine.id] = engine
        runner = web.AppRunner(service._application(), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        print(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", flush=True)
        await asyncio.Event().wait()


def reports(engines: int) -> Callable[[], object]:
    from megagrpo.rollout import control

    words = [sys.executable, "-W", "ignore", __file__, "--serve", "--engines", str(engines)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    url = process.stdout.readline().decode().strip()
    service = control.ServiceControl(url, KEY)
    together = hasattr(service, "report")

    def publish() -> None:
        ids = [engine.id for engine in service.engines()]
        if together:
            everyone = dict.fromkeys(ids, 1)
            assert not service.report("update", everyone) and not service.report("ready", everyone)
        else:
            with ThreadPoolExecutor(len(ids)) as pool:
                assert all(pool.map(lambda id: service.begin_update(id, 1), ids))
            with ThreadPoolExecutor(len(ids)) as pool:
                assert all(pool.map(lambda id: service.mark_ready(id, 1, 0), ids))
        process.kill()
        process.wait()

    return publish


async def serve_requests(engines: int) -> int:
    """Returns the port of engines that answer no request; prints when the first and when all have one."""
    from aiohttp import web

    asked: set[str] = set()

    async def generate(request: web.Request) -> web.Response:
        before = len(asked)
        asked.add(request.host)
        if len(asked) > before and len(asked) in (1, engines):
            print({1: FIRST, engines: EACH}[len(asked)], flush=True)
        await asyncio.sleep(3600)
        return web.Response()

    app = web.Application(client_max_size=2**28)
    app.add_routes([web.post("/generate", generate)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "0.0.0.0", 0, backlog=4096)
    await site.start()
    return site._server.sockets[0].getsockname()[1]


def first_requests(engines: int, awaited: str) -> Callable[[], object]:
    """A leader's step of two requests to each engine, from its begin on."""
    import torch

    import megagrpo
    from megagrpo.config.load import load_config
    from megagrpo.data.prompts import PromptSet
    from megagrpo.mesh import make_mesh
    from megagrpo.rollout.batches import Batches
    from megagrpo.rollout.control import ServiceControl
    from megagrpo.rollout.sampler import Sampler
    from megagrpo.rollout.source import RolloutSource
    from megagrpo.types import Prompt, TrainState

    words = [sys.executable, "-W", "ignore", __file__, "--serve", "--engines", str(engines)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    control = ServiceControl(process.stdout.readline().strip(), KEY)
    root = Path(megagrpo.__file__).parents[1]
    sets = [f"train.num_prompts_per_step={engines // 4}", "train.group_size=8"]
    config = load_config(root / "configs" / "quickstart.yaml", sets)
    prompts = tuple(Prompt(i, "", list(range(512)), "") for i in range(engines // 4))
    mesh = make_mesh(0, 1, torch.device("cpu"), 60.0)
    batches = Batches(config, mesh, PromptSet(prompts, 0, False))
    source = RolloutSource(control, Sampler(config, 1, control, None, str), batches)

    def end() -> None:
        source.close()
        process.kill()
        process.wait()

    def step() -> Callable[[], None]:
        begun = source.begin_step(TrainState())
        source.begin(begun.wanted())
        while process.stdout.readline().strip() != awaited:
            assert process.poll() is None, "the played engines have ended"
        return end

    return step


# What engines and trainers hold.


def names(layer: int, expert: int) -> list[str]:
    return [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for part in ("gate", "up", "down")
    ]


def held(layers: range, experts: range, apart: bool) -> list:
    """The copies of a rank with these experts. apart: a parameter for each, as in trainers."""
    from megagrpo.weights.copies.recorder import Copy

    made = []
    for layer in layers:
        for number, expert in enumerate(experts):
            gate, up, down = names(layer, expert)
            first, second = (f"{layer}.w13", f"{layer}.w2")
            at_first, at_second = number * 2 * WIDTH * HIDDEN, number * WIDTH * HIDDEN
            if apart:
                first, second, at_first, at_second = (
                    f"{layer}.fc1.{number}",
                    f"{layer}.fc2.{number}",
                    0,
                    0,
                )
            made += [
                Copy(gate, (0, 0), (WIDTH, HIDDEN), first, at_first, (HIDDEN, 1)),
                Copy(up, (0, 0), (WIDTH, HIDDEN), first, at_first + WIDTH * HIDDEN, (HIDDEN, 1)),
                Copy(down, (0, 0), (HIDDEN, WIDTH), second, at_second, (WIDTH, 1)),
            ]
    return made


def of_engine(layers: int) -> list[list]:
    part = EXPERTS // TP
    return [held(range(layers), range(r * part, r * part + part), False) for r in range(TP)]


def copy_lists(engines: int, layers: int) -> Callable[[], object]:
    from megagrpo.weights.copies.recorder import Copy
    from megagrpo.weights.engines.fleet import EngineFleet
    from megagrpo.weights.wire.mailbox import decode, encode

    recorded = [[astuple(copy) for copy in rank] for rank in of_engine(layers)]
    if hasattr(EngineFleet, "sort"):
        store = {f"copies/{rank}": encode(copies) for rank, copies in enumerate(recorded)}
        mailbox = SimpleNamespace(get=lambda key: decode(store[key]))
        fleet = EngineFleet(None, None, {}, None, 60.0)
        fleet._round = [f"engine-{i}" for i in range(engines)]
        fleet._connections = {
            id: SimpleNamespace(id=id, copies=tuple(store), mailbox=mailbox) for id in fleet._round
        }
        return fleet.sort
    answers = [encode({"answer": {"copies": copies}}) for copies in recorded]

    def tuples(values: list) -> list:
        return [tuple(value) if isinstance(value, list) else value for value in values]

    def read() -> list:
        """As EngineConnection.record and Exchange._open did."""
        everyone = [
            [
                [Copy(*tuples(copy)) for copy in decode(answer)["answer"]["copies"]]
                for answer in answers
            ]
            for _ in range(engines)
        ]
        kinds: list = []
        for slices in everyone:
            if slices not in kinds:
                kinds.append(slices)
        return kinds

    return read


def turns(links: int) -> Callable[[], object]:
    from megagrpo.weights.transports.reshard import SendOrder
    from megagrpo.weights.wire.clock import Deadline

    order = SendOrder([range(3)] * links)

    def send(link: int) -> None:
        for _ in range(3):
            with order.turn(link, Deadline(600.0)):
                pass
        order.leave(link)

    def run() -> None:
        with ThreadPoolExecutor(links) as pool:
            list(pool.map(send, range(links)))

    return run


def plans(engines: int, layers: int, rank: int) -> Callable[[], object]:
    import torch

    from megagrpo.weights.transports.reshard import ReshardTransport
    from megagrpo.weights.wire.engine_group import GroupLimits
    from megagrpo.weights.wire.mailbox import encode

    specs = {}
    for layer in range(layers):
        for expert in range(EXPERTS):
            gate, up, down = names(layer, expert)
            specs[gate] = specs[up] = ((WIDTH, HIDDEN), torch.bfloat16)
            specs[down] = ((HIDDEN, WIDTH), torch.bfloat16)
    stage = -(-layers // STAGES)
    part = EXPERTS // 8
    lists = {
        (s, e): held(
            range(min(s * stage, layers), min(s * stage + stage, layers)),
            range(e * part, e * part + part),
            True,
        )
        for s in range(STAGES)
        for e in range(8)
    }
    weights = SimpleNamespace(
        mesh=SimpleNamespace(rank=rank, is_main=rank == 0),
        copies=[lists[s, r % 8] for s in range(STAGES) for r in range(16)],
        specs=specs, bucket_bytes=512 << 20, num_engines=engines, delta=False,
    )  # fmt: skip
    transport = ReshardTransport(weights)
    links = [
        SimpleNamespace(
            name=f"weights-{i}", slot=i, kind=0, carriers=(), num_ranks=TP, patience_s=60.0, left_s=60.0,
            limits=GroupLimits(60.0),
        )
        for i in range(engines)
    ]  # fmt: skip
    kinds = [of_engine(layers)]
    mailbox = SimpleNamespace(put=lambda subject, message: str(len(encode(message))))

    def plan() -> object:
        transport._learn(links, SimpleNamespace(kinds=kinds))
        if rank == 0:
            for link in links:
                transport._requests(SimpleNamespace(mailbox=mailbox), link)
        return transport

    return plan


if __name__ == "__main__":
    main()

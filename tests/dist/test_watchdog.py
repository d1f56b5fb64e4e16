"""The page about who waits for whom, from real gloo ranks of which one is stuck in a way of its own."""

import ctypes
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megagrpo.mesh import make_mesh
from megagrpo.monitor import watchdog
from megagrpo.monitor.watchdog import Watchdog
from megagrpo.system.run_folder import RunFolder
from tests.experiments import experiment

WORLD, STUCK, DEADLINE_S = 3, 1, 12.0


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def holds_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(600)


def sleeps_in_a_loader() -> None:
    time.sleep(600)


def rank_main(rank: int, stuck, folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), WORLD), rank=rank, world_size=WORLD)
    mesh = make_mesh(rank, WORLD, torch.device("cpu"), 60.0)
    config = experiment(weights={"timeout_s": 1}, actor={"deadline_s": DEADLINE_S})
    watchdog._SILENT_S, watchdog._BEAT_S, watchdog._ANSWER_S = 3.0, 1.0, 5.0
    with Watchdog(config, mesh, RunFolder(folder), lambda: 6) as dog:
        if rank == STUCK and stuck is sleeps_in_a_loader:
            dog.waits.append(lambda: "2 sample(s) of the grader (prompts [4])")
        dog.enter("rollout")
        dist.barrier()
        dog.enter("update")
        (folder / f"pid{rank}").write_text(str(os.getpid()))
        if rank == STUCK:
            time.sleep(2.0)  # its last heartbeat is from here
            stuck()
        mesh.reduce(torch.ones(1), "sum")


STUCK_IN = [
    pytest.param(stopped, marks=pytest.mark.slow),
    holds_the_interpreter,
    pytest.param(sleeps_in_a_loader, marks=pytest.mark.slow),
]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("stuck", STUCK_IN, ids=lambda f: f.__name__)
def test_the_page_names_who_holds_up_whom(tmp_path: Path, stuck):
    ranks = mp.spawn(rank_main, args=(stuck, tmp_path), nprocs=WORLD, join=False)
    try:
        end = time.monotonic() + 90
        while not (pages := list((tmp_path / "logs").glob("deadline_*.txt"))):
            assert time.monotonic() < end, "no page"
            time.sleep(0.2)
    finally:
        for process in ranks.processes:
            process.kill()
    assert len(pages) == 1
    page = pages[0].read_text()
    summary, _, stacks = page.partition("\n\n")
    lines = summary.splitlines()
    pid = (tmp_path / f"pid{STUCK}").read_text()
    assert "is in update of step 7 for" in lines[0] and "nothing has moved for" in lines[0]
    assert lines[1].startswith(f"HELD UP BY rank {STUCK} (") and f"pid {pid})" in lines[1]
    assert lines[2].startswith("WAITING: ranks 0, 2: in update of step 7 since ") and len(lines) == 3
    assert "all_reduce" in lines[2] and "mesh.py" in lines[2]
    of_state, of_stacks = {
        stopped: (("no heartbeat since", "in update of step 7 since", "its process is stopped"), ()),
        holds_the_interpreter: (("no heartbeat since",), ("in holds_the_interpreter",)),
        sleeps_in_a_loader: (
            ("waits for 2 sample(s) of the grader (prompts [4]); at ",), ("in sleeps_in_a_loader",),
        ),
    }[stuck]  # fmt: skip
    assert all(words in lines[1] for words in of_state)
    assert all(words in stacks for words in (*of_stacks, "in all_reduce", "== stacks of rank"))

"""Threads of a trainer on GPU 3 work on GPU 3: torch's own rules for devices, over pretended drivers."""

import json
import re
import threading
from types import SimpleNamespace

from megagrpo.system.environment import child_environment
from tests.experiments import ROOT, python

PACKAGE = ROOT / "megagrpo"


def run() -> dict[str, str]:
    """Calls what a run calls, as local rank 3; returns what each came to."""
    from tests.pretended_cuda import OnGpu, current, pretended

    with pretended():
        import torch

        from megagrpo.actor.host import prepare_host

        device = prepare_host(deterministic=True)
        found = {"deterministic": str(torch.are_deterministic_algorithms_enabled())}
        from megagrpo.mesh import make_mesh

        torch.cuda.set_device(device)
        mesh = make_mesh(0, 1, device, deadline_s=30)
        found |= {"device": str(mesh.device), "index": str(torch.cuda._utils._get_device_index(mesh.device))}

        def in_a_thread(name, action) -> None:
            def body() -> None:
                try:
                    with OnGpu():  # a mode holds for its own thread
                        found[name] = f"cuda:{action()}"
                except Exception as exc:
                    found[name] = repr(exc)

            thread = threading.Thread(target=body)
            thread.start()
            thread.join()

        in_a_thread("digest", lambda: digested_on(mesh, current))
        in_a_thread("send", lambda: sent_on(mesh, current))
        in_a_thread("shared buffer", lambda: shared_on(mesh, current))
    return found


def digested_on(mesh, current) -> int:
    import torch

    from megagrpo.weights.expected_digests import ExpectedDigests

    where = []
    weights = SimpleNamespace(
        mesh=mesh, copies=[], specs={}, parameters=lambda: where.append(current()) or {"w": torch.empty(1)}
    )
    assert ExpectedDigests(weights).local().shape == (0,)
    return where[0]


def sent_on(mesh, current) -> int:
    from megagrpo.weights.transports.reshard import SendOrder, _TrainerEnd

    where = []
    link = SimpleNamespace(left_s=30.0, patience_s=30.0)
    end = _TrainerEnd(link, 0, 1, {}, False)
    end._group = SimpleNamespace()  # joined before, and asked to send nothing
    end.send(SimpleNamespace(mesh=mesh, parameters=lambda: where.append(current()) or {}), SendOrder([[]]), 0)
    return where[0]


def shared_on(mesh, current) -> int:
    import torch

    from megagrpo.weights.wire import shared_buffer

    torch.cuda.set_device(mesh.device)  # of the thread that moves weights
    shared_buffer.reduce_tensor = lambda values: (None, (None,) * 7 + (b"", 1, 0, 0, b"", 0, b"", False))
    assert shared_buffer.SharedBuffer(16, mesh.device).values.shape == (16,)
    return current()


def test_threads_of_local_rank_3_work_on_its_gpu():
    env = child_environment({"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": ""})
    printed = python("-m", "tests.unit.test_device_index", cwd=ROOT, env=env)
    expected = dict.fromkeys(("device", "digest", "send", "shared buffer"), "cuda:3")
    assert json.loads(printed.splitlines()[-1]) == expected | {"index": "3", "deterministic": "True"}


def test_no_cuda_device_without_an_index():
    """Megatron and torch take one for the current device, which threads do not share."""
    without = re.compile(r"torch\.device\(\s*[\"']cuda[\"']\s*\)")
    found = [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if without.search(path.read_text())]
    assert not found, found


if __name__ == "__main__":
    print(json.dumps(run()))

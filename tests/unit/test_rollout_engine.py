"""Command line and environment of an engine, and the shims that a CPU needs."""

import asyncio
from itertools import pairwise

import pytest
import torch

from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.service.engine_command import (
    CPU_SHIMS,
    ServerPlace,
    engine_command,
    engine_environment,
    engine_python_path,
)
from megagrpo.system.environment import ENGINE, ENGINE_HEADER, child_environment
from tests.experiments import experiment, python


def config(**rollout) -> ExperimentConfig:
    return experiment(rollout=rollout)


def options(command: list[str]) -> dict[str, str | None]:
    """Flag -> its value, None for a switch."""
    pairs = pairwise([*command[3:], "--"])
    return {word: None if after.startswith("--") else after for word, after in pairs if word.startswith("--")}


def place(cuda: bool, node_rank: int = 0) -> ServerPlace:
    return ServerPlace(node_rank, "127.0.0.1", 20001, "10.0.0.1:20002", cuda, 8, "engine-3")


def test_cpu_engine():
    found = options(engine_command(config(deterministic=True), place(cuda=False)))
    expected = {"--device": "cpu", "--attention-backend": "torch_native", "--sampling-backend": "pytorch"}
    expected |= {"--max-total-tokens": "20000", "--dtype": "float32", "--tokenizer-path": "m"}
    expected |= {"--custom-weight-loader": "megagrpo.weights.engines.loader.run"}
    expected |= dict.fromkeys(("--sleep-on-idle", "--skip-server-warmup", "--enable-deterministic-inference"))
    assert expected.items() <= found.items() and "--nnodes" not in found
    environment = engine_environment(config(), place(cuda=False))
    expected = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "PASSIVE", ENGINE: "engine-3"}
    assert expected.items() <= environment.items() and "SGLANG_CPU_OMP_THREADS_BIND" not in environment
    # the bits of a deterministic run do not depend on how many engines share the cores
    assert engine_environment(config(deterministic=True), place(cuda=False))["OMP_NUM_THREADS"] == "1"


def test_gpu_engine_is_plain():
    command = engine_command(config(tp=8, ep=4, dtype="bfloat16", extra_args=["--x", "y"]), place(cuda=True))
    found = options(command)
    assert (found["--tp-size"], found["--ep-size"], found["--mem-fraction-static"]) == ("8", "4", "0.85")
    of_cpus = {"--device", "--max-total-tokens", "--attention-backend", "--sleep-on-idle"}
    assert not {*of_cpus, "--enable-deterministic-inference"} & set(found) and command[-2:] == ["--x", "y"]
    assert engine_python_path(place(cuda=True)) == []
    assert "SGLANG_USE_CPU_ENGINE" not in engine_environment(config(), place(cuda=True))


def test_engine_over_two_nodes():
    two = config(tp=2, nodes_per_engine=2)
    second = options(engine_command(two, place(cuda=False, node_rank=1)))
    assert (second["--nnodes"], second["--node-rank"], second["--dist-init-addr"]) == ("2", "1", "10.0.0.1:20002")
    # a core for every rank of the engine, not only of the node
    assert engine_environment(two, place(cuda=False, node_rank=1))["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"


def test_an_engine_names_itself_in_its_answers(monkeypatch):
    from megagrpo.rollout.service.engine_process import NamesEngine

    monkeypatch.setenv(ENGINE, "engine-3")
    sent = []

    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b"x"})

    async def send(message):
        sent.append(message)

    asyncio.run(NamesEngine(application)({"type": "http"}, None, send))
    assert sent[0]["headers"] == [(b"a", b"b"), (ENGINE_HEADER.lower().encode(), b"engine-3")]
    assert sent[1] == {"type": "http.response.body", "body": b"x"}


def in_engine_python(code: str) -> str:
    variables, path = engine_environment(config(), place(cuda=False)), engine_python_path(place(cuda=False))
    return python("-c", code, env=child_environment(variables, path))


def test_shims_are_there_for_the_engine_alone():
    code = "import sys, sgl_kernel, sitecustomize; print(sgl_kernel.__file__, sitecustomize.__file__)"
    assert in_engine_python(code) == f"{CPU_SHIMS}/sgl_kernel/__init__.py {CPU_SHIMS}/sitecustomize.py"
    with pytest.raises(AssertionError, match="ModuleNotFoundError"):
        python("-c", "import sgl_kernel")


def test_kernels_are_defined_and_not_run():
    code = """
import triton, triton.language as tl
from triton.runtime.jit import KernelInterface
@triton.jit
def kernel(x, BLOCK: tl.constexpr): return tl.load(x)
@triton.autotune(configs=[triton.Config({"BLOCK": 8})], key=[])
def other(): return 3
class Launcher(KernelInterface[int]): pass
from sgl_kernel import silu_and_mul
try: silu_and_mul(1)
except NotImplementedError as exc: print(kernel.__name__, other(), exc, triton.cdiv(7, 2), triton.next_power_of_2(9))
"""
    assert in_engine_python(code) == "kernel 3 sgl_kernel.silu_and_mul does not exist on a CPU 4 16"


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, for whole blocks of four bytes, from the published algorithm, in integers."""
    state = 0
    for i in range(0, len(data), 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & 0xFFFFFFFF
        k = (k << 15 | k >> 17) & 0xFFFFFFFF
        state ^= k * 0x1B873593 & 0xFFFFFFFF
        state = ((state << 13 | state >> 19) & 0xFFFFFFFF) * 5 + 0xE6546B64 & 0xFFFFFFFF
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return state ^ state >> 16


def test_seed_hash_is_murmur3():
    from megagrpo.rollout.cpu.sgl_kernel import murmur_hash32

    seeds, positions, columns = [0, 2**62 + 12345, 2**63 - 1], [0, 5, 70_000], [0, 1, 151_000]
    got = murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    pack = lambda s, p, c: s.to_bytes(8, "little") + p.to_bytes(4, "little") + c.to_bytes(4, "little")  # noqa: E731
    assert got.tolist() == [[murmur3(pack(s, p, c)) for c in columns] for s, p in zip(seeds, positions, strict=True)]

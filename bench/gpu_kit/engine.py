"""SGLang on this GPU, with its own kernels where they are installed, else with torch's and
Triton's; then the loop."""

import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu_kit.figures import Figures, Setting, Unavailable
from bench.gpu_kit.models import QWEN3_1_7B, description
from examples.laptop.recipe import TinyModelConfig
from megagrpo.config.rollout import RolloutConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.cpu.engine_settings import FOLDER
from megagrpo.rollout.service.engine_command import (
    ServerPlace,
    engine_command,
    engine_environment,
)
from megagrpo.system.environment import child_environment

ROOT = Path(__file__).resolve().parents[2]
_BACKEND = "triton"  # of attention: it needs none of SGLang's CUDA kernels
_READY_S, _ANSWER_S = (
    120.0,
    120.0,
)  # two imports of SGLang and CUDA's start; a first request, which compiles kernels
_PLAIN_KERNELS = (
    *("--attention-backend", _BACKEND, "--sampling-backend", "pytorch"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
)
_BATCH, _DECODED = 128, 256  # requests, and tokens of each
_STEPS = 3
_LAST_LINES = 15


def engine(figures: Figures, setting: Setting) -> None:
    """Starts an engine and samples from it. It may not work here."""
    config = _config(setting)
    command = engine_command(config, _place(30_000))
    figures.add("words of an engine's command", len(command), "", " ".join(command[3:9]))
    _require(setting, "sglang")
    paths, variables = _without_kernels(setting)
    figures.add(
        "sgl_kernel", "its stand-in, and SGLang's plain functions" if paths else "installed"
    )
    _make_model(config)
    try:
        ready, first, tokens_s = _one_engine(config, setting, paths, variables)
    except (RuntimeError, OSError) as exc:
        figures.add("engine", None, note=str(exc))
        return
    figures.add("answers after", ready, "s")
    figures.add("first request", first, "s", "with compilation")
    figures.add("decodes", tokens_s, "tokens/s", "one request, tiny model")


def decode(figures: Figures, setting: Setting) -> None:
    """Decodes with a Qwen3-1.7B of random weights, by SGLang's own kernels where they are
    installed."""
    experiment = _experiment(setting)
    folder = setting.folder / "decode"
    experiment["model"] = {"path": str(folder)}
    experiment["rollout"] |= {"load_format": "dummy", "mem_fraction": 0.8}
    _require(setting, "sglang")
    paths, variables = _without_kernels(setting)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(description("qwen3", QWEN3_1_7B)))
    words = ["--skip-tokenizer-init", *(_PLAIN_KERNELS if paths else [])]
    config = ExperimentConfig.model_validate(experiment)
    with _server(config, setting, words, paths, variables) as port:
        for num_requests in (1, _BATCH):
            _seconds(port, num_requests, 8)  # what is compiled at a first batch
            seconds = _seconds(port, num_requests, _DECODED)
            speed = num_requests * _DECODED / seconds
            figures.add(f"decodes, {num_requests} at once", speed, "tokens/s")


def loop(figures: Figures, setting: Setting) -> None:
    """Runs a few steps of the whole loop on one GPU, colocated where the program can. It may fail:
    that is told."""
    experiment = _loop_experiment(setting)
    config = ExperimentConfig.model_validate(experiment)
    colocated = getattr(config.rollout, "colocate", False)
    figures.add(
        "engines", "on the trainer's GPU, asleep in training" if colocated else "beside the trainer"
    )
    _require(setting, "sglang", "ray")
    file = setting.folder / "loop.yaml"
    file.write_text(json.dumps(experiment))  # JSON is YAML
    paths, variables = _without_kernels(setting)
    recipe = setting.folder / "recipe.yaml"
    recipe.write_text(
        json.dumps(
            {"model": {"family": "qwen3"}, "dataset": {"kind": "arithmetic", "num_train": 256}}
        )
    )
    script = str(ROOT / "examples" / "laptop" / "prepare.py")
    commands = {
        "prepare": [script, str(file), "--recipe", str(recipe)],
        "run": ["-m", "megagrpo.cli", "run", str(file)],
    }
    for command, arguments in commands.items():
        words = [sys.executable, *arguments]
        start = time.perf_counter()
        done = subprocess.run(
            words, env=child_environment(variables, paths), capture_output=True, text=True, cwd=ROOT
        )
        if done.returncode:
            print("\n".join((done.stdout + done.stderr).splitlines()[-_LAST_LINES:]))
            raise RuntimeError(f"{command} ended with status {done.returncode}")
        figures.add(command, time.perf_counter() - start, "s")
    metrics = Path(config.output_dir) / "metrics.jsonl"
    lines = (
        [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    )
    figures.add("steps on record", len(lines))
    for key in ("reward/mean", "time/step", "mismatch/logprob_abs"):
        if lines and key in lines[-1]:
            figures.add(f"last step's {key}", float(lines[-1][key]))


def _one_engine(
    config: ExperimentConfig, setting: Setting, paths: list[str], variables: dict[str, str]
) -> tuple[float, float, float]:
    """Returns seconds until it answers and of a first request, and tokens/s of another.

    RuntimeError with its last lines when it dies.
    """
    start = time.perf_counter()
    with _server(config, setting, _PLAIN_KERNELS, paths, variables) as port:
        ready = time.perf_counter() - start
        first = _seconds(port, 1, 64)
        return ready, first, 64 / _seconds(port, 1, 64)


@contextmanager
def _server(
    config: ExperimentConfig,
    setting: Setting,
    more: Sequence[str],
    paths: list[str],
    variables: dict[str, str],
) -> Iterator[int]:
    """The port of an engine that answers; it is ended with the block. more: words of its command.

    RuntimeError with its last lines when it dies.
    """
    place = _place(30_010)
    log = setting.folder / "engine.log"
    start = time.perf_counter()
    with log.open("w") as output:
        env = child_environment(engine_environment(config, place) | variables, paths)
        words = [*engine_command(config, place), *more]
        server = subprocess.Popen(words, env=env, stdout=output, stderr=output)
    try:
        while not _answers(place.port):
            if server.poll() is not None or time.perf_counter() - start > _READY_S:
                state = (
                    f"ended with {server.poll()}"
                    if server.poll() is not None
                    else "did not answer in time"
                )
                last = [
                    line for line in log.read_text(errors="replace").splitlines() if line.strip()
                ][-_LAST_LINES:]
                print("\n".join(last))
                raise RuntimeError(f"{state}: {last[-1] if last else 'no output'}")
            time.sleep(0.5)
        yield place.port
    finally:
        server.kill()
        server.wait()


def _seconds(port: int, num_requests: int, tokens: int) -> float:
    """Returns seconds of so many requests at once, each answered with so many tokens."""
    requests = [
        {
            "input_ids": [5 + number, 6, 7, 8],
            "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True},
        }
        for number in range(num_requests)
    ]
    start = time.perf_counter()
    with ThreadPoolExecutor(num_requests) as pool:
        list(pool.map(partial(_post, port), requests))
    return time.perf_counter() - start


def _without_kernels(setting: Setting) -> tuple[list[str], dict[str, str]]:
    """Returns folders for PYTHONPATH and variables with which SGLang starts where its CUDA kernels
    are missing.

    Of the CPU's shims only sgl_kernel: the one of Triton would hide the real Triton.
    """
    if _importable("sgl_kernel"):
        return [], {}
    folder = setting.folder / "stand_in"
    folder.mkdir(exist_ok=True)
    if not (folder / "sgl_kernel").exists():
        (folder / "sgl_kernel").symlink_to(FOLDER / "sgl_kernel")
    return [str(folder)], {"SGLANG_FORCE_FUSED_OP_BACKEND": "torch"}


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def _post(port: int, body: dict) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
        answer.read()


def _place(port: int) -> ServerPlace:
    cores = os.cpu_count() or 1
    return ServerPlace(
        node_rank=0,
        bind_host="127.0.0.1",
        port=port,
        rendezvous="127.0.0.1:30099",
        cuda=True,
        num_cores=cores,
    )


def _require(setting: Setting, *libraries: str) -> None:
    if setting.small:
        raise Unavailable("left out at small sizes: it needs a GPU")
    missing = [name for name in libraries if not _importable(name)]
    if missing:
        raise Unavailable(f"not installed here: {', '.join(missing)}")


def _importable(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def _experiment(setting: Setting) -> dict[str, Any]:
    folder = setting.folder / "loop"
    return {
        "name": "kit",
        "output_dir": str(folder / "run"),
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "data" / "train.jsonl"), "max_prompt_tokens": 8},
        "sampling": {"max_response_tokens": 8},
        "reward": {"grader": "exact", "workers": 1},
        "train": {"num_steps": _STEPS, "num_prompts_per_step": 16, "group_size": 4},
        "actor": {"dtype": "bfloat16"},
        "rollout": {
            "num_engines": 1,
            "mem_fraction": 0.3,
            "dtype": "bfloat16",
            "load_format": "model",
        },
    }


def _loop_experiment(setting: Setting) -> dict[str, Any]:
    """Returns the experiment with engines whose attention needs no CUDA kernels of SGLang's own."""
    experiment, colocated = _experiment(setting), "colocate" in RolloutConfig.model_fields
    backend = {"attention_backend": _BACKEND, "sampling_backend": "pytorch"}
    engines: dict[str, Any] = {"sglang": backend}
    if colocated:
        engines["colocate"] = True
    # NCCL refuses two ranks on one GPU
    weights = {"transport": "ipc" if colocated else "disk"}
    return experiment | {"rollout": experiment["rollout"] | engines, "weights": weights}


def _config(setting: Setting) -> ExperimentConfig:
    return ExperimentConfig.model_validate(_experiment(setting))


def _make_model(config: ExperimentConfig) -> None:
    from examples.laptop.model import make_tiny_model

    make_tiny_model(TinyModelConfig(path=config.model.path, family="qwen3"), seed=0)

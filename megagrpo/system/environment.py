"""The only reader of os.environ; builds the environments of child processes."""

import ctypes
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path

import megagrpo

API_KEY = "MEGAGRPO_API_KEY"  # of service and engines; `serve` generates one if it is not set
USER_PATH = "MEGAGRPO_USER_PATH"  # PYTHONPATH as the user set it
REPORTS = "MEGAGRPO_REPORTS"  # the name of the ranks' error reports, which a launcher reads
SCORES_AT = "MEGAGRPO_SCORES_AT"  # the temperature of the scores of a teacher's engine
WEIGHT_LOADER = "megagrpo.weights.engines.loader.run"  # every engine's custom weight loader

# torch reads the first one that is set
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE, _FIXED = "expandable_segments:True", "expandable_segments:False"


get = os.environ.get  # a variable of this process, or a default


def get_int(name: str, default: int) -> int:
    """Returns a variable of this process as a number. Raises ValueError if it is not one."""
    return int(os.environ.get(name, default))


def nccl_interface(name: str) -> dict[str, str]:
    """Returns NCCL's variable for an interface by its whole name, because eth1 would take eth10, too;
    or the user's value."""
    return {"NCCL_SOCKET_IFNAME": get("NCCL_SOCKET_IFNAME") or f"={name}"}


def with_prefixes(prefixes: tuple[str, ...]) -> dict[str, str]:
    """Returns the variables of this process whose names begin so."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}


def cache_folder() -> Path:
    """Returns the folder of what this user's commands remember, by the XDG base directory rule: none
    that can exist if the user has no home, as in some containers."""
    home = get("HOME", "") or os.devnull
    return Path(get("XDG_CACHE_HOME", "") or f"{home}/.cache") / "megagrpo"


def secret(name: str | None, owner: str) -> str:
    """Returns the key in the variable that `api_key_env` names, without white space around it; ""
    if it names none. Raises ValueError, without the key, if the variable is not set or if no HTTP
    header can have its value."""
    if name is None:
        return ""
    key = get(name, "").strip()
    if not key:
        raise ValueError(f"{owner}: environment variable {name} (api_key_env) is not set here")
    if not key.isascii() or not key.isprintable():
        raise ValueError(
            f"{owner}: environment variable {name} (api_key_env) has a character that no key has"
        )
    return key


def unless_set(**defaults: str) -> dict[str, str]:
    """Returns the variables with these defaults, or with the user's own values."""
    return {name: get(name, value) for name, value in defaults.items()}


def bypass_proxies(host: str) -> None:
    """Makes clients in this process and its children reach a host without the proxies of the
    environment."""
    known = get("no_proxy", "") or get("NO_PROXY", "")
    if known != "*":
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{host},{known}"


def for_a_bare_shell() -> dict[str, str]:
    """Returns the variables of this process, without those that change how bash finds programs,
    functions, options and start files."""
    left_out = ("PATH", "BASH_ENV", "ENV", "SHELLOPTS", "BASHOPTS", "BASH_COMPAT")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in left_out and not name.startswith("BASH_FUNC_")
    }


def under_torchrun() -> bool:
    """Returns whether this process is a rank started by torchrun. Kubeflow's PyTorchJob sets RANK
    and MASTER_ADDR for a node, but no LOCAL_RANK."""
    return {"RANK", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys()


def num_trainer_nodes() -> int:
    """Returns the number of nodes in torchrun's world; 1 outside torchrun."""
    world = get_int("WORLD_SIZE", 1)
    return -(-world // get_int("LOCAL_WORLD_SIZE", world))


@contextmanager
def temporarily(name: str, value: str) -> Iterator[None]:
    """Sets a variable inside the block, for a library that reads it."""
    old = os.environ.get(name)
    with ExitStack() as stack:
        if old is None:
            stack.callback(os.environ.pop, name)
        else:
            stack.callback(os.environ.update, {name: old})
        os.environ[name] = value
        yield


def hide_gpus() -> None:
    """Hides all GPUs from this process and its children. No effect after CUDA was initialized."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def visible_gpus() -> list[str]:
    """Returns the numbers or names of the GPUs that this process may use."""
    shown = get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        if not _has_driver():
            return []
        import torch  # takes seconds

        return list(map(str, range(torch.cuda.device_count())))
    # as CUDA reads it: what follows -1, NoDevFiles, void is not visible either
    return list(takewhile(re.compile(r"\s*(\d+|(GPU|MIG)-\S+)").match, shown.split(",")))


def _has_driver() -> bool:
    """Returns whether CUDA's driver is installed, without which torch sees no GPU."""
    with suppress(OSError):
        return bool(ctypes.CDLL("libcuda.so.1"))
    return False


def nccl_variables(connect_s: float) -> dict[str, str]:
    """Returns the variables that trainers and engines must share, since they are members of one
    NCCL communicator.

    SGLang sets NCCL_CUMEM_ENABLE and NCCL_NVLS_ENABLE to 0 only for itself, unless they are set.
    connect_s: seconds for the ranks of a non-blocking communicator to meet in its first batch;
    torch's default is 30 minutes. Unless dumps are off, torch's heartbeat monitor ends a rank 8
    minutes after one of its peers died.
    """
    return unless_set(
        NCCL_CUMEM_ENABLE="0",
        NCCL_NVLS_ENABLE="0",
        TORCH_NCCL_NONBLOCKING_TIMEOUT=str(math.ceil(connect_s)),
        TORCH_NCCL_DUMP_ON_TIMEOUT="0",
    )


def trainer_rank_variables(
    *, cut: bool, beside_engines: bool, deterministic: bool
) -> dict[str, str]:
    """Returns the variables of trainer ranks in addition to nccl_variables. The user's own values
    take precedence.

    cut: layers are sharded by tensor or context parallelism. beside_engines: engines use the same
    GPUs. deterministic: the run must repeat bit by bit.
    """
    variables = {}
    if beside_engines:
        variables = without_expandable_segments()
    elif not any(map(get, _ALLOCATOR)):
        # varying micro-batch lengths fragment fixed segments
        variables[_ALLOCATOR[0]] = _EXPANDABLE
    if cut:  # Megatron issues a layer's communication first; with one queue it also runs first
        variables |= unless_set(CUDA_DEVICE_MAX_CONNECTIONS="1")
    if deterministic:
        variables |= unless_set(
            NVTE_ALLOW_NONDETERMINISTIC_ALGO="0", CUBLAS_WORKSPACE_CONFIG=":4096:8"
        )
    return variables


def without_expandable_segments() -> dict[str, str]:
    """Returns the user's settings of torch's allocator, if any, with expandable segments off.

    torch_memory_saver, which puts engines to sleep, rejects expandable segments. Processes can
    share their memory only by pidfd_getfd, which containers forbid.
    """
    return {
        name: value.replace(_EXPANDABLE, _FIXED)
        for name in _ALLOCATOR
        if _EXPANDABLE in (value := get(name, ""))
    }


def child_environment(
    extra: dict[str, str] | None = None, python_path: Iterable[str] = ()
) -> dict[str, str]:
    """Returns this process's environment with `extra` set and `python_path` first on PYTHONPATH.

    The folder of this package is always on the path, so that children can import megagrpo however
    the parent was started.
    """
    package = str(Path(megagrpo.__file__).parent.parent)
    own = get("PYTHONPATH", "")
    paths = {
        USER_PATH: get(USER_PATH, own),
        "PYTHONPATH": os.pathsep.join(filter(None, [*python_path, package, own])),
    }
    return {**os.environ, **paths, **(extra or {})}

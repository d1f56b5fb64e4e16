"""Submits an experiment as a Slurm job: checks it, then calls sbatch with a slurm/*.sbatch. For
Kubernetes and SkyPilot it prints a file."""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import megagrpo
from megagrpo.check.problems import preflight
from megagrpo.check.rules.inputs import absent_files, installed, read_files
from megagrpo.check.rules.placement import needs_gpus
from megagrpo.check.rules.subject import broken, model_description
from megagrpo.config.fields import refuse
from megagrpo.config.schema import ExperimentConfig
from megagrpo.system import environment
from megagrpo.system.arguments import natural, positive
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.job_request import SCRIPTS, Request, completed, misfits, nodes_of
from megagrpo.tools.manifests import APPLIED_BY, Job, Scheduler, manifest
from megagrpo.tools.plan.fitting import fit_problems, with_model
from megagrpo.tools.plan.roofline import plan_step, target_of

_VENV_OF_IMAGE = "/megagrpo/.venv"  # of launch/container
_SLURM = Scheduler()


_REQUESTED = {field.name for field in fields(Request)}


def submit(
    config: ExperimentConfig,
    experiment: list[str],
    request: Request,
    dry_run: bool,
    scheduler: Scheduler = _SLURM,
) -> int:
    """Submits `experiment` (file and overrides for the job's command line); returns sbatch's exit
    status.

    `dry_run` prints the scripts and the command, or the scheduler's file instead, and only notes what
    is not on this machine. Raises ValueError with all problems.
    """
    problems = misfits(config, request) + preflight(config, nodes_of(request))
    problems += fit_problems(config, request.gpus_per_node)
    elsewhere = list(broken(installed(config))) if dry_run or runs_elsewhere(request) else []
    elsewhere += broken(absent_files(config)) if dry_run else []
    problems = [problem for problem in problems if problem not in elsewhere]
    folder = config.run_folder.path.absolute()
    if scheduler.to == "slurm":
        problems += _machine_problems(config, request, dry_run)
    else:
        saved = Path(config.checkpoint.dir or folder).absolute()
        problems += scheduler.problems({Path(experiment[0]), folder, saved, Path.cwd()}, dry_run)
        elsewhere += [
            f"{key}: {path} is not in the folder of --volume, so the image must have it"
            for key, path in read_files(config)
            if not (_is_from_hub(path) or scheduler.sees(Path(path).absolute()))
        ]
        if request.time or request.partition or request.options or request.srun_options:
            problems.append("--time, --partition, --sbatch and --srun are for Slurm: omit them")
    refuse("this job cannot run", problems)
    for text in elsewhere + _short_grace(config, request):
        print(f"megagrpo submit: not refused: {text}", file=sys.stderr)
    request = completed(config, request)
    if scheduler.to != "slurm":
        print(manifest(_job(config, experiment, request), scheduler), end="")
        return 0
    assert request.kind is not None, "completed"
    script = _root() / "slurm" / SCRIPTS[request.kind]
    command = sbatch_command(config, experiment, request, script)
    variables = job_variables(request, script)
    if dry_run:
        _print_scripts(script, command, variables)
        return 0
    return _call_sbatch(RunFolder(folder), command, variables)


def _machine_problems(config: ExperimentConfig, request: Request, dry_run: bool) -> list[str]:
    """Returns what this machine lacks for a Slurm job."""
    problems = []
    scripts = _root() / "slurm"
    if not scripts.is_dir():
        problems.append(
            f"{scripts} is missing: submit from a checkout of the repository, not an installed "
            "package, or set MEGAGRPO_ROOT to one"
        )
    if dry_run:
        return problems
    if shutil.which("sbatch") is None:
        problems.append("sbatch is not on the PATH: submit from a login node, or use --dry-run")
    if not runs_elsewhere(request) and needs_gpus(config) and find_spec("sgl_kernel") is None:
        problems.append(
            f"{sys.prefix} is an installation for CPUs: MEGAGRPO_KIND=gpu bash launch/install.sh"
        )
    return problems


def _short_grace(config: ExperimentConfig, request: Request) -> list[str]:
    """Returns that no step ends within the grace period, if the plan of a step says so."""
    config = with_model(config)
    if not needs_gpus(config) or model_description(config) is None:
        return []
    bound = plan_step(config, target_of(config, gpus_per_node=request.gpus_per_node)).step
    return [
        f"a step takes at least {bound:.0f} s (`megagrpo plan`): with --grace-s {request.grace_s} a "
        "time limit ends most steps before they are saved"
    ] * (bound > request.grace_s)


def _print_scripts(script: Path, command: list[str], variables: dict[str, str]) -> None:
    job = script.parent / "job.sh"
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    print(f"{script.read_text()}\n# {job}:\n{job.read_text()}")
    print(f"# on every node: {_root() / 'launch'}/*node.sh\n# {words} {shlex.join(command)}")


def _job(config: ExperimentConfig, experiment: list[str], request: Request) -> Job:
    roles = {"all": request.trainer_nodes or 1}
    if request.rollout_nodes:
        roles = {"trainers": request.trainer_nodes or 1, "engines": request.rollout_nodes}
    return Job(
        config.name,
        _from_the_root(config, experiment),
        roles,
        gpus=_gpus(config, request) or 0,
        gpu=config.cluster.gpu,
        grace_s=request.grace_s,
        run_folder=config.run_folder.path.absolute(),
        root=_root(),
    )


def _call_sbatch(folder: RunFolder, command: list[str], variables: dict[str, str]) -> int:
    """Prints the job's number; and to standard error, where to look."""
    folder.logs.mkdir(parents=True, exist_ok=True)  # Slurm does not create it
    env = environment.child_environment(variables)
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="", flush=True)
    if done.returncode == 0:
        job = done.stdout.strip().partition(";")[0]
        print(
            f"megagrpo submit: the job writes {_output(folder, job)}; "
            f"`megagrpo status {folder.path} --watch` shows how far it is once it has started",
            file=sys.stderr,
        )
    return done.returncode


def runs_elsewhere(request: Request) -> bool:
    """Returns whether the nodes run an image, or another installation, so that this one does not
    count."""
    other = environment.get("MEGAGRPO_VENV", sys.prefix) != sys.prefix
    return other or _names_image(request) or bool(environment.get("MEGAGRPO_NODE_PREFIX"))


def _names_image(request: Request) -> bool:
    return any(option.startswith("--container") for option in request.srun_options)


def _root() -> Path:
    """Returns the checkout whose scripts the job runs."""
    return Path(
        environment.get("MEGAGRPO_ROOT") or Path(megagrpo.__file__).parent.parent
    ).absolute()


def _output(folder: RunFolder, job: str) -> Path:
    return folder.log(f"slurm-{job}").with_suffix(".out")


def job_variables(request: Request, script: Path) -> dict[str, str]:
    """Returns the variables that the job's script reads from sbatch's environment.

    Names in --export would make Slurm load the login environment instead, and hold the job if it
    cannot. A user's MEGAGRPO_VENV counts. Without one the installation is this one, or under
    --container-image that of the project's image; MEGAGRPO_NODE_PREFIX may be no container.
    """
    venv = _VENV_OF_IMAGE if _names_image(request) else sys.prefix
    variables = {
        "MEGAGRPO_ROOT": str(script.parent.parent),
        **environment.unless_set(MEGAGRPO_VENV=venv),
        "TRAINER_NODES": str(request.trainer_nodes),
    }
    if request.srun_options:
        variables["MEGAGRPO_SRUN"] = shlex.join(request.srun_options)
    return variables


def sbatch_command(
    config: ExperimentConfig, experiment: list[str], request: Request, script: Path
) -> list[str]:
    """Returns the command line of sbatch.

    A second job of a run folder waits until the first one ends, then resumes from its checkpoint.
    """
    folder = RunFolder(config.run_folder.path.absolute())
    name = f"{config.name}@{folder.path}"
    once = [
        "--parsable",
        f"--job-name={name}",
        "--dependency=singleton",
        f"--signal=B:USR1@{request.grace_s}",
        f"--output={_output(RunFolder(Path(str(folder.path).replace('%', '%%'))), '%j')}",
        "--export=ALL",
    ]
    # steps get what the job names, although its nodes are exclusive
    gpus = _gpus(config, request)
    limits = {"time": request.time, "partition": request.partition, "gpus-per-node": gpus}
    every = [
        *(f"--{option}={value}" for option, value in limits.items() if value),
        *request.options,
    ]
    match request.kind:
        case "one-job" | "colocated":
            nodes = [
                f"--nodes={(request.trainer_nodes or 0) + (request.rollout_nodes or 0)}",
                *every,
            ]
        case "het":
            # under the first component's name it would wait for that component for ever
            second = [f"--job-name={name}/rollout", f"--nodes={request.rollout_nodes}"]
            nodes = [f"--nodes={request.trainer_nodes}", *every, ":", *second, *every]
        case _:
            nodes = every
    return ["sbatch", *once, *nodes, str(script), *_from_the_root(config, experiment)]


def _gpus(config: ExperimentConfig, request: Request) -> int | None:
    """Returns the GPUs per node that a job requests."""
    if request.gpus_per_node is None and needs_gpus(config):
        return config.cluster.gpus_per_node
    return request.gpus_per_node


def _from_the_root(config: ExperimentConfig, experiment: list[str]) -> list[str]:
    """Returns `experiment` with the absolute path of the run folder, because an image has its own
    working directory."""
    path = config.run_folder.path
    if path.is_absolute():
        return experiment
    return [*experiment, "--set", f"output_dir={json.dumps(str(path.absolute()))}"]


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    option = command.add_argument
    kinds = (
        "the first nodes train and the others sample; heterogeneous "
        "job; one node; engines on the trainers' nodes"
    )
    option(
        "--kind",
        choices=SCRIPTS,
        help=f"{kinds}. Default: what the experiment needs",
    )
    option("--trainer-nodes", type=positive, help="default: as few as suffice")
    option(
        "--rollout-nodes",
        type=natural,
        help="nodes that have only engines; default: as few as suffice",
    )
    gpus = (
        "GPUs per node; 0: the job requests none; default: "
        "cluster.gpus_per_node, if the experiment needs GPUs"
    )
    option("--gpus-per-node", type=natural, help=gpus)
    option("--time", help="time limit, in sbatch's format")
    option("--partition", help="partition for the job")
    rest = "seconds before the time limit at which a step ends and is saved (default 300)"
    option("--grace-s", type=positive, default=300, help=rest)
    option(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="another option for the job: --sbatch=--account=x",
    )
    option(
        "--srun",
        action="append",
        default=[],
        metavar="OPTION",
        help="the same for each node's step: --srun=--container-image=image.sqsh; the words in "
        "MEGAGRPO_NODE_PREFIX go before each node's command",
    )
    option(
        "--to",
        choices=("slurm", *APPLIED_BY),
        default="slurm",
        help="scheduler (default slurm); for the others --dry-run prints a file",
    )
    option("--image", help="image of pods, or of SkyPilot's nodes")
    option(
        "--volume",
        metavar="NAME:FOLDER",
        help="claim of pods, or SkyPilot's volume, and the folder that shows it on all nodes",
    )
    option(
        "--dry-run", action="store_true", help="print scripts and sbatch's command line, or a file"
    )


def run(args: argparse.Namespace, config: ExperimentConfig) -> int:
    """Runs the command."""
    given = {name: value for name, value in vars(args).items() if name in _REQUESTED}
    request = Request(**given, options=tuple(args.sbatch), srun_options=tuple(args.srun))
    changes = (word for override in args.overrides for word in ("--set", override))
    words = [str(Path(args.config).absolute()), *changes]
    scheduler = Scheduler(args.to, args.image, args.volume)
    return submit(config, words, request, args.dry_run, scheduler)


def _is_from_hub(path: str) -> bool:
    """Returns whether read_files's path is files on the Hub, or where the cache has those of a name."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).absolute()
    return path.startswith("hf://") or Path(path).absolute().is_relative_to(cache)

"""An experiment's nodes as a file for Kubernetes or SkyPilot, whose nodes run launch/anywhere.sh.

A JobSet: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/. A SkyPilot task:
https://docs.skypilot.co/en/latest/reference/yaml-spec.html.
"""

import re
import shlex
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import yaml

APPLIED_BY = {"kubernetes": "`kubectl apply -f -`", "skypilot": "`sky launch`, as a file"}
_NEEDED = {
    "kubernetes": "--image and --volume CLAIM:/FOLDER",
    "skypilot": "--volume NAME:/FOLDER",
}
_IMAGE_ROOT = "/megagrpo"  # of launch/container
_ATTEMPT = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
_MAX_RESTARTS = 3  # after a failure; 85 does not count
_STOPPED = 85  # saved, to go on
# Exit codes of docs/operate.md that no restart mends, and _STOPPED. 1 is not among them, because
# engines that are lost end trainers with it. Engines end with 143 together with their pod.
_DECIDED = [2, _STOPPED, 86, 130, 143]
_DECIDED_ENGINES = [2]
_LONGEST_NAME = 40
_SECRET = "megagrpo"  # with RAY_AUTH_TOKEN and MEGAGRPO_API_KEY


@dataclass(frozen=True)
class Scheduler:
    """Slurm, or another one that starts nodes and what it must know of them."""

    to: str = "slurm"  # or a key of APPLIED_BY
    image: str | None = None
    volume: str | None = None  # NAME:FOLDER

    @property
    def mount(self) -> tuple[str, str]:
        """The name of the volume and the folder where nodes see it."""
        name, _, folder = (self.volume or "").partition(":")
        return name, folder

    def problems(self, paths: set[Path], dry_run: bool) -> list[str]:
        """Returns what a request for these nodes lacks. paths: of files that must outlive a pod."""
        problems = []
        if not dry_run:
            problems.append(
                f"--to {self.to} only prints: add --dry-run, and give what it "
                f"prints to {APPLIED_BY[self.to]}"
            )
        name, folder = self.mount
        if not (name and folder.startswith("/") and (self.image or self.to == "skypilot")):
            return [*problems, f"--to {self.to} needs {_NEEDED[self.to]}, which all nodes see"]
        return problems + [
            f"{path} is not in {folder} (--volume), which all nodes see under the same path"
            for path in sorted(paths)
            if not self.sees(path)
        ]

    def sees(self, path: Path) -> bool:
        """Returns whether all nodes see a file under this path."""
        return path.is_relative_to(self.mount[1])


@dataclass(frozen=True)
class Job:
    """A request, completed: what is the same in both files."""

    name: str
    words: list[str]  # experiment and overrides
    roles: dict[str, int]  # trainers and engines, or all -> nodes
    gpus: int  # per node; 0: none requested
    gpu: str
    grace_s: int
    run_folder: Path
    root: Path  # the checkout


def manifest(job: Job, scheduler: Scheduler) -> str:
    """Returns the file as YAML."""
    # a DNS label that leaves room for a pod's role and number, and that SkyPilot accepts
    name = "megagrpo-" + re.sub("[^a-z0-9]+", "-", job.name.lower()).strip("-")
    # other jobs' names may differ behind it, or in what is no letter here
    if len(name) > _LONGEST_NAME or name != f"megagrpo-{job.name}":
        digest = sha256(str(job.run_folder).encode()).hexdigest()[:6]
        name = f"{name[: _LONGEST_NAME - 7].strip('-')}-{digest}"
    job = replace(job, name=name)
    tree = _task(job, scheduler)
    if scheduler.to == "kubernetes":
        tree = _jobset(job, scheduler)
    return yaml.safe_dump(tree, sort_keys=False, width=120)


def _jobset(job: Job, scheduler: Scheduler) -> dict[str, object]:
    actions = {
        "stopped": ("RestartJobSetAndIgnoreMaxRestarts", f"exit code {_STOPPED} "),
        "final": ("FailJobSet", "exit code"),
    }
    rules = [
        {
            "name": rule,
            "action": action,
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": [message],
        }
        for rule, (action, message) in actions.items()
    ]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "failurePolicy": {
                "maxRestarts": _MAX_RESTARTS,
                "restartStrategy": "BlockingRecreate",  # one launcher per run folder
                "rules": rules,
            },
            # engines do not end by themselves
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [next(iter(job.roles))]},
            "replicatedJobs": [
                {"name": role, "template": {"spec": _of_role(job, scheduler, role)}}
                for role in job.roles
            ],
        },
    }


def _of_role(job: Job, scheduler: Scheduler, role: str) -> dict[str, object]:
    """Returns a Job with one pod per node, which fails with its first pod."""
    nodes = job.roles[role]
    codes = _DECIDED_ENGINES if role == "engines" else _DECIDED
    rule = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": codes}}
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [rule]},
        "template": {"spec": _pod(job, scheduler, role)},
    }


def _pod(job: Job, scheduler: Scheduler, role: str) -> dict[str, object]:
    claim, folder = scheduler.mount
    values = {
        "MEGAGRPO_ROLE": role,
        "MEGAGRPO_FOLDER": str(Path.cwd()),
        "NNODES": str(job.roles[role]),
        "MASTER_ADDR": f"{job.name}-{role}-0-0.{job.name}",
    }
    fields = {"NODE_ADDR": "status.podIP", "JOBSET_RESTART_ATTEMPT": _ATTEMPT}
    container: dict[str, object] = {
        "name": role,
        "image": scheduler.image,
        "command": ["bash", f"{_IMAGE_ROOT}/launch/anywhere.sh", *job.words],
        "env": [
            *({"name": key, "value": value} for key, value in values.items()),
            *(
                {"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}}
                for key, path in fields.items()
            ),
        ],
        "envFrom": [{"secretRef": {"name": _SECRET}}],
        "volumeMounts": [
            {"name": "shared", "mountPath": folder},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if job.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": job.gpus}}
    return {
        "restartPolicy": "Never",  # the JobSet restarts all pods
        "terminationGracePeriodSeconds": job.grace_s,
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _task(job: Job, scheduler: Scheduler) -> dict[str, object]:
    """Returns a task; without an image the nodes install this checkout."""
    volume, folder = scheduler.mount
    resources: dict[str, object] = {"job_recovery": {"recover_on_exit_codes": [_STOPPED]}}
    if job.gpus:
        resources["accelerators"] = f"{job.gpu}:{job.gpus}"
    envs = {"MEGAGRPO_FOLDER": str(Path.cwd()), "MEGAGRPO_RUN_FOLDER": str(job.run_folder)}
    if "trainers" in job.roles:
        envs["TRAINER_NODES"] = str(job.roles["trainers"])
    task: dict[str, object] = {
        "name": job.name,
        "num_nodes": sum(job.roles.values()),
        "resources": resources,
        "volumes": {folder: volume},
        "envs": envs,
        # the values: `sky launch --secret NAME`
        "secrets": {"RAY_AUTH_TOKEN": None, "MEGAGRPO_API_KEY": None},
    }
    root = "."
    if scheduler.image:
        root = _IMAGE_ROOT
        resources["image_id"] = f"docker:{scheduler.image}"
    else:
        task |= {"workdir": str(job.root), "setup": "bash launch/install.sh"}
    return task | {"run": f"bash {root}/launch/anywhere.sh {shlex.join(job.words)}"}

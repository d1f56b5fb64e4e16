"""Nodes that Slurm does not start: launch/anywhere.sh in the environments of Kubernetes, SkyPilot and Kubeflow, and the
files of `megagrpo submit --to`."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from megagrpo import cli
from megagrpo.cluster.supervise import Launch
from megagrpo.system import environment
from megagrpo.system.run_folder import RunFolder
from tests.experiments import QUICKSTART, ROOT, until

# In the place of the program on a node. It records its words and environment. An engine waits for a signal, a trainer
# for `go`.
_PROGRAM = f"""#!{sys.executable} -S
import json, os, pathlib, signal, sys, time
if "IMPORTS" in os.environ:
    pathlib.Path(os.environ["IMPORTS"]).touch()
    time.sleep(1)
for number, status in ((signal.SIGUSR1, 85), (signal.SIGUSR2, 0), (signal.SIGTERM, 143)):
    signal.signal(number, lambda *_, status=status: sys.exit(status))
record = pathlib.Path(os.environ["RECORD"])
signal.signal(signal.SIGINT, lambda *_: record.with_suffix(".int").open("a").write("Ctrl-C "))
part = record.with_suffix(".part")
words = sys.argv[sys.argv.index("megagrpo.cli") + 1 :]
part.write_text(json.dumps([words, dict(os.environ)]))
part.rename(record)
while words[0] == "serve" or not pathlib.Path(os.environ["GO"]).exists():
    time.sleep(0.05)
sys.exit(int(os.environ.get("STATUS", 0)))
"""
_POD_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch):
    """Jobs are submitted from a folder of the volume."""
    monkeypatch.chdir(tmp_path)


class Nodes:
    """Processes of launch/anywhere.sh, as the nodes of one run."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.go = folder / "go"
        program = folder / "venv/bin/python"
        program.parent.mkdir(parents=True)
        program.write_text(_PROGRAM)
        program.chmod(0o755)
        self.processes = list[subprocess.Popen]()

    def start(self, script: str = "anywhere.sh", *words: str, **variables: str) -> int:
        """Starts a node and returns its number here."""
        number = len(self.processes)
        env = {"PATH": os.environ["PATH"], "MEGAGRPO_VENV": f"{self._folder}/venv", "GO": str(self.go)}
        env |= {"RECORD": f"{self._folder}/{number}.json"} | variables
        # in the background of a shell SIGINT is ignored, also by what it starts
        command = ["env", "--default-signal=INT", "bash", str(ROOT / "launch" / script), "x.yaml", *words]
        self.processes.append(subprocess.Popen(command, env=env, cwd=self._folder, start_new_session=True))
        return number

    def started(self, number: int) -> tuple[list[str], dict[str, str]]:
        """Waits until a node's program runs; returns its words and its environment."""
        path = self._folder / f"{number}.json"
        until(path.exists, 60)
        words, env = json.loads(path.read_text())
        return words, env

    def status(self, number: int) -> int:
        return self.processes[number].wait(timeout=60)


@pytest.fixture
def nodes(tmp_path):
    made = Nodes(tmp_path)
    yield made
    made.go.touch()
    for process in made.processes:
        process.send_signal(signal.SIGUSR2)
        process.wait(timeout=60)


def placed(command: str, number: int, rank: int, first: str) -> list[str]:
    return [command, "--nnodes", str(number), "--node-rank", str(rank), "--master-addr", first, "x.yaml"]


@pytest.mark.verifies(
    "runs",
    "one script starts the nodes in the environments of Kubernetes, SkyPilot and Kubeflow, beside played programs",
)
@pytest.mark.parametrize("status", [0, 85])
def test_skypilots_first_nodes_train_and_the_others_sample_until_these_end(nodes, tmp_path, status):
    sky = {
        "SKYPILOT_NUM_NODES": "3",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2\n127.0.0.3",
        "TRAINER_NODES": "1",
        "MEGAGRPO_RUN_FOLDER": str(tmp_path / "run"),
        "STATUS": str(status),
    }
    for rank in range(3):
        nodes.start(SKYPILOT_NODE_RANK=str(rank), **sky)
    expected = [placed("train", 1, 0, "127.0.0.1"), *(placed("serve", 2, rank, "127.0.0.2") for rank in range(2))]
    assert [nodes.started(number)[0] for number in range(3)] == expected
    assert [process.poll() for process in nodes.processes] == [None] * 3
    nodes.go.touch()
    assert [nodes.status(number) for number in range(3)] == [status, 0, 0]


@pytest.mark.parametrize("status", [0, 85])
def test_an_engine_that_starts_after_its_tasks_trainers_have_ended_ends(nodes, tmp_path, status):
    """After 85 the task starts again under the same name, and its trainers will train."""
    sky = {"MEGAGRPO_RUN_FOLDER": str(tmp_path / "run"), "SKYPILOT_TASK_ID": "sky-1", "STATUS": str(status)}
    nodes.go.touch()
    assert nodes.status(nodes.start(MEGAGRPO_ROLE="trainers", **sky)) == status
    engine = nodes.start(MEGAGRPO_ROLE="engines", **sky)
    if status == 0:
        assert nodes.status(engine) == 0
        sky["SKYPILOT_TASK_ID"] = "sky-2"
        engine = nodes.start(MEGAGRPO_ROLE="engines", **sky)
    nodes.started(engine)
    with pytest.raises(subprocess.TimeoutExpired):
        nodes.processes[engine].wait(timeout=3)


def test_the_mark_of_an_earlier_start_ends_no_engine_and_an_engine_that_fails_is_a_failure(nodes, tmp_path):
    mark = tmp_path / "run/logs/trainers_ended"
    mark.parent.mkdir(parents=True)
    mark.touch()
    engine = nodes.start(MEGAGRPO_ROLE="engines", MEGAGRPO_RUN_FOLDER=str(tmp_path / "run"))
    nodes.started(engine)
    with pytest.raises(subprocess.TimeoutExpired):
        nodes.processes[engine].wait(timeout=3)
    nodes.processes[engine].terminate()
    assert nodes.status(engine) == 143


def test_kubeflows_variables_are_a_nodes_and_no_ranks(nodes, monkeypatch):
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "run-master-0", "MASTER_PORT": "23456", "PET_NPROC_PER_NODE": "8"}
    node = nodes.start(RANK="1", **job)
    words, env = nodes.started(node)
    assert words == placed("run", 2, 1, "run-master-0")
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "PET_NPROC_PER_NODE"} & set(env)
    words, _ = nodes.started(nodes.start(RANK="0", **job | {"MASTER_ADDR": "localhost"}))
    assert words[6] != "localhost", "no other node reaches that"
    for name in ("RANK", "MASTER_ADDR", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "1", **job}.items():
        monkeypatch.setenv(name, value)
    assert not environment.under_torchrun()
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert environment.under_torchrun()


@pytest.mark.parametrize(("role", "number"), [("all", 1), ("all", 2), ("trainers", 2)])
def test_a_pod_that_is_evicted_while_its_launcher_starts_says_that_it_may_go_on(nodes, tmp_path, role, number):
    imports = tmp_path / "imports"
    job = {"NNODES": str(number), "MASTER_ADDR": "127.0.0.1", "MEGAGRPO_ROLE": role}
    node = nodes.start(IMPORTS=str(imports), **job)
    until(imports.exists, 60)
    nodes.processes[node].terminate()
    assert nodes.status(node) == 85


def test_a_pod_that_is_alone_saves_at_a_term(nodes):
    node = nodes.start(JOBSET_RESTART_ATTEMPT="2")
    words, env = nodes.started(node)
    assert words == ["run", "x.yaml"] and env["SLURM_RESTART_COUNT"] == "2"
    nodes.processes[node].terminate()
    assert nodes.status(node) == 85


def test_a_ctrl_c_at_a_terminal_reaches_the_launcher_once(nodes, tmp_path):
    """A terminal sends it to all of a process group, and a second one ends a run without saving."""
    nodes.started(nodes.start())
    os.killpg(nodes.processes[0].pid, signal.SIGINT)
    until((tmp_path / "0.int").exists, 60)
    nodes.go.touch()
    assert nodes.status(0) == 0
    assert (tmp_path / "0.int").read_text() == "Ctrl-C "


@pytest.mark.parametrize("script", ["rollout_node.sh", "colocated_node.sh"])
def test_only_the_first_node_may_leave_out_the_address(nodes, script):
    first, _ = nodes.started(nodes.start(script, NNODES="2", NODE_RANK="0"))
    assert first[5] == "--master-addr" and first[6]
    later = [nodes.start(script, NNODES="2", NODE_RANK="1"), nodes.start(script, "--nnodes=2", "--node-rank=1")]
    later.append(nodes.start(script, "--nnodes", "2", "--node-rank", "1"))
    for number in later:
        assert "--master-addr" not in nodes.started(number)[0], "it would wait for itself"


def printed(capsys, folder: Path, to: str, *options: str, changes: Mapping[str, str]) -> dict:
    """What `submit` prints for the quickstart's experiment, which lies in `folder`."""
    file = folder / "x.yaml"
    file.write_text(QUICKSTART.read_text())
    sets = {"output_dir": str(folder / "run"), "rollout.host": "0.0.0.0", **changes}
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    volume = f"claim:{folder}"
    assert cli.main(["submit", str(file), *words, "--dry-run", "--to", to, "--volume", volume, *options]) == 0
    return yaml.safe_load(capsys.readouterr().out)


APART = {"actor.world_size": "2"}
TWO = ("--trainer-nodes", "2", "--rollout-nodes", "1", "--gpus-per-node", "8")


def exact(tree: Mapping[str, object], *names: str) -> None:
    assert set(tree) == set(names), "the published schema has the others under other names, or the server refuses them"


@pytest.mark.verifies("runs", "a JobSet and a SkyPilot task: their fields; never applied to a cluster")
def test_a_jobset_has_the_form_of_its_schema_and_starts_every_pod(nodes, tmp_path, capsys):
    tree = printed(
        capsys, tmp_path, "kubernetes", "--image", "r/m:1", *TWO, changes={"name": "A Long_name" * 9} | APART
    )
    exact(tree, "apiVersion", "kind", "metadata", "spec")
    assert (tree["apiVersion"], tree["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec, name = tree["spec"], tree["metadata"]["name"]
    exact(spec, "failurePolicy", "successPolicy", "replicatedJobs")
    jobs = {job["name"]: job["template"]["spec"] for job in spec["replicatedJobs"]}
    assert {role: job["completions"] for role, job in jobs.items()} == {"trainers": 2, "engines": 1}
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["trainers"]}
    for role, job in jobs.items():
        exact(job, "completionMode", "completions", "parallelism", "backoffLimit", "podFailurePolicy", "template")
        assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"]
        pod = job["template"]["spec"]
        exact(pod, "restartPolicy", "terminationGracePeriodSeconds", "containers", "volumes")
        assert pod["restartPolicy"] == "Never", "the API refuses podFailurePolicy with any other"
        (container,) = pod["containers"]
        exact(container, "name", "image", "command", "env", "envFrom", "volumeMounts", "resources")
        assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {str(tmp_path), "/dev/shm"}
        assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "claim"}
        assert container["envFrom"] == [{"secretRef": {"name": "megagrpo"}}]
        assert container["command"][:3] == ["bash", "/megagrpo/launch/anywhere.sh", f"{tmp_path}/x.yaml"]
        env = {entry["name"]: entry.get("value") for entry in container["env"]}
        first = f"{name}-{role}-0-0"
        assert env["MASTER_ADDR"] == f"{first}.{name}" and _POD_NAME.fullmatch(f"{first}00-12345")
        for rank in range(job["completions"]):
            of_pod = {key: value for key, value in env.items() if value} | {"NODE_ADDR": f"10.0.0.{rank}"}
            number = nodes.start(JOB_COMPLETION_INDEX=str(rank), **of_pod)
            words, _ = nodes.started(number)
            command = {"trainers": "train", "engines": "serve"}[role]
            words_of_place = placed(command, job["completions"], rank, env["MASTER_ADDR"])
            assert words == [*words_of_place[:-1], "--node-addr", f"10.0.0.{rank}", "x.yaml"]


def test_a_jobset_restarts_after_what_a_restart_mends(tmp_path, capsys):
    """The exit codes of the table in docs/operate.md."""
    spec = printed(capsys, tmp_path, "kubernetes", "--image", "r/m:1", *TWO, changes=APART)["spec"]
    rules = spec["failurePolicy"]["rules"]
    for rule in rules:
        exact(rule, "name", "action", "onJobFailureReasons", "onJobFailureMessagePatterns")

    def action(role: str, code: int) -> str:
        (job,) = [job for job in spec["replicatedJobs"] if job["name"] == role]
        (failing,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
        assert failing["action"] == "FailJob" and failing["onExitCodes"]["operator"] == "In"
        if code not in failing["onExitCodes"]["values"]:
            return "RestartJobSet"
        said = f"Container {role} for pod default/x-0 failed with exit code {code} matching FailJob rule at index 0"
        return next(r["action"] for r in rules if any(re.search(p, said) for p in r["onJobFailureMessagePatterns"]))

    table = re.findall(r"^\|.*\| (\d+) \|", (ROOT / "docs/operate.md").read_text(), re.MULTILINE)
    codes = {int(code) for code in table} - {0}
    assert codes == {1, 2, 85, 86, 130, 143}
    taken = {code: action("trainers", code) for code in codes}
    restarted = {1: "RestartJobSet", 85: "RestartJobSetAndIgnoreMaxRestarts"}
    assert taken == {code: restarted.get(code, "FailJobSet") for code in codes}
    assert {code: action("engines", code) for code in (1, 2, 143)} == dict.fromkeys((1, 143), "RestartJobSet") | {
        2: "FailJobSet"
    }


@pytest.mark.parametrize("image", [None, "r/m:1"])
def test_a_skypilot_task_has_the_form_of_its_schema(tmp_path, capsys, image):
    options = ["--image", image] if image else []
    task = printed(capsys, tmp_path, "skypilot", *TWO, *options, changes=APART | {"name": "my run @2"})
    exact(
        task,
        "name",
        "num_nodes",
        "resources",
        "volumes",
        "envs",
        "secrets",
        "run",
        *([] if image else ["workdir", "setup"]),
    )
    # sky/task.py, _VALID_NAME_REGEX
    assert re.fullmatch(r"[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*", task["name"])
    assert task["num_nodes"] == 3 and task["volumes"] == {str(tmp_path): "claim"}
    expected = {"accelerators": "H100:8", "job_recovery": {"recover_on_exit_codes": [85]}}
    assert task["resources"] == expected | ({"image_id": "docker:r/m:1"} if image else {})
    assert task["envs"]["TRAINER_NODES"] == "2" and all(isinstance(value, str) for value in task["envs"].values())
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None, "MEGAGRPO_API_KEY": None}
    root = "/megagrpo" if image else "."
    assert task["run"].startswith(f"bash {root}/launch/anywhere.sh {tmp_path}/x.yaml --set output_dir={tmp_path}/run")
    assert image or (task["workdir"], task["setup"]) == (str(ROOT), "bash launch/install.sh")


def test_one_node_is_one_pod_without_gpus_for_an_experiment_on_a_cpu(tmp_path, capsys):
    spec = printed(capsys, tmp_path, "kubernetes", "--image", "r/m:1", changes={})["spec"]
    (job,) = spec["replicatedJobs"]
    assert job["name"] == "all" and job["template"]["spec"]["completions"] == 1
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert "resources" not in container


def test_long_names_of_two_runs_stay_apart(tmp_path, capsys):
    names = set()
    for seed in range(2):
        changes = {"name": f"{'long_' * 9}seed{seed}", "output_dir": str(tmp_path / f"run{seed}")}
        names.add(printed(capsys, tmp_path, "kubernetes", "--image", "r/m:1", changes=changes)["metadata"]["name"])
    assert len(names) == 2 and all(re.fullmatch("megagrpo-long-[a-z0-9-]{0,26}[a-z0-9]", name) for name in names), names


@pytest.mark.parametrize("pair", [("\u8bad\u7ec3", "\u8bc4\u4f30"), ("a.b", "a_b"), ("Run", "run")])
def test_names_that_differ_in_what_a_label_lacks_stay_apart(tmp_path, capsys, pair):
    labels = set()
    for name in pair:
        changes = {"name": name, "output_dir": str(tmp_path / name)}
        labels.add(printed(capsys, tmp_path, "kubernetes", "--image", "r/m:1", changes=changes)["metadata"]["name"])
    assert len(labels) == 2 and all(map(_POD_NAME.fullmatch, labels)), labels


REFUSED: list[tuple[list[str], str]] = [
    (
        ["--to", "kubernetes", "--volume", "c:/"],
        "--to kubernetes only prints: add --dry-run, and give what it prints to `kubectl",
    ),
    (["--to", "skypilot", "--volume", "c:/"], "`sky launch`"),
    (["--to", "kubernetes", "--volume", "c:/", "--dry-run"], "needs --image and --volume CLAIM:/FOLDER"),
    (["--to", "skypilot", "--volume", "c", "--dry-run"], "needs --volume NAME:/FOLDER"),
    (["--to", "skypilot", "--volume", "c:/elsewhere", "--dry-run"], "x.yaml is not in /elsewhere (--volume)"),
    (["--to", "skypilot", "--volume", "c:/", "--dry-run", "--partition", "p"], "are for Slurm: omit them"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_what_these_clusters_need_is_said(tmp_path, capsys, options: list[str], said: str):
    file = tmp_path / "x.yaml"
    file.write_text(QUICKSTART.read_text())
    assert cli.main(["submit", str(file), *options]) == 2
    assert said in capsys.readouterr().err


def test_files_outlive_a_pod_or_are_said_to_be_in_its_image(tmp_path, capsys, monkeypatch):
    """In a folder of the container checkpoints would end with it."""
    monkeypatch.chdir("/")
    file = tmp_path / "x.yaml"
    file.write_text(QUICKSTART.read_text())
    words = ["--set", f"output_dir={tmp_path}/run", "--set", "checkpoint.dir=/scratch/mine"]
    volume = ["--to", "skypilot", "--volume", f"c:{tmp_path}", "--dry-run"]
    assert cli.main(["submit", str(file), *words, *volume]) == 2
    said = capsys.readouterr().err
    assert f"/scratch/mine is not in {tmp_path} (--volume)" in said and "x.yaml" not in said.partition("cannot run")[2]
    assert f"  / is not in {tmp_path} (--volume)" in said, "relative paths start in the folder of `submit`"
    monkeypatch.chdir(tmp_path)
    words[-1:] = ["model.path=/in/the/image", "--set", "data.path=here.jsonl"]
    assert cli.main(["submit", str(file), *words, *volume]) == 0
    said = capsys.readouterr().err
    assert (
        "model.path: /in/the/image is not in the folder of --volume" in said and "data.path: here.jsonl is" not in said
    )
    # names on the Hub are read as their files in this machine's cache; nodes have caches of their own
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/in/the")
    (tmp_path / "judge.txt").write_text("{response}")
    judge = ROOT / "configs/models/Qwen3-30B-A3B"
    words += ["--set", f"reward={{grader: judge, args: {{path: {judge}, prompt_file: judge.txt}}}}"]
    assert cli.main(["submit", str(file), *words, *volume]) == 0
    said = capsys.readouterr().err
    assert f"reward.args.path: {judge} is not in the folder of --volume" in said and "image is not in" not in said


def test_another_checkout_in_the_working_folder_is_not_the_program(tmp_path, monkeypatch):
    """`submit` hands its folder to the nodes, and an image has a program of its own."""
    (tmp_path / "megagrpo").mkdir()
    (tmp_path / "megagrpo/__init__.py").write_text("raise SystemExit('the program of another checkout')")
    (tmp_path / "torchrun.py").write_text(
        "import os, sys; assert sys.argv[1] == '--no-python'; os.execv(sys.argv[2], sys.argv[2:])"
    )
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path / "run")
    with Launch(folder, "run", end=()) as launch:
        assert launch.start(["--help"], "service", {}).process.wait(60) == 0
        assert launch.start_ranks(["--help"], ["torchrun.py"], {}).process.wait(60) == 0
    on_node = 'source launch/node.sh; test "$root" = "$0"; exec "${megagrpo[@]}" --help'
    variables = {"MEGAGRPO_VENV": sys.prefix, "MEGAGRPO_FOLDER": str(tmp_path), "CDPATH": ".:/"}
    env = environment.child_environment(variables)
    words = ["bash", "-euc", on_node, str(ROOT)]
    subprocess.run(words, env=env, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

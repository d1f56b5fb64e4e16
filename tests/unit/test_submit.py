"""What `megagrpo submit` refuses, the command line that it hands to sbatch, and the addresses that the job finds."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megagrpo import cli
from megagrpo.check.rules.inputs import installed
from megagrpo.check.rules.subject import broken
from megagrpo.config.schema import ExperimentConfig
from megagrpo.tools.job_request import SCRIPTS, Request, completed, misfits, nodes_of, seconds
from megagrpo.tools.submit import job_variables, sbatch_command, submit
from tests import experiments
from tests.experiments import QUICKSTART, ROOT, placement_problems


def experiment(**sections) -> ExperimentConfig:
    return experiments.experiment(**{"actor": {"world_size": 16}, "rollout": REACHED} | sections)


REACHED = {"host": "0.0.0.0"}
ENGINES = {"rollout": REACHED | {"num_engines": 4, "tp": 4}}
SHARED = {"rollout": REACHED | {"colocate": True, "num_engines": 4, "tp": 4}, "weights": {"transport": "ipc"}}
FITS = [
    (SHARED, Request("colocated", 2, gpus_per_node=8)),
    (SHARED, Request("one-node")),
    ({}, Request("one-job", 1, 1)),
    ({}, Request("het", 2, 1, gpus_per_node=8)),
    (ENGINES, Request("one-job", 2, 2, gpus_per_node=8)),
    ({"rollout": REACHED | {"tp": 16, "nodes_per_engine": 2}}, Request("one-job", 2, 2, gpus_per_node=8)),
    ({"rollout": {"num_engines": 2}, "actor": {"world_size": 4}}, Request("one-node", gpus_per_node=8)),
]
REFUSED = [
    ({}, Request("one-job", 3, 1), "3 trainer nodes: actor.world_size is 16, they do not divide; it may be 1, 2, 4,"),
    ({}, Request("one-job", 0, 1), "0 trainer nodes"),
    ({}, Request("het", 1, 1, gpus_per_node=8), "16 ranks a node on 8 GPUs; it may be 2, 4, 8, 16"),
    ({}, Request("one-job", 2, 2), "2 rollout nodes: 1 engine(s) over 1 node(s) each, so it may be 1 to 1"),
    ({"rollout": REACHED | {"tp": 2, "nodes_per_engine": 2}}, Request("one-job", 2, 1), "it may be 2 to 2"),
    (ENGINES, Request("one-job", 2, 1, gpus_per_node=8), "it may be 2 to 4"),
    ({"rollout": REACHED | {"tp": 16}}, Request("one-job", 2, 1, gpus_per_node=8), "raise rollout.nodes_per_engine"),
    ({"rollout": {}}, Request("one-job", 2, 1), "rollout.host 127.0.0.1: trainers on other nodes cannot reach it"),
    ({}, Request("one-node", gpus_per_node=8), "need 17 GPUs, and the node has 8"),
    ({}, Request("one-job", time="5", grace_s=300), "--time 5 is 300 s, not more than --grace-s 300"),
    ({}, Request("one-node", 1, 1), "trainers and engines share one node; omit --rollout-nodes"),
    (ENGINES | {"weights": {"transport": "ipc"}}, Request("one-job", 2, 2), "engines beside the trainers' GPUs"),
    (SHARED, Request("one-job", 2), "rollout.colocate wants colocated"),
    ({}, Request("colocated", 2), "--kind colocated wants rollout.colocate: true"),
    (SHARED, Request("colocated", 2, 1), "engines share the trainers' nodes; omit --rollout-nodes"),
]


def write_programs(folder: Path, programs: dict[str, str]) -> None:
    """Writes bash scripts by their names, in the place of the machine's programs."""
    for name, body in programs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)


@pytest.mark.parametrize(("sections", "request_", "said"), [*((*fitting, None) for fitting in FITS), *REFUSED])
def test_a_request_that_does_not_fit_is_refused_with_one_that_would(sections, request_, said):
    config = experiment(**sections)
    problems = misfits(config, request_) or placement_problems(config, nodes_of(request_))
    assert problems == [] if said is None else len(problems) == 1 and said in problems[0], problems


@pytest.mark.parametrize(
    ("sections", "gpus", "kind", "nodes"),
    [
        (SHARED, None, "one-node", (1, 0)),
        (SHARED, 8, "colocated", (2, 0)),
        (ENGINES, 8, "one-job", (2, 2)),
        ({}, 32, "one-node", (1, 0)),
    ],
)
def test_what_is_not_asked_for_is_what_the_experiment_takes(sections, gpus, kind, nodes):
    request = completed(experiment(**sections), Request(gpus_per_node=gpus))
    assert (request.kind, (request.trainer_nodes, request.rollout_nodes)) == (kind, nodes)


@pytest.mark.parametrize(
    ("sections", "request_"),
    [
        ({}, Request("one-job", gpus_per_node=32)),
        ({}, Request("het", gpus_per_node=32)),
        (SHARED, Request("one-node", 2)),
    ],
)
def test_a_kind_that_leaves_engines_or_trainers_without_a_node_is_refused(sections, request_):
    with pytest.raises(ValueError, match=f"--kind {request_.kind} does not go with . nodes of trainers"):
        completed(experiment(**sections), request_)


@pytest.mark.parametrize("option", ["--gpus-per-node", "--rollout-nodes"])
def test_a_number_is_no_less_than_none(capsys, option):
    with pytest.raises(SystemExit):
        cli.main(["submit", str(QUICKSTART), "--dry-run", option, "-1"])
    assert f"argument {option}" in capsys.readouterr().err


def test_time_limits():
    limits = {"30": 1800, "5:30": 330, "4:00:00": 14_400, "1-12": 129_600, "1-12:30": 131_400, "2-00:00:01": 172_801}
    assert {text: seconds(text) for text in limits} == limits
    for unlimited in ("UNLIMITED", "infinite", "0"):
        assert misfits(experiment(), Request("one-job", time=unlimited)) == []
    for wrong in ("tomorrow", "-5", "1:2:3:4", "1-x", ""):
        with pytest.raises(ValueError, match="should be like"):
            seconds(wrong)


def test_the_command_line():
    def command(request: Request) -> list[str]:
        script = ROOT / "slurm" / SCRIPTS[request.kind]
        return sbatch_command(experiment(output_dir="/t"), ["/x.yaml", "--set", "seed=1"], request, script)

    one = command(Request("one-job", 2, 1, 8, "4:00:00", "gpu", grace_s=600, options=("--account=a",)))
    assert one[-4:] == [str(ROOT / "slurm" / "one_job.sbatch"), "/x.yaml", "--set", "seed=1"]
    limits = {"--nodes=3", "--gpus-per-node=8", "--time=4:00:00", "--partition=gpu", "--account=a"}
    assert limits | {"--signal=B:USR1@600", "--dependency=singleton"} < set(one)
    assert "--export=ALL" in one, "any other value makes Slurm load the login environment"
    het = command(Request("het", 2, 1, time="4:00:00"))
    middle = het.index(":")
    assert "--nodes=2" in het[:middle] and het[middle + 2 : middle + 4] == ["--nodes=1", "--time=4:00:00"]
    names = [word for word in het if word.startswith("--job-name=")]
    assert len(set(names)) == 2 and names[1] == het[middle + 1], "singleton counts by name: else the second waits"
    assert not any(word.startswith("--nodes") for word in command(Request("one-node")))


def test_the_folder_of_a_log_is_no_pattern():
    config = experiment(output_dir="/runs/50%j %%")
    (output,) = [word for word in sbatch_command(config, [], Request("one-node"), Path("x")) if "--output" in word]
    assert output == "--output=/runs/50%%j %%%%/logs/slurm-%j.out"


def test_gpus_are_requested_for_an_experiment_that_needs_them():
    def gpus(given: int | None, **sections) -> list[str]:
        request = Request("one-node", gpus_per_node=given)
        words = sbatch_command(experiment(**sections), ["x.yaml"], request, ROOT / "slurm" / "one_node.sbatch")
        return [word for word in words if word.startswith("--gpus-per-node")]

    bf16 = {"rollout": REACHED | {"dtype": "bfloat16"}}
    assert gpus(None, **bf16) == gpus(None, cluster={"gpus_per_node": 8}, **bf16) == ["--gpus-per-node=8"]
    assert gpus(0, **bf16) == gpus(None) == [], "a cluster that counts no GPUs; an experiment for CPUs"
    assert gpus(4) == ["--gpus-per-node=4"]


@pytest.mark.parametrize(
    ("node_addr", "found"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("127.0.0.5", "127.0.0.5"),  # what Slurm itself connects to
        ("node7.example", "10.0.0.7"),
        ("unknown", "unknown"),
        ("", ""),  # no answer, as inside an image: from MASTER_ADDR
        ("node1", "10.0.0.1"),  # its own name is its loopback: the address of its way to node2
    ],
)
def test_a_node_has_an_address_that_others_reach(tmp_path: Path, node_addr: str, found: str):
    programs = {
        "scontrol": f'[ "$2" = node ] && echo "NodeAddr={node_addr} x" || printf "node1\\nnode2\\n"',
        "getent": "case $2 in node7.example) echo 10.0.0.7 STREAM;; node1) echo 127.0.1.1 STREAM;; "
        'node2) echo 10.0.0.2 STREAM;; [0-9]*) echo "$2" STREAM;; *) exit 2;; esac',
        "ip": '[ "$4" = 10.0.0.2 ] && echo "10.0.0.2 dev eth0 src 10.0.0.1 uid 0"',
    }
    write_programs(tmp_path, programs)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node[1-2]"}
    script = 'set -euo pipefail; source "$0"; address_of node1'
    words = ["bash", "-c", script, str(ROOT / "slurm" / "job.sh")]
    assert subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.strip() == found


def test_a_job_of_thousands_of_nodes_has_a_first_one_and_its_steps_a_whole_environment(tmp_path):
    """Of a pipe that ends early bash would make status 141."""
    names = "for n in $(seq 5000); do echo p4d24xlarge-dy-$n; done"
    write_programs(tmp_path, {"scontrol": names})
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1"}
    inherited = ("NTASKS", "GPUS", "NTASKS_PER_GPU", "NTASKS_PER_TRES", "GPUS_PER_TASK", "MEM_PER_NODE")
    env |= {f"SLURM_{name}": "16" for name in inherited} | {"SLURM_EXPORT_ENV": "NONE", "SLURM_GPUS_PER_NODE": "8"}
    shown = 'echo "$(first_node x) $SLURM_EXPORT_ENV $(compgen -e SLURM_ | grep "NTASK\\|GPU\\|MEM")"'
    words = ["bash", "-c", f'set -euo pipefail; source "$0"; {shown}', str(ROOT / "slurm/job.sh")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "p4d24xlarge-dy-1 ALL SLURM_GPUS_PER_NODE\n"


@pytest.mark.parametrize("script", ["one_node.sbatch", "job.sh"])
def test_options_of_srun_and_a_command_before_each_nodes(tmp_path: Path, script: str):
    """As inside an image: without scontrol, in a working directory of its own."""
    programs = {
        "bin/srun": 'while [ "$1" != bash ]; do echo "$1"; shift; done; cd /; exec "$@"',
        "venv/bin/python": 'trap "" USR1; printf "%s\\n" "in $IMAGE" "$@" "$PWD"',
        "enter an image": 'export IMAGE="$1"; shift; exec "$@"',
        "bin/scontrol": "exit 1",
    }
    write_programs(tmp_path, programs)
    options = ("--container-image=a.sqsh", "--container-mounts=/a b:/c")
    request = Request("one-node", 1, 0, srun_options=options)
    env = job_variables(request, ROOT / "slurm" / SCRIPTS["one-node"]) | {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "MEGAGRPO_VENV": f"{tmp_path}/venv",
        "MEGAGRPO_NODE_PREFIX": f"'{tmp_path}/enter an image' image.sif",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "127.0.0.1",
        "SLURM_PROCID": "0",
        "SLURMD_NODENAME": "127.0.0.1",
    }
    words = [str(ROOT / "slurm" / script), "x.yaml"]
    if script == "job.sh":
        start = "start torchrun_node.sh 127.0.0.1 30000 --nodes=1 -- x.yaml; wait $started"
        words = ["-c", f'set -euo pipefail; source "$0"; {start}', words[0]]
    done = subprocess.run(["bash", *words], env=env, capture_output=True, text=True, check=True, cwd=tmp_path)
    said = done.stdout.splitlines()
    assert str(tmp_path) in said, "relative paths start where the job was submitted"
    assert [word for word in said if word.startswith("--container")] == list(options)
    of_node = said[said.index("in image.sif") :]
    assert of_node[1:6] == ["-P", "-W", "ignore", "-m", "megagrpo.cli"] and "x.yaml" in of_node
    assert of_node[6] == ("train" if script == "job.sh" else "run")


IN_IMAGE = Request("one-node", gpus_per_node=8, srun_options=("--container-image=a.sqsh",))
SBATCH = 'printf "%s\\n" "$MEGAGRPO_VENV" "$MEGAGRPO_ROOT" "$@" >"$0.words"; echo "7;cluster"'
ON_GPUS = {"actor": {"dtype": "bfloat16", "world_size": 2}, "rollout": {}}


@pytest.fixture
def login_node(tmp_path, monkeypatch) -> Path:
    """A login node with sbatch, with the files of ON_GPUS and without an installation for GPUs."""
    write_programs(tmp_path, {"bin/sbatch": SBATCH})
    (tmp_path / "d").write_text('{"prompt": "1", "answer": "1"}\n')
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "unknown"}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    for name in ("MEGAGRPO_VENV", "MEGAGRPO_ROOT", "MEGAGRPO_NODE_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("megagrpo.tools.submit.preflight", lambda config, nodes: broken(installed(config)))
    monkeypatch.setattr("megagrpo.tools.submit.model_description", lambda config: None)
    return tmp_path


def test_an_image_has_its_own_installation(login_node, monkeypatch, capsys):
    """With a container on the nodes the login node needs nothing; the user's variables reach the job."""
    config = experiment(**ON_GPUS, sampling={"agent": {"command": ["only-in-the-image"]}})
    with pytest.raises(ValueError, match=r"only-in-the-image is no program(.|\n)*installation for CPUs"):
        submit(config, ["/x.yaml"], Request("one-node", gpus_per_node=8), dry_run=False)

    def submitted(request: Request) -> list[str]:
        assert submit(config, ["/x.yaml"], request, dry_run=False) == 0
        return (login_node / "bin" / "sbatch.words").read_text().splitlines()

    words = submitted(IN_IMAGE)
    assert words[:2] == ["/megagrpo/.venv", str(ROOT)]
    assert words[-2:] == ["--set", f'output_dir="{login_node}/t"'], "an image has a working directory of its own"
    said = capsys.readouterr()
    assert said.out == "7;cluster\n", "programs read the number"
    assert f"{login_node}/t/logs/slurm-7.out" in said.err and "only-in-the-image is no program" in said.err
    monkeypatch.setenv("MEGAGRPO_VENV", "/usr/venv")
    assert submitted(IN_IMAGE)[0] == "/usr/venv"
    assert submit(experiment(**ON_GPUS), ["/x.yaml"], Request("one-node", gpus_per_node=8), dry_run=False) == 0
    assert submitted(Request("one-node", gpus_per_node=8))[0] == "/usr/venv", "it has its own packages, too"
    monkeypatch.setenv("MEGAGRPO_NODE_PREFIX", "apptainer exec image.sif")
    assert submitted(Request("one-node", gpus_per_node=8))[0] == "/usr/venv"
    checkout = login_node / "checkout"
    checkout.mkdir()
    (checkout / "slurm").symlink_to(ROOT / "slurm")
    monkeypatch.setenv("MEGAGRPO_ROOT", str(checkout))
    words = submitted(IN_IMAGE)
    assert words[1] == str(checkout) and f"{checkout}/slurm/one_node.sbatch" in words


def test_a_dry_run_needs_neither_model_nor_data_and_shows_every_script(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(
        "{name: t, output_dir: t, model: {path: models/m}, data: {path: d.jsonl}, eval: {data: {path: nobody/nowhere}}}"
    )
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert cli.main(["submit", "x.yaml", "--dry-run"]) == 0
    said = capsys.readouterr()
    for script in ("one_node.sbatch", "job.sh"):
        assert (ROOT / "slurm" / script).read_text() in said.out
    assert f"{ROOT}/launch/*node.sh" in said.out
    for absent in ("models/m does not exist", "d.jsonl does not exist", "nobody/nowhere does not exist here"):
        assert absent in said.err
    write_programs(tmp_path, {"sbatch": "true"})
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert cli.main(["submit", "x.yaml"]) == 2
    assert "nobody/nowhere does not exist here" in capsys.readouterr().err


def test_a_grace_period_in_which_no_step_ends_is_said(tmp_path, monkeypatch, capsys):
    words = ["submit", str(ROOT / "configs/qwen3_235b_a22b.yaml"), "--dry-run", "--set", f"output_dir={tmp_path}"]
    said = {}
    for grace in ("300", "30000"):
        assert cli.main([*words, "--grace-s", grace]) == 0
        said[grace] = "a step takes at least" in capsys.readouterr().err
    assert said == {"300": True, "30000": False}


@pytest.mark.parametrize("signals", [["TERM"], ["USR1", "TERM"], ["USR1"]])
def test_a_cancelled_job_is_not_put_back_into_the_queue(tmp_path: Path, signals: list[str]):
    """Although its trainers, which get scancel's TERM too, save in time. After USR1 it is the time limit."""
    up, told = tmp_path / "up", tmp_path / "told"
    step = f"trap : USR1 USR2; touch {up}; until [ -e {told} ]; do sleep 0.1; done; exit 85"
    write_programs(tmp_path, {"srun": step, "scontrol": 'echo "requeued $2"; kill -TERM $PPID'})
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1", "MEGAGRPO_ROOT": str(ROOT)}
    job = 'source "$0"; srun & run_alone $!'
    words = ["bash", "-c", f"set -euo pipefail; {job}", str(ROOT / "slurm/job.sh")]
    running = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
    experiments.until(up.exists, 60)
    for name in signals:
        running.send_signal(getattr(signal, f"SIG{name}"))
        time.sleep(0.5)
    told.touch()
    said = running.communicate(timeout=120)[0]
    assert running.returncode == 85 and ("requeued 1" in said) == ("USR1" in signals), said


@pytest.mark.parametrize("status", [85, 86, 3])
def test_a_job_whose_service_ends_first_ends_as_its_trainers_do(tmp_path: Path, status: int):
    """TERM goes to both; the trainers may have saved."""
    up = tmp_path / "up"
    programs = {
        "srun": f"""case "$*" in
            *rollout_node.sh*) until [ -e {up} ]; do sleep 0.1; done ;;
            *) trap "exit {status}" USR2; touch {up}; while :; do sleep 0.1; done ;;
        esac""",
        "scontrol": '[ "$1" = requeue ] && echo "requeued $2" && kill -TERM $PPID',
    }
    write_programs(tmp_path, programs)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1", "MEGAGRPO_ROOT": str(ROOT)}
    job = "on_trainers=(--nodes=1) on_rollout=(--nodes=1); run_job 127.0.0.1 127.0.0.1 x.yaml"
    words = ["bash", "-c", f'set -euo pipefail; source "$0"; {job}', str(ROOT / "slurm/job.sh")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done
    assert "the rollout service has ended before the trainers" in done.stdout
    assert ("requeued 1" in done.stdout) == (status == 85)

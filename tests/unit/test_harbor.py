"""Tasks of Harbor: real commands and tests in real sandboxes, the model's turns by the fake service."""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_programs import run_all

from examples.laptop.model import character_tokenizer
from megagrpo.environments.harbor import program
from megagrpo.environments.harbor.local import Local
from megagrpo.rollout.agents.program_worker import read_result
from tests.experiments import ROOT

TASKS = ROOT / "examples" / "repositories"
NAMES = ["interval", "ledger", "slug"]
LETTERS = character_tokenizer("".join(map(chr, range(32, 127))) + "\nèéû")
isolated = pytest.mark.skipif(not shutil.which("bwrap"), reason="no bubblewrap here")
RUNTIMES = pytest.mark.parametrize("runtime", ["subprocess", pytest.param("bubblewrap", marks=isolated)])


LATE = {"args": {"command_s": 0.5}}


def says(text: str) -> dict:
    tokens = [*LETTERS(text)["input_ids"], LETTERS.eos_token_id]
    return {"output_token_logprobs": [[-0.25, t, None] for t in tokens], "finish_reason": {"type": "stop"}}


def bash(command: str) -> dict:
    return says(f"I try this.\n```bash\n{command}\n```")


def work(*turns, tasks=(TASKS / "interval",), runtime: str = "subprocess", **more) -> tuple[list, list[dict]]:
    """(the outcomes and the requests of rollouts, one per task)"""
    args = {"introduction": "", "runtime": runtime, **more.pop("args", {})}
    more = {"tokens": 6000, "max_turns": 8, "tokenizer": LETTERS, "function": "harbor", "args": args} | more
    extra = lambda number: {"task": str(tasks[number])}  # noqa: E731
    groups, requests = run_all(["-"] * len(tasks), *turns, program="", extra=extra, **more)
    return [group.outcomes[0] for group in groups], requests


def a_task(folder: Path, test: str, dockerfile: str = "FROM scratch\n", config: str = "") -> Path:
    for name, text in (("environment/Dockerfile", dockerfile), ("tests/test.sh", test), ("task.toml", config)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@RUNTIMES
@pytest.mark.parametrize("name", NAMES)
def test_a_bug_that_is_mended_is_rewarded_and_one_that_stays_is_not(name: str, runtime: str):
    solution = (TASKS / name / "solution" / "solve.sh").read_text()
    before, _ = work(says("There is no bug."), tasks=[TASKS / name], runtime=runtime)
    after, _ = work(bash(solution), says("Done."), tasks=[TASKS / name], runtime=runtime)
    assert [before[0].value, after[0].value] == [0.0, 1.0], (before, after)
    assert before[0].ok and after[0].ok


@RUNTIMES
def test_the_model_sees_ends_and_outputs_and_the_same_paths_everywhere(runtime: str):
    outcomes, requests = work(
        *(bash("pwd; ls; ls /app/nothing"), bash("exit 3"), bash("ls /tests"), says("Done.")), runtime=runtime
    )
    said = [LETTERS.decode(request["input_ids"]) for request in requests]
    assert "exit code 2\n```\n/app\nDockerfile\nintervals.py\n" in said[1] and "cannot access '/app/nothing'" in said[1]
    assert "exit code 3\n```\n\n```" in said[2], said[2]
    assert "exit code 2" in said[3][len(said[2]) :] and "harbor-" not in said[3], "the tests come later"
    assert outcomes[0].value == 0.0


@pytest.mark.parametrize("command", ["#" * 100_001, "#" + 18_000 * " /tmp"], ids=["long", "written longer"])
def test_a_command_that_no_command_line_holds_is_answered(command: str):
    outcomes, requests = work(bash(command), says("Done."), tokens=230_000)
    assert outcomes[0].ok and "exit code 126" in LETTERS.decode(requests[1]["input_ids"][-200:]), outcomes


@RUNTIMES
def test_a_command_that_hangs_is_killed_with_everything_that_it_started(runtime: str, tmp_path: Path):
    marker = f"4{time.time_ns() % 10**8:08d}"  # seconds of sleep that no other process has
    left = bash(f"sleep {marker} & setsid sleep {marker} & sleep {marker}")
    work(left, bash("sed -i 's/start < merged/start <= merged/' intervals.py"), says("."), runtime=runtime, **LATE)
    assert not [p for p in processes() if marker in p]
    work(bash(f"setsid sleep {marker} & sleep {marker} & echo left"), says("."), runtime=runtime)
    assert not [p for p in processes() if marker in p], "of a command that ended"
    outcomes, _ = work(bash(f"sleep {marker}; sleep {marker}"), runtime=runtime, timeout_s=3.0)
    assert outcomes[0].status == "timeout"
    assert not [p for p in processes() if marker in p], "of an agent that was ended"
    outcomes, requests = work(left, says("."), runtime=runtime, **LATE)
    assert outcomes[0].value == 0.0 and "time limit" in LETTERS.decode(requests[1]["input_ids"])


def test_commands_end_with_a_worker_that_is_killed(tmp_path: Path):
    marker = f"4{time.time_ns() % 10**8:08d}"
    program = f"""import asyncio, pathlib
from megagrpo.environments.harbor.local import Local
async def run():
    sandbox = Local(pathlib.Path({str(TASKS / "slug")!r}), {{}}, False)
    await sandbox.start()
    await sandbox.run("(sleep {marker}; true) & sleep {marker}", 1000.0)
asyncio.run(run())"""
    with subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)}) as worker:
        until(lambda: sum(p.startswith(f"sleep {marker}") for p in processes()) == 2)
        worker.kill()
    until(lambda: not [p for p in processes() if marker in p])


def until(condition) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def processes() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


def test_tests_that_hang_are_worth_nothing_and_tests_without_a_verdict_are_an_error(tmp_path: Path):
    slow = a_task(tmp_path / "slow", "sleep 1000", config="[verifier]\ntimeout_sec = 0.5")
    mute = a_task(tmp_path / "mute", "echo not today")
    several = a_task(tmp_path / "several", """echo '{"a": 1, "b": 0}' > /logs/verifier/reward.json""")
    named = a_task(tmp_path / "named", """echo '{"a": 1, "reward": 0.5}' > /logs/verifier/reward.json""")
    outcomes, _ = work(*[says(".")] * 4, tasks=[slow, mute, several, named])
    assert [(outcome.status, outcome.value) for outcome in outcomes] == [
        *(("score", 0.0), ("error", 0.0), ("error", 0.0), ("score", 0.5))
    ]
    assert "not today" in outcomes[1].detail and """none as `reward` to reward.json: '{"a": 1""" in outcomes[2].detail


ONE = "echo 1 > /logs/verifier/reward.txt\n"


@RUNTIMES
def test_a_script_runs_by_its_first_line_and_its_verdict_is_read_as_harbor_does(runtime: str, tmp_path: Path):
    strict = a_task(tmp_path / "strict", f"#!/bin/bash -e\n{ONE.replace('1', '0')}false\n{ONE}")
    kills = a_task(tmp_path / "kills", f"{ONE}sleep 1000 & kill -9 $!; wait $!")
    half = a_task(tmp_path / "half", "echo .50 > /logs/verifier/reward.txt")
    odd = a_task(tmp_path / "odd", f"test -L /app/broken && test -e /app/sub/Dockerfile && {ONE}")
    (odd / "environment" / "broken").symlink_to("nowhere")
    (odd / "environment" / "sub").mkdir()
    (odd / "environment" / "sub" / "Dockerfile").write_text("RUN true")
    (odd / "tests" / "latin.py").write_bytes(b"# \xe9\r\n")
    outcomes, _ = work(*[says(".")] * 4, tasks=[strict, kills, half, odd], runtime=runtime)
    assert [(outcome.status, outcome.value) for outcome in outcomes] == [
        *(("score", 0.0), ("score", 1.0), ("score", 0.5), ("score", 1.0))
    ]


@pytest.mark.parametrize(
    "report", ["null", '{"reward": null}', "{}", '{"passed": 3}', '{"reward": true}', "", "NaN", "{"]
)
def test_a_report_without_a_reward_leaves_it_to_the_text_beside_it(report: str, tmp_path: Path):
    """As Harbor reads them; alone it is an error, no 0."""
    written = f"echo '{report}' > /logs/verifier/reward.json\n"
    both = a_task(tmp_path / "both", written + ONE)
    alone = a_task(tmp_path / "alone", written)
    outcomes, _ = work(*[says(".")] * 2, tasks=[both, alone])
    assert [(outcome.status, outcome.value) for outcome in outcomes] == [("score", 1.0), ("error", 0.0)]


def test_a_cut_output_says_so():
    outcomes, requests = work(bash("seq 2000"), says("."), tasks=[TASKS / NAMES[0]])
    said = LETTERS.decode(requests[1]["input_ids"])
    assert "exit code 0\n```\n[output cut]\n" in said and "\n2000\n" in said and "\n17\n" not in said, outcomes


@RUNTIMES
def test_what_a_model_prepares_for_the_tests_is_not_there_and_nothing_of_tmp_stays(runtime: str, tmp_path: Path):
    task = a_task(tmp_path, f"test -e /logs/verifier/reward.txt || test -L /tests || {ONE}")
    left = f"left{time.time_ns()}"
    for command in ("mkdir -p /tests /logs/verifier; echo 0 > /logs/verifier/reward.txt", "ln -s /app /tests"):
        outcomes, _ = work(bash(f"{command}; touch /tmp/{left} $HOME/{left}"), says("."), tasks=[task], runtime=runtime)
        assert (outcomes[0].status, outcomes[0].value) == ("score", 1.0), outcomes
    assert not Path(f"/tmp/{left}").exists()


@pytest.fixture
def user_rights() -> Iterator[Path]:
    """A folder of a user without the rights of root, which this process then is."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        is_root = os.geteuid() == 0
        if is_root:
            os.chown(folder, 65534, 65534)
            os.setresuid(65534, 65534, 0)
        try:
            yield Path(folder)
        finally:
            if is_root:
                os.setresuid(0, 0, 0)


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf /app",
        "chmod 0 /app",
        "mkdir d; touch d/x; chmod 555 d",
        "mkdir d d/e; chmod 0 d",
        "mkdir -p /tests/d; touch /tests/d/x; chmod 555 /tests/d",
        "mkdir -p /tests/d/e; chmod 0 /tests/d /tests",
    ],
)
def test_folders_without_rights_end_no_rollout_and_stay_nowhere(command: str, user_rights: Path):
    async def run() -> tuple[str, object]:
        sandbox = Local(a_task(user_rights / "task", f"cd /app && {ONE}"), {}, isolated=False)
        scratch = sandbox._scratch
        assert scratch.parent == user_rights
        await sandbox.start()
        await sandbox.run(command, 10.0)
        end, _ = await sandbox.run("exit 3", 10.0)
        verdict = await sandbox.verify(10.0)
        await sandbox.close()
        assert not scratch.exists()
        return end, verdict

    tempfile.tempdir, before = str(user_rights), tempfile.tempdir
    try:
        assert asyncio.run(run()) == ("exit code 3", 1.0)
    finally:
        tempfile.tempdir = before


def test_a_limit_of_turns_of_tokens_or_of_seconds_leaves_the_verdict_to_the_tests(tmp_path: Path):
    mend = bash("sed -i 's/start < merged/start <= merged/' intervals.py")
    assert work(mend, max_turns=1)[0][0].value == 1.0
    assert work(mend, tokens=120)[0][0].value == 1.0
    test = "test -e /app/b && echo 1 > /logs/verifier/reward.txt"
    short = a_task(tmp_path, test, config="[agent]\ntimeout_sec = 0.5")
    outcomes, _ = work(bash("touch b; sleep 1000"), bash("rm b"), tasks=[short])
    assert outcomes[0].value == 1.0


def test_twenty_tasks_run_at_once():
    tasks = [TASKS / NAMES[number % 3] for number in range(20)]
    outcomes, _ = work(*[bash("sed -i 's/start < merged/start <= merged/' *.py")] * 20, tasks=tasks, max_turns=1)
    assert [outcome.value for outcome in outcomes] == [float(number % 3 == 0) for number in range(20)]


def test_a_row_a_task_and_a_runtime_that_cannot_be_played_say_why(tmp_path: Path):
    built = a_task(tmp_path / "built", "", "FROM debian\nRUN apt-get install -y git\n")
    outcomes, _ = work(tasks=[built, tmp_path / "none"])
    assert "RUN apt-get install -y git: only an image can have this; take runtime: docker" in outcomes[0].detail
    assert f"{tmp_path / 'none'} is not the folder of a task" in outcomes[1].detail
    configs = ('[[steps]]\nname = "a"', '[environment]\nworkdir = "/srv"', '[verifier.env]\nA = "${A:-b}"')
    tasks = [a_task(tmp_path / str(number), "", config=config) for number, config in enumerate(configs)]
    steps, workdir, template = (outcome.detail for outcome in work(tasks=tasks)[0])
    assert "task.toml: no agent here knows steps" in steps
    assert "workdir: only an image can have this" in workdir and "${A:-b}: only an image" in template
    outcomes, _ = work(runtime="docker")
    assert "No module named 'harbor'; `pip install harbor` into an interpreter of" in outcomes[0].detail


HARBOR = {  # what hosted.py takes from Harbor's package, with commands on this machine
    "environments/factory": """import pathlib, subprocess, types
class EnvironmentFactory:
    def run_preflight(kind): pass
    def create_environment(kind, environment_dir, **_): return Sandbox(environment_dir)
    def create_environment_from_import_path(path, **_): raise SystemError(path)
class Sandbox:
    def __init__(self, folder): self.log = pathlib.Path(folder).parent / "log"
    def note(self, word): self.log.open("a").write(f"{word} ")
    async def start(self, force_build): self.note("start")
    async def stop(self, delete): self.note("stop")
    async def exec(self, command):
        if "/logs/verifier" in command:
            return self.note(command)
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
        self.note(len(done.stdout))
        return types.SimpleNamespace(return_code=done.returncode, stdout=done.stdout, stderr=done.stderr)
""",
    "models/environment_type": "EnvironmentType = str",
    "models/task/task": """import types
class Task:
    short_name = "task"
    def __init__(self, folder):
        self.paths = types.SimpleNamespace(environment_dir=f"{folder}/environment")
        self.config = types.SimpleNamespace(environment={})
""",
    "models/trial/paths": """class TrialPaths:
    def __init__(self, trial_dir): pass
    def mkdir(self): pass
""",
    "verifier/verifier": """import asyncio, types
class Verifier:
    def __init__(self, task, paths, sandbox): self.folder = sandbox.log.parent
    async def verify(self):
        if self.folder.name == "lost": raise TimeoutError("no answer of the provider")
        if self.folder.name == "slow": await asyncio.sleep(1000)
        return types.SimpleNamespace(rewards={"reward": 0.5})
""",
}


def an_interpreter_with_harbor(folder: Path) -> str:
    for name, text in HARBOR.items():
        path = folder / "harbor" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_a_hosted_sandbox_runs_commands_gives_the_end_of_their_output_and_is_deleted(tmp_path: Path):
    task, python = a_task(tmp_path / "task", ""), an_interpreter_with_harbor(tmp_path)
    turns = bash("yes | head -c 300000; echo end >&2; exit 3"), bash("sleep 1000"), bash("exit 137"), says(".")
    args = {"python": python, "command_s": 1.0}
    outcomes, requests = work(*turns, tasks=[task], runtime="e2b", args=args)
    said = [LETTERS.decode(request["input_ids"]) for request in requests]
    assert outcomes[0].value == 0.5, outcomes
    assert "exit code 3\n" in said[1] and "\ny\ny\nend\n" in said[1] and "time limit" in said[2]
    assert "exit code 137\n" in said[3], "killed for memory"
    until(lambda: (task / "log").read_text() == "start 65536 0 0 find /logs/verifier/ -mindepth 1 -delete stop ")


def test_a_provider_that_is_late_is_an_error_and_hosted_tests_that_are_late_are_worth_nothing(tmp_path: Path):
    args = {"python": an_interpreter_with_harbor(tmp_path)}
    tasks = [a_task(tmp_path / name, "", config="[verifier]\ntimeout_sec = 0.5") for name in ("lost", "slow")]
    (lost, slow), _ = work(says("."), says("."), tasks=tasks, runtime="e2b", args=args)
    assert lost.status == "error" and "no answer of the provider" in lost.detail
    assert (slow.status, slow.value) == ("score", 0.0)


def test_a_hosted_sandbox_is_deleted_after_its_worker_was_killed_before_it_read_an_answer(tmp_path: Path):
    task, python = a_task(tmp_path / "task", ""), an_interpreter_with_harbor(tmp_path)
    ours, theirs = socket.socketpair()
    with theirs:
        command = [python, str(program._HOSTED), str(task), "e2b", str(theirs.fileno())]
        worker = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    with ours:
        assert ours.recv(5) == b"null\n"
        ours.sendall(b"[0, {}]\n")
        assert ours.recv(1, socket.MSG_PEEK)
    worker.wait(60.0)
    assert (task / "log").read_text() == "start stop "


@isolated
def test_bubblewrap_shows_neither_the_machine_nor_the_network():
    look = "cat /etc/shadow; ls /home /root /work; ls /proc | grep -c '^[0-9]'; id -u; cat < /dev/tcp/127.0.0.1/22; env"
    _, requests = work(bash(look), bash("head -c 300000000 /dev/zero > /app/x"), says("."), runtime="bubblewrap")
    said = LETTERS.decode(requests[2]["input_ids"])
    assert said.count("No such file or directory") >= 3
    assert "Network is unreachable" in said or "refused" in said
    assert "MEGAGRPO_KEY" not in said and "OPENAI" not in said
    assert "File size limit exceeded" in said or "exit code 153" in said


def test_measurements_of_a_sandbox_travel():
    result = read_result({"reward": 1, "info": {"commands": 2}, "sandbox_s": np.float32(1.5), "sandbox_killed": 1})
    assert json.loads(json.dumps(result)) == [1.0, None, '{"commands": 2}', {"sandbox_s": 1.5, "sandbox_killed": 1}]
    with pytest.raises(ValueError, match="it returned"):
        read_result({"reward": 1, "sandbox_s": "long"})


def test_rows_of_a_folder():
    command = [sys.executable, "-m", "megagrpo.environments.harbor.program", str(TASKS)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = [json.loads(line) for line in found.splitlines()]
    assert [Path(row["extra"]["task"]).name for row in rows] == NAMES
    assert rows[0]["prompt"] == (TASKS / "interval" / "instruction.md").read_text()

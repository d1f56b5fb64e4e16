"""What `megagrpo convert` reads of a shell script: as bash expands it, while nothing of it runs."""

from contextlib import suppress

import psutil
import pytest

from megagrpo.tools.convert.source import read_source
from tests.unit.test_convert import COMMAND, TRAINER, source


def cmdline(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def test_a_script_is_read_as_bash_reads_it_and_nothing_of_it_runs(tmp_path):
    script = (
        f"{TRAINER} a.kill=1\n".replace("python3", "builtin kill -0 $$ && python3")
        + f"echo > '{tmp_path}/made'; /bin/touch {tmp_path}/by_path; enable kill; set +r\n"
        + COMMAND
        + f"\ntouch {tmp_path}/touched; : > {tmp_path}/made; kill -9 $PPID; cd /; exec /bin/false\n"
    )
    given = read_source("verl", source(tmp_path, script)).given
    assert "a.kill" not in given, "no process of the user is in its reach"
    assert (
        given["data.train_files"] == "~/data/train.parquet"
        and given["data.train_batch_size"] == 256
    )
    assert given["data.val_files"] == ["~/a.parquet", "~/b.parquet"]
    assert given["actor_rollout_ref.model.path"] == "~/models/Qwen2.5-7B"
    assert (
        given["trainer.logger"] == ["console", "wandb"]
        and given["trainer.experiment_name"] == "my run"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run.sh"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hello", "has no command `python -m verl.trainer.main_ppo key=value ...`$"),
        ("while true; do :; done", "started no trainer"),
        ('[ -z "$OF_A_TEST" ] && exit 1', r"ends by `exit`, without \$OF_A_TEST$"),
        ("MY=${MY:-}; OWN=; if [ ! $OWN$MY ]; then exit; fi", r"`exit`, without \$MY$"),
    ],
)
def test_a_script_without_a_command_is_named(tmp_path, monkeypatch, text, message):
    monkeypatch.setattr("megagrpo.tools.convert.shell._TIME_LIMIT_S", 1)
    with pytest.raises(ValueError, match=message):
        read_source("verl", source(tmp_path, text))


@pytest.mark.parametrize(
    ("loop", "after"),
    [("nvidia-smi >> gpu.log; sleep 10", "wait"), (": of_a_test", ""), (": of_a_test", "wait")],
)
def test_a_loop_in_the_background_neither_holds_convert_nor_outlives_it(
    tmp_path, monkeypatch, loop, after
):
    monkeypatch.setattr("megagrpo.tools.convert.shell._TIME_LIMIT_S", 1 if "of" in loop else 60)
    text = f"# {tmp_path}\nwhile true; do {loop}; done &\n{TRAINER} a.b=1\n{after}\n"
    assert read_source("verl", source(tmp_path, text)).given == {"a.b": 1}
    left = [one for one in psutil.process_iter() if str(tmp_path) in str(cmdline(one))]
    assert not psutil.wait_procs(left, timeout=30)[1], "what was killed may take a moment"


@pytest.mark.parametrize(
    "loop",
    ["until nc -z host 6379; do sleep 5; done", "while :; do while :; do sleep 1; done; done"],
)
def test_a_loop_that_waits_before_the_command_is_left(tmp_path, loop):
    assert read_source("verl", source(tmp_path, f"{loop}\n{TRAINER} a.b=1")).given == {"a.b": 1}


def test_the_callers_variables_are_used_and_what_expands_to_nothing_is_noted(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_THE_CALLER", "/models/mine")
    monkeypatch.setenv("BASH_ENV", str(source(tmp_path, "echo() { exit; }", "profile")))
    text = """# $UNSEEN
    known=${WITH_DEFAULT:-yes} own= today=$(date +%m%d)
    name=run-$today-`hostname`; if [ -z "$UNUSED" ]; then :; fi
    echo $known
    python -m verl.trainer.main_ppo m.path=$OF_THE_CALLER/x m.name=$name a.known=$known "a.empty=$own" \\
        data.files=$UNSET/a.parquet a.files=${UNSET}/b "a.first=$1" \\
        a.nested=$(made of $UNSET) $UNSET.key=1 $@
    """
    read = read_source("verl", source(tmp_path, text))
    assert read.given == {
        "m.path": "/models/mine/x",
        "m.name": "run--",
        "a.known": "yes",
        "a.empty": None,
        "data.files": "/a.parquet",
        "a.files": "/b",
        "a.first": None,
        "a.nested": None,
    }
    assert sorted(read.notes) == [
        "expanded to nothing: $(date +%m%d) (line 2), in m.name",
        "expanded to nothing: $(hostname) (line 3), in m.name",
        "expanded to nothing: $(made of $UNSET) (line 7), in a.nested",
        "expanded to nothing: $1 (line 6), in a.first",
        "expanded to nothing: $UNSET (line 6), in data.files, a.files, .key",
    ]


def test_files_that_a_script_reads_are_read_and_missing_ones_are_noted(tmp_path):
    (tmp_path / "scripts" / "models").mkdir(parents=True)
    (tmp_path / "examples").mkdir()
    source(tmp_path, "WORDS=(m.a=1 m.b=$(seq 2 3 | { read a; echo $a; }))", "scripts/models/one.sh")
    source(tmp_path, "WORDS+=(m.c=3)", "examples/two.sh")
    text = """
    HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
    source "$HERE/../elsewhere/one.sh"; . "$HERE/two.sh"; source /nowhere/three.sh
    ray job submit --x=y -- python3 -m verl.trainer.main_ppo ${WORDS[@]} d.e=$(basename /x/y.sh .sh)
    bash -lc "python3 -m verl.trainer.main_ppo d.e=2"
    """
    read = read_source("verl", source(tmp_path, text, "examples/run.sh"))
    assert read.given == {"m.a": 1, "m.b": 2, "m.c": 3, "d.e": "y"}
    assert read.notes == [
        "/nowhere/three.sh could not be read; what it sets is missing",
        "2 commands start a trainer; this is the first",
    ]

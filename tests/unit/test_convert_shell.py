"""What `megagrpo convert` reads of a shell script: as bash expands it, while nothing of it runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megagrpo.tools.convert.foreign import whose
from megagrpo.tools.convert.reading import Source, read_source
from tests.unit.test_convert import COMMAND, TRAINER, source

STRANGERS = """
history -s 'echo written by the script'
history -w .bashrc
read -r line < {secret}
mapfile -t lines < {secret}
text=$(<{secret}); more=$(cat {secret}); source {secret}; source ./link.sh; . ~/.ssh/config
: < /dev/tcp/127.0.0.1/{port}; echo > made; touch {folder}/touched; : > {folder}/made
kill -9 $PPID; exec /bin/false; builtin kill -9 $$; enable kill; eval "touch {folder}/evaluated"
while true; do sleep 10; done
trap 'touch {folder}/trapped' EXIT
"""
WATCHED = """
import json, sys
from megagrpo.tools.convert.reading import read_source
from pathlib import Path
read_source("verl", Path("first.sh"))  # imports what is imported late
seen, watching = [], True
sys.addaudithook(lambda event, args: seen.append([event, str(args)]) if watching else None)
read = read_source("verl", Path("run.sh"))
watching = False
print(json.dumps([seen, read.given, read.notes]))
"""
MISSING = "could not be read; what it sets is missing"
PROBED = "D=${D:-$(python3 -c 'import npu' 2>/dev/null && echo npu || echo gpu)}"
FALSE = "taken as false, because nothing runs:"


def words(tmp_path: Path, text: str) -> tuple[object, list[str]]:
    """The value of the key `a.b` in a script's command, and notes."""
    read = read_source("verl", source(tmp_path, text))
    return read.given.get("a.b"), read.notes


def test_a_script_is_read_as_bash_reads_it_and_nothing_of_it_runs(tmp_path):
    script = COMMAND + f"\ntouch {tmp_path}/touched; : > {tmp_path}/made; cd /\n"
    given = read_source("verl", source(tmp_path, script)).given
    assert given["data.train_files"] == "~/data/train.parquet" and given["data.train_batch_size"] == 256
    assert given["data.val_files"] == ["~/a.parquet", "~/b.parquet"]
    assert given["actor_rollout_ref.model.path"] == "~/models/Qwen2.5-7B"
    assert given["trainer.logger"] == ["console", "wandb"] and given["trainer.experiment_name"] == "my run"
    assert [path.name for path in tmp_path.iterdir()] == ["run.sh"]


def test_a_strangers_script_writes_nothing_reads_no_file_and_starts_no_process(tmp_path):
    folder, home = tmp_path / "folder", tmp_path / "home"
    folder.mkdir(), home.mkdir()
    secret = source(home, "KEY=PRIVATE\nPRIVATE", "id_rsa")
    (folder / "link.sh").symlink_to(secret)
    (folder / ".bashrc").write_text("alias mine=yours\n")
    source(folder, f"{TRAINER} a.b=1 a.c=${{X:-1}}", "first.sh")
    text = STRANGERS.format(secret=secret, folder=folder, port=9)
    keys = "a.line=$line a.lines=${lines[0]} a.text=$text a.more=$more a.key=$KEY"
    source(folder, f"{text}{TRAINER} a.b=1 {keys}\n")
    before = {path.name: path.read_text() for path in folder.iterdir()}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    events, given, notes = json.loads(done.stdout)
    events = [event for event in events if event[0] != "object.__getattr__"]
    assert events and all(name == "open" and "'run.sh'" in args for name, args in events), events
    assert given == {"a.b": 1} | dict.fromkeys(["a.line", "a.lines", "a.text", "a.more", "a.key"])
    assert "PRIVATE" not in done.stdout and f"{secret} {MISSING}" in notes
    assert {path.name: path.read_text() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hello", "has no command `python -m verl.trainer.main_ppo key=value ...`$"),
        ("while true; do :; done", "has no command"),
        ('[ -z "$OF_A_TEST" ] && exit 1', r"ends by `exit`, without \$OF_A_TEST$"),
        ("MY=${MY:-}; OWN=; if [ ! $OWN$MY ]; then exit; fi", r"`exit`, without \$MY$"),
        ("f() { f; }; f", r"run.sh is not understood; .* alone: maximum recursion"),
        ("f() { g; g; }; g() { for x in 1 2 3; do h; h; done; }; h() { f; }; f", "too many|recursion"),
        ("X=${}", "run.sh is not understood"),
        ("X=${X:-$((", "run.sh is not understood|has no command"),
        (f"[ {'1' * 5000} -gt 1 ]", "run.sh is not understood"),
        ("X=" + "1234" * 999 + "; Y=$(" + "echo $X; " * 999 + ")", "too many commands, or too long ones"),
        ("f() { f $1$1; }; f 1234", "too many commands, or too long"),
        ("X=1234" + "; A=; Y=${A:=$X$X}; X=$A" * 30, "too many commands, or too long"),
        ("X=1234" + "; X=$X$X" * 30, "too many commands, or too long"),
        ("f0() { :; }; " + "".join(f"f{n + 1}() {{ f{n}; f{n}; }}; " for n in range(15)) + "f15", "too many"),
    ],
)
def test_a_script_without_a_command_is_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_source("verl", source(tmp_path, text))


@pytest.mark.parametrize("text", ["python 'train.py ' --x 1", "python train.py\u00a0--x 1"])
def test_a_word_with_white_space_is_no_program(tmp_path, text):
    with pytest.raises(ValueError, match="has no command"):
        read_source("slime", source(tmp_path, text))


def test_a_script_is_read_in_any_encoding(tmp_path):
    path = tmp_path / "run.sh"
    path.write_bytes(f"# caf\u00e9\nsource {tmp_path}/more.sh; {TRAINER} a.b=$X".encode("latin-1"))
    (tmp_path / "more.sh").write_bytes("X=1 # caf\u00e9\nreturn; X=2".encode("latin-1"))
    assert read_source("verl", path) == Source({"a.b": 1})


@pytest.mark.parametrize("text", ["\n" * 100_000, "grpo:\n" * 20_000, "run_grpo" * 20_000])
def test_whose_a_long_text_is_is_found_in_one_pass(text):
    assert whose(text) == ""
    assert whose(text + "\ngrpo:\npolicy:\n") == whose("policy:\na: 1\ngrpo: \n" + text) == "NeMo-RL"


@pytest.mark.parametrize(
    ("before", "word", "value"),
    [
        ("A='x y' B=\"$A\" C=$B", '"$C"', "x y"),
        ("A=x; A+=y; A+=$A", "$A", "xyxy"),
        ("A=/d/$A/x/$A/z", "$A", "/d//x//z"),
        ("N=3", "x[0]*$N+[1]*2", "x[0]*3+[1]*2"),
        ("A=http://$H:$P/x H=h P=1; A=http://$H:$P/x", "$A", "http://h:1/x"),
        ("A=(1 'b c'); A+=(3)", '"${A[*]}"', "1 b c 3"),
        ("A=(a.b=1 'a.c=2 3'); A[0]=a.b=7", '1 "${A[@]}"', 7),
        ("A=(a # one\n  b\n)", '"${A[0]}"', "a"),
        ("", "${X:-d}", "d"),
        ("", '${X:-"d e"}', "d e"),
        ("A='a.b=7 a.c=2'", '1 ${A:-"d e"}', 7),
        ("X=", "${X:-d}${X-e}", "d"),
        ("", "${X:=d}$X", "dd"),
        ("X=1", "${X:+y}${Z:+n}", "y"),
        ("", "${X:-$((2 * (3 + 4)))}", 14),
        ("p=1 q=2", "${X:-$(((p + q) * 2))}$(((q + q) * 2))", 68),
        ("A=Qwen/Qw", "${A,,}", "qwen/qw"),
        ("n=4", "$((n * 64 / 2 % 100))", 28),
        ("case v in a|v) A=1;; *) A=2;; esac", "$A", 1),
        ("case x in\n  # no\n  [0-9]) A=1;;\n  *) A=2;;\nesac", "$A", 2),
        ("if [ 1 = 2 ]; then A=1\nelif [ 1 -gt 2 ]; then A=2\n# no\nelse A=3\nfi", "$A", 3),
        ("[[ abc == abc && abc != x ]] && A=1 || A=2", "$A", 1),
        ("A='x y' B=$A\nexport C=$B D=$B", '"$C"', "x y"),
        ("if true; then\nA=1 B=2\nelse\nA=3 B=4\nfi", "$A$B", 12),
        ('if [ -z "$1" ]; then A=none; fi', "$A", "none"),
        ("(exit 3) && A=1 || A=2", "$A", 2),
        ("x || exit 1 && A=1", "$A", 1),
        ("A=1; (A=2); { A=$A-3; }", "$A", "1-3"),
        ("A=$(cd /x/y/.. && pwd)/z", "$A", "/x/z"),
        ("A=$(basename /x/y.sh .sh)-$(dirname /x/y.sh)", "$A", "y-/x"),
        ("", "$(seq 2 2 6 | cat)$(seq 2 2 2)", 2),
        ("", '"a\\$b\\"c"\'d\\e\'\\ f', 'a$b"cd\\e f'),
        ("export A=1 B; declare -r C=2; readonly D=3", "$A$C$D", 123),
        ("exit() { :; }; A=`echo q`", "$A", "q"),
        ("source ./none.sh; set -ex; ulimit -n 9", "1", 1),
        ("hf download x || exit 1; mkdir -p logs && cd logs", "1", 1),
        ("X=1; unset X", "${X:-d}", "d"),
        ("case v in (v) A=1;; (*) A=2;; esac", "$A", 1),
        ("A=$(echo -n 3 4)", '"$A"', "3 4"),
        ("A=$(basename -- /x/z)", "$A", "z"),
        ("A[0]=a.c=1; A[1]=a.b=2", '1 "${A[@]}"', 2),
    ],
)
def test_words_are_as_bash_makes_them(tmp_path, before, word, value):
    found, _ = words(tmp_path, f"{before}\n{TRAINER} a.b={word}")
    assert found == value


@pytest.mark.parametrize(
    ("before", "word", "value", "note"),
    [
        ("", "x-$(date +%s)", "x-", "expanded to nothing: $(date +%s) (line 2), in a.b"),
        ("N=$(smi | wc -l)", "${N:-8}", None, "expanded to nothing: $(smi | wc -l) (line 1), in a.b"),
        ("", "$UID", None, "expanded to nothing: $UID (line 2), in a.b"),
        ("", "$((N * 2))", 0, "expanded to nothing: $N (line 2), in a.b"),
        ("N=99999999999", "$((N * N))", None, "expanded to nothing: $((N * N)) (line 2), in a.b"),
        ("", "$((2 ** 70))", None, "expanded to nothing: $((2 ** 70)) (line 2), in a.b"),
        ("i=1; ((i++))", "$i", None, "expanded to nothing: ((i++)) (line 1), in a.b"),
        ("A=x.y", "${A%.*}", None, "expanded to nothing: ${A%.*} (line 2), in a.b"),
        ("A=(x y)", "${A[1]}", None, "expanded to nothing: ${A[1]} (line 2), in a.b"),
        ("A=Qwen", "${A:0:2}", None, "expanded to nothing: ${A:0:2} (line 2), in a.b"),
        ("A=(a.b=1 a.b=2)", '1 "${A[@]:1}"', 1, "expanded to nothing: ${A[@]:1} (line 2), in a.b"),
        ("set -- a.b=2", '1 "$@"', 1, "expanded to nothing: set -- a.b=2 (line 1), in a.b"),
        ("set -- --c a.b=2", '1 "$@"', 1, "expanded to nothing: set -- --c a.b=2 (line 1), in a.b"),
        ("A=(x y)", "${#A[@]}", None, "expanded to nothing: ${#A[@]} (line 2), in a.b"),
        ("let N=1+1", "$N", None, "expanded to nothing: let N=1+1 (line 1), in a.b"),
        ("printf -v N %02d 3", "$N", None, "expanded to nothing: printf -v N %02d 3 (line 1), in a.b"),
        ("f() { shift; N=$1; }; f p q", "$N", None, "expanded to nothing: f p q (line 1), in a.b"),
        ("A=1; f() { A=2; }; f", "$A", None, "expanded to nothing: f (line 1), in a.b"),
        ("A=(1 2); A+=x", "$A", None, "expanded to nothing: A+=x (line 1), in a.b"),
        ("i=5; (( i > 4 )) && N=1", "${N:-2}", 2, f"{FALSE} (( i > 4 )) (line 1)"),
        ("[[ abc == a* ]] && N=1", "${N:-2}", 2, f"{FALSE} [[ abc == a* ]] (line 1)"),
        ("A=$(basename -s .sh /x/y.sh)", "$A", None,
         "expanded to nothing: $(basename -s .sh /x/y.sh) (line 1), in a.b"),
        ("", "$((-7 / 2))", None, "expanded to nothing: $((-7 / 2)) (line 2), in a.b"),
        ("for x in a b; do N+=$x; done", "${N:-2}", 2,
         f"{FALSE} for x in a b; do N+=${{x}}; done (line 1)"),
        ("N=1; eval N=2", "$N", None, "expanded to nothing: eval N=2 (line 1), in a.b"),
        ("", "$'x'", None, "expanded to nothing: $'x' (line 2), in a.b"),
        ("", "<(x)", None, "expanded to nothing: <(x) (line 2), in a.b"),
        ("read -r x < f", "$x", None, "expanded to nothing: read -r x (line 1), in a.b"),
        (f"{PROBED}\ncase $D in npu) N=16;; gpu) N=8;; esac", "$N", 8,
         f"{FALSE} python3 -c 'import npu' 2>/dev/null (line 1)"),
        ("if nvidia-smi; then N=1; else N=2; fi", "$N", 2, f"{FALSE} nvidia-smi (line 1)"),
        ("[ -z $Q -o -z $R ] && N=1", "${N:-2}", 2, f"{FALSE} [ -z ${{Q}} -o -z ${{R}} ] (line 1)"),
        ("if [ -f x ]; then N=1; fi", "${N:-2}", 2, f"{FALSE} [ -f x ] (line 1)"),
        ("N=2\nwhile read -r x; do N=1; done < f", "$N", 2,
         f"{FALSE} while read -r x; do N=1; done (line 2)"),
        ("N=5\nfor N in 1 2; do :; done", "$N", None, "expanded to nothing: for N in 1 2; do :; done (line 2), in a.b"),
        ("N=5\nfor ((N = 0; N < 3; N++)); do :; done", "$N", None,
         "expanded to nothing: for ((N = 0; N < 3; N++)); do :; done (line 2), in a.b"),
        ("for x in $(hosts); do N=1; done", "${N:-2}", 2, f"{FALSE} for x in $(hosts); do N=1; done (line 1)"),
        ("N=\n: ${N:?set N, or M}", "${N:?set N}", None, "expanded to nothing: $N (line 3), in a.b"),
        ("N=3\n: ${N:?set N}; [ -f x ] && N=1", "${N:?set N}", 3, f"{FALSE} [ -f x ] (line 2)"),
        ("if true; then :", "1", 1, "run.sh is no bash that is understood; it may be read wrongly"),
    ],
)  # fmt: skip
def test_what_only_a_run_could_tell_is_said_with_its_line(tmp_path, before, word, value, note):
    found, notes = words(tmp_path, f"{before}\n{TRAINER} a.b={word}")
    assert found == value
    assert [each.removeprefix(f"{tmp_path}/") for each in notes] == [note]


@pytest.mark.parametrize(
    ("text", "several"),
    [
        (f"while true; do {TRAINER} a.b=1; sleep 1; done &\nwait", False),
        (f"until nc -z host 6379; do sleep 5; done\n{TRAINER} a.b=1", False),
        (f"mkdir -p logs && {TRAINER} a.b=1 2>&1 | tee logs/x", False),
        (f"C=\"{TRAINER} a.c='x y' a.b='1'\"; eval $C", False),
        (f"if command -v x; then {TRAINER} a.b=2; else {TRAINER} a.b=1; fi", True),
        (f"for b in 1 2; do {TRAINER} a.b=1; done", False),
        (f"bash -lc 'cd x; {TRAINER} a.b=1'", False),
        (f'CMD="{TRAINER} a.b=1"; $CMD', False),
        (f'CMD="{TRAINER} a.b=1"; eval "$CMD"; exit 0', False),
        (f'srun -N 2 bash -c "{TRAINER} a.b=1"', False),
        (f"ray job submit --x=y -- {TRAINER} a.b=1", False),
        (f"run() {{ nohup {TRAINER} a.b=$1 > log & }}; run 1", False),
        (f"pkill -9 -f main_ppo; mkdir -p logs/main_ppo\n{TRAINER} a.b=1 | tee main_ppo.log", False),
        (f"ps aux | grep main_ppo | awk '{{print $2}}' | xargs kill\n{TRAINER} a.b=1", False),
        (f"if ! {TRAINER} a.b=1; then exit 1; fi", False),
        (f"until {TRAINER} a.b=1; do sleep 5; done", False),
        (f"while ! {TRAINER} a.b=1; do sleep 5; done", False),
        (f"if ! [ -z ${{UNSET}} ]; then {TRAINER} a.b=2; else {TRAINER} a.b=1; fi", False),
    ],
)
def test_the_command_is_found_where_it_is(tmp_path, text, several):
    found, notes = words(tmp_path, text)
    assert found == 1
    assert any("commands start a trainer; this is the first" in note for note in notes) == several


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
        ".key=1": "no override",
    }
    assert sorted(read.notes) == [
        "expanded to nothing: $(date +%m%d) (line 2), in m.name",
        "expanded to nothing: $(hostname) (line 3), in m.name",
        "expanded to nothing: $(made of ${UNSET}) (line 7), in a.nested",
        "expanded to nothing: $1 (line 6), in a.first",
        "expanded to nothing: $UNSET (line 6), in a.files",
        "expanded to nothing: $UNSET (line 6), in data.files",
        "expanded to nothing: $UNSET (line 7), in .key",
    ]


def test_files_of_the_scripts_folder_are_read_and_others_are_noted(tmp_path):
    (tmp_path / "scripts" / "models").mkdir(parents=True)
    (tmp_path / "examples" / "inner").mkdir(parents=True)
    source(tmp_path, "WORDS=(m.a=1 m.b=$(basename /x/2.sh .sh))", "scripts/models/one.sh")
    source(tmp_path, "WORDS+=(m.c=$3)", "examples/inner/two.sh")
    source(tmp_path, "WORDS+=(m.d=4)", "beside.sh")
    text = """
    HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
    source "$HERE/../elsewhere/one.sh"; . "$HERE/inner/two.sh"; source $HERE/../beside.sh
    python3 -m verl.trainer.main_ppo ${WORDS[@]}
    """
    read = read_source("verl", source(tmp_path, text, "examples/run.sh"))
    assert read.given == {"m.a": 1, "m.b": 2, "m.c": None}
    assert read.notes == [f"{tmp_path}/examples/../beside.sh {MISSING}", "expanded to nothing: $3 (two.sh), in m.c"]

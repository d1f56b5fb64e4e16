"""How nodes are known to each other, and how Slurm ends a run of one."""

import json
import signal
import socket

import pytest

from megagrpo import cli
from megagrpo.cluster import machine, nodes
from megagrpo.cluster.machine import run
from megagrpo.config.load import load_config
from megagrpo.system.stop_request import STOPPED
from tests.experiments import QUICKSTART


@pytest.mark.parametrize("rank, address", [(0, None), (0, "node0"), (1, "node0")])
def test_no_node_of_several_is_known_by_its_loopback(rank, address, monkeypatch):
    """Debian's hosts files say `127.0.1.1 NAME`: gloo would take the interface lo between nodes."""
    monkeypatch.setattr(socket, "gethostbyname", lambda name: {"node0": "127.0.1.1"}.get(name, name))
    monkeypatch.setattr(nodes, "route_address", lambda host, port: host)
    with pytest.raises(ValueError, match=r"node0 is 127\.0\.1\.1 on this node(.|\n)*--node-addr"):
        _ = nodes.Node(rank, 2, address, "node0", 29500).own_address
    assert nodes.Node(rank, 2, "10.0.0.7", "node0", 29500).own_address == "10.0.0.7"
    assert nodes.Node(0, 1, None, "node0", 29500).own_address == "node0", "one node"
    assert nodes.Node(1, 2, "127.0.0.2", "127.0.0.1", 29500).own_address == "127.0.0.2", "nodes on one machine"


def test_a_node_that_has_no_ipv4_address_is_told(monkeypatch):
    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    node = nodes.Node(1, 2, "fd00::7", "10.0.0.1", 29500)
    with pytest.raises(ValueError, match="fd00::7 has no IPv4 address here: give one as --node-addr"):
        nodes._start_trainers(None, load_config(QUICKSTART), [], node, {})


# In torchrun's place: the ranks of a launcher that gets TERM, which end as asked.
_TERMINATED = """
import os, signal, time
from pathlib import Path
from megagrpo.system.stop_request import STOP_FILE, StopRequest

request = StopRequest(Path(os.environ[STOP_FILE]))
os.kill(os.getppid(), signal.SIGTERM)
while not request.made():
    time.sleep(0.01)
request.grant(3, final=False)
"""


@pytest.mark.parametrize("job, status", [("7", STOPPED), (None, 128 + signal.SIGTERM)])
def test_slurm_pre_empts_a_run_of_one_node_by_term(job, status, tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job is not None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    ranks = tmp_path / "ranks.py"
    ranks.write_text(_TERMINATED)
    config = load_config(QUICKSTART, [f"output_dir={tmp_path / 'run'}"])
    service = ["sh", "-c", "exec sleep 600"]
    log = config.run_folder.log("service")
    monkeypatch.setattr(machine, "torchrun", lambda *_, forks: [str(ranks)])
    monkeypatch.setattr(machine, "refuse_what_cannot_run", lambda *_: None)
    monkeypatch.setattr(machine, "start_service", lambda launch, *_: launch.spawn(service, log, {}))
    assert run(config) == status


def test_ranks_of_a_node_read_no_file_that_somebody_edits_between_their_restarts(tmp_path, monkeypatch):
    noted, ranks = tmp_path / "words.json", tmp_path / "ranks.py"
    ranks.write_text(f"import json, sys; json.dump(sys.argv[1:], open({str(noted)!r}, 'w'))")
    monkeypatch.setattr(nodes, "torchrun", lambda *_: [str(ranks)])
    edited = tmp_path / "mine.yaml"
    edited.write_bytes(QUICKSTART.read_bytes())
    where = [f"output_dir={tmp_path / 'run'}", "actor.device=cpu"]
    changes = [word for change in where for word in ("--set", change)]
    assert cli.main(["train", str(edited), *changes, "--service", "http://here"]) == 0
    edited.write_text("name: the next one")
    words = json.loads(noted.read_text())
    words = words[words.index("megagrpo.cli") + 1 :]
    args = cli._parser(words).parse_args(words)
    assert (words[0], args.service) == ("train", "http://here")
    assert load_config(args.config, args.overrides) == load_config(QUICKSTART, where)

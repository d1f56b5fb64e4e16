"""A real Slurm cluster on this machine: munged, slurmctld and one slurmd for each pretended node, in a private folder.

Every node has an address of its own (127.0.0.2, 127.0.0.3, ...) and a name that does not resolve, as on clusters
without DNS. It needs no systemd, cgroups or database; every daemon is a child of this process and is ended by its
process id.
"""

import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from megagrpo.system.environment import child_environment
from megagrpo.system.processes import spawn, stop_tree

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}
ENDED |= {"BOOT_FAIL", "DEADLINE"}
_START_S = 60.0
_SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

_CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
# tests look for processes by their job's number, and another cluster of the tests may run on this machine
FirstJobId={first_job}
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire: a job that is put back waits that long
AuthInfo=socket={root}/munge.sock,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SlurmctldParameters={parameters}
SlurmdTimeout=30
KillWait=10
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=5 PreemptMode=OFF
PartitionName=low  Nodes=ALL State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=120
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """What this machine lacks for a Slurm cluster, or None."""
    if subprocess.run(["id", "-u"], capture_output=True, text=True).stdout.strip() != "0":
        return "a private Slurm cluster is started by root"
    missing = [name for name in NEEDED if shutil.which(name, path=_SYSTEM_PATH) is None]
    return f"{', '.join(missing)} not found; install slurm-wlm and munge" if missing else None


class SlurmCluster:
    """`with SlurmCluster() as slurm: job = slurm.submit(...); slurm.wait(job)`. Nothing of it is left afterwards."""

    def __init__(self, num_nodes: int = 4, cpus_per_node: int = 4, user_signal_at_preemption: bool = True):
        self.nodes = [f"node{i + 1}" for i in range(num_nodes)]
        self.root = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: munge's socket path ends at 107 characters
        self.root.chmod(0o755)  # munge refuses a socket that not everybody may reach
        self.env = child_environment({"SLURM_CONF": str(self.root / "slurm.conf")})
        self._cpus = cpus_per_node
        self._parameters = "preempt_send_user_signal" if user_signal_at_preemption else "enable_configless"
        self._daemons: list[subprocess.Popen] = []
        self._slurmd: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "SlurmCluster":
        try:
            self._write_configuration()
            socket_path, key = self.root / "munge.sock", self.root / "munge.key"
            key.write_bytes(Path("/dev/urandom").open("rb").read(128))
            key.chmod(0o600)
            files = [f"--key-file={key}", f"--socket={socket_path}"]
            files += [f"--pid-file={self.root}/munged.pid", f"--seed-file={self.root}/munge.seed"]
            self._start("munged", "--foreground", *files)
            self._until(socket_path.exists, "munged's socket")
            self._start("slurmctld", "-D", "-c")
            for node in self.nodes:
                (self.root / f"spool-{node}").mkdir()
                self.start_node(node)
            idle = [str(len(self.nodes)), "idle"]
            self._until(lambda: self.run("sinfo", "-h", "-p", "main", "-o", "%D %t").split() == idle, "the nodes")
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc_info) -> None:
        try:
            for job in {int(word) for word in self.run("squeue", "-h", "-o", "%A").split()}:
                self.cancel(job)
            self._until(lambda: not self.run("squeue", "-h"), "the end of the jobs")
        except (AssertionError, subprocess.CalledProcessError):
            pass  # the daemons did not come up, or an error is on its way already
        for daemon in reversed(self._daemons):
            stop_tree(daemon.pid)
            daemon.wait()
        shutil.rmtree(self.root, ignore_errors=True)

    def run(self, *command: str) -> str:
        """Standard output of a Slurm command."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def start_node(self, node: str) -> None:
        self._slurmd[node] = self._start("slurmd", "-D", "-N", node, log=f"slurmd-{node}")

    def lose_node(self, node: str) -> None:
        """SIGKILL its daemon and all that ever started there, at once, as when its power is gone."""
        self._daemons.remove(daemon := self._slurmd.pop(node))
        daemon.send_signal(signal.SIGSTOP)  # reports no end of a step
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                words = process.cmdline()
                step = "slurmstepd" in " ".join(words[:1]) and process.ppid() == daemon.pid
                if step or process.environ().get("SLURMD_NODENAME") == node:
                    process.kill()
        daemon.kill()
        daemon.wait()

    def cancel(self, job: int) -> None:
        self.run("scancel", str(job))

    def job(self, job: int) -> dict[str, str]:
        """What `scontrol show job` says, by name; of a heterogeneous job its first component."""
        shown = self.run("scontrol", "-o", "show", "job", str(job)).splitlines()[0]
        return dict(re.findall(r"(\w[\w:/]*)=(\S*)", shown))

    def wait(self, job: int, *states: str, timeout_s: float = 300.0) -> str:
        """Waits until the job is in one of `states` (default: ended, not to be run again); returns the state."""
        wanted, deadline = set(states) or ENDED, time.monotonic() + timeout_s
        while (state := self.job(job)["JobState"]) not in wanted:
            assert time.monotonic() < deadline, f"job {job} is {state} after {timeout_s:.0f} s, not {sorted(wanted)}"
            time.sleep(0.3)
        return state

    def _start(self, name: str, *arguments: str, log: str | None = None) -> subprocess.Popen:
        program = shutil.which(name, path=_SYSTEM_PATH)
        daemon = spawn([program, *arguments], self.env, self.root / f"{log or name}.log")
        self._daemons.append(daemon)
        return daemon

    def _until(self, ready, what: str) -> None:
        deadline = time.monotonic() + _START_S
        while not ready():
            dead = [str(daemon.args) for daemon in self._daemons if daemon.poll() is not None]
            logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in self.root.glob("*.log"))
            assert not dead and time.monotonic() < deadline, f"waiting for {what}; ended: {dead}\n{logs}"
            time.sleep(0.1)

    def _write_configuration(self) -> None:
        host, ports = socket.gethostname().partition(".")[0], _free_ports(len(self.nodes) + 1)
        line = "NodeName={} NodeHostname={} NodeAddr=127.0.0.{} Port={} CPUs={} State=UNKNOWN"
        numbered = enumerate(zip(self.nodes, ports[1:], strict=True), start=2)
        nodes = "\n".join(line.format(node, host, i, port, self._cpus) for i, (node, port) in numbered)
        first = random.randrange(1_000, 60_000_000)
        sizes = {"port": ports[0], "first_job": first, "parameters": self._parameters}
        text = _CONF.format(host=host, root=self.root, nodes=nodes, **sizes)
        (self.root / "slurm.conf").write_text(text)
        # Named, since its choice by itself fails where /sys/fs/cgroup is not mounted.
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.root / "state").mkdir()


def _free_ports(number: int) -> list[int]:
    """Unused ports, below the kernel's ephemeral ones and away from the engines'."""
    found = []
    for port in range(7000, 9000):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
        if len(found) == number:
            return found
    raise RuntimeError("no free ports between 7000 and 9000")

"""What `megagrpo submit` refuses, and the command line that it hands to sbatch."""

import pytest

from megagrpo.cluster.submit import SCRIPTS, Request, misfits, sbatch_command, seconds
from megagrpo.config.schema import ExperimentConfig
from tests import experiments
from tests.experiments import ROOT


def experiment(**sections) -> ExperimentConfig:
    return experiments.experiment(**{"actor": {"world_size": 16}, "rollout": REACHED} | sections)


REACHED = {"host": "0.0.0.0"}
ENGINES = {"rollout": REACHED | {"num_engines": 4, "tp": 4}}
FITS = [
    ({}, Request("one-job", 1, 1)),
    ({}, Request("het", 2, 1, gpus_per_node=8)),
    (ENGINES, Request("one-job", 2, 2, gpus_per_node=8)),
    ({"rollout": REACHED | {"tp": 16, "nodes_per_engine": 2}}, Request("one-job", 2, 2, gpus_per_node=8)),
    ({"rollout": {"num_engines": 2}, "actor": {"world_size": 4}}, Request("one-node", gpus_per_node=8)),
]
REFUSED = [
    ({}, Request("one-job", 3, 1), "--trainer-nodes 3: actor.world_size is 16, they do not divide; it may be 1, 2, 4,"),
    ({}, Request("one-job", 0, 1), "--trainer-nodes 0"),
    ({}, Request("het", 1, 1, gpus_per_node=8), "16 ranks a node on 8 GPUs; it may be 2, 4, 8, 16"),
    ({}, Request("one-job", 2, 2), "--rollout-nodes 2: 1 engine(s) over 1 node(s) each, so it may be 1 to 1"),
    ({"rollout": REACHED | {"tp": 2, "nodes_per_engine": 2}}, Request("one-job", 2, 1), "it may be 2 to 2"),
    (ENGINES, Request("one-job", 2, 1, gpus_per_node=8), "it may be 2 to 4"),
    ({"rollout": REACHED | {"tp": 16}}, Request("one-job", 2, 1, gpus_per_node=8), "raise rollout.nodes_per_engine"),
    ({"rollout": {}}, Request("one-job", 2, 1), "rollout.host 127.0.0.1: trainers on other nodes cannot reach it"),
    ({}, Request("one-node", gpus_per_node=8), "16 trainer ranks and 1 engine ranks need 17 GPUs, not 8"),
    ({}, Request("one-job", time="5", grace_s=300), "--time 5 is 300 s, not more than --grace-s 300"),
    ({}, Request("one-node", 2, 1), "omit --trainer-nodes and --rollout-nodes"),
]


@pytest.mark.parametrize(("sections", "request_", "said"), [*((*fitting, None) for fitting in FITS), *REFUSED])
def test_a_request_that_does_not_fit_is_refused_with_one_that_would(sections, request_, said):
    problems = misfits(experiment(**sections), request_)
    assert problems == [] if said is None else len(problems) == 1 and said in problems[0], problems


def test_time_limits():
    limits = {"30": 1800, "5:30": 330, "4:00:00": 14_400, "1-12": 129_600, "1-12:30": 131_400, "2-00:00:01": 172_801}
    assert {text: seconds(text) for text in limits} == limits
    for wrong in ("tomorrow", "-5", "1:2:3:4", "1-x", ""):
        with pytest.raises(ValueError, match="should be like"):
            seconds(wrong)


def test_the_command_line():
    def command(request: Request) -> list[str]:
        script = ROOT / "slurm" / SCRIPTS[request.kind]
        return sbatch_command(experiment(), ["/x.yaml", "--set", "seed=1"], request, script)

    one = command(Request("one-job", 2, 1, 8, "4:00:00", "gpu", grace_s=600, options=("--account=a",)))
    assert one[-4:] == [str(ROOT / "slurm" / "one_job.sbatch"), "/x.yaml", "--set", "seed=1"]
    limits = {"--nodes=3", "--gpus-per-node=8", "--time=4:00:00", "--partition=gpu", "--account=a"}
    assert limits | {"--signal=B:USR1@600", "--dependency=singleton"} < set(one)
    assert any(word.startswith("--export=ALL,") and "TRAINER_NODES=2" in word for word in one)
    het = command(Request("het", 2, 1, time="4:00:00"))
    middle = het.index(":")
    assert "--nodes=2" in het[:middle] and het[middle + 2 : middle + 4] == ["--nodes=1", "--time=4:00:00"]
    names = [word for word in het if word.startswith("--job-name=")]
    assert len(set(names)) == 2 and names[1] == het[middle + 1], "singleton counts by name: else the second waits"
    assert not any(word.startswith("--nodes") for word in command(Request("one-node")))

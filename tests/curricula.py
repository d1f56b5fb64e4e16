"""The loop of a run with data.curriculum, without training: which rows its steps take."""

from dataclasses import replace
from pathlib import Path

from megagrpo.checkpoint import save as checkpoint
from megagrpo.checkpoint.folder import latest
from megagrpo.checkpoint.groups import saved_groups
from megagrpo.checkpoint.save import PendingSave, RunIdentity
from megagrpo.config.schema import CheckpointConfig, ExperimentConfig
from megagrpo.data.prompts import PromptSet
from megagrpo.mesh import Mesh
from megagrpo.rollout.control import ServiceControl
from megagrpo.types import Prompt, TrainState
from tests.sampling import experiment, source_of, take

ANY = RunIdentity({}, {"ranks": 1})
NUM_ROWS, RETURN_AFTER = 12, 2

# of each step the groups: (row, whether all its responses passed)
Steps = list[list[tuple[int, bool]]]


def prompt_set(number: int = NUM_ROWS, **of) -> PromptSet:
    """Rows whose ids are not their places."""
    prompts = [Prompt(3 * i, "", (1, 100 + i), "", location=f"rows.jsonl:{i + 1}") for i in range(number)]
    return PromptSet(tuple(prompts), 0, True, **of)


def section(**options) -> dict:
    """A section `data` with a curriculum."""
    return {"path": "rows.jsonl", "curriculum": options}


def dropping(staleness: int, **algorithm) -> ExperimentConfig:
    """Leaves solved rows out."""
    return experiment(
        data=section(name="drop_solved", args={"return_after": RETURN_AFTER}),
        rollout={"max_staleness": staleness},
        algorithm={"mismatch": {"weight": {"name": "tis"}} if staleness else {}, **algorithm},
    )


def assert_left_out(steps: Steps, staleness: int, return_after: int = RETURN_AFTER) -> None:
    """The rows of a batch come from the groups of the steps before the one that first asks for it:
    none of them was solved less than return_after steps before, and some solved ones came back."""
    returned, left_out = 0, 0
    for number, groups in enumerate(steps, 1):
        drawn_in = max(number - staleness, 1)
        last: dict[int, tuple[int, bool]] = {}
        for step in range(1, drawn_in):
            last |= {row: (step, solved) for row, solved in steps[step - 1]}
        rows = [row for row, _ in groups]
        assert len(set(rows)) == len(rows), "twice in a batch"
        for row, (step, solved) in last.items():
            young = drawn_in - step < return_after
            assert not (solved and young and row in rows), f"row {row} in step {number}"
            left_out += solved and young
            returned += solved and not young and row in rows
    assert left_out and returned, "nothing was left out, or nothing came back: it proves nothing"


class NoActor:
    """The plan of a checkpoint that holds no weights."""

    reshardable = True

    def __init__(self, part: Path):
        pass

    def write(self) -> dict:
        return {}

    def finish(self) -> None:
        pass


def continued(mesh: Mesh, url: str, folder: Path, config: ExperimentConfig, end: int) -> Steps:
    """The steps of a run up to step `end`, from the last checkpoint in `folder`; saves one.

    The service is a fake one, whose engine answers by the seed of a request.
    """
    control, prompts = ServiceControl(url, "key"), prompt_set()
    state, steps = TrainState(), []
    if found := latest(folder):
        state = checkpoint.load(found, ANY, lambda _: None, mesh)
        state.ahead = saved_groups(found, "ahead", mesh)
    source = source_of(control, config, decode=lambda ids: f"{ids[-1] % 2}", mesh=mesh)
    source.batches.restore(state)
    while state.step < end:
        # a run that is to end at `end` samples nothing for the steps after it
        taken = take(source, state, end - state.step, of=prompts)
        parts = mesh.gather_dp([(g.prompt.id // 3, all(o.value for o in g.outcomes)) for g in taken.groups])
        steps.append([group for part in parts for group in part])
        source.drain()
        mesh.from_main(lambda: control.report("ready", {"engine-0": 1}, state.step), "publish")
    whole = replace(state, ahead=source.batches.finished())
    PendingSave(folder, whole, ANY, CheckpointConfig(), NoActor, mesh).finish()
    source.close()
    return steps

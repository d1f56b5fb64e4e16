"""Actors that differ from a running engine by one planted mistake, and what `megagrpo bisect` finds."""

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from engine_process import ListedEngines
from torch import Tensor

from megagrpo.config.schema import ActorConfig, OptimizerConfig, ParallelConfig
from megagrpo.models.folder import Model
from megagrpo.types import EngineInfo, Prompt
from megagrpo.weights.hf_folder import HfFolder, write_hf_folder
from tests.experiments import experiment

PROMPTS = [[1, 40, 41, 42, 43], [1, *range(60, 95)]]
NEW_TOKENS = 12
PICTURES = {"images_key": "images", "chat_template": True, "max_prompt_tokens": 512}
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Found:
    """What a bisection said."""

    point: str | None
    computed: str | None
    text: str
    report: str
    margin: float  # smallest bound / error of all points


def noisy(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(0))
        tensors[name] = tensors[name] + 0.05 * tensors[name].abs().mean() * noise

    return change


def swapped(first: str, second: str) -> Callable[[Tensors], None]:
    """Every tensor of one expert for that of another."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if first in name]:
            other = name.replace(first, second)
            tensors[name], tensors[other] = tensors[other], tensors[name]

    return change


def with_config(**changes) -> Callable[[dict], None]:
    def change(hf: dict) -> None:
        for key, value in changes.items():
            rope = hf.get("rope_parameters") or {}
            (rope if key in rope else hf)[key] = value

    return change


def changed_copy(
    model: Path, folder: Path, tensors: Callable[[Tensors], None] | None, config: Callable[[dict], None] | None
) -> Path:
    """An HF folder like `model` with other tensors or another config.json."""
    like = folder / "like"
    shutil.copytree(model, like)
    hf = json.loads((like / "config.json").read_text())
    values = {name: HfFolder(model)[name].clone() for name in HfFolder(model)}
    for change, changed in ((config, hf), (tensors, values)):
        if change is not None:
            change(changed)
    (like / "config.json").write_text(json.dumps(hf))
    write_hf_folder(folder / "model", iter([values]), like=like, dtype=torch.float32)
    return folder / "model"


def _rounded_head() -> AbstractContextManager:
    """The output layer's product of operands in bfloat16."""
    from megagrpo.actor import head

    exact = head.chunked_logprobs

    def rounded(hidden: Tensor, weight: Tensor, *rest, **options):
        return exact(hidden.bfloat16().float(), weight.bfloat16().float(), *rest, **options)

    return patch.object(head, "chunked_logprobs", rounded)


def _wrong_section() -> AbstractContextManager:
    """Rotary embedding with one frequency more that turns with time, and one less with height."""
    from megagrpo.models.kinds.vision import layer as vision

    right = vision.section_angles

    def wrong(positions: Tensor, dim: int, theta: float, section: tuple[int, int, int], interleaved: bool) -> Tensor:
        return right(positions, dim, theta, (section[0] + 1, section[1] - 1, section[2]), interleaved)

    return patch.object(vision, "section_angles", wrong)


def _turned_grids() -> AbstractContextManager:
    """The tower takes an image's height for its width."""
    from megagrpo.models.kinds.vision.layer import Tower

    right = Tower.forward

    def turned(self: Tower, pixels: Tensor, grids: list[tuple[int, int, int]]) -> list[Tensor]:
        return right(self, pixels, [(time, width, height) for time, height, width in grids])

    return patch.object(Tower, "forward", turned)


def _wrong_features() -> AbstractContextManager:
    """The features of every image come in the opposite order."""
    from megagrpo.models.kinds.vision.layer import Tower

    right = Tower.forward
    return patch.object(Tower, "forward", lambda *args: [features.flip(0) for features in right(*args)])


def _late_deepstack() -> AbstractContextManager:
    from megagrpo.models.kinds.vision.layer import Sight

    right = Sight.with_deep
    return patch.object(Sight, "with_deep", lambda self, i, hidden: right(self, i - 1, hidden) if i else hidden)


MISTAKES: dict[str, Callable[[], AbstractContextManager]] = {
    "": nullcontext, "a bf16 head": _rounded_head, "a rotary section off by one": _wrong_section,
    "grids turned": _turned_grids, "features in another order": _wrong_features,
    "deepstack a layer late": _late_deepstack,
}  # fmt: skip


def bisect_cases(
    rank: int, info: EngineInfo, api_key: str, tp: int, folder: Path, cases: list[dict], world: int = 1
) -> list[Found]:
    """Collective. Bisects the engine against one actor after the other.

    A case: "model", an HF folder; "mistake": one of MISTAKES in what the actor computes;
    "parallel"; "version" of the weights; "publish": whether they are published first, for the
    engine has others; "dtype" of both; "data": a file of prompts, for PROMPTS.
    """
    from megagrpo.data.images import ImageStore
    from megagrpo.data.prompts import load_prompts, load_tokenizer
    from megagrpo.tools.bisect.engine import ProbedEngine
    from megagrpo.tools.bisect.findings import verdict, write_findings
    from megagrpo.tools.bisect.procedure import bisect_pair
    from megagrpo.tools.bisect.ranks import prove_weights
    from megagrpo.tools.certify.measure import joined
    from megagrpo.weights.actor_weights import load_initial_weights

    registry = ListedEngines([info])
    registry.api_key = api_key
    results = []
    for number, case in enumerate(cases):
        own = folder / f"case{number}"
        own.mkdir(parents=True, exist_ok=True)
        parallel = ParallelConfig(**case.get("parallel", {}))
        dtype = case.get("dtype", "float32")
        actor_config = ActorConfig(world_size=world, parallel=parallel, deadline_s=120.0, dtype=dtype)
        config = experiment(
            output_dir=str(own),
            model={"path": str(case["model"])},
            data=PICTURES | {"path": str(case["data"])} if "data" in case else {"path": "none"},
            rollout={"tp": tp, "dtype": dtype, "load_format": "dummy" if case.get("publish") else "model"},
            weights={"timeout_s": 60.0, "bucket_mb": 0.1},
        ).model_copy(update={"actor": actor_config})
        settings = {"optimizer": OptimizerConfig(distributed=False), "device": torch.device("cpu")}
        with joined(own / "store", config=actor_config, model_path=config.model.path, **settings) as actor:
            weights = load_initial_weights(actor, config.model.path)
            wrong = prove_weights(config, actor, weights, registry, case["version"] if case.get("publish") else None)
            images = ImageStore.of(Model.of(config), own / "images") if "data" in case else None
            engine = ProbedEngine(info, tp, api_key, own, 120.0, images) if rank == 0 else None
            if engine is not None:
                engine.resume()
            prompts = tuple(Prompt(number, "", prompt, "") for number, prompt in enumerate(PROMPTS))
            if images is not None:
                actor.images = images.pixels
                prompts = load_prompts(config.data, load_tokenizer(Model.of(config)), images).prompts
            with MISTAKES[case.get("mistake", "")]():
                found = bisect_pair(actor, engine, prompts, NEW_TOKENS, own, version=case.get("version"))
            if engine is not None and found is not None:
                engine.close()
                found.weights += wrong
                said = verdict(found)
                differences = (one for part in found.passes for one in part.differences)
                margin = min(one.bound / max(one.error, 1e-30) for one in differences)
                report = write_findings(own, found)
                results.append(Found(said.point, said.computed, said.text, report, margin))
    return results

"""`megagrpo bisect` with images: it names the point of the tower, the scatter, deepstack or positions that is wrong."""

from pathlib import Path

import pytest
from bisect_pairs import bisect_cases, changed_copy, noisy
from transport_cases import ListedEngines, running_engines

from megagrpo.weights.hf_folder import HfFolder
from tests.pictures import write_rows
from tests.tiny_vlm import FAMILIES, make_tiny_vlm

LEAST_MARGIN = 2.0  # of a bound over the difference of a healthy pair
ROWS = ([(112, 84)], [(84, 56), (112, 168), (168, 84)], [])  # the pictures of each prompt: width, height
COMPUTED = {  # mistake in what the actor computes -> point, words of the verdict
    "": (None, "nothing differs"),
    "grids turned": ("tower.blocks.0", "equal up to the tower's embedding of patches"),
    "features in another order": ("scatter", "where features are put"),
    "deepstack a layer late": ("layers.0.deepstack", "which layer adds features of images"),
    "a rotary section off by one": ("layers.0.q_rotary", "positions, their sections"),
}
PERTURBED = {  # end of a tensor's name -> the point at which a change of 5 % shows first
    "patch_embed.proj.weight": "tower.patch_embed",
    "blocks.2.attn.proj.weight": "tower.blocks.2",
    "visual.merger.mlp.2.weight": "tower.projector",
    "visual.merger.linear_fc2.weight": "tower.projector",
    "deepstack_merger_list.1.linear_fc2.weight": "tower.deepstack.1",
}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tp"), [*((family, 1) for family in FAMILIES), ("qwen2_5_vl", 2)])
def test_mistakes_with_images_are_found_and_named(family: str, tp: int, pool, tmp_path: Path):
    model, data = (make_tiny_vlm(tmp_path / family, family), write_rows(tmp_path / "data" / "train.jsonl", ROWS))
    deep = family != "qwen2_5_vl"
    planted = {what: found for what, found in COMPUTED.items() if "deepstack" not in what or deep}
    perturbed = {name: point for name in HfFolder(model) for end, point in PERTURBED.items() if name.endswith(end)}
    case = {"model": model, "data": data, "version": 1}
    cases = [case | {"mistake": what, "publish": not what} for what in planted]
    cases += [case | {"model": changed_copy(model, tmp_path / name, noisy(name), None)} for name in perturbed]
    pp = {"pp": 2, "first_stage_layers": 3} if deep else {"pp": 2}
    with running_engines(model, f"TP{tp}", tmp_path) as (info,):
        args = (info, ListedEngines.api_key, tp)
        found = pool.run(1, bisect_cases, *args, tmp_path / "out", cases)[0]
        for parallel in ({"tp": 2}, pp, {"cp": 2}):
            layout = [case | {"parallel": parallel}]
            found += pool.run(2, bisect_cases, *args, tmp_path / "_".join(parallel), layout, 2)[0]
    for (what, (point, words)), said in zip(planted.items(), found, strict=False):
        assert said.point == point and words in said.text, f"{what}:\n{said.report}"
        assert tp > 1 or "Not compared" not in said.report, said.report
    for (name, point), said in zip(perturbed.items(), found[len(planted) :], strict=False):
        assert (said.point, said.computed) == ("weights", point) and name in said.text, f"{name}:\n{said.report}"
    for said in [found[0], *found[-3:]]:
        assert said.point is None and said.margin > LEAST_MARGIN, said.report

"""Settings for a library: read from its source, checked by name and type, refused where they are not the user's."""

import dataclasses
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from megagrpo.config.fields import annotations_at
from megagrpo.config.libraries.megatron import MEGATRON_SETTINGS, SettingsTable, refusal_rows
from megagrpo.config.libraries.source import Library, LibraryMissing, accepted_values, accepts, library_fields
from megagrpo.config.load import ConfigError, load_config
from megagrpo.config.schema import ExperimentConfig

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
VIRTUAL = ["actor.world_size=4", "actor.parallel.pp=2", "actor.parallel.vpp=2"]
MESSAGES = [*VIRTUAL, "actor.megatron.overlap_p2p_comm=true"]
MADE_UP = '''
from dataclasses import dataclass, field
import enum

class Kind(enum.Enum):
    plain = 1
    fancy = 2

@dataclass
class Base:
    size: int = 1
    shared: bool = field(default=False, metadata={"x": 1})

@dataclass
class Made(Base):
    """Has one field of each notation."""
    rate: float = 1024 * 4
    name: "str | None" = None
    kind: Kind = Kind.plain
    mode: Optional[Literal["a", "b"]] = None
    some: Union[int, List[str]] = field(default_factory=list)
    pair: Tuple[int, int] = None
    table: Dict[str, int] = field(default_factory=dict)
    kept: torch.dtype = torch.float32
    function: Optional[Callable] = None
    noted: Annotated[int, "in tokens"] = 2
    size: int = 3
    constant: ClassVar[int] = 4
'''


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library") / "made_library"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('a library is read, not imported')")
    (folder / "parts.py").write_text(MADE_UP)
    sys.path.insert(0, str(folder.parent))
    yield library_fields(Library("made_library", ("parts.py",), "Made"))
    sys.path.remove(str(folder.parent))


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("size", [5], [5.0, True, "5", None]),
        ("shared", [True], [1, "true"]),
        ("rate", [1, 0.5], [True, "1"]),
        ("name", ["x", None], [3]),
        ("kind", ["fancy"], ["Fancy", 2]),
        ("mode", ["a", None], ["c", 1]),
        ("some", [1, ["x"]], [["x", 1], "x"]),
        ("pair", [[1, 2], None], [[1], [1, "2"]]),
        ("table", [{"a": 1}], [{"a": "b"}, []]),
        ("kept", ["bfloat16", "fp8"], ["bf16", 16]),
        ("noted", [7], ["7"]),
    ],
)
def test_a_value_is_checked_against_the_annotation(made, name, right, wrong):
    assert all(accepts(made[name], value) for value in right)
    assert not any(accepts(made[name], value) for value in wrong)
    assert accepted_values(made[name])


def test_fields_are_read_without_importing(made):
    assert [*made] == [
        *("size", "shared", "rate", "name", "kind", "mode", "some", "pair", "table", "kept", "function", "noted"),
    ]
    assert {name: made[name].default_value for name in ("size", "shared", "rate", "kind", "kept", "some")} == {
        "size": 3,
        "shared": False,
        "rate": 4096,
        "kind": "plain",
        "kept": "float32",
        "some": [],
    }
    assert accepted_values(made["function"]) == ""
    with pytest.raises(LibraryMissing, match="nowhere is not installed"):
        library_fields(Library("nowhere", ("parts.py",), "Made"))


@pytest.mark.parametrize("table", MEGATRON_SETTINGS, ids=lambda table: ".".join(table.path))
def test_every_field_of_megatron_is_decided_once(table: SettingsTable):
    decided = Counter([*table.allowed, *table.refused])
    assert set(table.fields) == set(decided), "a new version: allow the field or say why not"
    assert max(decided.values()) == 1
    assert [name for name in table.allowed if not accepted_values(table.fields[name])] == []


@pytest.mark.parametrize("table", MEGATRON_SETTINGS, ids=lambda table: ".".join(table.path))
def test_refusals_name_keys_that_exist(table: SettingsTable):
    for refusal in table.refused.values():
        for word in refusal.instead.replace(",", " ").replace(":", " ").split():
            if word.startswith("actor."):
                keys = tuple(word.split("."))
                settings = next((t for t in MEGATRON_SETTINGS if t.path == keys[: len(t.path)]), None)
                known = settings.allowed if settings is not None else ()
                assert annotations_at(ExperimentConfig, keys) or keys[-1] in known, word


def test_the_page_has_every_refusal():
    page = (ROOT / "docs" / "evidence" / "gpu.md").read_text()
    assert [row for row in refusal_rows() if row not in page] == []


def test_the_source_says_what_the_imported_classes_say():
    from megagrpo.actor.host import prepare_host

    prepare_host()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    classes = (MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    for table, kind in zip(MEGATRON_SETTINGS, classes, strict=True):
        assert set(table.fields) == {field.name for field in dataclasses.fields(kind)}
        for field in dataclasses.fields(kind):
            if type(field.default) in (int, float, bool, str, type(None)):
                assert table.fields[field.name].default_value == field.default, field.name


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.megatron.moe_permute_fusoin=true", "no such field; did you mean 'moe_permute_fusion'"),
        ("actor.megatron.no_such_thing_at_all=1", "Megatron's TransformerConfig has no such field"),
        ("actor.megatron.tensor_model_parallel_size=2", "set actor.parallel.tp"),
        ("actor.megatron.params_dtype=bfloat16", "set actor.dtype"),
        ("actor.megatron.moe_aux_loss_coeff=0.1", "set actor.router_losses.balance"),
        ("actor.megatron.recompute_granularity=full", "set actor.recompute"),
        ("actor.megatron.num_layers=3", "config.json says it; set model.path"),
        ("actor.megatron.calculate_per_token_loss=false", "Megatron must only sum"),
        ("actor.megatron.hidden_dropout=0.1", "ratio of new to old probabilities"),
        ("actor.megatron.fp8_param=true", "digests compare parameters"),
        ("actor.megatron.cuda_graph_impl=local", "a graph replays one shape"),
        ("actor.megatron.moe_expert_capacity_factor=1.0", "engines drop no token"),
        ("actor.megatron.attention_backend=flsh", "one of flash, fused, unfused, local, auto"),
        ("actor.megatron.recompute_modules=mlp", "a list of (a text) or null"),
        ("actor.megatron.recompute_num_layers=1.0", "a whole number or null"),
        ("actor.megatron.apply_rope_fusion=1", "true or false"),
        ("actor.ddp.average_in_collective=true", "gradients are sums"),
        ("actor.ddp.check_for_nan_in_grad=true", "leaves the others waiting"),
        ("actor.ddp.grad_reduce_in_fp32=false", "set actor.optimizer.megatron.main_grads_dtype"),
        ("actor.ddp.bucket_size=abc", "a whole number or null"),
        ("actor.ddp.use_megatron_fsdp=true", "FSDP"),
        ("actor.optimizer.megatron.lr=1", "set actor.optimizer.lr"),
        ("actor.optimizer.megatron.loss_scale=2.0", "gradients are not scaled"),
        ("actor.optimizer.megatron.exp_avg_dtype=bf16", "one of float32, float16, bfloat16, fp8"),
        ("actor.optimizer.megatron.optimizer=sgd", "Adam"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_key(override, message):
    with pytest.raises(ConfigError) as error:
        load_config(QUICKSTART, [override])
    key, _value = override.split("=")
    assert f"--set {override}: {key} = " in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor.megatron.recompute_modules=[mlp]"], "read with actor.recompute selective alone, which is none"),
        (["actor.recompute=selective", "actor.megatron.recompute_num_layers=2"], "actor.recompute full alone"),
        (
            [
                *("actor.transformer_engine=false", "actor.recompute=selective"),
                "actor.megatron.recompute_modules=[mlp, moe_act]",
            ],
            "moe_act: only with Transformer Engine's layers",
        ),
        (["actor.transformer_engine=false", "actor.megatron.fp8=hybrid"], "needs Transformer Engine's layers"),
        (["actor.lora.rank=4", "actor.ddp.overlap_grad_reduce=true"], "with lora, replicas of experts"),
        (["actor.optimizer.distributed=false", "actor.ddp.overlap_param_gather=true"], "sharded"),
        (["actor.megatron.overlap_p2p_comm=true"], "messages overlap in the schedule of virtual stages alone"),
        (["actor.ddp.align_param_gather=true"], "in others each would be waited for"),
        ([*MESSAGES, "actor.megatron.deallocate_pipeline_outputs=true"], "frees an output that it is still sending"),
        ([*MESSAGES, "actor.megatron.batch_p2p_comm=true"], "with overlap_p2p_comm messages are sent one by one"),
        ([*VIRTUAL, "actor.megatron.batch_p2p_comm=true"], "a batch mixes up what is for which"),
        (["actor.optimizer.megatron.optimizer_cpu_offload=true"], "with actor.dtype float32 there are none"),
        (["actor.dtype=bfloat16", "actor.optimizer.megatron.exp_avg_dtype=bfloat16"], "use_precision_aware_optimizer"),
    ],
)
def test_settings_that_other_keys_contradict_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(QUICKSTART, overrides)


def test_problems_of_all_maps_come_with_their_lines(tmp_path):
    text = QUICKSTART.read_text().replace(
        "actor:\n", "actor:\n  megatron:\n    apply_rope_fusion: 1\n    tp: 2\n  ddp: {bucket_size: x}\n", 1
    )
    file = tmp_path / "e.yaml"
    file.write_text(text)
    line = text.splitlines().index("  megatron:") + 1
    with pytest.raises(ConfigError) as error:
        load_config(file)
    lines = [problem.strip().removeprefix(f"{file}:").split(":")[0] for problem in str(error.value).splitlines()[1:]]
    assert lines == [str(line + 1), str(line + 2), str(line + 3)]


def test_checking_settings_loads_no_torch():
    code = (
        "import sys; from megagrpo.config.load import load_config; "
        f"load_config({str(QUICKSTART)!r}, ['actor.megatron.clone_scatter_output_in_embedding=false']); "
        "print([name for name in ('torch', 'megatron.core', 'sglang') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

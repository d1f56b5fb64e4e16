"""`rollout.sglang`: every field of ServerArgs is decided, wrong and forbidden ones are refused, right ones arrive."""

import pytest

from megagrpo.config.load import load_config
from megagrpo.config.schema import ExperimentConfig
from megagrpo.environment import WEIGHT_LOADER
from megagrpo.preflight import preflight
from megagrpo.rollout.service import server_settings
from megagrpo.rollout.service.engine_command import ServerPlace, describe_settings, engine_command, engine_settings
from megagrpo.rollout.service.server_fields import server_fields
from megagrpo.rollout.service.server_settings import ALLOWED, OURS, REFUSED_GROUPS, engine_setting_problems

PLACE = {cuda: ServerPlace(0, "127.0.0.1", 20001, "10.0.0.1:20002", cuda=cuda, num_cores=8) for cuda in (False, True)}


def config(**rollout) -> ExperimentConfig:
    sections = {"name": "t", "output_dir": "t", "model": {"path": "m"}, "data": {"path": "d"}}
    return ExperimentConfig.model_validate(sections | {"rollout": rollout})


def problems(**rollout) -> list[str]:
    return engine_setting_problems(config(**rollout).rollout)


def test_every_field_is_decided_once():
    fields = server_fields()
    decisions = {
        name: [
            name in OURS,
            name in server_settings._REASONS,
            name in ALLOWED,
            field.group in REFUSED_GROUPS,
        ]
        for name, field in fields.items()
    }
    assert len(fields) > 500
    assert not [name for name, found in decisions.items() if sum(found) != 1]
    assert not (set(OURS) | set(server_settings._REASONS) | ALLOWED) - set(fields)
    assert {field.group for field in fields.values()} >= set(REFUSED_GROUPS)
    assert not [name for name in ALLOWED if not fields[name].options]


@pytest.mark.parametrize(
    "given, said",
    [
        ({"chunked_prefil_size": 1}, "rollout.sglang.chunked_prefil_size is no field of SGLang's ServerArgs; "
         "do you mean chunked_prefill_size?"),
        ({"chunked_prefill_size": "8k"}, "should be a whole number, as SGLang declares it (sglang/srt/arg_groups/"),
        ({"chunked_prefill_size": True}, "should be a whole number"),
        ({"disable_radix_cache": 1}, "should be true or false"),
        ({"schedule_policy": "best"}, "should be one of lpm, random, fcfs"),
        ({"attention_backend": "fa9"}, "should be one of triton, torch_native"),
        ({"cuda_graph_bs_decode": [1, "2"]}, "should be a list of (a whole number)"),
        ({"schedule_conservativeness": "1"}, "should be a number"),
        ({"radix_eviction_policy_config": "{}"}, "should be a map"),
        ({"tp_size": 8}, "rollout.sglang.tp_size is set by rollout.tp"),
        ({"random_seed": 1}, "is set by seed"),
        ({"api_key": "x"}, "MEGAGRPO_API_KEY"),
        ({"enable_fp32_lm_head": False}, "is set by rollout.dtype"),
        ({"enable_memory_saver": True}, "is set by rollout.colocate"),
        ({"speculative_algorithm": "EAGLE"}, "a draft model would keep its first weights"),
        ({"quantization": "fp8"}, "is refused: engines sample from the weights that the actor has"),
        ({"moe_runner_backend": "flashinfer_trtllm"}, "digests would stop the run; it may be triton, deep_gemm"),
        ({"moe_runner_backend": "auto"}, "digests would stop the run"),
        ({"moe_a2a_backend": "megamoe"}, "it may be none, deepep"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "of another distribution"),
        ({"enable_eplb": True}, "experts would leave the ranks"),
        ({"pp_size": 2}, "an engine's ranks are rollout.tp"),
        ({"dp_size": 2}, "rollout.sglang.dp_size without enable_dp_attention"),
        ({"enable_hierarchical_cache": True}, "keys and values of older weights"),
        ({"stat_loggers": {}}, "its value is a function"),
    ],
)  # fmt: skip
def test_refused(given, said):
    found = problems(sglang=given)
    assert len(found) == 1 and said in found[0], found
    with pytest.raises(ValueError, match="rollout.sglang"):
        engine_command(config(sglang=given), PLACE[True])


@pytest.mark.parametrize(
    "words, said",
    [
        (["--tensor-parallel-size", "8"], "rollout.extra_args: --tensor-parallel-size is set by rollout.tp"),
        (["--tensor-par=8"], "is set by rollout.tp"),  # argparse takes a beginning for the whole
        (["--quantization=fp8"], "is refused: engines sample"),
        (["--moe-runner-backend", "flashinfer_trtllm"], "digests would stop the run"),
        (["--config", "x.yaml"], "a file of settings is not read here"),
        (["--custom-weight-loader", "mine.run"], "is set by weights.transport"),
    ],
)
def test_the_same_is_refused_as_a_word(words, said):
    found = problems(extra_args=words)
    assert len(found) == 1 and said in found[0], found


def test_words_that_are_no_fields_or_allowed_pass():
    words = ["--disable-cuda-graph", "--decode-log-interval", "1", "--moe-runner-backend=deep_gemm"]
    assert problems(extra_args=[*words, "--custom-weight-loader", WEIGHT_LOADER, "other.run"]) == []


def test_right_ones_arrive_and_take_the_place_of_our_defaults():
    given = {
        "chunked_prefill_size": 4096,
        "disable_radix_cache": True,
        "disable_overlap_schedule": False,  # SGLang's default, which no word can say
        "cuda_graph_bs_decode": [1, 2],
        "bf16_gemm_backend": "torch",  # its option has another name
        "radix_eviction_policy_config": {"a": 1},
        "sampling_backend": "flashinfer",  # its option is added by hand
        "log_level_http": "info",
    }
    command = engine_command(config(sglang=given, extra_args=["--x"]), PLACE[False])
    text = " ".join(command)
    assert '--radix-eviction-policy-config {"a": 1}' in text and "--overlap" not in text and command[-1] == "--x"
    assert (
        "--chunked-prefill-size 4096 --disable-radix-cache --cuda-graph-bs-decode 1 2 --bf16-gemm-backend torch" in text
    )
    assert command.count("--sampling-backend") == command.count("--log-level-http") == 1
    assert command[command.index("--sampling-backend") + 1] == "flashinfer"


def test_bfloat16_engines_on_gpus_have_logits_of_float32():
    half, full = config(dtype="bfloat16"), config()
    assert engine_settings(half, PLACE[True])["enable_fp32_lm_head"]
    assert "enable_fp32_lm_head" not in engine_settings(half, PLACE[False]) | engine_settings(full, PLACE[True])


def test_experts_keep_their_order_on_every_gpu():
    assert engine_settings(config(), PLACE[True])["moe_runner_backend"] == "triton"
    assert "moe_runner_backend" not in engine_settings(config(sglang={"moe_a2a_backend": "deepep"}), PLACE[True])


def test_check_says_what_differs():
    lines = describe_settings(config(dtype="bfloat16", sglang={"page_size": 64}))
    assert "    enable_fp32_lm_head = True [False]" in lines and "    page_size = 64 [None]" in lines
    assert "as SGLang's default: ep_size = 1, host = '127.0.0.1', tp_size = 1" in lines[-1]
    assert "on a CPU" in describe_settings(config())[0]


def test_without_sglang_nothing_is_taken_unchecked(monkeypatch):
    monkeypatch.setattr(server_settings, "server_fields", dict)
    assert problems(sglang={"page_size": 64}) == [
        "rollout.sglang: SGLang is not installed here, so its settings cannot be checked"
    ]
    assert problems() == []


def test_preflight_reports_them(tmp_path):
    found = preflight(load_config("configs/quickstart.yaml", overrides=['rollout.sglang={"page_sise": 1}']))
    assert any("rollout.sglang.page_sise is no field" in text for text in found)

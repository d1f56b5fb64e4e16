"""Configuration files, good and bad: every problem is reported at once, with its location, its value and the remedy."""

from pathlib import Path

import pytest
import yaml

from megagrpo.config.data import DataConfig
from megagrpo.config.fields import all_paths, annotations_at, members, sections
from megagrpo.config.load import ConfigError, dump_config
from megagrpo.config.schema import ExperimentConfig
from tests.experiments import read_experiment

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
MINIMAL = """\
name: test
output_dir: out
model: {path: m}
data: {path: d.jsonl}
"""


def load(tmp_path, text, *overrides):
    path = tmp_path / "e.yaml"
    path.write_text(text)
    return read_experiment(path, list(overrides))


def problems(tmp_path, text, *overrides) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text, *overrides)
    first, *rest = str(error.value).replace(f"{tmp_path}/", "").split("\n  ")
    assert first == f"e.yaml: {len(rest)} problem{'s' if len(rest) > 1 else ''}"
    return rest


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_every_shipped_config_loads_and_survives_being_written(path, tmp_path):
    config = read_experiment(path)
    dump_config(config, tmp_path / "resolved.yaml")
    assert read_experiment(tmp_path / "resolved.yaml") == config


def test_a_minimal_file_gets_the_defaults_and_overrides_win(tmp_path):
    overrides = ("train.num_steps=7", "actor.optimizer.lr=1e-6", "sampling.stop=['a', b]", "reward.args.format=last")
    config = load(tmp_path, MINIMAL, *overrides)
    assert (config.train.num_steps, config.actor.optimizer.lr) == (7, 1e-6)
    assert (config.sampling.stop, config.reward.args) == (["a", "b"], {"format": "last"})
    assert config.train.group_size == ExperimentConfig.model_fields["train"].default.group_size


def test_scalars_hold_no_surprises(tmp_path):
    numbers = {"1e-6": 1e-6, "1E5": 1e5, "1.5e+3": 1500.0, "0.1": 0.1, ".5": 0.5, "3": 3.0, "1_000": 1000.0}
    for text, value in numbers.items():
        assert load(tmp_path, MINIMAL + f"algorithm: {{entropy_coef: {text}}}\n").algorithm.entropy_coef == value
    text = "name: no\noutput_dir: 2026-11-21\nmodel: {path: m}\ndata: {path: d, limit: 010}\n"
    text += "sampling: {stop: [on, 1:30]}\neval: ~\n"
    config = load(tmp_path, text)
    assert config.eval is None and config.data.limit == 10
    assert (config.name, config.output_dir, config.sampling.stop) == ("no", "2026-11-21", ["on", "1:30"])


@pytest.mark.parametrize("text", ["1e5", "08", "1.5e3", "-1E5", ".5", "no", "true", "~", "0x1F", "1:30", ""])
def test_a_text_that_looks_like_another_scalar_is_written_as_a_text(tmp_path, text):
    """Ranks read what the launcher has written: there, 08 would be the number 8."""
    quoted = (
        f"name: '{text or 'x'}'\n" + MINIMAL.partition("\n")[2] + f"reward: {{grader: 'a:b', args: {{x: '{text}'}}}}\n"
    )
    config = load(tmp_path, quoted)
    dump_config(config, tmp_path / "resolved.yaml")
    assert config.reward.args == {"x": text} and read_experiment(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize("name", ["''", "' '"])
def test_a_name_says_something(tmp_path, name):
    assert problems(tmp_path, MINIMAL.replace("test", name, 1)) == ["e.yaml:1: name: it is empty"]


def test_what_is_wrong_in_data_is_said_of_data_alone(tmp_path):
    """Evaluation and warm-up read their files with the same keys."""
    alike = MINIMAL.replace("d.jsonl", "d.jsonl, system_prompt: hi")
    (said,) = problems(tmp_path, alike + "eval: {data: {path: e}}\nsft: {path: s, model: m}\n")
    assert said.startswith("e.yaml:4: data: system_prompt needs chat_template")


def test_a_line_break_of_unicode_is_read_as_it_was_written(tmp_path):
    config = load(tmp_path, MINIMAL + 'sampling: {stop: ["a\\Nb", "\\L", "\\P", "x\\Ny\\nz"]}\n')
    dump_config(config, tmp_path / "resolved.yaml")
    assert config.sampling.stop[0] == "a\x85b" and read_experiment(tmp_path / "resolved.yaml") == config


def test_every_key_has_a_description_in_the_schema():
    missing = []
    for *parents, key in (path.split(".") for path in all_paths(ExperimentConfig)):
        for section in sections(annotations_at(ExperimentConfig, tuple(parents))):
            field = section.model_fields.get(key)
            chooses_variant = bool(parents) and key == "name"  # the heading of the variant names it
            if field is None or len(sections(members(field.annotation))) == 1:
                continue  # the section's own docstring describes it
            if not chooses_variant and not field.description:
                missing.append(f"{section.__name__}.{key}")
            if not section.__doc__:
                missing.append(section.__name__)
    assert not missing


BAD = """\
name: 3
output_dir: out
model: {path: m}
train:
  num_steps: "20"
  group_sise: 8
  num_prompts_per_step: 8.0
  max_bad_fraction: .nan
group_size: 4
algorithm:
  advantage: {name: gropo}
  kl: {loss_coef: 1e-3, estimator: k33}
reward:
  args: {x: [1], y: 2}
rollout:
  num_engines: 3
  min_healthy_engines: 3
actor: {dtype: bf16, optimizer: {lr: -1e-6}}
sampling: {top_p: 0.9}
eval: 3
log: {dump_steps: 3}
"""


def test_all_problems_are_reported_at_once_with_line_value_and_remedy(tmp_path):
    found = problems(tmp_path, BAD)
    expected = [
        "e.yaml:1: name = 3: should be a valid string; write it in quotes: '3'",
        "e.yaml: data is missing; it has no default, write it",
        "e.yaml:5: train.num_steps = '20': should be a valid integer; write it without quotes",
        "e.yaml:6: train.group_sise = 8: unknown key; did you mean 'group_size'?",
        "e.yaml:7: train.num_prompts_per_step = 8.0: should be a valid integer; write 8",
        "e.yaml:8: train.max_bad_fraction = nan: should be a finite number",
        "e.yaml:9: group_size = 4: unknown key; did you mean train.group_size?",
        "e.yaml:11: algorithm.advantage.name = 'gropo': unknown; did you mean 'grpo'?",
        "e.yaml:12: algorithm.kl.estimator = 'k33': not a choice; did you mean 'k3'?",
        "e.yaml:14: reward.args.x = [1]: should be a valid string or a valid integer or a valid number or a valid "
        "boolean or a valid dictionary",
        "e.yaml:18: actor.dtype = 'bf16': not a choice; did you mean 'bfloat16'?",
        "e.yaml:18: actor.optimizer.lr = -1e-06: should be greater than 0",
        "e.yaml:20: eval = 3: should be a section with keys data, every, before_first_step, num_samples, temperature, "
        "top_p, top_k, "
        "num_as_trained, max_response_tokens",
        "e.yaml:21: log.dump_steps = 3: should be a valid list; write [3]",
    ]
    (rest,) = set(found) - set(expected)
    assert rest.startswith("e.yaml:19: sampling: top_p < 1") and len(found) == len(expected) + 1


@pytest.mark.parametrize(
    "more, said",
    [
        ("algorithm: {advantage: {eps: 1e-6}}\n", "advantage = {'eps': 1e-06}: needs a 'name', one of grpo, "),
        ("algorithm: {advantage: {name: dr_grpo, eps: 0.5}}\n", "algorithm.advantage.eps = 0.5: unknown key"),
        (
            "algorithm: {loss: {name: sapo, clip_ratio_low: 0.1}}\n",
            "clip_ratio_low = 0.1: unknown key; known: name, tau_positive, tau_negative",
        ),
        ("train: [1]\n", "e.yaml:5: train = [1]: should be a section with keys num_steps"),
        ("train:\n", "e.yaml:5: train = None: should be a section with keys num_steps"),
        ("seed: true\n", "e.yaml:5: seed = True: should be a valid integer"),
        ("data: {path: d}\n", "e.yaml:5: data is written twice (first at e.yaml:4); remove one"),
        ("train:\n  num_steps: 1\n  num_steps: 2\n", "e.yaml:7: train.num_steps is written twice (first at e.yaml:6)"),
        ("train: {num_steps: 1\n", "e.yaml:6: not valid YAML"),
        (
            "algorithm: {advantage: {name: grpo_passk, normalise: false}}\n",
            "advantage.normalise = False: unknown key; did you mean 'normalize'?",
        ),
        (
            "algorithm: {mismatch: {weight: {name: tis, self_normalise: true}}}\n",
            "weight.self_normalise = True: unknown key; did you mean 'self_normalize'?",
        ),
        ("seed: !!int x\n", "e.yaml:5: not valid YAML: 'x' is no int"),
        ("seed: !!bool x\n", "e.yaml:5: not valid YAML: 'x' is no bool"),
        (f"seed: {'1' * 5000}\n", "e.yaml:5: not valid YAML: '111"),
        ("train: !!map x\n", "e.yaml:5: not valid YAML: expected a mapping node, but found scalar"),
        ("sampling: {stop: !!seq x}\n", "e.yaml:5: not valid YAML: expected a sequence node, but found scalar"),
        ("train: &own {num_steps: *own}\n", "e.yaml: not valid YAML: maximum recursion depth"),
        ("checkpoint: {dir: ' '}\n", "e.yaml:5: checkpoint.dir: it is empty"),
        ("eval: {data: {path: ''}}\n", "e.yaml:5: eval.data.path: it is empty"),
        ("eval: {data: {path: $NOPE/x}}\n", "e.yaml:5: eval.data.path: '$NOPE/x' names a variable that is not set"),
        ("eval: {data: {path: 5}}\n", "e.yaml:5: eval.data.path = 5: should be a valid string or a valid list"),
        ("eval: {data: {path: [5]}}\n", "e.yaml:5: eval.data.path.0 = 5: should be a valid string; write it in quotes"),
        ("checkpoint: {asynchronous: maybe}\n", "asynchronous = 'maybe': should be a valid boolean or 'auto'"),
        ("reward: {grader: code, args: {x: {y: [1]}}}\n", "reward.args.x.y = [1]: should be a valid string or"),
        ("rollout: {host: ''}\n", "e.yaml:5: rollout.host: it is empty"),
        ("log: {wandb: {project: ' '}}\n", "e.yaml:5: log.wandb.project: it is empty"),
        (
            "reward: {graders: [{grader: code, args: {x: 1}}]}\n",
            "e.yaml:5: reward.graders.0: args of grader code: x: Extra",
        ),
        (f"checkpoint: {{dir: {'é' * 128}}}\n", "e.yaml:5: checkpoint.dir: no file has so long a name"),
        (f"checkpoint: {{dir: {'a/' * 2001}}}\n", "e.yaml:5: checkpoint.dir: no file has so long a name"),
        (f"checkpoint: {{dir: {'é/' * 1400}}}\n", "e.yaml:5: checkpoint.dir: no file has so long a name"),
        ("name2: !!python/object:os.system {}\n", "e.yaml:5: name2 = {}: unknown key; did you mean 'name'?"),
        ("actor: {world_size: 3, parallel: {tp: 2}}\n", "3 is not a multiple of tp x pp x cp = 2; 4 would be"),
        ("actor: {world_size: 4, parallel: {ep: 3}}\n", "world_size 4 is not a multiple of etp x ep x pp = 3; 6"),
        ("actor: {routing_replay: []}\n", "actor.routing_replay = []: not a choice"),
        ("actor: {device: cpu, transformer_engine: true}\n", "transformer_engine true with device cpu: it needs CUDA"),
        ("actor: {parallel: {vpp: 2}}\n", "e.yaml:5: actor.parallel: vpp 2 needs pp > 1"),
        ("rollout: {tp: 3, ep: 2}\n", "e.yaml:5: rollout: tp 3 is not a multiple of ep 2"),
        ("sft: {model: m, path: []}\n", "sft: path names no file"),
        ("eval: {data: {path: []}}\n", "eval.data: path names no file"),
        ("actor: {optimizer: {min_lr: 1, lr_schedule: linear}}\n", "actor.optimizer: min_lr 1 is above lr 1e-06"),
        ("train: {num_prompts_per_step: 9, num_updates_per_step: 2}\n", "9 is not a multiple of num_updates"),
        ("train: {num_steps: 9, num_epochs: 2}\n", "train: num_steps 9 and num_epochs 2 both say how long the run is"),
        (
            "train: {num_steps: 0, num_epochs: 2}\neval: {data: {path: a.jsonl}}\n",
            "num_steps 0 and num_epochs 2 both say",
        ),
        ("train: {num_steps: 0}\n", "num_steps 0 is an evaluation alone, and there is no section eval"),
        ("train: {num_epochs: 2}\nalgorithm: {dynamic_sampling: {}}\n", "num_epochs with algorithm.dynamic_sampling"),
    ],
)
def test_one_bad_line(tmp_path, more, said):
    found = problems(tmp_path, MINIMAL + more)
    assert len(found) == 1 and said in found[0]


@pytest.mark.parametrize(
    "override, said",
    [
        ("train.num_stepz=3", "--set train.num_stepz=3: train.num_stepz = 3: unknown key; did you mean 'num_steps'?"),
        ("trian.num_steps=3", "--set trian.num_steps=3: trian = {'num_steps': 3}: unknown key; did you mean 'train'?"),
        ("train.num_steps=many", "--set train.num_steps=many: train.num_steps = 'many': should be a valid integer"),
        ("train.num_steps", "--set train.num_steps: should look like --set train.num_steps=20"),
        ("train..num_steps=1", "--set train..num_steps=1: should look like"),
        ("name.x=1", "--set name.x=1: name is 'test', not a section"),
        ("sampling.stop=[a", "--set sampling.stop=[a:1: not valid YAML"),
    ],
)
def test_bad_overrides_name_themselves(tmp_path, override, said):
    found = problems(tmp_path, MINIMAL, override)
    assert len(found) == 1 and found[0].startswith(said)


def test_an_override_can_mend_a_bad_line(tmp_path):
    text = MINIMAL + "train: {num_steps: many}\n"
    assert load(tmp_path, text, "train.num_steps=3").train.num_steps == 3
    with_advantage = MINIMAL + "algorithm: {advantage: {name: grpo, eps: 0.5}}\n"
    assert load(tmp_path, with_advantage, "algorithm.advantage={name: dr_grpo}").algorithm.advantage.name == "dr_grpo"


def test_an_override_of_the_variant_drops_what_belonged_to_the_old_one(tmp_path):
    text = MINIMAL + "algorithm: {loss: {name: ppo_clip, clip_ratio_low: 0.1, clip_ratio_high: 0.2}}\n"
    loss = load(tmp_path, text, "algorithm.loss.clip_ratio_high=5e-4", "algorithm.loss.name=gspo").algorithm.loss
    assert (loss.name, loss.clip_ratio_low, loss.clip_ratio_high) == ("gspo", 3e-4, 5e-4), "the paper's, and the given"
    assert load(tmp_path, text, "algorithm.loss.name=ppo_clip").algorithm.loss.clip_ratio_high == 0.2
    found = problems(tmp_path, text, "algorithm.loss.name=gsqo")
    said = "--set algorithm.loss.name=gsqo: algorithm.loss.name = 'gsqo': unknown; did you mean 'gspo'"
    assert len(found) == 1 and found[0].startswith(said)
    weight = MINIMAL + "algorithm: {mismatch: {weight: {name: tis, cap: 3}}}\n"
    assert load(tmp_path, weight, "algorithm.mismatch.weight.name=icepop").algorithm.mismatch.weight.high == 5.0
    config = load(tmp_path, MINIMAL, "algorithm.aggregation=token-mean", "preset=dr_grpo")
    assert (config.algorithm.advantage.name, config.algorithm.aggregation) == ("dr_grpo", "token-mean")


def test_a_name_that_selects_no_variant_leaves_the_keys_beside_it(tmp_path, monkeypatch):
    args = "sampling: {environment: {function: frozen_lake, args: {name: easy, size: 4}}}\n"
    pools = "data: {path: d.jsonl, curriculum: {name: pools, pass_reward: 0.5}}\n"
    settings = ("sampling.environment.args.name=hard", "data.curriculum.name=drop_solved")
    config = load(tmp_path, MINIMAL.replace("data: {path: d.jsonl}\n", pools) + args, *settings)
    assert config.sampling.environment.args == {"name": "hard", "size": 4}
    assert (config.data.curriculum.name, config.data.curriculum.pass_reward) == ("drop_solved", 0.5)
    (tmp_path / "mine.yaml").write_text(args)
    monkeypatch.setattr("megagrpo.config.load.PRESETS", tmp_path)
    own = "preset: mine\nsampling: {environment: {args: {name: hard}}}\n"
    assert load(tmp_path, MINIMAL + own).sampling.environment.args == {"name": "hard", "size": 4}


def test_presets_lie_under_the_files_own_values(tmp_path, monkeypatch):
    folder = tmp_path / "presets"
    folder.mkdir()
    preset = "algorithm:\n  advantage: {name: grpo, single_sample: raw, eps: 1e-4}\n  aggregation: token-mean\n"
    preset += "train: {num_steps: 3}\n"
    (folder / "mine.yaml").write_text(preset)
    monkeypatch.setattr("megagrpo.config.load.PRESETS", folder)
    config = load(tmp_path, MINIMAL + "preset: mine\nalgorithm: {advantage: {eps: 1e-5}}\n", "train.num_steps=4")
    assert (config.algorithm.advantage.single_sample, config.algorithm.advantage.eps, config.train.num_steps) == (
        "raw",
        1e-5,
        4,
    )
    other = load(tmp_path, MINIMAL + "preset: mine\nalgorithm: {advantage: {name: dr_grpo}}\n")
    assert other.algorithm.advantage.name == "dr_grpo" and other.train.num_steps == 3
    (folder / "mine.yaml").write_text(preset.replace("num_steps", "group_sise"))
    found = problems(tmp_path, MINIMAL + "preset: mine\n")
    assert found == ["presets/mine.yaml:4: train.group_sise = 3: unknown key; did you mean 'group_size'?"]
    found = problems(tmp_path, MINIMAL + "preset: mime\n")
    assert found == [
        "e.yaml:5: preset 'mime' is unknown; did you mean 'mine'?",
        "presets/mine.yaml:4: train.group_sise = 3: unknown key; did you mean 'group_size'?",
    ], "the nearest preset stands in, so that it hides nothing"


def test_bad_files(tmp_path):
    (tmp_path / "experiment.yaml").write_text(MINIMAL)
    with pytest.raises(ConfigError, match=r"exporiment\.yaml: no such file; did you mean .*experiment\.yaml"):
        read_experiment(tmp_path / "exporiment.yaml")
    assert problems(tmp_path, "# nothing\n") == ["e.yaml: the file is empty"]
    assert "should be sections like 'model:'" in problems(tmp_path, "- a\n")[0]
    assert "not valid YAML" in problems(tmp_path, "a: \x07\n")[0]
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    for unreadable in (tmp_path, tmp_path / "latin.yaml"):
        with pytest.raises(ConfigError, match="cannot be read as text"):
            read_experiment(unreadable)


def test_writing_is_whole_or_nothing(tmp_path, monkeypatch):
    config = load(tmp_path, MINIMAL)
    target = tmp_path / "run" / "config.yaml"
    dump_config(config, target)
    before = target.read_text()
    assert yaml.safe_load(before)["name"] == "test"

    def disk_full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", disk_full)
    with pytest.raises(OSError, match="No space left"):
        dump_config(config, target)
    assert target.read_text() == before and [p.name for p in target.parent.iterdir()] == ["config.yaml"]


def test_a_thousand_files_are_looked_through_once(monkeypatch):
    """Every rank reads the experiment; each file was compared with all others, and all were listed anew for each."""
    listed = []
    parts = DataConfig.parts.fget
    monkeypatch.setattr(DataConfig, "parts", property(lambda data: listed.append(1) or parts(data)))
    DataConfig(path=[f"{number}.parquet" for number in range(1000)])
    assert len(listed) < 10

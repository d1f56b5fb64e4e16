"""Each reference answer is right for itself, in every form of public data; the same messages are the
same text in every file and for every program."""

import json
import random
from itertools import cycle

import pytest

from megagrpo.config.data import DataConfig
from megagrpo.data.prompts import load_prompts
from megagrpo.rewards.graders import gsm8k, math
from megagrpo.rollout.agents.renderer import Renderer
from megagrpo.sandbox import sandbox
from megagrpo.sandbox.grader import grade
from tests.unit import golds
from tests.unit.report_cases import SECONDS, rows_file, tokenizer
from tests.unit.test_messages import SPELLED, TEMPLATES

isolated = pytest.mark.skipif(bool(sandbox.isolation()), reason=f"no namespaces here: {sandbox.isolation()}")


@pytest.mark.parametrize("seed", [0, 1])
def test_math_takes_each_gold_for_itself(seed):
    found = list(golds.of_math(seed))
    assert len(found) > 250
    for number, plain in enumerate(found):
        gold = golds.solution(plain, f"{seed} {number}")
        response = gold if gold != plain else f"Hence $\\boxed{{{plain}}}$."
        other = f"\\boxed{{{found[(number + 31) % len(found)]}}}"  # of another form
        assert math.grade(response, gold) == 1, gold
        assert math.grade(other, gold) == 0, (other, gold)


def test_gsm8k_takes_each_gold_for_itself():
    for gold in golds.of_gsm8k(0):
        response = gold if "####" in gold else f"so\n#### {gold}"
        assert gsm8k.grade(response, gold) == 1, gold
        assert gsm8k.grade("#### 1234567890", gold) == 0


RUBBISH = ("print('rubbish')", "raise SystemExit(3)", "")


@isolated
@pytest.mark.parametrize("program, name, arguments, result", golds.CALLS)
def test_code_takes_each_function_for_its_tests(program, name, arguments, result):
    returns_nothing = (f"{name} = print", f"def {name}(*_): 0")
    rubbish = cycle([*RUBBISH, *(returns_nothing if result is not None else ())])
    for tests in golds.of_code(name, arguments, result):
        text = json.dumps(tests)
        assert grade(f"So:\n```python\n{program}\n```", text, **SECONDS) == (1.0, ""), text
        assert grade(next(rubbish), text, **SECONDS)[0] == 0.0, text


@isolated
@pytest.mark.parametrize("program, given, shown", golds.PROGRAMS)
def test_code_takes_each_program_for_its_tests(program, given, shown):
    rubbish = cycle(RUBBISH)
    for tests in golds.of_programs(given, shown):
        text = json.dumps(tests)
        assert grade(f"```python\n{program}\n```", text, **SECONDS) == (1.0, ""), text
        assert grade(next(rubbish), text, **SECONDS)[0] == 0.0, text


# LiveCodeBench's form, as verl's converted data has it: test cases as JSON in reward_model.ground_truth.
TRIANGLE = {
    "prompt": [{"role": "user", "content": "Read n, print 1 + ... + n."}],
    "data_source": "livecodebench",
    "reward_model": {
        "style": "rule",
        "ground_truth": json.dumps(
            [
                {"input": f"{n}\n", "output": f"{n * (n + 1) // 2}\n", "testtype": "stdin", "metadata": {}}
                for n in (1, 4, 10, 0)
            ]
        ),
    },
    "extra_info": {"index": 0},
}
TEN_PROGRAMS = [  # the reward by hand: passed tests of 1, 10, 55, 0
    ("n = int(input())\nprint(n * (n + 1) // 2)", 1.0),
    ("print(sum(range(int(input()) + 1)))", 1.0),
    ("print('rubbish')", 0.0),
    ("raise SystemExit(3)", 0.0),
    ("", 0.0),
    ("print(input())", 0.5),  # 1 and 0
    ("print(int(input()) ** 2)", 0.5),  # 1 and 0
    ("n = int(input())\nprint([1, 3, 6, 10][n - 1])", 0.5),  # 1 and 10; 10 raises, 0 prints 10
    ("print(55)", 0.25),
    ("n = int(input())\nwhile n > 4: raise ValueError\nprint(n * (n + 1) // 2)", 0.75),  # not 55
]


@isolated
def test_a_converted_file_rewards_ten_programs_as_by_hand():
    keys = {"answer_key": "reward_model.ground_truth", "source_key": "data_source", "chat_template": True}
    data = DataConfig(path=rows_file([TRIANGLE], "lcb.parquet"), grader_by_source={"livecodebench": "code"}, **keys)
    (prompt,) = load_prompts(data, tokenizer("Qwen3")).prompts
    assert prompt.grader == "code"
    rewards = [grade(f"```python\n{program}\n```", prompt.answer, **SECONDS)[0] for program, _ in TEN_PROGRAMS]
    assert rewards == [by_hand for _, by_hand in TEN_PROGRAMS]


def conversation(seed: str) -> list[dict]:
    """Messages as data sets have them: some with a system message, calls, names, nulls and thoughts."""
    r = random.Random(seed)
    said: list[dict] = [{"role": "system", "content": "be brief"}] if r.random() < 0.4 else []
    for turn in range(r.randint(1, 3)):
        said.append({"role": "user", "content": r.choice(["2+3", "a", "say 'b'\n"])})
        if r.random() < 0.3:
            said[-1]["name"] = "eve"
        if r.random() < 0.6:
            arguments: object = r.choice([{"a": 2}, {"a": "x", "b": [1, 2]}])
            if r.random() < 0.5:
                arguments = json.dumps(arguments)
            function = {"name": "add", "arguments": arguments}
            call = {"id": f"{turn}", "type": "function", "function": function}
            said.append({"role": "assistant", "content": r.choice([None, ""]), "tool_calls": [call]})
            said.append({"role": "tool", "tool_call_id": f"{turn}", "content": "5"})
        said.append({"role": "assistant", "content": "5"})
        if r.random() < 0.3:
            said[-1]["reasoning_content"] = "2 and 3"
    return [*said, {"role": "user", "content": "and now?"}]


def spelled(messages: list[dict]) -> list[dict]:
    """Arguments as texts: one column of a parquet file cannot hold both forms."""
    out = json.loads(json.dumps(messages))
    for call in (call for message in out for call in message.get("tool_calls", ())):
        if not isinstance(call["function"]["arguments"], str):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return out


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("system_prompt", [None, "add"])
def test_the_same_messages_are_the_same_ids_everywhere(template, system_prompt):
    said = [conversation(f"{template} {number}") for number in range(40)]
    made = tokenizer(template, SPELLED)
    found = []
    for name, messages in (("a.jsonl", said), ("a.parquet", list(map(spelled, said)))):
        path = rows_file([{"prompt": each, "answer": ""} for each in messages], name)
        data = DataConfig(path=path, chat_template=True, system_prompt=system_prompt, max_prompt_tokens=9999)
        prompts = load_prompts(data, made).prompts
        found.append([prompt.token_ids.tolist() for prompt in prompts])
    renderer = Renderer(made, data, False)
    pairs = list(zip(said, prompts, strict=True))
    found.append([renderer.start(messages, prompt).tolist() for messages, prompt in pairs])
    found.append([renderer.start(prompt.messages[-1]["content"], prompt).tolist() for prompt in prompts])
    found.append([renderer.begin(prompt.messages).tolist() for prompt in prompts])  # an agent's
    assert all(ids == found[0] for ids in found)
    assert not any(word in prompt.text for prompt in prompts for word in ("None", "null"))

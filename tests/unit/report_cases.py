"""Bug reports of other trainers' users, of which each stood for a fault here, and relatives of each
that stand in no report: (what, expected, how to get it). bench/reports.py writes their table."""

import json
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet

from examples.laptop.model import character_tokenizer
from megagrpo.checkpoint.folder import data_problem
from megagrpo.config.data import DataConfig
from megagrpo.config.reward import JudgeOptions
from megagrpo.config.rollout import SamplingConfig
from megagrpo.data.prompts import load_prompts, render_rows
from megagrpo.data.rows import fingerprint, read_rows
from megagrpo.data.texts import decoder
from megagrpo.environments.python_programs import PythonPrograms
from megagrpo.models.folder import Model
from megagrpo.rewards.graders import format as form
from megagrpo.rewards.graders import gsm8k, math
from megagrpo.rewards.graders.judge import render
from megagrpo.rollout.agents.answering import RolloutTask
from megagrpo.rollout.agents.renderer import Renderer
from megagrpo.sandbox.grader import grade
from tests.unit.test_messages import CALL, END, PLAIN, SPELLED, TEMPLATES, TOOLS_USED, as_object
from tests.unit.test_tool_parsers import heard, tokenizer_of

Case = tuple[str, object, Callable[[], object]]
SECONDS = {"test_s": 20.0, "total_s": 60.0}


def refusal(function: Callable[..., object], *args, **keys) -> str:
    try:
        return str(function(*args, **keys))
    except ValueError as exc:
        return re.sub(r"/\S*/", "", str(exc))


# ---- graders


ADDS = "a, b = map(int, input().split())\nprint(a + b)"
ADD = "def add(a, b):\n    return a + b"


def code(program: str, tests: object) -> object:
    """The scores of a program and of rubbish, or why the tests are refused."""
    text = json.dumps(tests)
    try:
        return [grade(each, text, **SECONDS)[0] for each in (program, "print('rubbish')")]
    except ValueError:
        return "refused"


def called(program: str, name: str, arguments: list, result: object) -> float:
    tests = json.dumps({"fn_name": name, "inputs": [arguments], "outputs": [result]})
    return grade(program, tests, **SECONDS)[0]


def itself(gold: str) -> float:
    return math.grade(gold, gold)


def pair(response: str, gold: str) -> float:
    return math.grade(f"\\boxed{{{response}}}", gold)


def judged(reply: str) -> float:
    found = list(re.finditer(JudgeOptions.model_fields["pattern"].default, reply))
    return float(found[-1][1].replace(",", ""))


def formatted(text: str) -> float:
    return form.grade(text, "")


# ---- rows


def rows_file(rows: list, name: str = "a.jsonl") -> str:
    path = Path(tempfile.mkdtemp()) / name
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), str(path))
    else:
        path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in rows))
    return str(path)


def tokenizer(template: str = "Qwen2.5", alphabet: str = SPELLED):
    made = character_tokenizer(alphabet)
    made.chat_template = TEMPLATES.get(template, template) + END
    return made


def text_of(messages: object, template: str = "Qwen2.5", name: str = "a.jsonl", **keys) -> str:
    """The prompt of the last of two rows."""
    rows = [{"prompt": PLAIN, "answer": ""}, {"prompt": messages, "answer": ""}]
    data = DataConfig(path=rows_file(rows, name), chat_template=True, **keys)
    return load_prompts(data, tokenizer(template)).prompts[-1].text


def same_text(messages: list, template: str = "Llama-3.1") -> bool:
    return text_of(messages, template) == text_of(messages, template, "a.parquet")


def question(prompt: object, **keys) -> str:
    """The text that a program of the environment `python` is written for."""
    data = DataConfig(path=rows_file([{"prompt": prompt, "answer": ""}]), chat_template=True, **keys)
    (found,) = load_prompts(data, tokenizer()).prompts
    row = RolloutTask(found, hash, None, 1, str).row
    return PythonPrograms(row, 0, "exact").reset().rpartition("\n\n")[2]


def refused(*rows: object, template: str = "Qwen2.5", **keys) -> list[int]:
    """The numbers of the rows that `check` names."""
    path = rows_file([{"prompt": "1", "answer": ""}, *rows])
    data = DataConfig(path=path, **{"chat_template": True, **keys})
    problems: list[str] = []
    render_rows(data, tokenizer(template), read_rows(data, problems), None, problems)
    return [int(problem.removeprefix(path).split(":")[1]) for problem in problems]


def half(**row: object) -> str:
    rows = [{"prompt": PLAIN, "answer": "", "tools": []} | row]
    data = DataConfig(path=rows_file(rows), chat_template=True, tools_key="tools")
    return refusal(load_prompts, data, tokenizer())[:40]


def resumed(after: list, name: str = "a.jsonl", limit: int | None = None) -> str:
    """What the start of a run says whose checkpoint was written with the rows 0 to 9."""
    before = rows_file([{"prompt": f"{i}", "answer": f"{i}"} for i in range(10)])
    folder = Path(before).parent
    saved = {"rows": fingerprint(read_rows(DataConfig(path=before)))}
    (folder / "state.json").write_text(json.dumps(saved))
    after = rows_file([{"prompt": f"{i}", "answer": f"{i}"} for i in after], name)
    said = data_problem(folder, fingerprint(read_rows(DataConfig(path=after, limit=limit))))
    counts = re.search(r"(\d+) rows in use then.*, (\d+) now", said)
    return f"{counts[1]} then, {counts[2]} now" if counts else said


def one_token(prompt: object, alphabet: str = SPELLED, **keys) -> str:
    """Whether a row is taken by a tokenizer whose <bos>, <eos> and <unk> are one, as SmolLM's."""
    made = tokenizer(alphabet=alphabet)
    made.bos_token = made.eos_token = made.unk_token = "<unk>"
    data = DataConfig(path=rows_file([{"prompt": prompt, "answer": ""}]), **keys)
    problems: list[str] = []
    prompts = render_rows(data, made, read_rows(data), None, problems)
    return "taken" if prompts else problems[0].partition(": ")[2][:22]


# ---- turns


def seen(name: str, text: str) -> str:
    """What graders and parsers get of a sampled text."""
    return heard(tokenizer_of(name), text + tokenizer_of(name).eos_token, Path())


def exact(sampled: str) -> float:
    return form.exact(heard(tokenizer_of("Qwen3"), sampled, Path()), "12")


def with_tool(messages: list, template: str = "DeepSeek-V3") -> str:
    """The arguments of the first call, as an agent's next turn reads them."""
    data = DataConfig(path="a.jsonl", chat_template=True)
    made = tokenizer(template, SPELLED + "°")
    text = made.decode(Renderer(made, data, False).begin(messages))
    return re.search(r"\{.*?\}", text)[0]


def with_arguments(arguments: object) -> list:
    calls = [{**CALL, "function": {"name": "add", "arguments": arguments}}]
    return [TOOLS_USED[1], {**TOOLS_USED[2], "tool_calls": calls}, TOOLS_USED[3]]


def sent(call: str) -> str:
    """What the environment `mcp` answers to a call, and what its server got."""
    from megagrpo.environments.mcp_tools import McpTools

    tools, got = object.__new__(McpTools), []
    tools._tools, tools._max_chars, tools._timeout_s = [{"name": "add"}], 100, 20.0
    tools._session = SimpleNamespace(call=lambda name, arguments: got.append(arguments) or "5")
    said, _, _ = tools.step(call)
    return f"{len(got)} sent, {'error' if 'error' in said else 'answered'}"


def tool_call(arguments: str) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'


def stopped(sampled: str, **sampling: list) -> str:
    """What graders get of a response by a tokenizer of characters, with <|im_end|> as token 7."""
    made = character_tokenizer("5<>")
    made.add_tokens(["<|im_end|>"], special_tokens=True)
    decode = decoder(made, Model(Path(), Path(), {}, False), SamplingConfig(**sampling))
    return decode(np.array(made(sampled)["input_ids"]))


def from_parquet(answer: object, kind: object, key: str = "answer") -> str:
    path = str(Path(tempfile.mkdtemp()) / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1"], "answer": pyarrow.array([answer], kind)}), path)
    return read_rows(DataConfig(path=path, answer_key=key))[0].answer


HALF = "\ud83d"
SYSTEM = {"role": "system", "content": "be brief"}
NO_SECOND_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('two') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
THOUGHT = {"role": "assistant", "content": "5", "reasoning_content": "2 and 3"}
CALLED = TOOLS_USED[1:]
KIMI_CALL = "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
DEEP_CALL = "<\uff5ctool▁calls▁begin\uff5c>x<\uff5ctool▁calls▁end\uff5c>"
STDIN = {"input": "1 2", "output": "3"}
SOLUTION = "class Solution:\n    def f(self, a: {}): return {}"
p = partial

# the report's subject: (what it was here, cases)
REPORTS: dict[str, tuple[str, list[Case]]] = {
    "1 tests as a list of objects": ("right program 0, rubbish 1", [
        ("LiveCodeBench's stdin", [1, 0], p(code, ADDS, [{**STDIN, "testtype": "stdin"}])),
        ("DeepCoder's type", [1, 0], p(code, ADDS, [{**STDIN, "type": "stdin_stdout"}])),
        ("pairs", [1, 0], p(code, ADDS, [["1 2", "3"]])),
        ("functional, function in metadata", [1, 0], p(code, ADD, [
            {"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}])),
        ("TACO's input_output as a text", [1, 0], p(code, ADDS, {
            "input_output": json.dumps({"inputs": ["1 2"], "outputs": ["3"]})})),
        ("objects under asserts", "refused", p(code, ADDS, {"asserts": [{"code": "x"}]})),
        ("[null]", "refused", p(code, ADDS, [None])),
        ("check(candidate) of a builtin's name", [1, 0], p(
            code, "def min(x):\n    return 7", ["def check(f):\n    assert f([1]) == 7\ncheck(min)"])),
    ]),
    "2 chat template applied twice": ("the rendered prompt in a message", [
        ("text", "2+3", p(question, "2+3")),
        ("messages with a system message", "2+3", p(question, [SYSTEM, *PLAIN])),
        ("messages as JSON in a text", "2+3", p(question, json.dumps(PLAIN))),
        ("content in parts", "2+3", p(question, [{"role": "user", "content": [{"type": "text", "text": "2+3"}]}])),
        ("prompt_template", "2+3!", p(question, PLAIN, prompt_template="{prompt}!")),
        ("the judge's {prompt}", "2+3|x", lambda: render("{prompt}|{response}", question("2+3"), "x", "")),
    ]),
    "3 special tokens cut off": ("no marker left", [
        (name, text, p(seen, model, text)) for name, model, text in (
            ("<think>", "Qwen3", "<think>a</think>b"), ("<tool_call>", "Qwen2.5", "<tool_call>x</tool_call>"),
            ("Kimi-K2's markers", "Kimi-K2", KIMI_CALL), ("DeepSeek's", "DeepSeek-V3", DEEP_CALL),
            ("GLM-4.5's", "GLM-4.5", "<arg_key>a</arg_key>"), ("Mistral's", "Mixtral", "[TOOL_CALLS] []"))
    ] + [("grader exact, a sampled <bos>", 1, p(exact, "12<bos>"))]),
    "4 arguments of DeepSeek's calls": ("TypeError, every second turn refused", [
        ("text", '{"a": 2, "b": 3}', p(with_tool, CALLED)),
        ("object", '{"a": 2, "b": 3}', p(with_tool, as_object(CALLED))),
        ("empty text", "{}", p(with_tool, with_arguments("{}"))),
        ("not ASCII", '{"a": "°"}', p(with_tool, with_arguments({"a": "°"}))),
        ("no JSON", "{a: 2}", p(with_tool, with_arguments("{a: 2}"))),
        ("a row of the data", True, lambda: '{"a": 2, "b": 3}' in text_of(CALLED, "DeepSeek-V3")),
    ]),
    "5 arguments that are no object (mcp)": ("sent; the server dies", [
        ("a text", "0 sent, error", p(sent, tool_call(json.dumps('{"a": 2}')))),
        ("a list", "0 sent, error", p(sent, tool_call("[2, 3]"))),
        ("a number", "0 sent, error", p(sent, tool_call("5"))),
        ("NaN", "0 sent, error", p(sent, tool_call('{"a": NaN}'))),
        ("1,100 braces", "0 sent, error", p(sent, tool_call('{"a":' * 1100))),
        ("no end", "0 sent, error", p(sent, '<tool_call>{"name": "add"}')),
        ("an object", "1 sent, answered", p(sent, tool_call('{"a": 2}'))),
    ]),
    "6 nulls of Arrow": ("parquet refused at row 1", [
        ("tool_calls", True, p(same_text, CALLED)),
        ("name", True, p(same_text, [{**PLAIN[0], "name": "eve"}], "Kimi-K2")),
        ("reasoning_content", True, p(same_text, [*PLAIN, THOUGHT, *PLAIN], "Qwen3")),
        ("arguments as an object", True, p(same_text, as_object(CALLED), "GLM-4.5")),
        ("tool_call_id", True, p(same_text, [*PLAIN, {**TOOLS_USED[3], "tool_call_id": "1"}])),
        ("content of a call", True, p(same_text, [*PLAIN, {**TOOLS_USED[2], "content": None}, TOOLS_USED[3]])),
    ]),
    "7 arguments encoded twice": ('"{\\"a\\": 2}" in the prompt', [
        (name, True, lambda name=name: text_of(CALLED, name) == text_of(as_object(CALLED), name))
        for name in TEMPLATES
    ]),
    "8 other boxes": ("0 for its own gold", [
        (gold, 1, p(itself, gold)) for gold in (
            r"\boxed 7", r"\fbox{12}", r"\boxed{2} and \boxed{5}", r"\boxed\frac12", r"\boxed{7}. Again: \boxed{",
            r"\boxed{\left\{1, 2\right\}}", r"$\boxed {x^2}$")
    ]),
    "9 one odd row": ("check: no problems found", [
        ("unknown character", [2], p(refused, {"prompt": "é", "answer": ""})),
        ("two of them, one empty", [2, 4], p(refused, {"prompt": "", "answer": ""}, {"prompt": "1", "answer": ""},
            {"prompt": "é", "answer": ""}, chat_template=False)),
        ("broken JSON", [3], p(refused, {"prompt": "1", "answer": ""}, '{"prompt": ')),
        ("the template refuses it", [2], p(refused, {"prompt": [*PLAIN, SYSTEM], "answer": ""},
            template=NO_SECOND_SYSTEM)),
        ("no answer", [2], p(refused, {"prompt": "1"})),
        ("NaN as the answer", [2], p(refused, '{"prompt": "1", "answer": NaN}')),
    ]),
    "10 tiny numbers": ("1.0 for 8 of 16", [
        (f"{a} for {b}", 0, p(pair, a, b)) for a, b in (
            ("1/2004!", "1/2006!"), (r"\frac{1}{20!}", r"\frac{1}{19!}"), ("2^{-64}", "2^{-63}"),
            (r"1-2^{-60}", r"1-2^{-61}"), ("e^{-1000}", "e^{-1001}"), (r"\{3^{-300}, 1\}", r"\{3^{-301}, 1\}"))
    ] + [("2^{-2000} for 4^{-1000}", 1, p(pair, "2^{-2000}", "4^{-1000}"))]),
    "11 two system messages": ("both", [
        ("the row's own wins", "<system>be brief<user>2+3<assistant>", p(
            text_of, [SYSTEM, *PLAIN], system_prompt="add")),
        ("as JSON in a text", "<system>be brief<user>2+3<assistant>", p(
            text_of, json.dumps([SYSTEM, *PLAIN]), system_prompt="add")),
        ("in parquet", "<system>be brief<user>2+3<assistant>", p(
            text_of, [SYSTEM, *PLAIN], name="a.parquet", system_prompt="add")),
        ("none of its own", "<system>add<user>2+3<assistant>", p(text_of, PLAIN, system_prompt="add")),
        ("a template that refuses two", "<system>be brief<user>2+3<assistant>", p(
            text_of, [SYSTEM, *PLAIN], NO_SECOND_SYSTEM, system_prompt="add")),
        ("and prompt_template", "<system>be brief<user>2+3!<assistant>", p(
            text_of, [SYSTEM, *PLAIN], system_prompt="add", prompt_template="{prompt}!")),
    ]),
    "12 <think> in the prompt": ("format: always 0", [
        ("no opening tag", 1, p(formatted, "a</think><answer>5</answer>")),
        ("both tags", 1, p(formatted, "<think>a</think>\n<answer>5</answer>")),
        ("empty thought", 1, p(formatted, "\n</think>\n\n<answer>5</answer>\n")),
        ("no closing tag", 0, p(formatted, "<think>a<answer>5</answer>")),
        ("no answer", 0, p(formatted, "a</think>5")),
        ("as special tokens", 1, lambda: formatted(seen("Qwen3", "a</think><answer>5</answer>"))),
    ]),
    "13 half a character": ("TypeError without a row", [
        (what, "a.jsonl:1: ", lambda row=row: half(**row)[:11]) for what, row in (
            ("in a message", {"prompt": [{"role": "user", "content": HALF}]}), ("in a text", {"prompt": HALF}),
            ("in a part", {"prompt": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]}),
            ("in a call", {"prompt": with_arguments({"a": HALF})}), ("in the answer", {"answer": HALF}),
            ("in a tool", {"tools": [{"type": "function", "function": {"name": HALF}}]}))
    ]),
    "14 forms of a judge's score": ("errors; 1e-1 is 1", [
        (reply, score, p(judged, reply)) for reply, score in (
            ("**Score:** 7", 7), ("Score: .8", 0.8), ("Score: 1e-1", 0.1), ("Score: 1,000", 1000),
            ("Score: [[7]]", 7), ("Score: 9\nMax score: 10", 9), ("Score\uff1a -1", -1))
    ]),
    "15 resume with other data": ("goes on; rows twice and never", [
        ("two rows more", "10 then, 12 now", p(resumed, [*range(12)])),
        ("two exchanged", "10 then, 10 now", p(resumed, [1, 0, *range(2, 10)])),
        ("one another", "10 then, 10 now", p(resumed, [*range(9), 11])),
        ("limit", "10 then, 5 now", p(resumed, [*range(10)], limit=5)),
        ("the same, moved and renamed", "", p(resumed, [*range(10)], "b.jsonl")),
        ("the same, as parquet", "", p(resumed, [*range(10)], "b.parquet")),
    ]),
    "16 bos is unk": ("every row refused", [
        ("add_bos", "taken", p(one_token, "1", add_bos=True)),
        ("its name in the text", "taken", p(one_token, "1<unk>2")),
        ("both", "taken", p(one_token, "1<unk>2", add_bos=True)),
        ("in messages", "taken", p(one_token, "1<unk>", chat_template=True)),
        ("an unknown character", "the tokenizer does not", p(one_token, "1é", add_bos=True)),
        ("one and its name", "the tokenizer does not", p(one_token, "<unk>é")),
    ]),
    "16b programs of public data": ("0 for right ones", [
        ("List", 1, p(called, "def f(a: List[int]): return sum(a)", "f", [[1, 2]], 3)),
        ("Optional", 1, p(called, SOLUTION.format("Optional[int]", "a"), "f", [1], 1)),
        ("defaultdict", 1, p(called, "def f(a): return defaultdict(int)[a]", "f", [1], 0)),
        ("ListNode", 1, p(called, SOLUTION.format("Optional[ListNode]", "a"), "f", [None], None)),
        ("APPS' [[3]]", 1, p(called, ADD, "add", [1, 2], [3])),
        ("integer keys", 1, p(called, "def f(a): return {a: 1}", "f", [2], {"2": 1})),
        ("a function named sum", 1, p(called, "def sum(a): return 7", "sum", [[1]], 7)),
    ]),
    "17 words of the same letters": ("1 for another order", [
        ("BADC for ABCD", 0, p(pair, "BADC", "ABCD")),
        ("THH for HHT", 0, p(pair, "THH", "HHT")),
        ("listen for silent", 0, p(pair, "listen", "silent")),
        ("angle ACB for ABC", 0, p(pair, r"\angle ACB", r"\angle ABC")),
        ("zyx for xyz", 1, p(pair, "zyx", "xyz")),
        ("segment BA for AB", 1, p(pair, "BA", "AB")),
    ]),
    "18 bold answers": ("0 for right ones", [
        ("math without a box", 1, p(math.grade, "2*234 = 468. Final Answer: **73**", "73", require_boxed=False)),
        ("in a box", 1, p(pair, "**73**", "73")),
        ("another number", 0, p(pair, "**72**", "73")),
        ("a power", 1, p(pair, "2**3", "8")),
        ("gsm8k", 1, p(gsm8k.grade, "#### **73**", "73")),
        ("gsm8k, text behind it", 1, p(gsm8k.grade, "#### **73**, as " + "said " * 99, "73")),
    ]),
    "19 a stop of one's own": ("format, exact: always 0", [
        ("stop", "5", p(stopped, "5<|im_end|>", stop=["<|im_end|>"])),
        ("stop_token_ids", "5", p(stopped, "5<|im_end|>", stop_token_ids=[7])),
        ("among others", "5", p(stopped, "5<|im_end|>", stop=[">", "<|im_end|>"])),
        ("inside a response", "5<|im_end|>5", p(stopped, "5<|im_end|>5", stop=[">"])),
        ("a text", "<5>", p(stopped, "<5>", stop=[">"])),
        ("the model's own end", "5", p(stopped, "5<eos>")),
    ]),
    "20 short floats of Parquet": ("0.10000000149011612", [
        ("answer", "0.1", p(from_parquet, 0.1, "float32")),
        ("in a struct", "3.3", p(from_parquet, {"a": 3.3}, pyarrow.struct({"a": "float32"}), "answer.a")),
        ("in a list", "[0.7]", p(from_parquet, [0.7], pyarrow.list_(pyarrow.float32()))),
        ("whole", "2.0", p(from_parquet, 2.0, "float32")),
        ("long floats", "0.30000000000000004", p(from_parquet, 0.1 + 0.2, "float64")),
        ("a time in a struct", "1970-01-01 00:00:01.000", p(from_parquet, {"a": 1}, pyarrow.struct({
            "a": pyarrow.timestamp("s")}), "answer.a")),
    ]),
}  # fmt: skip

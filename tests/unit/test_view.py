"""What `megagrpo view` reads, bounds and writes; the page in headless Chromium: no error, no request, hostile texts."""

import json
import re
import socket
import threading
import time
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser

import httpx
import pytest
from chromium import BrowserPage, find_chromium
from made_run import HOSTILE, made_groups, make_run

from megagrpo import cli
from megagrpo.config.schema import LogConfig
from megagrpo.monitor.rollout_log import RolloutLog
from megagrpo.monitor.step_log import StepLog
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.view import command
from megagrpo.tools.view.command import view_server, write_view
from megagrpo.tools.view.rendered import rendered
from megagrpo.tools.view.samples import read_samples, spread
from megagrpo.types import Outcome, Prompt, RolloutGroup, Sample

pytestmark = pytest.mark.verifies("runs", "`view` in headless Chromium")


class Scripts(HTMLParser):
    """The script elements of a page as a browser finds them: [(type, text)], and every tag."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[list[str]] = []
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag == "script":
            self.found.append([dict(attributes).get("type", ""), ""])

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.found[-1][1] += data


def runs_of(page: str) -> list[dict]:
    (text,) = (text for kind, text in Scripts(page).found if kind == "application/json")
    return json.loads(text)["runs"]


def test_one_page_holds_the_samples(tmp_path, capsys):
    make_run(tmp_path / "run")
    assert cli.main(["view", str(tmp_path / "run")]) == 0
    assert f"page: {tmp_path / 'run' / 'view.html'}" in capsys.readouterr().out
    (run,) = runs_of((tmp_path / "run" / "view.html").read_text())
    assert run["name"] == "run" and run["notes"] == []
    assert [group["step"] for group in run["groups"]] == [step for step in range(1, 6) for _ in range(3)]
    first, *_, hostile = run["groups"][0]["samples"]
    assert (first["reward"], first["advantage"], first["finish_reason"], first["weight_version"]) == (1, 1.5, "stop", 0)
    assert first["tokens"] == {"ids": [5, 6], "difference": [0.002, 0.002]}
    assert (hostile["text"], hostile["reward"], hostile["outcome"]["status"]) == (HOSTILE, None, "timeout")
    assert "tokens" not in run["groups"][2]["samples"][0] and run["groups"][2]["samples"][0]["advantage"] == 1.5
    assert run["pieces"] == {"5": " one", "6": "<b>", "9": "é"}


def test_nothing_of_a_response_becomes_part_of_the_page(tmp_path):
    folder = make_run(tmp_path / "<b>run")
    write_view([folder], 20.0, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    parser = Scripts(page)
    assert [kind for kind, _ in parser.found] == ["application/json", ""]
    assert not {"img", "b", "iframe", "a"} & parser.tags, "elements that only responses have"
    assert HOSTILE in [sample["text"] for sample in runs_of(page)[0]["groups"][0]["samples"]]
    text = page.partition('id="data">')[2].partition("</script>")[0].lower()
    assert not re.search("<(!--|/?script)", text) and "\\u003c/script" in text and "<!-" not in text
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert cli.main(["view", str(tmp_path / "absent")]) == 2
    assert "metrics.jsonl: no such file" in capsys.readouterr().err
    folder = RunFolder(tmp_path / "without")  # tokens switched off
    with closing(StepLog(folder, LogConfig(tensorboard=False))) as log, closing(RolloutLog(folder, 0)) as samples:
        log.write(1, {"reward/mean": 0.5})
        samples.write(1, made_groups(1))
    assert cli.main(["view", str(folder.path)]) == 0
    (run,) = runs_of(folder.view.read_text())
    assert [sample["advantage"] for sample in run["groups"][0]["samples"]] == [None] * 4


def test_samples_are_bounded_in_bytes_and_spread_over_steps(tmp_path):
    folder = RunFolder(tmp_path)
    with closing(RolloutLog(folder, 0)) as log:
        for step in range(1, 301):
            log.write(step, made_groups(step, num_groups=6))
    data, notes = read_samples(folder, 150_000)
    steps = [group["step"] for group in data["groups"]]
    assert 75_000 < len(json.dumps(data)) < 450_000, "estimated, not measured: about as much as requested"
    assert steps[0] == 1 and steps[-1] == 300 and len(set(steps)) == 200
    assert all(group["group_id"] == 0 for group in data["groups"] if steps.count(group["step"]) == 1)
    assert "200 of 300 steps" in notes[0] and "--sample-mb 0.15" in notes[1]
    everything, notes = read_samples(folder, 1e9)
    assert len(everything["groups"]) == 1200 and notes == ["samples: of 200 of 300 steps, evenly spread"]
    assert spread(range(5), 7) == [0, 1, 2, 3, 4] and spread(range(101), 3) == [0, 50, 100]


def test_a_rollout_with_an_environment_is_a_conversation(tmp_path):
    prompt = Prompt(0, "?", (1,), "")
    grown = Sample(0, (5, 6, 9, 5), 4 * (-0.5,), "stop", 0, "5695", loss_mask=(True, True, False, True))
    outcome = Outcome("score", 1.25, end="done", turn_rewards=(0.25, 1.0))
    walk = [replace(grown, index=i, token_ids=(i,), logprobs=(-0.5,), loss_mask=None, rollout=1) for i in (1, 2)]
    walk = [replace(sample, prompt_ids=(7, sample.index)) for sample in walk]
    cut = Outcome("error", detail="the tool is gone", end="error", turn_rewards=(0.5,))
    group = RolloutGroup(0, prompt, (replace(grown, rollout=0), *walk), (outcome, cut))
    with closing(RolloutLog(RunFolder(tmp_path), 0, decode=lambda ids: "".join(map(str, ids)))) as log:
        log.write(1, [group])
    samples = read_samples(RunFolder(tmp_path), 50_000)[0]["groups"][0]["samples"]
    plain = {"html": ["", ""]}
    first = {"by": "model", "text": "56", "reward": 0.25} | plain, {"by": "environment", "text": "9"} | plain
    assert samples[0]["turns"] == [*first, {"by": "model", "text": "5", "reward": 1.0} | plain]
    assert (samples[0]["outcome"]["end"], samples[0]["reward"], samples[2]["reward"]) == ("done", 1.25, None)
    assert [s["prompt"] for s in samples[1:]] == ["71", "72"], "its own"
    assert samples[1]["turns"] == [{"by": "model", "text": "1", "reward": 0.5} | plain]
    assert samples[2]["turns"] == [{"by": "model", "text": "2"} | plain], "its environment gave no answer"


def test_half_a_character_in_a_graders_detail_is_shown(tmp_path):
    (group,) = made_groups(1, num_groups=1)
    outcomes = (replace(group.outcomes[0], detail="cut \ud83d"), *group.outcomes[1:])
    with closing(RolloutLog(RunFolder(tmp_path), 0)) as log:
        log.write(1, [replace(group, outcomes=outcomes)])
    samples = read_samples(RunFolder(tmp_path), 50_000)[0]["groups"][0]["samples"]
    assert samples[0]["outcome"]["detail"] == "cut \ud83d"
    RunFolder(tmp_path).metrics.write_text("")
    write_view([RunFolder(tmp_path)], 1.0, None)
    (run,) = runs_of((tmp_path / "view.html").read_text())
    assert run["groups"][0]["samples"][0]["outcome"]["detail"] == "cut \ud83d"
    server, url = view_server([RunFolder(tmp_path)], 1.0, 0)
    with server:
        threading.Thread(target=server.handle_request).start()
        assert runs_of(httpx.get(url).text) == [run]


def test_turns_and_prompts_of_samples_count(tmp_path):
    (group,) = made_groups(1, num_groups=1)
    ids = tuple(range(100)) * 5
    walk = [Sample(i, ids, 500 * (-0.5,), "stop", 0, "", rollout=0, prompt_ids=ids) for i in range(4)]
    walk = [replace(sample, loss_mask=tuple(i % 2 == 0 for i in range(500))) for sample in walk]
    outcome = Outcome("score", 1.0, end="done")
    with closing(RolloutLog(RunFolder(tmp_path), 0, decode=lambda ids: "x" * 400 * len(ids))) as log:
        log.write(1, [replace(group, samples=tuple(walk), outcomes=(outcome,)) for _ in range(3)])
    data, _ = read_samples(RunFolder(tmp_path), 300_000)
    assert len(json.dumps(data)) < 600_000


def test_recorded_tokens_and_turns_of_long_responses_are_bounded(tmp_path):
    folder = make_run(tmp_path, num_steps=3)
    for path in folder.trained_files().values():
        lines = list(map(json.loads, path.read_text().splitlines()))
        for tokens in (tokens for line in lines for tokens in line["tokens"]):
            tokens |= {"ids": [5] * 50_000, "difference": [0.25] * 50_000}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data, notes = read_samples(folder, 150_000)
    samples = [sample for group in data["groups"] for sample in group["samples"]]
    shown = [len(sample["tokens"]["ids"]) for sample in samples if "tokens" in sample]
    assert 0 < sum(shown) <= 150_000 / 16 and "or tokens, within --sample-mb 0.15" in notes[-1]
    assert data["pieces"] == {"5": " one"}


def test_one_huge_response_does_not_fill_the_page(tmp_path):
    (group,) = made_groups(1, num_groups=1)
    long = replace(group.samples[0], text="x" * 1_000_000)
    with closing(RolloutLog(RunFolder(tmp_path), 0)) as log:
        log.write(1, [replace(group, samples=(long, *group.samples[1:]))])
    data, _ = read_samples(RunFolder(tmp_path), 50_000)
    text = data["groups"][0]["samples"][0]["text"]
    assert len(text) < 20_100 and text.endswith("[... 980000 more characters]")


@pytest.mark.parametrize(
    "text, html",
    [
        ("## A *b*", "<h2>A <em>b</em></h2>"),
        ("one\ntwo", ""),  # no mark: shown as it is
        ("one & <b>\ntwo 'x' \"y\"", ""),
        ("**one**\ntwo", "<p><strong>one</strong><br />\ntwo</p>"),
        ("costs $5 and $6", ""),
        ("costs $5-$6", ""),
        ("a$ b$ c", ""),
        (r"so $x_1*y*z$.", '<p>so <code class="formula">$x_1*y*z$</code>.</p>'),
        (r"so \(x < 1\).", r'<p>so <code class="formula">\(x &lt; 1\)</code>.</p>'),
        (r"so $$y$$", '<p>so <code class="formula">$$y$$</code></p>'),
        ("is\n\\[\nx\n- 2\n\\]\n", '<p>is<br />\n<code class="formula">\\[\nx\n- 2\n\\]</code></p>'),
        ("- $$\n  a\n  $$", '<ul>\n<li><code class="formula">$$\n  a\n  $$</code></li>\n</ul>'),
        (r"a \\(b\\) \$c$", r"<p>a \(b\) $c$</p>"),
        ("\ue0005; *a*", "<p>5; <em>a</em></p>"),
        ("|a|\n|-:|", '<table>\n<thead>\n<tr>\n<th align="right">a</th>\n</tr>\n</thead>\n</table>'),
        ("`$x$`", '<p><code><code class="formula">$x$</code></code></p>'),  # shown as text
        ("```\n$$\n```\n```\n$$\n```", "<pre><code>$$\n</code></pre>\n<pre><code>$$\n</code></pre>"),
        ("![a](http://x/y.png)", '<p>!<a href="http://x/y.png">a</a></p>'),
        ("[a](javascript:alert(1))", ""),
        (
            "<img src=x onerror=alert(1)>\n\n<script>",
            "<p>&lt;img src=x onerror=alert(1)&gt;</p>\n<p>&lt;script&gt;</p>",
        ),
    ],
)
def test_markdown(text, html):
    assert rendered(text, {}) == html


def test_a_formula_is_mathml_or_stays_text():
    texts = [r"\frac{1}{2}", r"\text{&lt;script&gt;}", r"5% of x", r"\frac{1", "{" * 900, r"\def\a{\a\a}\a", "x^"]
    found: dict[str, str] = {}
    for text in texts:
        rendered(f"so ${text}$", found)
    found = {formula.strip("$"): mathml for formula, mathml in found.items()}
    assert [text for text in texts if found[text]] == texts[:4] and [*found] == texts
    assert "<mfrac><mrow><mn>1</mn></mrow><mrow><mn>2</mn></mrow></mfrac>" in found[texts[0]]
    assert "<mtext>&lt;script&gt;</mtext>" in found[texts[1]]
    assert "<mi>x</mi>" in found[texts[2]], "a sign of per cent hides nothing"
    sums: dict[str, str] = {}
    rendered(r"\[\sum_1^2\] \(\sum_1^2\)", sums)
    assert "<munderover>" in sums[r"\[\sum_1^2\]"] and "<msubsup>" in sums[r"\(\sum_1^2\)"]


def test_a_text_that_becomes_too_long_stays_plain():
    table = f"|{'a|' * 180}\n|{'-|' * 180}\n" + "a\n" * 362
    for text in (table * 14, table[:-1].replace("\n", "\r> ") * 14):
        started = time.monotonic()
        assert rendered(text, {}) == "" and time.monotonic() - started < 5
    for text in ("[" * 20_000, "![[" * 6_000, r"\[" * 10_000, r"\(" * 10_000):  # each looks for its end
        started = time.monotonic()
        assert rendered(text, {}) == "" and time.monotonic() - started < 0.2
    small = "|a|b|\n|-|-|\n" + "|1|2|\n" * 1_000
    assert rendered(small, {}).count("<td>") == 2_000
    found: dict[str, str] = {}
    assert rendered("".join(f"${number}{'x' * 90}$ " for number in range(500)), found) == "" and not found


ROWS, COUNT = ("document.querySelectorAll('#table tbody tr').length", "document.getElementById('count').textContent")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    find_chromium()
    with BrowserPage(tmp_path_factory.mktemp("browser") / "profile") as page:
        yield page


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [make_run(folder / name, num_steps=12) for name in ("first", "second")]


@pytest.fixture
def page(browser, runs):
    """The page of two runs; at the end it has logged no error and made no request."""
    write_view(runs, 20.0, None)
    browser.errors.clear()
    browser.requests.clear()
    browser.open(runs[0].view.as_uri())
    yield browser
    assert browser.errors == []
    assert browser.requests == [runs[0].view.as_uri()]
    assert browser.value("performance.getEntriesByType('resource').length") == 0


def test_the_newest_step_comes_first_and_a_reload_keeps_the_choices(page):
    steps = "[...document.querySelectorAll('#table tbody tr td:nth-child(2)')].map(e => e.textContent)"
    assert page.value(steps)[0] == "12"
    page.click("#search")
    page.type("banana 12")
    page.wait(f"{COUNT} === '10 of 288 samples'")
    page.click("#table th:nth-child(1)")  # run, which orders the second run's rows first
    page.click("#table tbody tr:nth-child(3)")
    chosen = "document.querySelector('#detail h2').textContent"
    before = page.value(steps), page.value(chosen)
    page.value("window.before = true; location.reload()")
    page.wait("window.before === undefined && document.readyState === 'complete' && !!document.getElementById('count')")
    assert page.value(COUNT) == "10 of 288 samples"
    assert (page.value(steps), page.value(chosen)) == before
    page.requests.pop()


def test_a_curve_says_its_value_under_the_pointer(page):
    caption = "document.querySelector('#curves figcaption').textContent"
    whole = page.value(caption)
    move = (
        "new PointerEvent('pointermove', {clientX: (b => b.x + b.width - 1)(svg.getBoundingClientRect()), clientY: 9})"
    )
    page.value(f"(svg => svg.dispatchEvent({move}))(document.querySelector('#curves svg'))")
    assert re.fullmatch(r"reward/mean, step 12: [\d.e+-]+, [\d.e+-]+", page.value(caption)), "one value of each run"
    page.value("document.querySelector('#curves svg').dispatchEvent(new PointerEvent('pointerleave'))")
    assert page.value(caption) == whole
    assert page.value("document.querySelector('#curves .axis').textContent") == "step 112"


def test_reasoning_is_folded(page):
    page.value("chosenRow.sample.text = 'so <b>\\n</think>\\n\\n42'; showSample(chosenRow)")
    pane = "document.querySelector('#detail details')"
    assert page.value(f"{pane}.open") is False
    assert page.value(f"[{pane}.querySelector('pre').textContent, {pane}.nextSibling.textContent]") == [
        "so <b>\n",
        "42",
    ]


def test_a_served_page_is_made_anew_and_needs_its_address(tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")
    server, url = view_server([folder], 20.0, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        early = httpx.get(url)
        assert early.status_code == 503 and "metrics.jsonl: no such file" in early.text
        make_run(folder.path)
        answer = httpx.get(url)
        assert [run["name"] for run in runs_of(answer.text)] == ["run"] and '"renew_s":60' in answer.text
        assert httpx.get(url.rsplit("/", 1)[0] + "/").status_code == 404
        with socket.create_connection(server.server_address):  # as browsers open one for later
            assert httpx.get(url).status_code == 200
        assert cli.main(["view", str(folder.path), "--serve", str(server.server_port)]) == 2
        assert f"--serve {server.server_port}: [Errno" in capsys.readouterr().err
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_served_page_that_takes_long_comes_in_the_end(browser, tmp_path, monkeypatch):
    folder, make_page = make_run(tmp_path / "run"), command._page

    def slowly(*arguments):
        time.sleep(3)  # longer than the page waits before it looks again
        return make_page(*arguments)

    monkeypatch.setattr(command, "_page", slowly)
    monkeypatch.setattr(command, "_RENEW_S", 0.5)
    server, url = view_server([folder], 20.0, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        browser.open(url)
        browser.value("window.before = true")
        browser.wait("window.before === undefined && document.readyState === 'complete'")
    finally:
        browser.call("Page.navigate", url="about:blank")
        server.shutdown()
        server.server_close()


def test_filter_search_and_order(page):
    assert page.value(COUNT) == "288 of 288 samples"
    assert page.value(ROWS) == 100, "the rest is added on scrolling"
    page.value("document.getElementById('scroll').scrollTop = 1e6")
    page.wait(f"{ROWS} === 200")
    page.click("#search")
    page.type("BANANA 12")
    page.wait(f"{COUNT} === '10 of 288 samples'")
    assert page.value(ROWS) == 10
    page.value("document.getElementById('search').value = ''")
    page.click("#reward-min")
    page.type("0.5")
    page.wait(f"{COUNT} === '72 of 288 samples'")
    page.value("document.getElementById('reward-min').value = ''")
    for choice, count in (("length", 72), ("", 288)):
        page.value(f"(e => {{ e.value = '{choice}'; e.dispatchEvent(new Event('change')); }})(byId('finish'))")
        assert page.value(COUNT) == f"{count} of 288 samples"
    for first in ("-1", "1.5"):
        page.click("#table th:nth-child(7)")  # advantage
        assert page.value("document.querySelector('#table tbody tr td:nth-child(7)').textContent") == first


def test_it_opens_with_a_sample_and_the_runs_curves(page):
    assert page.value("document.querySelectorAll('#table tr.chosen').length") == 1
    assert page.value("document.querySelectorAll('#detail pre').length") >= 3
    drawn = "[...document.querySelectorAll('#curves figure')].map(e => e.textContent)"
    assert any(text.startswith("reward/mean: ") for text in page.value(drawn))
    lines = "document.querySelectorAll('#curves figure:first-child polyline').length"
    assert page.value(lines) == 2, "one of each run"
    page.click("#curves svg")  # its middle: the nearest step's samples
    page.wait(f"{COUNT} === '24 of 288 samples'")
    assert page.value("document.getElementById('step').value") in ("6", "7")
    assert page.value("document.querySelector('#table tr.chosen td:nth-child(2)').textContent") in ("6", "7")


def test_a_hostile_response_is_text(page):
    page.click("#search")
    page.type("taken over")
    page.wait(f"{COUNT} === '24 of 288 samples'")
    page.click("#table tbody tr")
    page.wait("document.querySelectorAll('#detail pre').length >= 3")
    assert HOSTILE in page.value("[...document.querySelectorAll('#detail pre')].map(e => e.textContent)")
    assert page.value("document.title") == "first | second"
    assert page.value("document.querySelectorAll('img, iframe, #detail b, #detail script').length") == 0


MARKED = r"""## Plan
Let \(x = \frac{1}{2}\), **so** <b>no</b> [here](http://127.0.0.1:9/leads) [js](javascript:alert(1))
![pixel](http://127.0.0.1:9/pixel.png) <script>document.title = "taken over"</script> <img src=x onerror=alert(1)>

| a | b |
|---|--:|
| $\text{&lt;img src=x onerror=alert(2)&gt;}$ | $\href{javascript:alert(3)}{y} \style{position:fixed}{z} \class{a}{b}$ |

\[
x
- constructor
\]
```
$in code$
```
constructor $x^$
"""


@pytest.fixture
def marked(tmp_path, browser):
    """The page of a run whose responses have marks."""
    (group,) = made_groups(1, num_groups=1)
    samples = [replace(each, text=f"think **hard**</think>{MARKED}") for each in group.samples]
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("")
    with closing(RolloutLog(folder, 0)) as log:
        log.write(1, [replace(group, prompt=replace(group.prompt, text="# Ask\n$1$"), samples=tuple(samples))])
    write_view([folder], 1.0, None)
    browser.errors.clear()
    browser.requests.clear()
    browser.open(folder.view.as_uri())
    yield browser
    assert browser.errors == [] and {*browser.requests} == {folder.view.as_uri()}


def test_markdown_and_formulas_are_shown_where_they_are_wanted(marked):
    raw = "[...document.querySelectorAll('#detail > pre')].map(e => e.textContent)"
    assert MARKED in marked.value(raw), "what the model wrote comes first"
    marked.click("#markdown")
    marked.wait("document.querySelectorAll('#detail .markdown').length === 3")
    shown = "(s => [...document.querySelectorAll('#detail ' + s)].map(e => e.textContent))"
    assert marked.value(f"{shown}('h1')") == ["Ask"] and marked.value(f"{shown}('h2:not(#detail > h2)')") == ["Plan"]
    assert marked.value(f"{shown}('details .markdown')") == ["think hard"]
    assert marked.value(f"{shown}('strong')") == ["hard", "so"]
    assert marked.value(f"{shown}('.markdown th')") == ["a", "b"]
    assert marked.value("getComputedStyle(document.querySelector('#detail th:last-child')).textAlign").endswith("right")
    boxes = "[...document.querySelectorAll('#detail mfrac')].map(e => e.getBoundingClientRect().height)"
    assert len(marked.value(boxes)) >= 1 and min(marked.value(boxes)) > 10, "drawn as a fraction"
    title = "document.querySelector('#detail math[display=block]').getAttribute('title')"
    assert marked.value(title) == "\\[\nx\n- constructor\n\\]"
    assert marked.value(f"{shown}('pre code')") == ["$in code$\n"]
    marked.value("window.before = true; location.reload()")
    marked.wait("window.before === undefined && document.readyState === 'complete'")
    marked.wait("document.querySelectorAll('#detail .markdown').length === 3")
    marked.click("#markdown")
    assert MARKED in marked.value(raw)


def test_nothing_of_a_rendered_response_runs_loads_or_leads_away(marked):
    marked.click("#markdown")
    marked.wait("document.querySelectorAll('#detail .markdown').length === 3")
    text = marked.value("document.querySelector('#detail > .markdown.model').textContent")
    for visible in ("<b>no</b>", "<script>document.title", "<img src=x onerror=alert(1)>", "[js](javascript:alert(1))"):
        assert visible in text
    assert "<img src=x onerror=alert(2)>" in text.replace("\xa0", " "), "also in a formula"
    bad = "img, a, script:not(body > script), iframe, b, [href], [style], [onerror], [class]:is(math *)"
    assert marked.value(f"[...document.querySelectorAll('#detail :is({bad})')].map(e => e.outerHTML)") == []
    assert marked.value("[...document.querySelectorAll('#detail u')].map(e => e.title)") == [
        "http://127.0.0.1:9/leads",
        "http://127.0.0.1:9/pixel.png",
    ]
    assert marked.value("document.title") != "taken over"
    # whatever came as HTML, the page copies only what it knows
    hostile = "<img src=x onerror=alert(1)><svg><script>1</script></svg><p onclick=alert(1) id=data>t</p>"
    made = f"(box => (box.append(...copiesOf(DATA.runs[0], {json.dumps(hostile)})), box.innerHTML))(make('div'))"
    assert marked.value(made) == "1<p>t</p>"


def test_tokens_are_colored(page):
    page.click("#with-tokens")
    page.wait(f"{COUNT} === '192 of 288 samples'")
    page.click("#table tbody tr:nth-child(2)")
    page.wait("document.querySelectorAll('#detail .token').length > 0")
    tokens = page.value(
        "[...document.querySelectorAll('#detail .token')].map(e => [e.textContent, e.title, e.style.background])"
    )
    assert [text for text, *_ in tokens] == [" one", "<b>", "é"]
    assert all("0.002" in title and shade == "rgb(249, 142, 82)" for _, title, shade in tokens)


def test_a_phone_shows_one_column(page):
    page.call("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=False)
    try:
        page.wait("innerWidth === 400")
        assert page.value("document.documentElement.scrollWidth") <= 400, "nothing is cut at the side"
        boxes = "['scroll', 'detail'].map(id => (b => [b.x, b.y, b.width, b.height])(byId(id).getBoundingClientRect()))"
        (x, y, width, height), (its_x, its_y, its_width, _) = page.value(boxes)
        assert x == its_x and y + height < its_y and width == its_width > 300, "the sample is below the table"
    finally:
        page.call("Emulation.clearDeviceMetricsOverride")

"""The page in headless Chromium: no error, no request, and what a person does with it works."""

import json
import threading

import pytest
from chromium import BrowserPage, find_chromium
from made_run import HOSTILE, make_run

from megagrpo.view.command import view_data, write_view
from megagrpo.view.run_data import ViewLimits
from megagrpo.view.serve import page_server, stamp_of

ROWS = "document.querySelectorAll('#sample-table tbody tr').length"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    find_chromium()
    with BrowserPage(tmp_path_factory.mktemp("browser") / "profile") as page:
        yield page


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [make_run(folder / "first", num_steps=12), make_run(folder / "second", num_steps=12, level=0.3)]


@pytest.fixture
def page(browser, runs):
    """The page of two runs, freshly opened; afterwards it has logged no error and asked nobody for anything."""
    write_view(runs, ViewLimits(), runs[0].view)
    url = runs[0].view.as_uri()
    browser.errors.clear()
    browser.requests.clear()
    browser.open(url)
    yield browser
    assert browser.errors == []
    assert browser.requests == [url]
    assert browser.value("performance.getEntriesByType('resource').length") == 0


def test_curves_of_both_runs_with_bands(page):
    assert page.value("document.title") == "first | second"
    drawn = page.value(
        "[...document.querySelectorAll('#charts > div')].map(e => [e.dataset.key, e.querySelectorAll('.scatterlayer"
        " .trace path.js-line').length, e.querySelectorAll('.scatterlayer .js-fill').length])"
    )
    charts = {key: (lines, fills) for key, lines, fills in drawn}
    assert charts["reward/mean"][1] == 2, "a band of each run"
    assert charts["reward/mean"][0] >= 2 and charts["policy/entropy"][0] == 2 and "time per phase 1" in charts
    values = page.value("Plotly && document.querySelector('[data-key=\"reward/mean\"]').data.map(t => [...t.y])")
    assert max(values[-1]) == 1.5 and max(values[2]) == 1.2  # of the second run and the first


def test_any_metric_can_be_chosen(page):
    assert not page.value("!!document.querySelector('[data-key=\"reward/std\"]')")
    page.click("#metric-search")
    page.type("reward/st")
    assert page.value("document.querySelectorAll('#metric-list input').length") == 1
    page.click("#metric-list input")
    page.wait("!!document.querySelector('[data-key=\"reward/std\"] .js-line')")
    page.click("#metric-list input")
    page.wait("!document.querySelector('[data-key=\"reward/std\"]')")


def test_timeline_of_a_step(page):
    page.click("nav [data-tab=timeline]")
    page.wait("document.querySelectorAll('#timeline-chart .barlayer .point').length > 0")
    rows = page.value("[...document.querySelectorAll('#timeline-chart .ytick')].map(e => e.textContent)")
    assert rows == ["engine-0 calls", "rank 1", "rank 0"]
    assert page.value("document.querySelectorAll('#timeline-step option').length") == 12
    assert page.value("document.getElementById('timeline-said').textContent").startswith("8 requests, 49 tokens, 1 att")


def test_filter_search_and_order(page):
    page.click("nav [data-tab=samples]")
    count = "document.getElementById('sample-count').textContent"
    assert page.value(count) == "288 of 288 samples"
    assert page.value(ROWS) == 100, "the rest is added while one scrolls"
    page.value("document.getElementById('sample-scroll').scrollTop = 1e6")
    page.wait(f"{ROWS} === 200")
    page.click("#search")
    page.type("BANANA 12")
    page.wait(f"{count} === '10 of 288 samples'")
    assert page.value(ROWS) == 10
    page.value("document.getElementById('search').value = ''")
    page.click("#reward-min")
    page.type("0.5")
    page.wait(f"{count} === '72 of 288 samples'")
    page.value("document.getElementById('reward-min').value = ''")
    page.value("(e => { e.value = 'length'; e.dispatchEvent(new Event('change')); })(byId('sample-finish'))")
    assert page.value(count) == "72 of 288 samples"
    page.value("(e => { e.value = ''; e.dispatchEvent(new Event('change')); })(byId('sample-finish'))")
    page.click("#sample-table th:nth-child(7)")  # advantage
    first = "document.querySelector('#sample-table tbody tr td:nth-child(7)').textContent"
    assert page.value(first) == "-1"
    page.click("#sample-table th:nth-child(7)")
    assert page.value(first) == "1.5"


def test_a_hostile_response_is_text(page):
    page.click("nav [data-tab=samples]")
    page.click("#search")
    page.type("taken over")
    page.wait("document.getElementById('sample-count').textContent === '24 of 288 samples'")
    page.click("#sample-table tbody tr")
    page.wait("document.querySelectorAll('#sample-detail pre').length >= 3")
    shown = page.value("[...document.querySelectorAll('#sample-detail pre')].map(e => e.textContent)")
    assert HOSTILE in shown
    assert page.value("document.title") == "first | second"
    assert page.value("document.querySelectorAll('img, iframe, #sample-detail b, #sample-detail script').length") == 0


def test_tokens_are_coloured(page):
    page.click("nav [data-tab=samples]")
    page.click("#with-tokens")
    page.wait("document.getElementById('sample-count').textContent === '192 of 288 samples'")
    page.click("#sample-table tbody tr:nth-child(2)")
    page.wait("document.querySelectorAll('#sample-detail .token').length > 0")
    tokens = page.value(
        "[...document.querySelectorAll('#sample-detail .token')].map(e => [e.textContent, e.title, e.style.background])"
    )
    assert [text for text, *_ in tokens] == [" one", "<b>", "é"]
    assert all("0.002" in title and shade == "rgb(249, 142, 82)" for _, title, shade in tokens)


def test_a_served_page_follows_the_run(browser, tmp_path):
    folder = make_run(tmp_path / "run", num_steps=2)
    with page_server(lambda: view_data([folder], ViewLimits()), lambda: stamp_of([folder]), "run", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            own = f"http://127.0.0.1:{server.server_address[1]}/"
            browser.errors.clear()
            browser.requests.clear()
            browser.open(own)
            steps = "document.querySelector('[data-key=\"policy/entropy\"]').data[0].x.length"
            assert browser.value(steps) == 2
            make_run(tmp_path / "run", num_steps=4, start_step=2)
            browser.wait(f"{steps} === 4")
        finally:
            browser.open("about:blank?")
            server.shutdown()
            thread.join()
    assert browser.errors == [] and all(url.startswith((own, "about:")) for url in browser.requests)
    assert json.dumps(browser.requests).count("/data") >= 1

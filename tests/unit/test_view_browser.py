"""The page in headless Chromium: no error, no request; filters, search, order, tokens and hostile responses."""

import pytest
from chromium import BrowserPage, find_chromium
from made_run import HOSTILE, make_run

from megagrpo.view.command import write_view

ROWS, COUNT = "document.querySelectorAll('#table tbody tr').length", "document.getElementById('count').textContent"


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
    write_view(runs, 20.0, 20, None, None)
    browser.errors.clear()
    browser.requests.clear()
    browser.open(runs[0].view.as_uri())
    yield browser
    assert browser.errors == []
    assert browser.requests == [runs[0].view.as_uri()]
    assert browser.value("performance.getEntriesByType('resource').length") == 0


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


def test_a_hostile_response_is_text(page):
    page.click("#search")
    page.type("taken over")
    page.wait(f"{COUNT} === '24 of 288 samples'")
    page.click("#table tbody tr")
    page.wait("document.querySelectorAll('#detail pre').length >= 3")
    assert HOSTILE in page.value("[...document.querySelectorAll('#detail pre')].map(e => e.textContent)")
    assert page.value("document.title") == "first | second"
    assert page.value("document.querySelectorAll('img, iframe, #detail b, #detail script').length") == 0


def test_tokens_are_coloured(page):
    page.click("#with-tokens")
    page.wait(f"{COUNT} === '192 of 288 samples'")
    page.click("#table tbody tr:nth-child(2)")
    page.wait("document.querySelectorAll('#detail .token').length > 0")
    tokens = page.value(
        "[...document.querySelectorAll('#detail .token')].map(e => [e.textContent, e.title, e.style.background])"
    )
    assert [text for text, *_ in tokens] == [" one", "<b>", "é"]
    assert all("0.002" in title and shade == "rgb(249, 142, 82)" for _, title, shade in tokens)

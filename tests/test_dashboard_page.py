"""The page in a real browser, from a real server: live without reload, through a restart, on a phone, and as a file."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser import chromium
from tests.dashboard_server import RUN, Server, dashboard
from tests.fake_journal import fill
from volunteer_kit.dashboard import export_page
from volunteer_kit.journal import Journal

pytestmark = pytest.mark.slow
SOON = 120_000  # ms; the page asks every 2 s, and behind failures every 30 s
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 780}
IS_DRAWN = """key => {
    const canvas = document.querySelector(`[data-chart=${key}] canvas`);
    if (!canvas) return false;
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const colours = new Set();
    for (let i = 0; i < data.length; i += 4) {
        if (data[i + 3] > 200) colours.add(`${data[i]},${data[i + 1]},${data[i + 2]}`);
    }
    return colours.size > 3;
}"""
AWAY = "net::ERR_CONNECTION"  # the server has ended, in some tests before the page
CURVES = ("loss", "samples_per_second", "volunteers")


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser):
    """visit(url, ...) -> page; afterwards no page may have had anything to complain about."""
    contexts, complaints = [], []

    def visit(url: str, **options) -> Page:
        context = browser.new_context(**{"viewport": DESKTOP, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: line.type == "error" and AWAY not in line.text and complaints.append(line.text))
        page.on("request", lambda request: request.url.startswith(url[:20]) or complaints.append(request.url))
        page.goto(url)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not complaints


@pytest.fixture
def journal(tmp_path):
    with Journal(tmp_path / "journal.sqlite") as journal:
        yield journal


def report(journal: Journal, epoch: int, **given) -> None:
    row = dict(loss=4.5, samples_per_second=12.5, volunteers=2, progress=0.5, samples_total=256 * epoch) | given
    journal.add_metrics(time.time(), epoch, **row)


def fact(page: Page, name: str):
    return page.locator(".facts > div", has_text=name).locator("b")


def test_an_open_page_follows_the_journal_without_reload(visit, journal, tmp_path):
    with dashboard(tmp_path) as server:
        page = visit(server.url)
        page.evaluate("window.same = true")
        expect(page.locator(".state")).to_have_text("Waiting for the first report")
        report(journal, 7)
        expect(page.locator(".state")).to_have_text("Training", timeout=SOON)
        expect(fact(page, "Global step")).to_have_text("7")
        journal.add_event(time.time(), "joined", username="ada", device="Tesla T4")
        journal.set_leaderboard([{"username": "ada", "samples": 1792, "seconds": 1800, "machines": 1}])
        expect(page.locator(".events")).to_contain_text("ada joined with Tesla T4", timeout=SOON)
        expect(page.locator("tbody th")).to_have_text(re.compile("ada"))
        report(journal, 8, loss=4.25)
        expect(fact(page, "Loss")).to_have_text("4.25", timeout=SOON)
        assert page.evaluate(IS_DRAWN, "loss") and page.evaluate("window.same")
        assert page.title() == "demo: Training"


def test_it_survives_the_servers_restart_and_says_when_it_is_stale(visit, journal, tmp_path):
    report(journal, 7)
    first = Server(tmp_path)
    try:
        page = visit(first.url)
        page.evaluate("window.same = true")
        expect(fact(page, "Global step")).to_have_text("7")
    finally:
        first.stop()
    expect(page.locator("#lost")).to_contain_text("No connection to the server", timeout=SOON)
    report(journal, 9)
    with dashboard(tmp_path, first.port):
        expect(fact(page, "Global step")).to_have_text("9", timeout=SOON)
        expect(page.locator("#lost")).to_be_hidden()
        assert page.evaluate("window.same")


def test_what_a_reader_does_stays_while_the_page_changes(visit, tmp_path):
    fill(tmp_path, "many")
    with dashboard(tmp_path) as server, Journal(tmp_path / "journal.sqlite") as journal:
        page = visit(server.url)
        page.get_by_text("Places 16 to 41").click()
        page.get_by_role("button", name="Day").focus()
        page.keyboard.press("Enter")
        image = page.locator(".pictures img").first.element_handle()
        report(journal, 7700)
        expect(fact(page, "Global step")).to_have_text("7,700", timeout=SOON)
        expect(page.locator("details.more")).to_have_attribute("open", "")
        day = page.get_by_role("button", name="Day")
        expect(day).to_have_attribute("aria-pressed", "true")
        expect(day).to_be_focused()
        assert image.evaluate("node => node.isConnected")


def test_strangers_script_is_shown_and_not_run(visit, journal, tmp_path):
    evil = '<script>window.evil = 1</script><img src="x" onerror="window.evil = 2">'
    report(journal, 7)
    with dashboard(tmp_path) as server:
        page = visit(server.url)
        journal.add_event(time.time(), "banned", username="mallory", reason=evil)
        journal.set_leaderboard([{"username": evil, "samples": 5}])
        expect(page.locator(".events")).to_contain_text(evil, timeout=SOON)  # by the poll
        page.reload()  # by the server
        expect(page.locator(".events")).to_contain_text(evil)
        expect(page.locator("tbody th")).to_contain_text(evil[:50])
        assert page.evaluate("window.evil") is None


def test_a_name_that_gets_hidden_disappears_from_an_open_page(visit, journal, tmp_path):
    report(journal, 7)
    journal.add_event(time.time(), "joined", username="secretperson")
    journal.set_leaderboard([{"username": "secretperson", "samples": 1792}])
    with dashboard(tmp_path) as server:
        page = visit(server.url)
        expect(page.locator("tbody th")).to_have_text(re.compile("secretperson"))
        journal.hide("secretperson", True)
        expect(page.locator("tbody th")).to_have_text(re.compile("a volunteer"), timeout=SOON)
        assert "secretperson" not in page.content()


@pytest.mark.parametrize("stage", ["waiting", "one", "young", "many", "crowd", "silent"])
def test_every_stage_fits_a_phone_and_draws_its_curves(visit, tmp_path, stage):
    fill(tmp_path, stage)
    shots = os.environ.get("VOLUNTEER_KIT_SCREENSHOTS")
    with dashboard(tmp_path) as server:
        for name, options in {"phone-dark": {"viewport": PHONE, "color_scheme": "dark"}, "desktop": {}}.items():
            page = visit(server.url, **options)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            for key in CURVES if stage != "waiting" else ():
                assert page.evaluate(IS_DRAWN, key)
                labels = page.evaluate("key => Charts.plots[key].axes[0]._values", key)
                assert labels and all(one != two for one, two in zip(labels, labels[1:], strict=False))
            if shots:
                page.screenshot(path=Path(shots) / f"dashboard-{stage}-{name}.png", full_page=True)


def test_the_dark_page_is_dark_and_changes_at_once(visit, tmp_path):
    fill(tmp_path, "one")
    with dashboard(tmp_path) as server:
        page = visit(server.url, color_scheme="light")
        colour = "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(colour) == "rgb(255, 255, 255)"
        page.emulate_media(color_scheme="dark")
        assert page.evaluate(colour) == "rgb(20, 24, 30)"
        assert page.evaluate("getComputedStyle(document.body).color") == "rgb(230, 233, 238)"
        page.wait_for_function("Charts.plots.loss.axes[0].stroke() === '#a3adba'")  # on a canvas, so not by CSS


def test_without_scripts_the_numbers_are_there(visit, tmp_path):
    fill(tmp_path, "one")
    with dashboard(tmp_path) as server:
        page = visit(server.url, java_script_enabled=False)
        expect(fact(page, "Volunteers now")).to_have_text("1")
        assert "Curves are drawn with JavaScript" in page.locator("#charts").inner_text()


def test_the_export_opened_as_a_file_shows_curves_and_pictures(visit, tmp_path):
    index = export_page(RUN, tmp_path / "space", folder=fill(tmp_path / "monitor", "many"))
    page = visit(index.as_uri())
    expect(page.locator("header")).to_contain_text("This is a snapshot, written")
    for key in CURVES:
        assert page.evaluate(IS_DRAWN, key)
    picture = page.locator(".pictures img").first
    picture.scroll_into_view_if_needed()
    page.wait_for_function("document.querySelector('.pictures img').naturalWidth === 128")
    page.get_by_role("button", name="Hour").click()
    assert page.evaluate("Charts.plots.loss.scales.x.max - Charts.plots.loss.scales.x.min") == pytest.approx(3600)

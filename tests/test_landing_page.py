"""The host's page in a real browser: its buttons copy, it follows what happens, and strangers' words stay words."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser import chromium
from tests.fake_journal import fill, hostile_journal
from tests.local_authority import served
from tests.test_landing import OFFER, Site, long, run  # noqa: F401  (fixtures)
from volunteer_kit.journal import Journal
from volunteer_kit.ways_in import colab_link, note_pushed

pytestmark = pytest.mark.slow
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
SOON = 120_000  # ms; the page asks every 2 s
LINE = "volunteer-kit join https://run.example.org"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def site(tmp_path, long) -> Iterator[Site]:  # noqa: F811
    made = Site(tmp_path, long)
    yield made
    made.close()


@pytest.fixture
def url(site) -> Iterator[str]:
    with served(site.authority) as url:
        yield url


def visit(browser: Browser, url: str, *, permissions: tuple[str, ...] = (), **how) -> Page:
    page = browser.new_context(viewport=DESK, **how, permissions=list(permissions)).new_page()
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("console", lambda line: page.errors.append(line.text) if line.type in ("error", "warning") else None)
    page.goto(url)
    return page


def test_the_buttons_copy_and_the_page_follows_what_happens(site, url, browser):
    with Journal(site.folder / "monitor" / "journal.sqlite") as journal:
        page = visit(browser, url, permissions=("clipboard-read", "clipboard-write"))
        expect(page.get_by_text("waiting for the first volunteer")).to_be_visible()
        page.get_by_role("button", name="Copy all").click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        lines = page.evaluate("navigator.clipboard.readText()").splitlines()
        assert lines[0].startswith("python3 -m venv ") and lines[1].startswith("python -m pip install")
        assert lines[2:] == ["volunteer-kit setup", LINE]

        journal.add_metrics(time.time(), 5, 4.0, 10.0, 1, 0.5, 1280)
        journal.set_members([{"username": "ada", "peer_id": "Qm1", "device": "T4", "here": True}])
        journal.set_leaderboard([{"username": "ada", "samples": 900}])
        expect(page.locator("#people").get_by_text("ada")).to_be_visible(timeout=SOON)  # without a reload
        expect(page.get_by_text("1 volunteer training now")).to_be_visible()
        note_pushed(site.folder, OFFER, is_private=False)
        journal.add_metrics(time.time(), 6, 4.0, 10.0, 1, 0.5, 1280)
        link = page.get_by_role("link", name="Join in Colab")
        expect(link).to_have_attribute("href", colab_link("cats/run"), timeout=SOON)
        assert not page.errors


def test_without_a_clipboard_the_lines_are_selected(url, browser):
    page = visit(browser, url)
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.get_by_role("button", name="Copy the join line").click()
    expect(page.get_by_role("button", name="Selected: press Ctrl-C")).to_be_visible()
    assert LINE in page.evaluate("getSelection().toString()")


def test_without_scripts_everything_is_there_but_the_buttons(site, url, browser):
    fill(site.folder / "monitor", "many", time.time())
    page = visit(browser, url, java_script_enabled=False)
    expect(page.get_by_text(LINE)).to_be_visible()
    expect(page.locator("#people").get_by_text("ada", exact=True)).to_be_visible()
    expect(page.locator("button.copy").first).to_be_hidden()


def test_strangers_words_stay_words(site, url, browser):
    hostile_journal(site.folder / "monitor")
    page = visit(browser, url)
    dialogs = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.reload()
    page.wait_for_load_state("networkidle")
    assert not dialogs and not page.errors and "secretperson" not in page.content().casefold()


@pytest.mark.parametrize("path", ["", "/run.yaml"])
def test_the_run_link_in_a_browser_is_the_page(url, browser, path):
    page = visit(browser, url + path)
    expect(page.get_by_role("heading", name="demo", level=1)).to_be_visible()
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.get_by_role("link", name="Run file").click()
    expect(page.get_by_text("run_id: demo")).to_be_visible()

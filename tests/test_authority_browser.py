"""The moderators' page in a real browser, on a phone and on a desk: signing in, banning, and how it looks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests
from playwright.sync_api import Browser, Page, expect

from tests.browser import chromium
from tests.convicting import DETAILS, evidence_by, report_body
from tests.free_ports import free_port
from tests.hub import App
from tests.local_authority import Authority, add_person, join_body, make_authority, served

pytestmark = pytest.mark.slow
PHONE = {"viewport": {"width": 375, "height": 740}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}
DESK = {"viewport": {"width": 1100, "height": 900}}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def authority(hub, tmp_path) -> Iterator[Authority]:
    hub.app = App("the-hosts-app", person="Mona")
    url = f"http://127.0.0.1:{free_port()}"
    authority = make_authority(tmp_path, url=url, oauth_client_id="the-hosts-app")
    yield authority
    authority.storage.close()


@pytest.fixture
def url(hub, authority) -> Iterator[str]:
    with served(authority, urlsplit(authority.app.state.desk.settings.url).port) as url:
        for number, name in enumerate(("anna", "Bernard-with-a-rather-long-name-at-the-Hub", "carl")):
            answer = requests.post(f"{url}/v1/join", json=join_body(add_person(hub, name, "cats"), number), timeout=20)
            assert answer.status_code == 200
        yield url


def open_page(browser: Browser, url: str, scheme: str, how: dict) -> Page:
    page = browser.new_context(**how, color_scheme=scheme).new_page()
    page.errors = []
    page.on("console", lambda said: page.errors.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.goto(f"{url}/moderate")
    return page


def picture(page: Page, name: str, folder: Path) -> None:
    place = Path(os.environ.get("VOLUNTEER_KIT_SCREENSHOTS") or folder)
    page.screenshot(path=place / f"moderate-{name}.png", full_page=True)


def test_a_moderator_on_a_phone_signs_in_at_the_hub_and_bans(browser, url, hub, tmp_path):
    page = open_page(browser, url, "dark", PHONE)
    picture(page, "sign-in-phone-dark", tmp_path)
    page.get_by_role("link", name="Sign in with Hugging Face").click()
    expect(page.get_by_role("heading", name="People")).to_be_visible()
    assert page.url == f"{url}/moderate", "the strict cookie came along"
    add = page.get_by_role("textbox", name="Name at the Hub").first
    add.fill("dora")
    page.get_by_role("button", name="Add").click()
    expect(page.get_by_role("status")).to_have_text("dora may take part now.")
    row = page.locator("li", has_text="anna").first
    row.get_by_text("Ban", exact=True).click()
    row.get_by_label("Reason").fill("sends numbers that are far too large")
    picture(page, "ban-phone-dark", tmp_path)
    row.get_by_role("button", name="Ban anna").click()
    expect(page.get_by_role("status")).to_have_text(re.compile("anna is banned"))
    picture(page, "phone-dark", tmp_path)
    assert page.evaluate("document.documentElement.scrollWidth") <= 375, "nothing sticks out to the side"
    assert (
        requests.post(f"{url}/v1/join", json=join_body(add_person(hub, "anna", "cats")), timeout=20).status_code == 403
    )
    sizes = page.evaluate(
        "[...document.querySelectorAll('button, .button')].map(b => b.getBoundingClientRect().height)"
    )
    assert min(sizes) >= 44, "fingers are wide"
    page.get_by_role("button", name="Lift the ban of anna").click()
    expect(page.get_by_text("Nobody is banned.")).to_be_visible()
    assert page.errors == []


@pytest.mark.parametrize(("name", "scheme", "how"), [("phone-dark", "dark", PHONE), ("desk-light", "light", DESK)])
def test_a_moderator_reads_what_the_swarm_has_found_and_lifts_its_ban(
    browser, url, authority, tmp_path, name, scheme, how
):
    body = report_body(authority, evidence_by([1, 2]))
    assert requests.post(f"{url}/v1/convict", json=body, timeout=20).status_code == 200
    page = open_page(browser, url, scheme, how)
    page.get_by_role("link", name="Sign in with Hugging Face").click()
    expect(page.get_by_text("by the swarm, just now")).to_be_visible()
    expect(page.get_by_text(DETAILS)).to_be_hidden()
    page.get_by_text("What was found", exact=True).click()
    expect(page.get_by_text(DETAILS)).to_be_visible()
    expect(page.get_by_text("Signed by Bernard-with-a-rather-long-name-at-the-Hub, carl.")).to_be_visible()
    picture(page, f"convicted-{name}", tmp_path)
    assert page.evaluate("document.documentElement.scrollWidth") <= how["viewport"]["width"]
    page.get_by_role("button", name="Lift the ban of anna").click()
    expect(page.get_by_role("status")).to_contain_text("what the swarm has found until now is set aside")
    expect(page.get_by_text("Nobody is banned.")).to_be_visible()
    assert requests.post(f"{url}/v1/convict", json=body, timeout=20).json()["error"]["kind"] == "set_aside"
    assert page.errors == []


def test_a_moderator_at_a_desk_signs_in_with_a_token(browser, url, hub, tmp_path):
    token = add_person(hub, "Max")
    page = open_page(browser, url, "light", DESK)
    page.get_by_text("Or with a token").click()
    page.get_by_label("A Hugging Face token").fill("hf_wrong")
    page.get_by_role("button", name="Sign in", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("does not know this token")
    picture(page, "sign-in-refused", tmp_path)
    page.get_by_text("Or with a token").click()
    page.get_by_label("A Hugging Face token").fill(token)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="People")).to_be_visible()
    page.get_by_text("Ban somebody who is not here").click()
    form = page.locator("details", has_text="Ban somebody who is not here")
    form.get_by_label("Name at the Hub").fill("eve")
    form.get_by_label("Reason").fill("several accounts; see the chat of 12 May")
    form.get_by_role("button", name="Ban").click()
    expect(page.get_by_role("status")).to_contain_text("eve is banned")
    page.get_by_role("textbox", name="Find a name").fill("RN")
    page.keyboard.press("Enter")
    expect(page.locator("section").first.locator("ul.people li")).to_have_count(1)
    page.get_by_role("link", name="Show everybody").click()
    picture(page, "desk-light", tmp_path)
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="People")).to_have_count(0)
    page.go_back()
    expect(page.get_by_role("heading", name="People")).to_have_count(0)
    assert [error for error in page.errors if "403" not in error] == []

"""A volunteer's hour in the real JupyterLab and a real browser: join, log in, see it train, reload, stop."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests import fake_colab
from tests.browser import JupyterLab, Tab, chromium
from tests.hub import Hub
from tests.local_authority import make_authority, served, this_hub
from volunteer_kit.auth.moderation import Allowlist
from volunteer_kit.run_reader import find_run_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOKEN, NAME = "hf_thisOneCanOnlyRead1234567", "anna"
READY, TRAINS, LEAVES = 120, 300, 120  # s, on two busy cores
SHOWN = """least => [...document.querySelectorAll('.vk-fact')].some(fact => fact.innerText.includes('Your samples')
           && Number(fact.querySelector('b').innerText.replace(/[^0-9]/g, '') || 0) > least)"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        hub.tokens, hub.rights = {TOKEN: NAME}, {TOKEN: {"role": "read"}}
        yield hub


@pytest.fixture
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def of_hub(hub: Hub, folder: Path) -> dict[str, str | None]:
    """The environment of a machine whose Hub this is, as changes to ours."""
    theirs = hub.environment(folder / "hf")
    return {name: theirs.get(name) for name in {*os.environ, *theirs} if os.environ.get(name) != theirs.get(name)}


@pytest.fixture
def run_file(tmp_path, hub) -> Iterator[str]:
    """The demo with a login and an authority at work, as a run file's path."""
    (tmp_path / "authority").mkdir()
    authority = make_authority(tmp_path / "authority", allowlist=Allowlist.of(is_open=True))
    with this_hub(hub), served(authority) as url:
        about = f"\nauthority: {{url: '{url}', public_key: '{authority.public_key}', open: true}}\n"
        path = tmp_path / "run.yaml"
        path.write_text(find_run_file("demo").read_text() + about)
        yield str(path)
    authority.storage.close()


def joins(run: str):
    """An edit of the notebooks: this run is written into the field."""

    def edit(name: str, code: str) -> str:
        return re.sub(r'^RUN = "demo"', f"RUN = {run!r}", code, flags=re.MULTILINE)

    return edit


def samples(tab: Tab) -> int:
    shown = tab.outputs(1).locator(".vk-fact").filter(has_text="Your samples").locator("b").inner_text()
    return int(re.sub(r"\D", "", shown) or 0)


def see_samples(tab: Tab, more_than: int = 0) -> int:
    """Until the page shows more of my samples than this."""
    tab.page.wait_for_function(SHOWN, arg=more_than, timeout=TRAINS * 1000)
    return samples(tab)


def assert_terms_stand_beside_their_headings(tab: Tab) -> None:
    """JupyterLab has rules of its own for lists of terms, which once mixed headings and texts up."""
    headings = tab.outputs(1).locator("dl.vk-terms dt")
    rows = headings.evaluate_all(
        "all => all.map(term => [term.getBoundingClientRect(), term.nextElementSibling.getBoundingClientRect()])"
    )
    assert len(rows) > 3
    assert all(abs(term["top"] - text["top"]) < 2 and term["right"] <= text["left"] for term, text in rows)


def start(tab: Tab) -> None:
    """Both cells, and the button of the second."""
    tab.run(0)
    tab.wait_for(0, "is ready", READY)
    tab.run(1)
    tab.press(1, re.compile("^Start"))


def assert_clean(tab: Tab, lab: JupyterLab) -> None:
    """No traceback in any output, and the token in no file: notebook, settings, logs."""
    saved = json.loads(tab.save())
    outputs = json.dumps([cell.get("outputs") for cell in saved["cells"]])
    assert "Traceback" not in outputs and '"error"' not in outputs
    found = []
    for path in lab.folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # the server has removed it meanwhile
            if path.is_file() and path.name != "colab-secrets.json" and TOKEN.encode() in path.read_bytes():
                found.append(path)
    assert not found


def shown_in_words(tab: Tab, text: str) -> None:
    expect(tab.outputs(1).get_by_text(text).first).to_be_visible(timeout=READY * 1000)


@pytest.mark.parametrize("ipykernel", [6, 7])
def test_a_volunteer_joins_logs_in_trains_and_leaves(tmp_path, hub, browser, run_file, ipykernel):
    edit = joins(run_file)
    with JupyterLab(tmp_path / "lab", ipykernel=ipykernel, environment=of_hub(hub, tmp_path), edit=edit) as lab:
        tab = Tab(browser, lab, "join.ipynb")
        tab.picture(f"{ipykernel}-opened")
        tab.run(0)
        tab.wait_for(0, "is ready", READY)
        tab.run(1)
        shown_in_words(tab, "IP address")
        assert_terms_stand_beside_their_headings(tab)
        tab.picture(f"{ipykernel}-welcome", 1)
        tab.type(1, "hf_nobodyKnowsThisOne")
        tab.press(1, "Start")
        shown_in_words(tab, "settings/tokens")
        tab.type(1, TOKEN)
        tab.press(1, "Start")
        first = see_samples(tab)
        see_samples(tab, more_than=first)
        tab.picture(f"{ipykernel}-light")
        tab.theme("dark")
        tab.picture(f"{ipykernel}-dark")
        tab.stop()
        tab.wait_for(1, "You have left", LEAVES)
        tab.wait_done(1, LEAVES)
        assert samples(tab) > first
        tab.picture(f"{ipykernel}-left-dark")
        tab.theme("light")
        tab.picture(f"{ipykernel}-left")
        assert_clean(tab, lab)
        assert not lab.processes("volunteer_kit.worker")
        assert hub.asked and all(asked.token in (None, TOKEN, "hf_nobodyKnowsThisOne") for asked in hub.asked)


def test_a_closed_tab_loses_nothing(tmp_path, browser):
    with JupyterLab(tmp_path / "lab") as lab:
        tab = Tab(browser, lab, "join.ipynb")
        start(tab)
        before = see_samples(tab)
        workers = {process.pid for process in lab.processes("volunteer_kit.worker")}
        tab.close()
        meanwhile = wait_for_more(lab, than=before)
        tab.reopen()
        tab.run(1)
        after = see_samples(tab, more_than=meanwhile - 1)
        assert after >= meanwhile > before
        assert {process.pid for process in lab.processes("volunteer_kit.worker")} == workers
        tab.picture("reopened")
        tab.press(1, "Leave")
        tab.wait_for(1, "You have left", LEAVES)
        tab.wait_done(1, LEAVES)
        assert samples(tab) >= after
        assert_clean(tab, lab)
        assert not lab.processes("volunteer_kit.worker")


def test_on_colab_a_secret_is_enough(tmp_path, hub, browser, run_file):
    (tmp_path / "lab").mkdir()
    environment = of_hub(hub, tmp_path) | fake_colab.environment(tmp_path / "lab", {"HF_TOKEN": TOKEN})
    with JupyterLab(tmp_path / "lab", environment=environment, edit=joins(run_file)) as lab:
        tab = Tab(browser, lab, "join.ipynb")
        tab.run_all()
        shown_in_words(tab, "compute units")
        tab.press(1, f"Start as {NAME}")
        assert see_samples(tab) > 0
        assert tab.interactions <= 2
        tab.picture("colab")
        tab.stop()
        tab.wait_for(1, "You have left", LEAVES)
        tab.wait_done(1, LEAVES)
        assert_clean(tab, lab)


def wait_for_more(lab: JupyterLab, than: int) -> int:
    """My samples, once the worker's own file says that there are more than this; no page is open."""
    for _ in range(TRAINS * 5):
        for path in (lab.folder / "home").glob("runs/*/status.json"):
            if (now := json.loads(path.read_text() or "{}").get("my_samples", 0)) > than:
                return now
        time.sleep(0.2)
    raise AssertionError(f"no more than {than} samples after {TRAINS} s without a page")

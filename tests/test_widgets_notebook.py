"""The notebook's surfaces in real kernels, as Colab, Kaggle and we have them, against the stand-in Hub."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from unittest import mock

import nbformat
import psutil
import pytest
from jupyter_client import KernelManager
from nbclient import NotebookClient

from tests.hub import Hub
from tests.notebook_page import ROOT, Page, kernel, opened

READ, WRITE = "hf_readonlyAAAA", "hf_writesBBBB"
START = """
import sys, time, dataclasses
from volunteer_kit.auth.login import Login, LoginError
from volunteer_kit.widgets.progress import Picture, Progress
from volunteer_kit.widgets.surface import Declined, TermsError, open_surface
from volunteer_kit.widgets.terms import Terms
"""
WELCOME = """
surface = open_surface({arguments})
login = Login(for_authority=True)
login.find()
try:
    surface.welcome(Terms("demo", checked_by="auth.example.org"), login)
    print("welcome", login.identity, flush=True)
except (Declined, TermsError) as error:
    print(type(error).__name__, error, flush=True)
"""
SHOW = """
surface, wishes = open_surface(), []
progress = Progress(run_id="demo", state="training", why="because", plan="batches of 8", target_batch_size=4096)
while not {"leave", "detach"} & set(wishes):
    new = surface.pump(0.1)
    wishes += new
    if new and new[-1] in ("pause", "resume"):
        progress.state = "paused" if new[-1] == "pause" else "training"
    progress.swarm_samples += 1
    surface.show(progress)
progress.state = "left"
surface.close(progress)
print("wishes", wishes, flush=True)
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        hub.tokens = {READ: "anna", WRITE: "berta", "hf_from_browser": "dora"}
        hub.rights = {READ: {"role": "read"}, WRITE: {"role": "write"}}
        yield hub


@pytest.fixture(scope="module", params=["colab", "kaggle", "installed"])
def manager(request, hub, tmp_path_factory) -> Iterator[KernelManager]:
    with kernel(request.param, START, hub.environment(tmp_path_factory.mktemp("hf"))) as manager:
        yield manager


@pytest.fixture
def page(manager) -> Iterator[Page]:
    with opened(manager) as page:
        page.run_as_a_person = lambda code: page.client.execute(code, allow_stdin=True)
        yield page
        if not page.is_idle:  # a test that failed must not block the next ones
            manager.interrupt_kernel()


def wait_for(page: Page, **state: str) -> str:
    page.until(lambda: page.find(**state) is not None)
    return page.find(**state)


def everything(page: Page) -> str:
    """All that the kernel said to the page."""
    return json.dumps([page.outputs, [*page.replies.values()]], default=str)


def test_one_screen_one_button_and_the_token_is_nowhere(page, manager, hub):
    cell = page.run_as_a_person(WELCOME.format(arguments=""))
    button = wait_for(page, description="Start", _model_name="ButtonModel")
    field = wait_for(page, _model_name="PasswordModel")
    assert page.find(value="gradients and your IP address")
    assert len([s for s in page.widgets().values() if s["_model_name"] == "ButtonModel"]) == 1
    assert page.find(value="goes to the Hub and to auth.example.org, the run's authority")
    for typed, answer in (("", "Log in first"), (WRITE, "can write"), ("hf_unknown", "does not know this token")):
        page.fill(field, typed)
        page.click(button)
        wait_for(page, value=answer)
        assert cell not in page.replies
    before = len(page.outputs)
    page.fill(field, READ)
    wait_for(page, value="Your token is here. Press Start.")
    sent = [m["content"] for m in page.outputs[before:] if m["content"].get("comm_id") == field]
    assert {"value": ""} in [content["data"].get("state") for content in sent], "it is no longer in the field"
    page.click(button)
    page.until_replied(cell)
    assert "welcome Identity(name='anna', orgs=())" in page.text(cell)
    assert page.widgets().keys().isdisjoint({button, field}), "the fields are gone"
    assert "What you agreed to" in page.shown()[-1]
    assert READ not in everything(page) and WRITE not in everything(page)
    process = psutil.Process(manager.provisioner.process.pid)
    assert READ not in " ".join(process.cmdline()) + str(process.environ())


def test_a_login_that_is_here_needs_one_click(page):
    found = WELCOME.replace("login.find()", f"login.find({READ!r})")
    cell = page.run_as_a_person(found.format(arguments=""))
    button = wait_for(page, description="Start as anna")
    assert page.find(_model_name="PasswordModel") is None
    page.click(button)
    page.until_replied(cell)
    assert "welcome Identity(name='anna'" in page.text(cell)


def test_the_browser_login_shows_link_and_code_and_starts(page, hub):
    hub.device = type(hub.device)(pending=2)
    cell = page.run_as_a_person(WELCOME.format(arguments="").replace("for_authority=True", "client_id='host-app'"))
    wait_for(page, value="52AT-FLYZ")
    button = wait_for(page, description="Start as dora")
    page.click(button)
    page.until_replied(cell)
    assert "welcome Identity(name='dora'" in page.text(cell)
    assert "hf_from_browser" not in everything(page) and "user_code=52AT-FLYZ" in everything(page)


def test_stop_on_the_first_screen_declines(page, manager):
    cell = page.run_as_a_person(WELCOME.format(arguments=""))
    wait_for(page, description="Start")
    manager.interrupt_kernel()
    assert page.until_replied(cell)["status"] == "ok"
    assert "Declined You did not start" in page.text(cell) and page.widgets() == {}


def test_pause_resume_and_leave(page):
    cell = page.run(SHOW)
    live = wait_for(page, value='data-vk-state="training"')
    pause, leave = wait_for(page, description="Pause"), wait_for(page, description="Leave")
    plan = wait_for(page, value="How this machine works")
    page.click(pause)
    page.until(lambda: 'data-vk-state="paused"' in page.widgets()[live]["value"])
    page.until(lambda: page.widgets()[pause]["description"] == "Resume")
    page.click(pause)
    page.until(lambda: 'data-vk-state="training"' in page.widgets()[live]["value"])
    page.click(leave)
    page.until_replied(cell)
    assert "wishes ['pause', 'resume', 'leave']" in page.text(cell)
    updates = [m["content"] for m in page.outputs if m["msg_type"] == "comm_msg"]
    of_plan = [u for u in updates if u["comm_id"] == plan and u["data"]["method"] == "update"]
    assert len(of_plan) <= 1, "a text that somebody unfolded is not drawn again"
    assert "You have left" in page.shown()[-1] and page.widgets() == {}


def test_who_looks_on_has_no_buttons_but_to_stop_looking(page):
    cell = page.run(SHOW.replace("Progress(run_id", "Progress(is_elsewhere=True, run_id"))
    stop = wait_for(page, description="Stop looking")
    pause = wait_for(page, description="Pause")
    page.until(lambda: page.widgets()[pause]["disabled"])
    page.click(stop)
    page.until_replied(cell)
    assert "wishes ['leave']" in page.text(cell)


def test_it_draws_at_most_twice_a_second(page):
    cell = page.run(SHOW)
    live = wait_for(page, value='data-vk-state="training"')

    def drawn() -> int:
        return sum(m["content"].get("comm_id") == live for m in page.outputs if m["msg_type"] == "comm_msg")

    page.until(lambda: drawn() >= 8)
    times = [m["header"]["date"] for m in page.outputs if m["content"].get("comm_id") == live][1:]
    gaps = [(b - a).total_seconds() for a, b in zip(times, times[1:], strict=False)]
    assert sum(gaps) / len(gaps) > 0.4
    page.click(page.find(description="Leave"))
    page.until_replied(cell)


def test_running_the_cell_again_detaches(page):
    first = page.run(SHOW)
    wait_for(page, value='data-vk-state="training"')
    until = time.monotonic() + 2  # what comes sooner may have been sent by "Run All"
    page.until(lambda: time.monotonic() > until)
    again = page.run("print('again')  # join_swarm()")
    page.until_replied(first)
    assert "'detach'" in page.text(first)
    assert page.until_replied(again)["status"] == "ok" and "again" in page.text(again)


def test_without_ipywidgets_it_is_html_that_is_updated_in_place(page):
    without = "sys.modules['ipywidgets'] = None\n"
    cell = page.run(
        without + "surface = open_surface()\nprint(type(surface).__name__, flush=True)\n"
        "surface._drawn_at = 0\nsurface.show(Progress(run_id='demo', plan='p', why='w'))\nsurface._drawn_at = 0\n"
        "surface.show(Progress(run_id='demo', state='training', plan='p', why='w'))\n"
        "surface.close(Progress(run_id='demo', state='left', plan='p', why='w'))\ndel sys.modules['ipywidgets']"
    )
    assert page.until_replied(cell)["status"] == "ok"
    assert "HtmlSurface" in page.text(cell)
    shown = [m for m in page.outputs if m["msg_type"] == "display_data"]
    updated = [m for m in page.outputs if m["msg_type"] == "update_display_data"]
    assert len(shown) == 2 and len(updated) == 2, "one block that changes, and the plan, which does not"
    assert "You have left" in page.shown()[0]


def test_typed_where_buttons_get_no_events(page, hub):
    """As in VS Code: the token is asked for by the kernel's own password prompt."""
    cell = page.run_as_a_person("import os; os.environ['VSCODE_PID'] = '1'\n" + WELCOME.format(arguments="") +
                                "\ndel os.environ['VSCODE_PID']")  # fmt: skip
    for typed in (WRITE, READ):
        asked = page.client.get_stdin_msg(timeout=180)
        assert asked["content"]["password"] is True and "token" in asked["content"]["prompt"].lower()
        page.client.input(typed)
    assert page.until_replied(cell)["status"] == "ok"
    assert "This token can write" in page.text(cell) and "Logged in as anna." in page.text(cell)
    assert READ not in everything(page)


def test_a_notebook_that_a_program_runs(tmp_path, hub):
    """nbclient: nobody can answer, so terms have to be accepted by the caller; no token in the saved notebook."""
    cells = [START + WELCOME.format(arguments=""), WELCOME.format(arguments="accept_terms=True"),
             "progress = Progress(run_id='demo', state='training', name=login.name)\nsurface.show(progress)\n"
             "surface.pump(0.2)\nprogress.state = 'left'\nsurface.close(progress)"]  # fmt: skip
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with mock.patch.dict(os.environ, {**hub.environment(tmp_path, READ), "PYTHONPATH": path}):
        NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    saved = nbformat.writes(notebook)
    assert "TermsError The terms above have to be accepted" in saved and "--accept-terms" in saved
    assert "welcome Identity(name='anna'" in saved and "You have left" in saved and "Never files" in saved
    assert READ not in saved


def test_a_process_started_by_us_inherits_no_token(hub, tmp_path):
    """What check() does leaves nothing in the environment for children."""
    code = (
        f"from volunteer_kit.auth.login import Login; import subprocess; login = Login(); login.check({READ!r})\n"
        "print(login.name, subprocess.run(['env'], capture_output=True, text=True).stdout)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=hub.environment(tmp_path), capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("anna ") and not re.search(READ, done.stdout + done.stderr)

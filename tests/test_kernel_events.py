"""Clicks, a reloaded page and the stop button reach a cell that blocks: in kernels as Colab and Kaggle have them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from jupyter_client import KernelManager

from tests.notebook_page import Page, kernel, opened

START = """
import ipywidgets, time
from volunteer_kit.widgets.kernel_events import kernel_events
events = kernel_events()
clicks = []
button = ipywidgets.Button()
button.on_click(lambda _: clicks.append(1))
"""
BLOCK = """
events = kernel_events()
print("comm", button.comm.comm_id, flush=True)
while not {until}:
    events.pump(0.1)
print("went on", flush=True)
"""

# Cells come along until the next click, however slow the machine is, and not for so many seconds.
WINDOW = """
import sys
module = sys.modules["volunteer_kit.widgets.kernel_events"]
usual = module.CAME_ALONG
module.CAME_ALONG = float("inf")
def close(_):
    module.CAME_ALONG = 0.0
    button.on_click(close, remove=True)
    print("over", flush=True)
button.on_click(close)
"""


@pytest.fixture(scope="module", params=["colab", "kaggle", "installed"])
def manager(request) -> Iterator[KernelManager]:
    with kernel(request.param, START) as manager:
        yield manager


@pytest.fixture
def page(manager) -> Iterator[Page]:
    """A fresh page for each test, with `clicks` empty."""
    with opened(manager) as page:
        page.until_replied(page.run("clicks.clear()"))
        yield page


def test_a_click_arrives_while_the_cell_blocks(page):
    cell = page.run(BLOCK.format(until="clicks"))
    page.until_printed("comm ")
    click = page.click()
    assert page.until_replied(cell)["status"] == "ok"
    assert "went on" in page.text(cell), "what the cell prints after a click is the cell's output, not the click's"
    assert page.states(click) == ["busy", "idle"]


def test_a_loaded_page_gets_its_answers_and_the_kernel_says_it_is_busy(page):
    cell = page.run(BLOCK.format(until="clicks"))
    page.until_printed("comm ")
    for kind in ("kernel_info_request", "comm_info_request"):
        asked = page.send(kind, {})
        assert page.until_replied(asked)["status"] == "ok"
    assert page.comm in page.replies[asked]["content"]["comms"]
    page.until(lambda: page.states(cell)[-1:] == ["busy"] and len(page.states(cell)) > 1)
    page.send("comm_open", {"comm_id": "c0ffee", "target_name": "jupyter.widget.control", "data": {}}, version="1.0.0")
    page.send("comm_msg", {"comm_id": "c0ffee", "data": {"method": "request_states"}})
    page.until(lambda: any("states" in m["content"]["data"] for m in page.outputs if m["msg_type"] == "comm_msg"))
    assert cell not in page.replies
    page.click()
    page.until_replied(cell)


def test_cells_that_wait_run_afterwards_in_their_order(page):
    cell = page.run(BLOCK.format(until="len(clicks) >= 3"))
    page.until_printed("comm ")
    waiting = []
    for number in range(3):
        waiting.append(page.run(f"print('cell {number}', flush=True)"))
        click = page.click()
        page.until(lambda click=click: "idle" in page.states(click))
    for name in (cell, *waiting):
        assert page.until_replied(name)["status"] == "ok"
    assert re.findall(r"went on|cell \d", page.text()) == ["went on", "cell 0", "cell 1", "cell 2"]


def test_the_stop_button_gets_through_and_the_kernel_lives_on(page, manager):
    cell = page.run("try:\n" + "".join(f"    {line}\n" for line in BLOCK.format(until="False").splitlines()) +
                    "except KeyboardInterrupt:\n    print('stopped', flush=True)")  # fmt: skip
    page.until_printed("comm ")
    after = page.run("print('after', len(clicks), flush=True)")
    clicks = [page.click() for _ in range(5)]
    page.until(lambda: "idle" in page.states(clicks[-1]))
    manager.interrupt_kernel()
    assert page.until_replied(cell)["status"] == "ok" and "stopped" in page.text(cell)
    assert page.until_replied(after)["status"] == "ok" and "after 5" in page.text()
    manager.interrupt_kernel()  # an idle kernel must not die of it
    assert page.until_replied(page.run("print('alive', flush=True)"))["status"] == "ok"


def test_interrupts_in_the_middle_of_clicks_lose_nothing(page, manager):
    """Pressed again and again while messages pour in: every interrupt arrives, every waiting cell has its reply."""
    cell = page.run(
        "stops = 0\nprint('comm', button.comm.comm_id, flush=True)\nevents = kernel_events()\n"
        "while stops < 6:\n    try:\n        events.pump(0.02)\n"
        "    except KeyboardInterrupt:\n        stops += 1\n        print('stop', stops, flush=True)"
    )
    page.until_printed("comm ")
    waiting, sent = [], 0
    for stop in range(1, 7):
        waiting.append(page.run(f"print('cell {stop}', flush=True)"))
        for _ in range(20):
            page.click()
            sent += 1
        manager.interrupt_kernel()
        page.until(lambda stop=stop: f"stop {stop}\n" in page.text())
        if stop < 6:  # it answers within the `try` alone
            page.until_replied(page.send("kernel_info_request", {}))
    for name in (cell, *waiting):
        assert page.until_replied(name)["status"] == "ok"
    page.until_replied(page.run("print('clicked', len(clicks), flush=True)"))
    assert f"clicked {sent}" in page.text()
    assert re.findall(r"cell (\d+)", page.text()) == [str(number) for number in range(1, 7)]


def test_a_callback_that_hangs_can_be_interrupted(page, manager):
    hang = "lambda _: (print('hangs', flush=True), [time.sleep(0.1) for _ in range(999)])"
    page.until_replied(page.run(f"slow = ipywidgets.Button()\nslow.on_click({hang})"))
    cell = page.run(BLOCK.format(until="False").replace("button.comm", "slow.comm"))
    page.until_printed("comm ")
    page.click()
    page.until_printed("hangs")
    manager.interrupt_kernel()
    content = page.until_replied(cell)
    assert content["status"] == "error" and content["ename"] == "KeyboardInterrupt"


def test_running_the_cell_again_is_noticed_and_run_all_is_not(page):
    again = "join_swarm = lambda: print('join_swarm again', flush=True)\njoin_swarm ()"
    page.until_replied(page.run(WINDOW))
    cell = page.run(BLOCK.format(until="events.run_again"))
    along = page.run(again)  # as "Run All" sends it
    page.until_printed("comm ")
    page.until_replied(page.send("kernel_info_request", {}))  # the cell has looked at what came along
    page.click()
    page.until_printed("over")
    other = page.run("import volunteer_kit  # without a word about join_swarm being called")
    for _ in range(2):  # by the second answer the cell would have ended
        page.until_replied(page.send("kernel_info_request", {}))
    assert cell not in page.replies
    later = page.run(again)
    assert page.until_replied(cell)["status"] == "ok"
    for name in (along, other, later):
        assert page.until_replied(name)["status"] == "ok"
    assert page.text().count("join_swarm again") == 2
    page.until_replied(page.run("module.CAME_ALONG = usual"))


def test_idle_messages_are_seen_after_the_cell(page, manager):
    """zmq tells of a message once: the kernel must not sleep on one that came while an interrupt ended the cell."""
    for _ in range(8):
        cell = page.run("try:\n    while True: kernel_events().pump(1)\nexcept KeyboardInterrupt: print('x')")
        page.until(lambda cell=cell: "busy" in page.states(cell))
        manager.interrupt_kernel()
        last = page.run("1")
        assert page.until_replied(last)["status"] in ("ok", "aborted")


@pytest.mark.newer_packages
def test_clicks_sent_to_a_thread_of_the_kernel():
    """JupyterLab >= 4.4 with ipykernel 7. From 7.4 on the kernel sends them back to the shell that made the widget."""
    with kernel("installed", START) as manager, opened(manager) as page:
        cell = page.run(BLOCK.format(until="len(clicks) >= 2"))
        page.until_printed("comm ")
        page.click(subshell=page.new_subshell())
        assert page.until_replied(page.send("kernel_info_request", {}))["status"] == "ok"
        page.click()
        assert page.until_replied(cell)["status"] == "ok"


def test_unknown_kernels_and_vscode_have_no_events(monkeypatch):
    from volunteer_kit.widgets import kernel_events

    class Kernel:
        session = dispatch_shell = set_parent = get_parent = io_loop = _parent_ident = _publish_status = object()

    assert kernel_events.kernel_events(Kernel()) is None

    class Queue:
        def get_nowait(self): ...
        def qsize(self): ...

    class Stream:
        def flush(self): ...

    Kernel.msg_queue, Kernel.shell_stream = Queue(), Stream()
    assert kernel_events.kernel_events(Kernel()) is not None
    monkeypatch.setenv("VSCODE_PID", "7")
    assert kernel_events.kernel_events(Kernel()) is None

"""A notebook's page as a kernel knows it: sends cells and clicks, collects what comes back."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jupyter_client import BlockingKernelClient, KernelManager

from tests import older_packages

ROOT = Path(__file__).parents[1]
TIMEOUT = 180  # s until something is there; a busy machine takes long to start anything


class Page:
    """What a notebook page is to a kernel: sends, and collects what comes back."""

    def __init__(self, client: BlockingKernelClient) -> None:
        self.client = client
        self.outputs: list[dict[str, Any]] = []
        self.replies: dict[str, dict[str, Any]] = {}

    def run(self, code: str) -> str:
        return self.client.execute(code, store_history=True, allow_stdin=False)

    def send(self, kind: str, content: dict[str, Any], subshell: str | None = None, **metadata: str) -> str:
        message = self.client.session.msg(kind, content, metadata=metadata)
        if subshell:
            message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)
        return message["header"]["msg_id"]

    def click(self, comm: str | None = None, subshell: str | None = None) -> str:
        data = {"method": "custom", "content": {"event": "click"}}
        return self.send("comm_msg", {"comm_id": comm or self.comm, "data": data}, subshell)

    def new_subshell(self) -> str:
        """A thread of the kernel for this page's clicks, as JupyterLab >= 4.4 asks of ipykernel 7."""
        self.client.control_channel.send(self.client.session.msg("create_subshell_request", {}))
        return self.client.get_control_msg(timeout=TIMEOUT)["content"]["subshell_id"]

    def fill(self, comm: str, text: str) -> str:
        """Type into the field of this comm."""
        return self.send("comm_msg", {"comm_id": comm, "data": {"method": "update", "state": {"value": text}}})

    def widgets(self) -> dict[str, dict[str, Any]]:
        """The state of each widget that is open, by its comm, as the front end has it."""
        states: dict[str, dict[str, Any]] = {}
        for message in self.outputs:
            content = message["content"]
            if message["msg_type"] == "comm_open":
                states[content["comm_id"]] = dict(content["data"]["state"])
            elif message["msg_type"] == "comm_msg" and content["data"].get("method") == "update":
                states.setdefault(content["comm_id"], {}).update(content["data"]["state"])
            elif message["msg_type"] == "comm_close":
                states.pop(content["comm_id"], None)
        return states

    def shown(self) -> list[str]:
        """The HTML of each output as the page has it now; an update of an output that it never got changes nothing."""
        outputs: list[dict[str, Any]] = []
        for message in self.outputs:
            content = message["content"]
            known = content.get("transient", {}).get("display_id")
            if message["msg_type"] == "display_data":
                outputs.append({"id": known, **content["data"]})
            elif message["msg_type"] == "update_display_data":
                outputs = [{"id": known, **content["data"]} if o["id"] == known else o for o in outputs]
        return [output.get("text/html", "") for output in outputs]

    def find(self, **state: str) -> str | None:
        """The comm of the widget whose state has these texts in it."""
        found = (comm for comm, has in self.widgets().items() if all(v in str(has.get(k)) for k, v in state.items()))
        return next(found, None)

    @property
    def comm(self) -> str:
        return re.search(r"comm (\w+)", self.text())[1]

    def text(self, name: str | None = None) -> str:
        """What was printed, by the cell `name` or all."""
        streams = [m for m in self.outputs if m["msg_type"] == "stream"]
        return "".join(m["content"]["text"] for m in streams if name in (None, m["parent_header"].get("msg_id")))

    def states(self, name: str) -> list[str]:
        mine = [m for m in self.outputs if m["msg_type"] == "status" and m["parent_header"].get("msg_id") == name]
        return [m["content"]["execution_state"] for m in mine]

    @property
    def is_idle(self) -> bool:
        """Whether every cell that began has ended."""
        began = {m["parent_header"]["msg_id"] for m in self.outputs if m["msg_type"] == "execute_input"}
        return all("idle" in self.states(name) for name in began)

    def until(self, is_so: Callable[[], bool]) -> None:
        """Collect messages until `is_so`."""
        deadline = time.monotonic() + TIMEOUT
        while not is_so():
            assert time.monotonic() < deadline, (self.text(), [m["msg_type"] for m in self.outputs[-9:]], self.replies)
            with contextlib.suppress(queue.Empty):
                self.outputs.append(self.client.get_iopub_msg(timeout=0.05))
            with contextlib.suppress(queue.Empty):
                reply = self.client.get_shell_msg(timeout=0.01)
                self.replies[reply["parent_header"]["msg_id"]] = reply

    def until_replied(self, name: str) -> dict[str, Any]:
        self.until(lambda: name in self.replies and "idle" in self.states(name))
        return self.replies[name]["content"]

    def until_printed(self, text: str) -> None:
        self.until(lambda: text in self.text())


VERSIONS = "print('version', ipykernel.__version__, ipywidgets.__version__)"
VERSIONS_OF = {"colab": "version 6.17.1 7.7.1", "kaggle": "version 6.17.1 8.1.5"}


@contextlib.contextmanager
def kernel(version: str, start: str = "", env: Mapping[str, str] | None = None) -> Iterator[KernelManager]:
    """A real kernel that has run `start`: with the "installed" packages, or with those of "colab" or "kaggle"."""
    inherited = {name: value for name, value in (env or os.environ).items() if not name.startswith("VSCODE_")}
    older = [str(older_packages.folder(f"{version}-kernel"))] if version != "installed" else []
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env={**inherited, "PYTHONPATH": os.pathsep.join([*older, str(ROOT)])})
    try:
        with opened(manager) as page:
            page.until_replied(page.run(f"{start}\nimport ipykernel, ipywidgets\n{VERSIONS}"))
            assert VERSIONS_OF.get(version, "version ") in page.text()
        yield manager
    finally:
        manager.shutdown_kernel(now=True)


@contextlib.contextmanager
def opened(manager: KernelManager) -> Iterator[Page]:
    """A fresh page of this kernel."""
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=TIMEOUT)
    try:
        yield Page(client)
    finally:
        client.stop_channels()

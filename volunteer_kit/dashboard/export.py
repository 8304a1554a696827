"""The page as files: for a Hugging Face static Space, any web server, or a double click."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

from volunteer_kit.dashboard.board import Board
from volunteer_kit.dashboard.door import monitor_folder
from volunteer_kit.dashboard.errors import DashboardError
from volunteer_kit.dashboard.page import STATIC, render
from volunteer_kit.dashboard.state import State, run_info
from volunteer_kit.journal.file import JournalError
from volunteer_kit.runs import RunConfig, load_run
from volunteer_kit.storage import write_whole

MARK = 'name="generator" content="volunteer-kit'
POLL = 60.0  # s; an open page looks whether a newer export has been put there
_OURS = re.compile(r"\d+-\d+\.png")
_README = """---
title: "{title}"
colorFrom: blue
colorTo: green
sdk: static
app_file: index.html
pinned: false
---

The dashboard of the run *{title}*, trained by volunteers: {description}

Written by `volunteer-kit dashboard export`; write it again and upload this folder to bring it up to date:

    volunteer-kit dashboard export RUN --folder FOLDER --out .
    hf upload --repo-type space ACCOUNT/NAME . .
"""


def export_page(run: str | Path | RunConfig, out: str | Path, *, folder: str | Path | None = None) -> Path:
    """Write index.html, state.json, README.md, pictures/ and static/ into `out`, and return index.html's path.

    Files of an earlier export are replaced, a README.md stays as it is, and others are left alone.
    :param folder: the monitor's. Default: ./RUN_ID-host/monitor
    Raises RunError, DashboardError.
    """
    config = run if isinstance(run, RunConfig) else load_run(run)
    out, now = Path(out), time.time()
    board = Board(monitor_folder(config, folder), run_info(config))
    try:
        edition = board.edition()
        if edition.problem:
            raise DashboardError(edition.problem)
        _require_own(out)
        _write(board, edition.state, out, now)
    except JournalError as error:
        raise DashboardError(str(error)) from error
    except OSError as error:
        if isinstance(error, DashboardError):
            raise
        raise DashboardError(f"{out} could not be written: {error.strerror or error}.") from error
    finally:
        board.close()
    return out / "index.html"


def _require_own(out: Path) -> None:
    index = out / "index.html"
    if index.is_file() and MARK not in index.read_text(errors="replace"):
        raise DashboardError(
            f"{index} is there already and was not written by this command; it is not replaced.\n"
            "1. Give another folder: --out DIR\n2. Or move that file away."
        )


def _write(board: Board, state: State, out: Path, now: float) -> None:
    """index.html last: until then the earlier page is whole."""
    out.mkdir(parents=True, exist_ok=True)
    _copy_static(out / "static")
    shown = _copy_pictures(board, state, out / "pictures")
    state = {**state, "images": [image for image in state["images"] if image["url"] in shown]}
    if not (out / "README.md").exists():
        title, description = state["run"]["run_id"], state["run"]["description"]
        write_whole(out / "README.md", _README.format(title=title, description=description or "see its page."))
    shown_state = json.dumps({**state, "written": now}, allow_nan=False, ensure_ascii=False, indent=1)
    write_whole(out / "state.json", shown_state)
    write_whole(out / "index.html", render(state, tag=f"{now:.0f}", poll=POLL, snapshot=now))
    for old in (out / "pictures").glob("*.png"):
        if _OURS.fullmatch(old.name) and f"pictures/{old.name}" not in shown:
            old.unlink(missing_ok=True)


def _copy_static(target: Path) -> None:
    for source in STATIC.rglob("*"):
        if source.is_file():
            place = target / source.relative_to(STATIC)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, place)


def _copy_pictures(board: Board, state: State, target: Path) -> set[str]:
    """:returns: the addresses of those that are there"""
    target.mkdir(parents=True, exist_ok=True)
    shown = set()
    for image in state["images"]:
        name = Path(image["url"]).name
        source = board.picture(int(name.split("-")[0]))
        if source is not None:
            shutil.copyfile(source, target / name)
            shown.add(image["url"])
    return shown

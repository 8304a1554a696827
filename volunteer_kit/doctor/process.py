"""What surrounds this process: the terminal's characters, the user's home folder, and who may write what it makes."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from volunteer_kit.doctor.finding import Finding
from volunteer_kit.storage.places import NoHome, has_home, is_open, kit_folder, umask

SIGNS = "“”–…●█"  # that the kit's screens have


def look(home: str | Path | None) -> list[Finding]:
    """:param home: the folder that the volunteer names with --home"""
    try:
        folder = Path(home) if home else kit_folder()
    except NoHome:
        folder = None
    is_shared = folder is not None and folder.is_dir() and is_open(folder.stat().st_mode)
    return [
        terminal(getattr(sys.stdout, "encoding", None)),
        home_folder(has_home(), folder),
        rights(umask(as_found=True), folder if is_shared else None),
    ]


def terminal(encoding: str | None) -> Finding:
    """:param encoding: of stdout; None: there is none"""
    if encoding is None:
        return Finding("terminal", "ok", "there is none; what is said goes nowhere")
    try:
        SIGNS.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        text = f"its encoding is {encoding}: similar signs stand for those that it lacks"
        return Finding("terminal", "warning", text, "export LANG=C.UTF-8")
    return Finding("terminal", "ok", encoding)


def home_folder(has_own: bool, folder: Path | None) -> Finding:
    """:param has_own: the user has a home folder that can be written
    :param folder: of the kit's files; None: nobody named one, and the user has none"""
    if has_own:
        return Finding("home", "ok", f"the kit's files are in {folder}")
    if folder is None:
        way_out = "Name one: --home FOLDER, or export VOLUNTEER_KIT_HOME=FOLDER, or export HOME=FOLDER"
        return Finding("home", "problem", f"this user (id {os.getuid()}) has no home folder", way_out)
    text = f"this user (id {os.getuid()}) has no home folder that can be written; {folder} takes its place"
    return Finding("home", "ok", text)


def rights(mask: int, shared: Path | None) -> Finding:
    """:param mask: the umask
    :param shared: the folder of the kit's files, if everybody may write there"""
    texts, ways = [], []
    if shared is not None:
        texts.append(f"everybody may replace files in {shared}, your key among them")
        ways.append(f"chmod go-w {shared}")
    if not mask & stat.S_IWOTH:
        texts.append(f"the umask is {mask:03o}: everybody may write what programs make; the kit takes 022 for itself")
        ways.append("umask 022")
    if texts:
        return Finding("rights", "warning", "; ".join(texts), "\n".join(ways))
    return Finding("rights", "ok", f"the umask is {mask:03o}")

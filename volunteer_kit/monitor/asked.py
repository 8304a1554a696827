"""What a person asks of a monitor that runs: a file in its folder, and a file with the answer."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from volunteer_kit.storage import DamagedFile, read_json, write_whole

FOLDER = "asked"
LATE = 600.0  # s; what nobody answered in this time was asked of a monitor that has died since


def ask(folder: Path, to_epoch: int, patience: float) -> dict | None:
    """:returns: {"done": whether it was, "text": in words}; None if nobody answered within `patience` s."""
    place, name = folder / FOLDER, secrets.token_hex(8)
    question, answer = place / f"{name}.json", place / f"{name}.answer"
    _write(question, {"to_epoch": to_epoch, "time": time.time()})
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            found = read_json(answer)
        except (OSError, DamagedFile):
            time.sleep(0.1)
            continue
        answer.unlink(missing_ok=True)
        return found
    question.unlink(missing_ok=True)
    return None


def answer_all(folder: Path, act: Callable[[int], tuple[bool, str]]) -> None:
    """To be called now and then by the monitor. `act`: epoch -> (whether it was done, in words)."""
    try:
        questions = sorted((folder / FOLDER).glob("*.json"))
        unheard = [path for path in (folder / FOLDER).glob("*.answer") if time.time() - path.stat().st_mtime > LATE]
    except OSError:
        return
    for path in unheard:  # whoever asked was ended
        _delete(path)
    for path in questions:
        try:
            asked = read_json(path)
            to_epoch, when = int(asked["to_epoch"]), float(asked["time"])
        except (OSError, ValueError, TypeError, KeyError, OverflowError):
            _delete(path)
            continue
        _delete(path)
        if time.time() - when <= LATE:
            done, text = act(to_epoch)
            _write(path.with_suffix(".answer"), {"done": done, "text": text})


def _delete(path: Path) -> None:
    with suppress(OSError):  # a folder is nobody's question, and stays
        path.unlink()


def _write(path: Path, words: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(words), durable=False)

"""What a person asks of a monitor that runs: a file in its folder, and a file with the answer."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

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
            found = json.loads(answer.read_text())
        except (OSError, ValueError):
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
    except OSError:
        return
    for path in questions:
        try:
            asked = json.loads(path.read_text())
            to_epoch, when = int(asked["to_epoch"]), float(asked["time"])
        except (OSError, ValueError, TypeError, KeyError):
            path.unlink(missing_ok=True)
            continue
        path.unlink(missing_ok=True)
        if time.time() - when <= LATE:
            done, text = act(to_epoch)
            _write(path.with_suffix(".answer"), {"done": done, "text": text})


def _write(path: Path, words: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(words))
    os.replace(part, path)

"""A run file behind a link: fetched within bounds, kept for the day when its server is down."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import requests

from volunteer_kit.data.http_session import Session

MAX_RUN_FILE = 256 * 1024  # bytes; a stranger wrote it
PATIENCE = 20.0  # s for all of it


class LinkError(Exception):
    """Why the link gave no run file, in words."""


def fetch_run_file(url: str, folder: Path) -> Path:
    """The file behind an http(s) address, in `folder`; an earlier copy where the server does not answer. Redirects are
    not followed: the link should be the file's own. Raises LinkError."""
    kept = folder / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.yaml"
    try:
        text = _get(url)
    except (requests.RequestException, OSError) as error:
        if kept.is_file():
            return kept
        raise LinkError(f"its server does not answer ({type(error).__name__})") from None
    folder.mkdir(parents=True, exist_ok=True)
    part = kept.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(text)
    os.replace(part, kept)
    return kept


def _get(url: str) -> bytes:
    with Session() as session:
        session.deadline = time.monotonic() + PATIENCE
        with session.get(url, stream=True, timeout=10, headers={"Accept-Encoding": "identity"}) as answer:
            if answer.status_code != 200:
                raise LinkError(f"its server answered HTTP {answer.status_code}")
            text = answer.raw.read(MAX_RUN_FILE + 1)
    if len(text) > MAX_RUN_FILE:
        raise LinkError(f"it has more than {MAX_RUN_FILE} bytes, so it is no run file")
    if text.lstrip()[:1] == b"<":
        raise LinkError("it is a web page, not the file itself; on GitHub, take the link of the button Raw")
    return text

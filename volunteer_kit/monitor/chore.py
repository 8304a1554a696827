"""Work that may take long or fail in any way, in a process of its own: pictures, and the way to the Hub.

The process reads one line of JSON from its stdin and prints one; logs of libraries go to stderr. It cannot hold up the
loop, take its memory, or end it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from volunteer_kit import output
from volunteer_kit.http_client import blamed_on_proxy

LIMIT = 2**20  # bytes of an answer
NICE = 10  # training on the same cores goes first


class Chore:
    """One process at a time.

    :param module: run with `python -m`
    :param patience: s until it is killed
    """

    def __init__(self, module: str, patience: float):
        self._module, self._patience = module, patience
        self._process: subprocess.Popen[str] | None = None
        self._started = 0.0

    @property
    def is_busy(self) -> bool:
        return self._process is not None

    def start(self, **task: Any) -> None:
        """Not while it is busy. Secrets in `task` go through a pipe and nowhere else. Raises OSError."""
        environment = {key: value for key, value in os.environ.items() if key not in ("HF_TOKEN",)}
        environment |= {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._started = time.monotonic()
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(task) + "\n")

    def result(self) -> dict[str, Any] | None:
        """What it answered, once it has ended: {"error": words} if it failed. None: it is at work, or there is none."""
        process = self._process
        if process is None:
            return None
        if process.poll() is None:
            if time.monotonic() - self._started < self._patience:
                return None
            self.stop()
            return {"error": f"it took longer than {self._patience:.0f} s"}
        text = process.stdout.read(LIMIT)
        process.stdout.close()
        self._process = None
        with suppress(ValueError, IndexError):
            found = json.loads(text.strip().splitlines()[-1])
            if isinstance(found, dict):
                return found
        return {"error": f"its process ended with code {process.returncode}"}

    def stop(self) -> None:
        """Kill it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            process.stdout.close()


def do_chore(work: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """The process's main: a line in, a line out. stdout is the answer's alone."""
    output.keep_up()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with suppress(OSError):
        os.nice(NICE)
    try:
        answer = work(json.loads(sys.stdin.readline()))
    except Exception as error:  # told in words; the monitor tries again later
        answer = {"error": _in_words(error)[:2000]}
    out.write(json.dumps(answer) + "\n")
    out.flush()
    return 0


def _in_words(error: Exception) -> str:
    from huggingface_hub import constants

    is_line = isinstance(error, ConnectionError) or type(error).__module__.startswith(("httpx", "httpcore", "requests"))
    trouble = blamed_on_proxy(constants.ENDPOINT, error) if is_line else None
    return str(trouble) if trouble else f"{type(error).__name__}: {error}"

"""What a test says to a peer in a process of its own, and what that says: lines on its stdin and stdout."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

from volunteer_kit.worker import own_stdin


def say(event: str, **fields) -> None:
    """One JSON event a line."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")  # one write: several threads have something to say
    sys.stdout.flush()


class Orders:
    """Words that come to a peer: "finish EPOCH", "go", "leave", and more, each of which sets its event; and questions
    in JSON. What is none of these is "leave", as is the end of stdin.

    :param words: an event for each
    """

    def __init__(self, **words: Any):
        self.last: int | None = None  # epoch
        self.leave = threading.Event()
        self.go = threading.Event()  # is set by "leave" too: nothing is waited for any more
        self._words = {**words, "go": self.go}
        self._stdin = own_stdin()

    def follow(self, answer: Callable[[dict], dict] | None = None) -> None:
        """Read them from now on, in a thread."""
        threading.Thread(target=self._read, args=(answer,), daemon=True).start()

    def _read(self, answer: Callable[[dict], dict] | None) -> None:
        for line in self._stdin:
            word, *rest = line.decode().split()
            if word == "finish":
                self.last = int(rest[0])
            elif word in self._words:
                self._words[word].set()
            elif answer is not None and word.startswith("{"):
                say("answer", **answer(json.loads(line)))
            else:
                break
        self.leave.set()
        self.go.set()

    def are_done(self, optimizer) -> bool:
        """Is the last epoch reached? The others may have made the last step without us: then we take their state."""
        return self.leave.is_set() or (self.last is not None and optimizer.come_to(self.last))

"""What a person sees while shards are encoded: a bar on a terminal, one line a shard elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from volunteer_kit.data.causes import FILES
from volunteer_kit.data.shards import shown
from volunteer_kit.encode.pool import Done, Event, Moved, Unreadable


class EncodeProgress:
    """Follows the events of encode_shards; `say` gets the lines where `console` is no terminal. What was there before
    this command began does not count for its speed."""

    def __init__(self, shards: int, say: Callable[[str], None], console: Console | None = None) -> None:
        self.finished = 0  # shards
        self.unreadable: list[Unreadable] = []
        self.records, self.counts = 0, Counter[str]()  # of the finished shards
        self._shards, self._say = shards, say
        self._through: dict[str, int] = {}  # records of a shard's input that are done with
        self._before: dict[str, int] = {}  # as many of them were, when this command heard of the shard first
        self._finished_records = 0
        self._started = time.monotonic()
        console = console or Console(stderr=True)
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("shards, {task.fields[speed]}")
        self._bar = Progress(*columns, console=console) if console.is_terminal else None
        self._task = self._bar.add_task("", total=shards, speed="starting") if self._bar else None

    def __enter__(self) -> EncodeProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def follow(self, event: Event) -> None:
        """Take notice of an event and show it."""
        line = None
        if isinstance(event, Moved):
            self._note(event.shard, event.records + event.left_out)
        elif isinstance(event, Done):
            summary = event.summary
            self.finished += 1
            self._note(event.shard, summary.seen)
            self._finished_records += summary.seen
            self.records += summary.records
            self.counts.update(summary.counts)
            line = f"{summary.name}.tar: {summary.records} records{in_words(summary.counts)}"
            if not summary.records:
                line = f"WARNING: nothing of this shard can be used. {line}"
                if self._bar:
                    self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif isinstance(event, Unreadable):
            self.unreadable.append(event)
            line = f"{shown(event.shard)} cannot be read now ({event.cause}): {event.message}"
        if self._bar:
            self._bar.update(self._task, completed=self.finished, speed=self._speed())
        elif line:
            self._say(f"[{self.finished}/{self._shards}] {line}; {self._speed()}")

    def _note(self, shard: str, through: int) -> None:
        self._through[shard] = through
        self._before.setdefault(shard, through)

    def _speed(self) -> str:
        """How much, how fast, and how long it will take, if the other shards are like those that are finished."""
        through = sum(self._through.values())
        rate = (through - sum(self._before.values())) / (time.monotonic() - self._started)
        text = f"{through} records"
        if rate <= 0:  # all of them were there already
            return text
        text += f", {rate:.{0 if rate >= 10 else 1}f} records/s"
        if self.finished:
            left = self._finished_records / self.finished * (self._shards - len(self.unreadable)) - through
            text += f", {timedelta(seconds=round(max(0.0, left) / rate))} left"
        return text


def in_words(counts: Mapping[str, int]) -> str:
    """As ", 6 left out (aspect 2, nsfw 4), 3 files passed over (other_member 3)", or nothing."""
    records = {cause: number for cause, number in counts.items() if cause not in FILES}
    files = {cause: number for cause, number in counts.items() if cause in FILES}
    return _listed("left out", records) + _listed(f"file{'s' * (sum(files.values()) != 1)} passed over", files)


def _listed(what: str, counts: Mapping[str, int]) -> str:
    if not counts:
        return ""
    causes = ", ".join(f"{cause} {number}" for cause, number in sorted(counts.items()))
    return f", {sum(counts.values())} {what} ({causes})"

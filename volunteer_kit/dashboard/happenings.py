"""Events in words. Names are put in when somebody reads, so one that is hidden today is hidden in the past as well."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from volunteer_kit.journal.bounds import account_key
from volunteer_kit.widgets.words import count, number, plain

SOMEBODY = "a volunteer"
AT_ONCE = 4  # joins or leaves in a row from here on become one line
CHECKPOINTS = 2  # the newest; that they are made is no news
TOGETHER = 600.0  # s between two of them
LONGEST = 400  # characters

# The first whose fields are all known is taken.
SENTENCES: Mapping[str, tuple[str, ...]] = {
    "joined": ("{username} joined with {device}", "{username} joined"),
    "left": ("{username} left",),
    "banned": ("{username} was banned: {reason}", "{username} was banned"),
    "unbanned": ("{username} may take part again",),
    "rollback": (
        "The model went back to its checkpoint of step {to_epoch}: {reason}",
        "The model went back to its checkpoint of step {to_epoch}",
        "The model went back to its last good checkpoint",
    ),
    "checkpoint": ("Checkpoint of step {epoch} saved", "Checkpoint saved"),
    "outlier": (
        "{username} is not like the others: {reason}",
        "{username} is not like the others",
    ),
    "refused": ("{username} was refused: {reason}", "{username} was refused"),
    "warning": ("{reason}", "Something is unusual"),
}
_FIELD = re.compile(r"\{([a-z_]{1,32})\}")
_PEOPLE = ("username", "by")


class Names:
    """Who is shown, and how those are shown who do not wish to be."""

    def __init__(self, hidden: Collection[str]):
        self._hidden = frozenset(hidden)
        names = sorted(self._hidden, key=len, reverse=True)
        # a ban's reason or a warning may name somebody, too
        inner = "|".join(re.escape(name) for name in names if name)
        self._in_text = re.compile(rf"(?<![\w.-])(?:{inner})(?![\w-])", re.IGNORECASE) if inner else None

    def is_hidden(self, username: str) -> bool:
        return account_key(username) in self._hidden

    def shown(self, username: str) -> str:
        return SOMEBODY if not username or self.is_hidden(username) else plain(username, 96)

    def kept_out(self, text: str) -> str:
        """A text with hidden names in it, without them."""
        return self._in_text.sub(SOMEBODY, text) if self._in_text else text


def sentence(event: Mapping[str, Any], names: Names) -> str:
    """One event in words: its own template or its kind's, its fields put in."""
    fields = {name: _field(name, value, names) for name, value in event["detail"].items()}
    for name in _PEOPLE:
        fields.setdefault(name, SOMEBODY)
    fitting = (each for each in SENTENCES.get(event["kind"], ()) if set(_FIELD.findall(each)) <= fields.keys())
    chosen = event["text"] or next(fitting, "")
    return _capital(_FIELD.sub(lambda found: fields.get(found[1], "…"), names.kept_out(chosen)))


def _field(name: str, value: Any, names: Names) -> str:
    if name in _PEOPLE:
        return names.shown(str(value))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number(value)
    return names.kept_out(plain(value, LONGEST))


def told(events: Iterable[Mapping[str, Any]], names: Names) -> list[dict[str, Any]]:
    """Events in words, newest first; many joins or leaves in a row become one line, with the newest one's time."""
    lines: list[dict[str, Any]] = []
    for run in _runs(_news(events)):
        if len(run) >= AT_ONCE:
            lines.append({"time": run[0]["time"], "kind": run[0]["kind"], "text": _crowd(run, names)})
        else:
            lines += [{"time": e["time"], "kind": e["kind"], "text": sentence(e, names)} for e in run]
    return lines


def _news(events: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    left = CHECKPOINTS
    for event in events:
        left -= event["kind"] == "checkpoint"
        if event["kind"] != "checkpoint" or left >= 0:
            yield event


def _runs(events: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    runs: list[list[Mapping[str, Any]]] = []
    for event in events:
        last = runs[-1][-1] if runs else None
        is_more = last and last["kind"] == event["kind"] in ("joined", "left") and not (last["text"] or event["text"])
        if is_more and last["time"] - event["time"] <= TOGETHER:
            runs[-1].append(event)
        else:
            runs.append([event])
    return runs


def _crowd(run: list[Mapping[str, Any]], names: Names) -> str:
    """ "alice, bob and 12 others joined": the newest two who show their names."""
    everybody = {account_key(str(e["detail"].get("username", ""))): names.shown(str(e["detail"].get("username", "")))
                 for e in run}  # fmt: skip
    shown = [name for name in everybody.values() if name != SOMEBODY][:2]
    rest = len(everybody) - len(shown)
    if not shown:
        return _capital(f"{count(rest, 'volunteer')} {run[0]['kind']}")
    others = f" and {count(rest, 'other')}" if rest else ""
    return _capital(f"{(', ' if rest else ' and ').join(shown)}{others} {run[0]['kind']}")


def _capital(text: str) -> str:
    """ "a volunteer left" begins a sentence; a name keeps its own spelling."""
    return "A" + text[1:] if text.startswith(SOMEBODY) else text

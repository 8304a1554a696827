"""The page: one template for the server, the poll and the export. Everything is escaped; there is no inline script."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from volunteer_kit import __version__
from volunteer_kit.dashboard.state import SILENT_AFTER, State, profile_of
from volunteer_kit.swarm.records.failures import CAUSES
from volunteer_kit.widgets import words

HERE = Path(__file__).parent
STATIC = HERE / "static"
TITLES = {
    "waiting": ("busy", "Waiting for the first report"),
    "running": ("good", "Training"),
    "empty": ("still", "Nobody is training at the moment"),
    "silent": ("bad", "No news from the monitor"),
    "finished": ("good", "The run is finished"),
}


def render(state: State, *, tag: str = "", problem: str = "", poll: float = 0.0, snapshot: float | None = None) -> str:
    """HTML of the whole page.

    :param tag: of the state; the page asks for another one only
    :param poll: s between two looks of an open page at the server; 0: never
    :param snapshot: when it was written (s), if it is a file and no server's answer
    """
    return page_environment().get_template("page.html").render(
        state=state, run=state["run"], now=state["now"], tag=tag, problem=problem, poll=poll, snapshot=snapshot,
        facts=facts(state), headline=headline(state), images=by_epoch(state["images"]), curves=curves(state),
        summary=summaries(state), failed=failed(state), version=__version__, assets=static_tag(),
        silent_after=SILENT_AFTER,
    )  # fmt: skip


def headline(state: State) -> tuple[str, str]:
    """Tone and words of the state."""
    status = state["run"]["status"]
    is_empty = status == "running" and not state["now"]["volunteers"]
    return TITLES["empty" if is_empty else status]


def facts(state: State) -> list[words.Fact]:
    """The numbers at the top."""
    run, now = state["run"], state["now"]
    first = next((p["loss"] for p in state["history"] if p["loss"] is not None), None)
    began = f"began at {first:.2f}" if first is not None else "lower is better"
    loss = now["loss"] if now["loss"] is not None else _last(state, "loss")
    since = f"in {words.duration(now['time'] - run['began'])}" if run["began"] and now["time"] else ""
    people = f"{words.number(state['accounts'])} so far" if state["accounts"] else ""
    return [
        words.Fact("Volunteers now", words.number(now["volunteers"]), people),
        words.Fact("Speed", _of(words.number(now["samples_per_second"]), "samples/s"), "all together"),
        words.Fact("Global step", words.number(now["epoch"]), f"of {words.number(run['total_epochs'])}"),
        words.Fact("Loss", f"{loss:.2f}" if loss is not None else words.NOT_YET, began),
        words.Fact("Samples", large(now["samples_total"]), since),
    ]


def failed(state: State) -> list[tuple[str, int, str]]:
    """Of rounds that failed: why, how many, of all how many. The most frequent first."""
    counts, total = state["rounds"]["failed"], state["rounds"]["total"]
    found = sorted((cause for cause in counts if counts[cause]), key=lambda cause: -counts[cause])
    return [(CAUSES[cause], counts[cause], share(counts[cause], total)) for cause in found]


def share(part: float, whole: float) -> str:
    """99.98 % is not 100 %, and 0.04 % not 0 %: with the digits that it takes to tell."""
    if not whole:
        return words.NOT_YET
    percent = 100 * part / whole
    return f"{percent:.0f} %" if part in (0, whole) else f"{min(max(percent, 0.01), 99.99):.2f} %"


def large(value: float | None) -> str:
    """31,250; 3.1 million; 2.4 billion."""
    if not words.known(value) or value < 1e6:
        return words.number(value)
    name, scale = ("billion", 1e9) if value >= 1e9 else ("million", 1e6)
    return f"{value / scale:.1f} {name}" if value < 100 * scale else f"{value / scale:,.0f} {name}"


def _of(value: str, unit: str) -> str:
    return value if value == words.NOT_YET else f"{value} {unit}"


def _last(state: State, name: str) -> float | None:
    return next((p[name] for p in reversed(state["history"]) if p[name] is not None), None)


def by_epoch(images: list[Mapping[str, Any]]) -> list[tuple[int, list[Mapping[str, Any]]]]:
    """Pictures of one global step together, newest first."""
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for image in images:
        groups.setdefault(image["epoch"], []).append(image)
    return sorted(groups.items(), reverse=True)


def curves(state: State) -> Markup:
    """What the charts draw, as JSON that may stand inside <script type="application/json">."""
    names = ("time", "epoch", "loss", "samples_per_second", "volunteers")
    columns = {name: [_short(point[name]) for point in state["history"]] for name in names}
    marks = [[event["time"], event["text"]] for event in state["events"] if event["kind"] == "rollback"]
    text = json.dumps({**columns, "marks": marks}, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _short(value: float | None) -> float | None:
    return float(f"{value:.5g}") if isinstance(value, float) and value < 1e6 else value


def summaries(state: State) -> dict[str, str]:
    """Each chart in a sentence, for those who do not see it."""
    points = [p for p in state["history"] if p["loss"] is not None]
    if not points:
        return dict.fromkeys(("loss", "samples_per_second", "volunteers"), "Nothing has been reported yet.")
    first, last, top = points[0], points[-1], max(state["history"], key=lambda p: p["volunteers"])
    fastest = max(p["samples_per_second"] for p in state["history"])
    since = f"since {moment(first['time'])}"
    return {
        "loss": f"Loss: {first['loss']:.2f} at step {words.number(first['epoch'])}, "
        f"{last['loss']:.2f} at step {words.number(last['epoch'])}; lower is better.",
        "samples_per_second": f"Speed {since}: {words.number(last['samples_per_second'])} samples per second now, "
        f"{words.number(fastest)} at most.",
        "volunteers": f"Volunteers {since}: {words.number(last['volunteers'])} now, "
        f"{words.number(top['volunteers'])} at most.",
    }


def moment(time: float) -> str:
    """22 Nov 2026, 14:05 UTC: what stands there until the reader's browser knows better."""
    return f"{datetime.fromtimestamp(time, timezone.utc):%d %b %Y, %H:%M} UTC".lstrip("0")


def iso(time: float) -> str:
    """For the attribute of <time>."""
    return datetime.fromtimestamp(time, timezone.utc).isoformat(timespec="seconds")


@lru_cache
def static_tag() -> str:
    """Differs if any static file does, so that no browser shows a new page with an old script."""
    digest = hashlib.sha256()
    for path in sorted(STATIC.rglob("*.*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:10]


@lru_cache
def page_environment() -> Environment:
    """Where the pages' templates come from; whatever they show is escaped."""
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"), autoescape=select_autoescape(default=True),
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(
        number=words.number, percent=words.percent, count=words.count, moment=moment, iso=iso, large=large,
        hours=hours, share_of=share,
    )  # fmt: skip
    environment.globals["profile_of"] = profile_of
    return environment


def hours(value: float) -> str:
    """0.4; 12; 1,204."""
    if 0 < value < 0.05:
        return "< 0.1"
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"

"""Numbers and words for people; HTML, terminal and text say the same because all of them ask here."""

from __future__ import annotations

import math
import time
import unicodedata
from typing import Literal, NamedTuple

from volunteer_kit.widgets.progress import Progress, State

Tone = Literal["good", "busy", "still", "bad"]
NOT_YET = "–"
LONGEST = 300  # characters of anything that others wrote
LONGEST_WARNING = 700  # with a path or two in it
LONGEST_MESSAGE = 2000  # with numbered ways out, and the end of a log

TONES: dict[State, Tone] = {
    "starting": "busy",
    "connecting": "busy",
    "downloading": "busy",
    "training": "good",
    "averaging": "good",
    "reconnecting": "bad",
    "restarting": "bad",
    "paused": "still",
    "leaving": "busy",
    "finished": "good",
    "left": "still",
    "failed": "bad",
}
HEADLINES: dict[State, str] = {
    "starting": "Starting",
    "connecting": "Connecting to the other volunteers",
    "downloading": "Downloading the model",
    "training": "Training",
    "averaging": "Averaging with the others",
    "reconnecting": "Connection lost, trying again",
    "restarting": "The training program broke off and starts again",
    "paused": "Paused",
    "leaving": "Leaving",
    "finished": "The run is finished",
    "left": "You have left",
    "failed": "Stopped",
}
MEANINGS: dict[State, str] = {
    "starting": "A worker process begins on this machine; the first time takes up to a minute.",
    "connecting": "Your machine is looking for the others and says hello.",
    "downloading": "You get what the others have learned so far. Training starts when it is here.",
    "training": "Your machine studies pictures with captions and works out how the model should change.",
    "averaging": "All volunteers put together what they worked out, and take one step.",
    "reconnecting": "It goes on by itself; what you gave stays counted.",
    "restarting": "It goes on by itself; what you gave stays counted.",
    "paused": "Once goodbye is said, nothing is computed or sent until you press Resume.",
    "leaving": "What you gave stays counted. Samples of the step under way are not handed over; the others go on.",
    "finished": "Everybody's work is in the final model. Thank you!",
    "left": "What you gave stays counted. Thank you!",
    "failed": "It cannot go on by itself.",
}
ENDED: tuple[State, ...] = ("finished", "left", "failed")


class Fact(NamedTuple):
    """One number: its name, itself, and what stands small beneath."""

    label: str
    value: str
    note: str = ""


def plain(text: object, longest: int = LONGEST) -> str:
    """Text from outside, in one line, without control characters (a terminal obeys them), cut at `longest`."""
    line = " ".join(str(text).split())
    line = "".join(c for c in line if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co") or c == "\u200d")
    return line if len(line) <= longest else line[: longest - 1] + "…"


def plain_lines(text: object, longest: int = LONGEST_MESSAGE) -> str:
    """As plain(), but its lines and their indentation stay: for steps that are to be followed one by one."""
    lines = [line for line in str(text).splitlines() if line.strip()]
    whole = "\n".join(" " * (len(line) - len(line.lstrip(" "))) + plain(line, longest) for line in lines)
    return whole if len(whole) <= longest else whole[: longest - 1] + "…"


def known(value: float | None) -> bool:
    """Whether this is a number at all: not None, not NaN, not infinite."""
    return value is not None and math.isfinite(value)


def number(value: float | None) -> str:
    """1,234; 12.3; 0.27."""
    if not known(value):
        return NOT_YET
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2g}" if abs(value) < 1 else f"{value:.1f}"


def size(count: float | None) -> str:
    """Of bytes: 640 B, 12 kB, 3.2 GB (powers of ten, as network plans count)."""
    if not known(count):
        return NOT_YET
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}" if count < 10 * scale else f"{count / scale:,.0f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float | None) -> str:
    """8 s, 2 min, 1 h 20 min, 3 d 4 h."""
    if not known(seconds):
        return NOT_YET
    whole = max(0, round(seconds))
    if whole < 90:
        return f"{whole} s"
    minutes = round(whole / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    days, rest = divmod(round(minutes / 60), 24)
    return f"{days} d {rest} h" if rest else f"{days} d"


def percent(share: float | None) -> str:
    """0.34 is 34 %; small ones keep a digit."""
    if not known(share):
        return NOT_YET
    value = 100 * share
    if 0 < value < 0.1:
        return "< 0.1 %"
    if share < 1:
        value = min(value, 99.9)  # nothing is done before it is
    return f"{value:.1f} %" if value < 10 and value != int(value) else f"{math.floor(value + 1e-9)} %"


def ordinal(place: int) -> str:
    """1st, 2nd, 3rd, 11th."""
    ending = "th" if place % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place:,}{ending}"


def count(value: int, word: str) -> str:
    """1 volunteer, 2 volunteers."""
    return f"{number(value)} {word}{'' if value == 1 else 's'}"


def tone(progress: Progress) -> Tone:
    """The colour of the dot."""
    return TONES[progress.state]


def headline(progress: Progress) -> str:
    """The state in one line, as one would say it."""
    state, detail = progress.state, plain(progress.detail)
    first = HEADLINES[state]
    if state == "training":
        return ", ".join([first, *_place(progress), *([detail] if detail else []), *_are_in(progress)])
    if state == "downloading" and not detail:
        detail = _download(progress)
    if not detail:
        return first
    return f"{first} {detail}" if detail.startswith("in ") else f"{first}: {detail}"


def meaning(progress: Progress) -> str:
    """What the state means to somebody who has never trained a model; at an end, the last word, in its lines."""
    return plain_lines(progress.message) if progress.message and progress.state in ENDED else MEANINGS[progress.state]


def _place(progress: Progress) -> list[str]:
    if progress.rank and progress.volunteers and progress.volunteers > 1:
        return [f"{ordinal(progress.rank)} of {count(progress.volunteers, 'volunteer')}"]
    return [f"{count(progress.volunteers, 'volunteer')} here"] if progress.volunteers else []


def _are_in(progress: Progress) -> list[str]:
    if progress.my_waiting:  # it is cut off from most of the swarm
        return [f"{count(progress.my_waiting, 'sample')} of yours wait for the others"]
    return ["your samples are in"] if progress.my_samples else []


def _download(progress: Progress) -> str:
    done = [percent(progress.downloaded)] if known(progress.downloaded) else []
    left = [f"about {duration(progress.seconds_left)} left"] if known(progress.seconds_left) else []
    return ", ".join(done + left)


def facts(progress: Progress) -> list[Fact]:
    """The numbers beneath the headline."""
    p = progress
    place = f"{ordinal(p.rank)} of {number(p.volunteers)}" if p.rank and p.volunteers else ""
    share = f"{percent(p.share)} of the swarm's" if known(p.share) else ""
    steps = f"in {count(p.my_epochs, 'step')}" if p.my_epochs else "none counted yet"
    given = (share if p.my_samples else "") or steps
    of_all = f"of {number(p.total_epochs)}" if p.total_epochs else ""
    here = p.volunteers if known(p.volunteers) else None
    swarm_speed = f"{number(p.swarm_samples_per_second)} samples/s together" if p.swarm_samples_per_second else ""
    return [
        Fact("Your samples", number(p.my_samples), f"{number(p.my_waiting)} more wait" if p.my_waiting else given),
        Fact("Your place", place or NOT_YET, "by samples given" if place else ""),
        Fact("Your speed", f"{number(p.samples_per_second)} samples/s", "pictures with captions"),
        Fact("The swarm", count(here, "volunteer") if here is not None else NOT_YET, swarm_speed),
        Fact("Global step", number(p.epoch), of_all),
        Fact("Network", f"{size(p.bytes_sent)} ↑", f"{size(p.bytes_received)} ↓"),
    ]


def step_line(progress: Progress) -> str:
    """How far the next step is: "Next step: 3,021 of 4,096 samples, about 40 s left"."""
    if not progress.target_batch_size:
        return "Next step: not known yet"
    collected = f"{number(progress.swarm_samples)} of {number(progress.target_batch_size)} samples collected together"
    left = f", about {duration(progress.seconds_to_step)} left" if known(progress.seconds_to_step) else ""
    return f"Next step: {collected}{left}"


def step_share(progress: Progress) -> float:
    """Of the next step's samples, 0 to 1."""
    if not progress.target_batch_size or progress.target_batch_size <= 0:
        return 0.0
    return min(1.0, max(0.0, progress.swarm_samples / progress.target_batch_size))


def bar(progress: Progress) -> tuple[str, float | None]:
    """The one bar: of the download while that lasts, of the next step after. None: not known how far."""
    if progress.state == "downloading":
        share = progress.downloaded
        return f"Model: {_download(progress) or 'asking who has it'}", (
            min(1.0, max(0.0, share)) if known(share) else None
        )
    return step_line(progress), step_share(progress)


def points(progress: Progress) -> list[tuple[int, float]]:
    """The loss curve without what is no number."""
    return [(int(step), float(loss)) for step, loss in progress.loss if known(loss) and known(step)]


def loss_line(progress: Progress) -> str:
    """The loss in words: "Loss 4.42 (began at 7.10; lower is better)"."""
    values = points(progress)
    if not values:
        return "Loss: not known yet"
    return f"Loss {values[-1][1]:.2f} (began at {values[0][1]:.2f}; lower is better)"


def warnings(progress: Progress) -> list[str]:
    """Newest first, each with how long ago."""
    now = progress.updated or time.time()
    return [f"{plain(text, LONGEST_WARNING)} ({_ago(now - when)})" for when, text in reversed(progress.warnings)]


def _ago(seconds: float) -> str:
    return "just now" if seconds < 5 else f"{duration(seconds)} ago"


def stay(progress: Progress) -> str:
    """How long this stay is, as whom, and what else there is to know of it."""
    here = duration((progress.updated or time.time()) - progress.started)
    who = f"as {plain(progress.name, 60)}, " if progress.name else ""
    again = f"; the worker was restarted {count(progress.restarts, 'time')}" if progress.restarts else ""
    kept = f"; newest checkpoint: {plain(progress.checkpoint)}" if progress.checkpoint else ""
    is_there = progress.is_elsewhere and progress.state not in ENDED
    elsewhere = "; Pause and Leave are in the other window" if is_there else ""
    return f"{who}{here} here{again}{kept}{elsewhere}"


def plan(progress: Progress) -> str:
    """Device and plan in one line."""
    return ": ".join(plain(part) for part in (progress.device, progress.plan) if part)


def summary(progress: Progress) -> list[str]:
    """The last lines of a stay; the last word may be several."""
    p = progress
    share = f", {percent(p.share)} of what those here gave" if known(p.share) else ""
    lines = [
        *f"{headline(p)}. {meaning(p)}".split("\n"),
        f"{count(p.my_samples, 'sample')} of yours in {count(p.my_epochs, 'step')}{share}; {stay(p)}.",
    ]
    if p.my_waiting:
        lines.append(
            f"{number(p.my_waiting)} more came when most of the swarm was away. They count once those are back, or "
            "somebody new joins, unless the others have trained more meanwhile."
        )
    return lines

"""The demo's files and last words: loss curve, pictures, summary, one line of JSON."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from volunteer_kit.data.causes import CAUSES
from volunteer_kit.demo.state import CurvePoint, DemoState, Mark
from volunteer_kit.demo.view import duration

BLUE, GREY = "#2563a8", "#6b7280"
GOOD, HALF, BAD = "#15803d", "#b45309", "#b91c1c"


@dataclass(frozen=True)
class Picture:
    """One picture for the grid, (S, S, 3) uint8, and what is written under it."""

    image: np.ndarray
    caption: str
    verdict: str = ""  # a few words
    colour: str = GREY  # of the verdict


def _figure(width: float, height: float) -> Any:
    """A figure of its own backend: the caller's matplotlib settings stay as they are. Sizes in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_curve(curve: Sequence[CurvePoint], marks: Sequence[Mark], path: Path, title: str) -> Path:
    """Mean loss of the swarm by epoch, with a line for each mark."""
    figure = _figure(9, 4.8)
    axes = figure.subplots()
    axes.plot([p.epoch for p in curve], [p.loss for p in curve], color=BLUE, linewidth=1.8)
    if len(curve) == 1:
        axes.plot(curve[0].epoch, curve[0].loss, "o", color=BLUE)
    for place, (epoch, labels) in enumerate(_by_epoch(marks)):
        axes.axvline(epoch, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            labels, (epoch, 0.97 - 0.09 * (place % 3)), xycoords=axes.get_xaxis_transform(), xytext=(4, 0),
            textcoords="offset points", va="top", fontsize=9, color="#111827",
            bbox={"boxstyle": "round,pad=0.2", "fc": "white", "ec": "none", "alpha": 0.85},
        )  # fmt: skip
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_xlabel("epoch (one step of the whole swarm)")
    axes.set_ylabel("loss, mean of all volunteers")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path)
    return path


def _by_epoch(marks: Sequence[Mark]) -> list[tuple[int, str]]:
    labels: dict[int, list[str]] = {}
    for epoch, label in marks:
        labels.setdefault(epoch, []).append(label)
    return [(epoch, "\n".join(labels[epoch])) for epoch in sorted(labels)]


def draw_grid(
    pictures: Sequence[Picture], path: Path, title: str, columns: int = 6, rows_of: Sequence[tuple[str, int]] = ()
) -> Path:
    """Pictures with captions, `columns` a row. `rows_of` names sections: (heading, how many pictures belong to it)."""
    sections = list(rows_of) or [("", len(pictures))]
    lines = [(heading, pictures[start : start + n]) for heading, start, n in _spans(sections)]
    rows_in = [max(1, math.ceil(len(part) / columns)) for _, part in lines]
    heights = [
        rows * (2.3 if any(p.caption for p in part) else 1.8) + (0.3 if heading else 0)
        for rows, (heading, part) in zip(rows_in, lines, strict=True)
    ]  # inches
    figure = _figure(1.75 * columns, sum(heights) + 0.4)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    parts = np.atleast_1d(figure.subfigures(len(lines), 1, height_ratios=heights))
    for part, (heading, shown), rows in zip(parts, lines, rows_in, strict=True):
        if heading:
            part.suptitle(heading, fontsize=10, x=0.01, ha="left", color=GREY)
        grid = np.atleast_1d(part.subplots(rows, columns)).ravel()
        for axes in grid:
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        for axes, picture in zip(grid, shown, strict=False):
            _draw_picture(axes, picture)
    figure.savefig(path)
    return path


def _draw_picture(axes: Any, picture: Picture) -> None:
    axes.imshow(picture.image, interpolation="nearest")
    caption = "\n".join(textwrap.wrap(picture.caption, 24, max_lines=3, placeholder=" ..."))
    if picture.verdict:
        axes.set_title(picture.verdict, fontsize=8, color=picture.colour, pad=3)
    if caption:
        axes.set_xlabel(caption, fontsize=7.5, color="#111827", labelpad=3)


def _spans(sections: Sequence[tuple[str, int]]) -> list[tuple[str, int, int]]:
    spans, start = [], 0
    for heading, count in sections:
        spans.append((heading, start, count))
        start += count
    return spans


@dataclass(frozen=True)
class DemoResult:
    """What a demo came to; the last line of its output is `json_line`. None: does not apply to this run."""

    peers: int  # volunteers that trained, the late one counted
    epochs: int  # steps of the whole swarm
    samples: int  # that entered them
    loss_first: float | None
    loss_last: float | None
    colour_match: float | None
    caption_match: float | None
    caption_match_shuffled: float | None
    checker_accuracy: float | None
    killed_peer_recovered: bool
    joined_late_in_sync: bool
    max_param_gap: float | None  # None: could not be measured
    loss_curve: str  # path
    images: str  # path
    skipped: dict[str, int] | None = None  # records left out by cause; None for data that have none
    reconstruction_error: float | None = None
    problems: tuple[str, ...] = ()  # why the demo failed, in words; empty: it did what it should

    @property
    def ok(self) -> bool:
        """The swarm trained and recovered from the kill, and the late joiner is in step."""
        return not self.problems

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1

    def json_line(self) -> str:
        """One line of strict JSON with every field but `problems`."""
        fields = {name: value for name, value in vars(self).items() if name != "problems"}
        return json.dumps({name: _rounded(value) for name, value in fields.items()}, allow_nan=False)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def find_problems(
    state: DemoState, *, recovered: bool, in_sync: bool, gap: float | None, max_gap: float, epochs: Sequence[int] = ()
) -> list[str]:
    """Why this demo did not show a swarm that trains and recovers; empty if it did. `epochs`: each volunteer's last."""
    problems = _problems_of_training([point.loss for point in state.curve])
    volunteers = state.volunteers.values()
    if gap is None:
        problems.append("not every volunteer saved its model in time, so they cannot be compared")
    elif not gap <= max_gap:
        problems.append(f"two volunteers' parameters differ by {gap:.2g} of their size, more than {max_gap:g}")
    if len(set(epochs)) > 1:
        problems.append(f"the volunteers ended at different epochs: {', '.join(map(str, epochs))}")
    if not recovered:
        is_back = any(v.returned for v in volunteers)
        what = "came back, but did not end with the others' model" if is_back else "did not come back into the training"
        problems.append(f"the killed volunteer {what}")
    if not in_sync:
        too_late = any(v.joined_late and not v.samples for v in volunteers)
        what = "was not ready before the training ended" if too_late else "did not end in step with the first volunteer"
        problems.append(f"the late joiner {what}")
    return problems


def _problems_of_training(losses: Sequence[float]) -> list[str]:
    if len(losses) < 2:
        return ["fewer than two epochs were applied: there was no training to speak of"]
    if not all(math.isfinite(loss) for loss in losses):
        return ["the loss was not finite"]
    if losses[-1] >= losses[0]:
        return [f"the loss did not fall: {losses[0]:.3f} at first, {losses[-1]:.3f} at the end"]
    return []


def summary(result: DemoResult, state: DemoState, *, seconds: float, level: int | None, same_bytes: bool) -> list[str]:
    """The demo in plain words, a sentence a line."""
    speed = result.samples / seconds if seconds > 0 else 0.0
    lines = [
        f"{result.peers} volunteers made {result.epochs:,} epochs of {result.samples:,} samples in {duration(seconds)}"
        f" ({speed:,.0f} samples/s, one epoch every {seconds / max(1, result.epochs):.1f} s).",
        f"Loss: {_text(result.loss_first)} in the first epochs, {_text(result.loss_last)} in the last.",
    ]
    lines += [_story(v) for v in state.volunteers.values() if v.killed_at or v.joined_late]
    if same_bytes:
        lines.append("In the end all volunteers hold the same model, bit by bit.")
    elif result.max_param_gap is not None:
        lines.append(f"The volunteers' parameters differ by {result.max_param_gap:.2g} of their size at most.")
    if state.lost_parts:
        lines.append(f"In {state.lost_parts} of the averagings a volunteer did not receive everything (kills do that).")
    if result.colour_match is not None:
        what = "one object" if level == 1 else "two objects"
        lines += [
            f"The model drew 64 pictures from captions ({what}) whose combination of words it had never seen:",
            f"  {result.colour_match:.0%} have the right colours, {result.caption_match:.0%} are right in everything"
            " (size, colour, shape, place, background);",
            f"  beside another picture's caption, {result.caption_match_shuffled:.0%} of them would pass. The checker"
            f" itself is right on {result.checker_accuracy:.1%} of true pictures.",
        ]
    if result.reconstruction_error is not None:
        lines.append(
            f"From a picture to codes and back, the image tokenizer is off by {result.reconstruction_error:.3f} (root"
            " mean square; black to white is 1): the model cannot draw sharper than that."
        )
    if result.skipped is not None:
        lines += skipped_lines(result.skipped)
    return lines + [f"Problem: {problem}." for problem in result.problems]


def _story(volunteer: Any) -> str:
    if volunteer.killed_at:
        if not volunteer.returned:
            return f"{volunteer.name} was killed and did not come back."
        return (
            f"{volunteer.name} was killed, was back at work after {volunteer.back_after:.0f} s, and gave"
            f" {volunteer.samples_of_life:,} samples since."
        )
    if not volunteer.samples:
        return f"{volunteer.name} came late and could not contribute."
    model = "took over the model from the others" if volunteer.source == "peers" else "began with an untrained model"
    return f"{volunteer.name} came late, {model}, and gave {volunteer.samples:,} samples."


def skipped_lines(skipped: dict[str, int]) -> list[str]:
    """Records left out, by cause: a table."""
    if not skipped:
        return ["No record was left out of training."]
    rows = sorted(skipped.items(), key=lambda item: -item[1])
    return [
        "Left out of training, as counted by the volunteer that has read most:",
        *(f"{count:>7,}  {cause:<18} {CAUSES.get(cause, '')}".rstrip() for cause, count in rows),
    ]


def _text(value: float | None) -> str:
    return "not known" if value is None else f"{value:.3f}"

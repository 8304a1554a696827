"""Curves over the number of peers, as one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.simulate_parts.model import Prediction

COLOURS = {"blockwise8": "tab:blue", "sparse": "tab:orange"}


def draw(
    path: Path, peers: Sequence[int], curves: Mapping[tuple[str, bool, bool], Sequence[Prediction]], about: str
) -> bool:
    """:param curves: by codec, whether the target batch grows, and whether slices are even
    :returns: False where matplotlib is missing"""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((rounds, traffic), (fixed, grown)) = pyplot.subplots(2, 2, figsize=(12, 8.5), layout="constrained")

    def line(axes: Any, codec: str, grows: bool, even: bool, what: str, by: float = 1.0) -> None:
        style = {"ls": "--" if even else "-", "color": COLOURS[codec], "lw": 1.6 if even else 2.2}
        label = codec + (", slices as even as bandwidths ask" if even else ", slices of whole parts, as today")
        axes.plot(peers, [getattr(p, what) / by for p in curves[codec, grows, even]], label=label, **style)

    for codec in COLOURS:
        for even in (False, True):
            line(rounds, codec, True, even, "round")
            line(traffic, codec, True, even, "bytes_per_sample", 1000)
            line(fixed, codec, False, even, "goodput")
            line(grown, codec, True, even, "goodput")
    first = next(iter(COLOURS))
    for grows, style, words in ((False, ":", "an epoch, fixed batch"), (True, "-.", "an epoch, batch grows with N")):
        epochs = [p.epoch for p in curves[first, grows, False]]
        rounds.plot(peers, epochs, ls=style, color="0.35", lw=1.6, label=words)
    titles = {
        rounds: ("Round, from an epoch's end to the last answer", "s"),
        traffic: ("Sent for each sample, by all; batch grows with N", "kB"),
        fixed: ("Goodput, target batch of 4,096", "share of device time"),
        grown: ("Goodput, target batch grows with N (512 samples a peer)", "share of device time"),
    }
    for axes, (title, unit) in titles.items():
        axes.set(title=title, ylabel=unit, xlabel="peers", xscale="log", xlim=(peers[0], peers[-1]))
        axes.grid(alpha=0.3)
    for axes in (rounds, traffic):
        axes.set_yscale("log")
    for axes in (fixed, grown):
        axes.set_ylim(0, 1.02)
    figure.legend(*rounds.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    figure.suptitle(about, fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True

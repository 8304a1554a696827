"""How much a cheat can hide inside the tolerances, measured on the demo's DALL-E through the real 8-bit codec.

A sender adds some of its contribution's length along the honest mean, backwards; validators compute in the other
precision. A reducer shifts its answer backwards. `found` is the share of draws of a direction that show it.
"""

from __future__ import annotations

from math import ceil, comb, log
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.byzantine_parts.defences import Piece, arrived, pieces_of
from benchmarks.byzantine_parts.demo import DemoDalle
from benchmarks.byzantine_parts.exchange import directions
from benchmarks.byzantine_parts.swarm import ATTACKERS, PEERS
from volunteer_kit.robust.centered_clip import centered_clip, factor, radius_of
from volunteer_kit.robust.reducing import DISTANCE, NORM, ROUNDING, SUMS, residual
from volunteer_kit.robust.sketch import mismatch
from volunteer_kit.robust.standing import Settings
from volunteer_kit.swarm.codecs.registry import CODECS

CHEATS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 1.0)  # of the contribution's length
SHIFTS = (0.0, 0.02, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3)  # of the answer's length and the radius
SAMPLES, STEPS = 16, (0, 30)  # of a contribution; of the model, when it is looked at
DRAWS = 200
CODEC_NAMES = ("float16", "blockwise8", "uniform8")
BANNED = 0.99  # chance within the window below which a cheat counts as hidden


class Scene(NamedTuple):
    """One model, and what all members compute on it."""

    sent: list[torch.Tensor]  # of each member, in its own precision
    again: list[torch.Tensor]  # the same samples in the other one
    pieces: list[Piece]
    tensors: list[slice]  # of the vector, one for each parameter; no part of a real exchange has values of two

    @property
    def mean(self) -> torch.Tensor:
        return torch.stack(self.sent).mean(0)

    def average(self, vectors: list[torch.Tensor]) -> torch.Tensor:
        parts = ([vector[piece.place] for vector in vectors] for piece in self.pieces)
        return torch.cat([centered_clip(some, [1.0] * len(some)).average for some in parts])


def measure(console: Console) -> dict[str, Any]:
    """`hidden_pct` and the honest members' distance from both tolerances, printed with what they are made of."""
    torch.set_num_threads(1)
    settings = Settings()
    scenes = make_scenes()
    hidden, mismatch_max = of_senders(console, scenes, settings)
    residual_max = of_reducers(console, scenes, settings)
    return {
        "hidden_pct": round(100 * hidden, 1),
        "honest_mismatch_max": round(mismatch_max, 4),
        "honest_residual_max": round(residual_max, 4),
        **of_codecs(console, scenes, settings),
    }


def make_scenes() -> list[Scene]:
    task, scenes, done = DemoDalle(), [], 0
    state = task.start(0)
    for steps in STEPS:
        for step in range(done, steps):
            names = range(SAMPLES * (PEERS + step), SAMPLES * (PEERS + step + 1))
            state = task.step(state, task.gradient(state.params, list(names), False), step)
        done = steps
        lists = [list(range(SAMPLES * peer, SAMPLES * (peer + 1))) for peer in range(PEERS)]
        both = [[task.gradient(state.params, names, bf16) for names in lists] for bf16 in (False, True)]
        sent = [both[peer % 2][peer] for peer in range(PEERS)]
        again = [both[1 - peer % 2][peer] for peer in range(PEERS)]
        scenes.append(Scene(sent, again, pieces_of(task.size, range(PEERS)), task.tensors))
    return scenes


# --- senders ---


def of_senders(console: Console, scenes: list[Scene], settings: Settings) -> tuple[float, float]:
    """:returns: the largest cheat that may stay, honest contributions' largest mismatch"""
    found = np.concatenate([mismatches(scene, settings, seed) for seed, scene in enumerate(scenes)])  # (draws, cheats)
    title = f"A sender's cheat: tolerance {settings.tolerance:g}, {settings.share:.4f} of contributions looked at"
    within = f"banned within {settings.window} epochs, %"
    table = Table("cheat, % of its length", "found by one check, %", "epochs until found in half of the cases", within,
                  "seven of sixteen move the average by, %", title=title)  # fmt: skip
    hidden = 0.0
    for place, cheat in enumerate(CHEATS):
        chance = float((found[:, place] > settings.tolerance).mean())
        banned = at_least(settings.strikes, settings.window, settings.share * chance)
        hidden = cheat if banned < BANNED else hidden
        until = ceil(log(0.5) / log(1 - settings.share * chance)) if chance else "never"
        moved = 100 * np.mean([moves(scene, cheat) for scene in scenes])
        table.add_row(f"{100 * cheat:g}", f"{100 * chance:.1f}", f"{until}", f"{100 * banned:.2f}", f"{moved:.1f}")
    console.print(table)
    largest = float(found[:, 0].max())
    console.print(f"honest contributions differ by {largest:.4f} at most, {settings.tolerance:g} is allowed")
    return hidden, largest


def mismatches(scene: Scene, settings: Settings, seed: int) -> np.ndarray:
    """(draws, cheats), each draw of another direction, and of the members by turns."""
    size, slices = len(scene.mean), [piece.place for piece in scene.pieces]
    by_member = []
    for peer in range(PEERS):
        by_member.append(torch.stack([arrived_whole(cheating(scene, peer, cheat), slices) for cheat in CHEATS]))
    results = []
    for draw in range(DRAWS // len(STEPS)):
        peer = draw % PEERS
        rows = torch.from_numpy(directions(_seed(seed, draw), size, settings.sums)).float()
        # (cheats, slices, sums)
        sent = torch.stack([by_member[peer][:, place] @ rows[:, place].T for place in slices], 1)
        again = torch.stack([rows[:, place] @ scene.again[peer][place] for place in slices])
        results.append([mismatch(one.numpy(), again.numpy()) for one in sent])
    return np.array(results)


def cheating(scene: Scene, peer: int, cheat: float) -> torch.Tensor:
    own, mean = scene.sent[peer], scene.mean
    return own - cheat * own.norm() / mean.norm() * mean


def moves(scene: Scene, cheat: float) -> float:
    """Of the average, in lengths of an honest contribution."""
    vectors = [cheating(scene, peer, cheat if peer < ATTACKERS else 0.0) for peer in range(PEERS)]
    moved = scene.average(vectors) - scene.average(scene.sent)
    return float(moved.norm() / torch.stack(scene.sent).norm(dim=1).median())


def at_least(strikes: int, epochs: int, chance: float) -> float:
    return 1 - sum(comb(epochs, k) * chance**k * (1 - chance) ** (epochs - k) for k in range(strikes))


# --- reducers ---


def of_reducers(console: Console, scenes: list[Scene], settings: Settings) -> float:
    """:returns: the largest residual of honest answers"""
    table = Table("shift, % of answer and radius", "found, %", "in % of an honest part's length",
                  title=f"A reducer's cheat: {ROUNDING:g} is allowed")  # fmt: skip
    # (draws, 2, shifts)
    found = np.concatenate([residuals(scene, settings, seed) for seed, scene in enumerate(scenes)])
    for place, shift in enumerate(SHIFTS):
        off, length = found[:, 0, place], found[:, 1, place]
        table.add_row(f"{100 * shift:g}", f"{100 * (off > ROUNDING).mean():.1f}", f"{100 * length.mean():.1f}")
    console.print(table)
    largest = float(found[:, 0, 0].max())
    console.print(f"honest answers are off by {largest:.4f} at most: a margin of {ROUNDING / max(largest, 1e-9):.1f}")
    return largest


def residuals(scene: Scene, settings: Settings, seed: int) -> np.ndarray:
    """(draws, 2, shifts): what members find, and how far the answer was shifted."""
    size, weights, results = len(scene.mean), [1.0] * PEERS, []
    made = [_answers([arrived(one[piece.place]) for one in scene.sent]) for piece in scene.pieces]
    for draw in range(DRAWS // len(STEPS)):
        piece, (parts, answers, lengths) = scene.pieces[draw % PEERS], made[draw % PEERS]
        rows = torch.from_numpy(directions(_seed(seed, draw), size, settings.sums)[:, piece.place])
        numbers = np.zeros((PEERS, SUMS + settings.sums))
        numbers[:, NORM] = [float(part.norm()) for part in parts]
        numbers[:, SUMS:] = torch.stack(parts).double() @ rows.T
        off = []
        for answer in answers:
            numbers[:, DISTANCE] = [float((part - answer).norm()) for part in parts]
            stated = np.asarray(numbers, np.float32)
            said = np.array([float(answer.norm()), *(rows @ answer.double()).tolist()])
            off.append(residual(stated, weights, said, True))
        results.append([off, lengths])
    return np.array(results)


def _answers(parts: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    true = centered_clip(parts, [1.0] * PEERS).average
    radius = radius_of([float((part - true).norm()) for part in parts], [1.0] * PEERS)
    scale, usual = float(true.norm()) + radius, float(torch.stack(parts).norm(dim=1).median())
    answers = [arrived(true - shift * scale * true / true.norm()) for shift in SHIFTS]
    return parts, answers, [shift * scale / usual for shift in SHIFTS]


# --- honest ones, by codec ---


def of_codecs(console: Console, scenes: list[Scene], settings: Settings) -> dict[str, float]:
    """How near to the tolerances honest members come, by true lengths, each parameter being one part: the runs' own
    codecs are told, of which the demo's parameters are too small for the one of 8 bits."""
    table = Table("codec", f"contribution differs by, {settings.tolerance:g} is allowed",
                  f"answer is off by, {ROUNDING:g} is allowed", title="Honest ones, worst of all")  # fmt: skip
    figures = {}
    for name in CODEC_NAMES:
        differ = max(_codec_mismatch(scene, peer, name) for scene in scenes for peer in range(PEERS))
        off = max(_codec_residual(scene, place, name) for scene in scenes for place in scene.tensors)
        figures |= {f"honest_mismatch_{name}": round(differ, 4), f"honest_residual_{name}": round(off, 4)}
        table.add_row(name, f"{differ:.4f}", f"{off:.4f}")
    console.print(table)
    return figures


def _codec_mismatch(scene: Scene, peer: int, name: str) -> float:
    sent = torch.cat([arrived(scene.sent[peer][place], CODECS[name]) for place in scene.tensors])
    again = scene.again[peer]
    return float((sent - again).norm() / max(sent.norm(), again.norm()))


def _codec_residual(scene: Scene, place: slice, name: str) -> float:
    parts = [arrived(vector[place], CODECS[name]) for vector in scene.sent]
    answer = arrived(centered_clip(parts, [1.0] * PEERS).average, CODECS[name])
    distances = [float((part - answer).norm()) for part in parts]
    radius = radius_of(distances, [1.0] * PEERS)
    off = sum(factor(one, radius) / PEERS * (part - answer) for one, part in zip(distances, parts, strict=True))
    return float(off.norm()) / max(float(answer.norm()) + radius, 1e-30)


def arrived_whole(vector: torch.Tensor, slices: list[slice]) -> torch.Tensor:
    return torch.cat([arrived(vector[place]) for place in slices])


def _seed(scene: int, draw: int) -> bytes:
    return b"hide" + scene.to_bytes(4, "little") + draw.to_bytes(8, "little")

"""What the sixteen learn, by name."""

from __future__ import annotations

from benchmarks.byzantine_parts.digits import Digits, Task

TITLES = {
    "digits": "Digits, accuracy after {} epochs, of which all but {} under attack",
    "demo": "The demo's DALL-E, minus its loss after {} epochs, of which all but {} under attack",
}


def kind(name: str) -> type:
    if name == "demo":
        from benchmarks.byzantine_parts.demo import DemoDalle

        return DemoDalle
    return Digits


def make(name: str) -> Task:
    return kind(name)()


def title(name: str) -> str:
    return TITLES[name].format(kind(name).epochs, kind(name).attack_from)


def lost(name: str) -> float:
    return kind(name).lost


def is_done(name: str) -> bool:
    """Has the run without attack learnt all there is in its epochs? Else a worse score may be a later one."""
    return kind(name).is_done

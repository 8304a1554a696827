"""Sums of outcomes: figures and their bounds, a line and a row each."""

from __future__ import annotations

from typing import Any

from benchmarks.hostile_parts.attack import Outcome

BOUNDS = {
    "peers_stopped": 0, "runs_stopped": 0, "worst_recovery_s": 30, "worst_pause_s": 2, "memory_growth_mb": 200,
    "authority_503_s": 15, "local_files_read": 0, "code_run": 0, "newcomers_refused": 0, "untried": 0,
}  # fmt: skip


def figures(outcomes: list[Outcome], quiet: dict[str, float]) -> dict[str, float]:
    by_message = [outcome for outcome in outcomes if outcome.case.who != "machine"]
    pause = max((outcome.pause for outcome in by_message), default=0.0)
    return {
        "attacks": len(outcomes),
        "peers_stopped": sum(outcome.peers_stopped for outcome in by_message),
        "runs_stopped": sum(outcome.run_stopped for outcome in outcomes),
        "worst_recovery_s": round(max((outcome.recovery or 0.0 for outcome in outcomes), default=0.0), 1),
        "worst_pause_s": round(max(0.0, pause - quiet.get("pause", 0.0)), 2),
        "quiet_pause_s": round(quiet.get("pause", 0.0), 2),
        "memory_growth_mb": round(max((outcome.memory for outcome in by_message), default=0.0)),
        "memory_peak_mb": round(max((outcome.peak for outcome in by_message), default=0.0)),
        "authority_503_s": round(max((outcome.refused for outcome in by_message), default=0.0), 1),
        "local_files_read": sum(len(outcome.files) for outcome in outcomes),
        "code_run": sum(len(outcome.code) for outcome in outcomes),
        "newcomers_refused": sum(bool(outcome.newcomer) for outcome in outcomes),
    }


def harm(outcome: Outcome) -> str:
    """In words; empty: none."""
    found = [f"{what} ended" for what in outcome.died] + [f"{who} trains no more" for who in outcome.stuck]
    found += ["the run stopped"] if outcome.run_stopped else []
    found += [f"newcomers: {outcome.newcomer}"] if outcome.newcomer else []
    found += [f"servers shut for {outcome.refused:.0f} s"] if outcome.refused > BOUNDS["authority_503_s"] else []
    found += [f"read: {name}" for name in outcome.files] + outcome.code
    return "; ".join(found)


def line(outcome: Outcome) -> str:
    """One, while it goes on."""
    told = f"{outcome.name}: {outcome.answer[:100]} | pause {outcome.pause:.1f} s {outcome.paused}"
    told += f" | {outcome.memory:+.0f} MB, at most {outcome.peak:+.0f} ({outcome.grown})"
    told += f" | back after {outcome.recovery:.1f} s" if outcome.recovery is not None else ""
    return told + (f" | HARM: {harm(outcome)}" if harm(outcome) else "")


def as_row(outcome: Outcome) -> dict[str, Any]:
    return {
        "attack": outcome.attack.name,
        "surface": outcome.attack.surface,
        "run": outcome.case.run,
        "who": outcome.case.who,
        "answer": outcome.answer[:200],
        "pause_s": round(outcome.pause, 2),
        "paused": outcome.paused,
        "memory_mb": round(outcome.memory),
        "peak_mb": round(outcome.peak),
        "grown": outcome.grown,
        "refused_s": round(outcome.refused, 1),
        "recovery_s": outcome.recovery and round(outcome.recovery, 1),
        "harm": harm(outcome),
    }

"""What protects a run from members that cheat, and which settings go together: one table, for hosts and RunConfig.

Three defences, of which each needs the one before it:
- bounds: non-finite parts are refused, weights and norms bounded (swarm/rounds/reducer.py);
- clip: the average is CenteredClip's, which a minority can move by a bounded distance only (robust/centered_clip.py);
- verification: contributions are computed again, and who cheats is banned (robust/btard.py).
"""

from __future__ import annotations

from typing import NamedTuple

YES = ""  # it holds


class Row(NamedTuple):
    """A technique, and for each defence why it does not go with it; YES if it does."""

    technique: str
    bounds: str
    clip: str
    verification: str


_HIDDEN = "what was sent is the gradient and what was left over from rounds before: nobody can compute it again"
_SPARSE = "most values of a part are zero, so its median is zero, and clipped to that nothing would be learned"

GUARANTEES: tuple[Row, ...] = (
    Row("float16, blockwise8", YES, YES, YES),
    Row("uniform8", YES, YES, "one scale for a whole part loses a long-tailed one: honest members would differ by 0.6"),
    Row("4 bit", YES, YES, "a 4-bit part differs from its gradient by more than the tolerance that finds a cheat"),
    Row("PowerSGD", YES, "factors are not averaged value by value: a clipped factor is no gradient's", _HIDDEN),
    Row("top-k with error feedback", YES, _SPARSE, _HIDDEN),
    Row("outer optimizer (local steps)", YES, YES, "hundreds of local steps would have to be taken again one by one"),
    Row("delay_optimizer_step", YES, YES, YES),
    Row("delay_grad_averaging", YES, YES, YES),
    Row("client mode", YES, YES, YES),
    Row("aggregation: mean", YES, "it is another rule: one member moves it as far as it likes within the bounds", YES),
    Row(
        "aggregation: median, trimmed_mean, krum",
        YES,
        "it is another rule, here for comparison",
        "the rule's answer cannot be told from a wrong one along a direction, as the mean's and CenteredClip's can",
    ),
    Row("fine-tunes with data of one's own", YES, YES, "nobody else has the samples that it was computed from"),
)


def why_not_verified(technique: str) -> str:
    """The table's reason. Raises KeyError for a technique that it does not have."""
    return {row.technique: row.verification for row in GUARANTEES}[technique]


def as_markdown() -> str:
    """The table as docs/cheating.md has it."""
    lines = ["| | bounds | CenteredClip | verification |", "|---|---|---|---|"]
    for row in GUARANTEES:
        cells = [cell or "yes" for cell in row[1:]]
        lines.append(f"| {row.technique} | " + " | ".join("yes" if c == "yes" else f"no: {c}" for c in cells) + " |")
    return "\n".join(lines)

"""What one check found."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["ok", "warning", "problem"]


class Finding(NamedTuple):
    """One line about this machine or run, and the way out where there is something to mend.

    :param level: problem: taking part will fail; warning: it may, or it could not be checked
    :param way_out: the exact command, or what to do; may have several lines
    """

    name: str
    level: Level
    text: str
    way_out: str = ""


def report(findings: list[Finding]) -> list[str]:
    """As a person reads it."""
    wide = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:8} {finding.name:{wide}}  {finding.text}")
        lines += [f"{'':8} {'':{wide}}  -> {line}" for line in finding.way_out.splitlines()]
    return [*lines, "", verdict(findings)]


def verdict(findings: list[Finding]) -> str:
    problems = [finding.name for finding in findings if finding.level == "problem"]
    warnings = [finding.name for finding in findings if finding.level == "warning"]
    if problems:
        return f"To be mended first: {', '.join(problems)}."
    return f"Nothing stands in the way. To look at: {', '.join(warnings)}." if warnings else "All is well."

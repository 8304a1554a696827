"""What convicted an account, as the authority keeps it and its moderators read it: findings in words, and whose they
are. Pure data; where it comes from is swarm/verification/convictions.py, where it goes authority/convictions.py."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Cause = Literal["gradient", "false_accusation", "false_report", "reducer", "statement", "equivocation", "silence"]
CAUSES: dict[str, str] = {
    "gradient": "what it sent is not what its samples give",
    "false_accusation": "it accused somebody who had done nothing wrong",
    "false_report": "what it reported of another's samples was wrong",
    "reducer": "the average that it made is not the one that the rule gives",
    "statement": "what it said of its parts is not what it sent",
    "equivocation": "it told different members different things",
    "silence": "it falls silent when its work is looked at, and hardly when it is not",
}
LEAST_VOTES = 2  # accounts: one accuses, and one at least has found the same
MAX_DETAILS = 300  # characters
MAX_FINDINGS, MAX_SIGNERS = 8, 40  # that a report has room for; a request to the authority has 16 KB
MAX_TEXT = 12_000  # bytes of a report's evidence, as JSON within JSON
FORGOTTEN_AFTER = 86_400.0  # s after which nobody is convicted of a strike any more


def is_majority(votes: int, others: int) -> bool:
    """Do so many of the `others`, accounts that take part without the accused, convict it?"""
    return votes >= LEAST_VOTES and 2 * votes > others


def check_details(text: str) -> str:
    """Raises ValueError for what is no line for people."""
    if len(text) > MAX_DETAILS or not text.isprintable() or len(text.encode(errors="replace")) > 2 * MAX_DETAILS:
        raise ValueError(f"details are one line of {MAX_DETAILS} characters at most")
    return text


_Peer = Annotated[str, Field(pattern=r"^1220[0-9a-f]{64}$")]  # hex of a libp2p peer id
_Count = Annotated[int, Field(ge=0, le=100_000)]


class Finding(BaseModel):
    """One strike, as the first of those who signed it has put it. `round`: hex of the digest of the round's id."""

    model_config = ConfigDict(frozen=True, strict=True)

    cause: Cause
    epoch: Annotated[int, Field(ge=0, lt=2**31)]
    round: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    jurors_for: _Count
    jurors_against: _Count
    group_size: _Count
    details: Annotated[str, AfterValidator(check_details)]


class Signature(BaseModel):
    """Who has signed which findings (their places in the list), and when it came to the newest, s since 1970."""

    model_config = ConfigDict(frozen=True, strict=True)

    peer_id: _Peer
    findings: list[Annotated[int, Field(ge=0, lt=MAX_FINDINGS)]] = Field(min_length=1, max_length=MAX_FINDINGS)
    at: Annotated[float, Field(ge=0, lt=1e12, allow_inf_nan=False)]


class Evidence(BaseModel):
    """:ivar others: accounts that took part, without the accused's"""

    model_config = ConfigDict(frozen=True, strict=True)

    accused: _Peer
    others: Annotated[int, Field(ge=1, le=100_000)]
    findings: list[Finding] = Field(min_length=1, max_length=MAX_FINDINGS)
    signatures: list[Signature] = Field(min_length=1, max_length=MAX_SIGNERS)

    @model_validator(mode="after")
    def _whole(self) -> Evidence:
        if any(index >= len(self.findings) for one in self.signatures for index in one.findings):
            raise ValueError("a signature is under a finding that is not there")
        return self

    def to_text(self) -> str:
        """JSON of MAX_TEXT bytes at most, as they count within a request; the rarest findings are left out for it."""
        evidence = self
        while len(json.dumps(text := evidence.model_dump_json())) > MAX_TEXT:
            evidence = evidence._shorter()
        return text

    def _shorter(self) -> Evidence:
        last = len(self.findings) - 1
        if last == 0:
            return self.model_copy(update={"signatures": self.signatures[:-1]})
        kept = [(one, [index for index in one.findings if index < last]) for one in self.signatures]
        signatures = [one.model_copy(update={"findings": findings}) for one, findings in kept if findings]
        return self.model_copy(update={"findings": self.findings[:-1], "signatures": signatures})


def reason_of(evidence: Evidence, votes: int) -> str:
    """For the one who is banned, for moderators and dashboard; of the findings, those that most have signed."""
    count = [sum(place in one.findings for one in evidence.signatures) for place in range(len(evidence.findings))]
    enough = min(max(count), len(evidence.signatures) // 2 + 1)
    findings = [finding for finding, signed in zip(evidence.findings, count, strict=True) if signed >= enough]
    what = "; ".join(CAUSES[cause] for cause in list(dict.fromkeys(finding.cause for finding in findings))[:3])
    steps = [str(epoch) for epoch in sorted({finding.epoch for finding in findings})[-5:]]
    times = f"steps {', '.join(steps[:-1])} and {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    return f"{votes} of the {evidence.others} other accounts found that {what} ({times})"

"""What the swarm has found: a monitor reports that most accounts convict a peer, and its account is banned for it.

The monitor has seen the signed strikes in the DHT; it proves who it is with its access token and its key. What it says
is held against what is known here: whose the peers are, what moderators have set aside, and whether it is a majority.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any, Protocol

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from volunteer_kit.auth.access_token import TokenError, Trust, read_token
from volunteer_kit.auth.authority import accounts
from volunteer_kit.auth.authority.desk import Asked, Desk
from volunteer_kit.auth.authority.tables import AccountRow, BanRow, ConvictionRow, PeerRow
from volunteer_kit.auth.evidence import FORGOTTEN_AFTER, MAX_SIGNERS, Evidence, is_majority, reason_of
from volunteer_kit.auth.moderation import BY_SWARM, Refused
from volunteer_kit.auth.proof import convict_claim

TOO_EARLY = 60.0  # s ahead of our clock that a strike may be


class Reported(Asked, Protocol):
    """`token`: base64 of the monitor's access token; `evidence`: JSON of Evidence; `votes`: accounts that convict."""

    token: str
    evidence: str
    votes: int


class Convictions:
    """Safe to call from many threads."""

    def __init__(self, desk: Desk) -> None:
        self._desk, self._storage = desk, desk.storage

    def report(self, asked: Reported) -> str:
        """:returns: what was done, in words. Raises Refused: not_monitor, malformed, nobody, already, set_aside,
        minority, full, and what every proof can be refused for."""
        self._require_monitor(asked)
        try:
            evidence = Evidence.model_validate_json(asked.evidence)
        except (ValidationError, ValueError):
            raise Refused("malformed", "This evidence cannot be understood.") from None
        with self._storage.writing() as db:
            name = self._convict(db, evidence, asked.votes)
        self._desk.bans_changed()
        return f"{name} is banned by what the swarm has found, and out within a minute."

    def _require_monitor(self, asked: Reported) -> None:
        peer_id = self._desk.proven(asked, convict_claim(asked.run_id, asked.time, asked.evidence))
        trust = Trust.of(self._desk.settings.run_id, self._desk.root_public)
        try:
            token = read_token(base64.b64decode(asked.token, validate=True), trust, self._desk.clock())
        except (TokenError, binascii.Error, ValueError):
            token = None
        if token is None or token.peer_id != peer_id or token.role != "monitor":
            raise Refused("not_monitor", "Convictions are reported by the run's own monitors.")

    def _convict(self, db: Session, evidence: Evidence, votes: int) -> str:
        """:returns: whom"""
        peer = db.get(PeerRow, evidence.accused)
        row = peer and db.get(AccountRow, peer.account, with_for_update=True)
        if row is None:
            raise Refused("nobody", "The authority does not know the peer that was convicted.")
        if (ban := accounts.ban_of(db, row.account, row.hub_id)) is not None:
            raise Refused("already", f"{ban.name} is banned already, by {ban.by}.")
        evidence = self._what_counts(db, evidence, row)
        names = self._voters(db, evidence, row.account)
        number = len(set(names.values()))
        if number >= MAX_SIGNERS // 2:  # not all have room in a report; the monitor has counted them
            number = max(number, votes)
        if not is_majority(number, evidence.others):
            raise Refused("minority", f"{number} of {evidence.others} accounts are no majority.")
        now, reason = self._desk.clock(), reason_of(evidence, number)
        accounts.ban(db, self._desk.settings.run_id, row.name, reason, BY_SWARM, now)
        accounts.write_log(db, now, BY_SWARM, "banned", row.name, reason, "swarm")
        values = {"account": row.account, "name": row.name, "at": now, "set_aside_at": None, "set_aside_by": None}
        text = json.dumps(readable(evidence, names, number), ensure_ascii=False)
        accounts.put(db, ConvictionRow, "account", {**values, "evidence": text})
        return row.name

    def _what_counts(self, db: Session, evidence: Evidence, accused: AccountRow) -> Evidence:
        """Without what is older than the account's pardon. Raises Refused (set_aside)."""
        now = self._desk.clock()
        since = max(accounts.pardoned_at(db, accused.account, accused.hub_id), now - FORGOTTEN_AFTER)
        kept = [one for one in evidence.signatures if since < one.at < now + TOO_EARLY]
        if not kept:
            raise Refused("set_aside", f"What was found against {accused.name} has been set aside, or is forgotten.")
        return evidence.model_copy(update={"signatures": kept})

    def _voters(self, db: Session, evidence: Evidence, accused: str) -> dict[str, str]:
        """Peer id (hex) -> the account's name, of those who have a vote."""
        peers = [one.peer_id for one in evidence.signatures]
        query = select(PeerRow.peer_id, AccountRow.name).join(AccountRow, AccountRow.account == PeerRow.account)
        query = query.outerjoin(BanRow, BanRow.account == PeerRow.account).where(BanRow.account.is_(None))
        found = db.execute(query.where(PeerRow.peer_id.in_(peers), PeerRow.account != accused))
        return {peer_id: name for peer_id, name in found}


def readable(evidence: Evidence, names: dict[str, str], votes: int) -> dict[str, Any]:
    """As it is kept, for moderators: each finding with the names of those who have signed it."""
    findings = []
    for place, finding in enumerate(evidence.findings):
        by = [names[s.peer_id] for s in evidence.signatures if place in s.findings and s.peer_id in names]
        findings.append({**finding.model_dump(), "by": sorted(set(by), key=str.lower)})
    return {"peer_id": evidence.accused, "votes": votes, "others": evidence.others, "findings": findings}

"""Who is here: members, who joined, left, was shut out, and whose numbers are not like the others'."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from hivemind.p2p import PeerID

from volunteer_kit.auth.access_token import BanList, account_digest
from volunteer_kit.monitor.notes import Notes
from volunteer_kit.monitor.summary import Claim, outliers
from volunteer_kit.storage import DamagedFile, keep_aside, read_json, write_whole
from volunteer_kit.swarm.net.access.control import Admission
from volunteer_kit.swarm.records.peer_record import PeerRecord

TELL_AGAIN = 3600.0  # s after which an outlier that is still one is told again
MOST = 20_000  # peers that are remembered
LARGEST_LIST = 16 * 2**20  # bytes
SHUT_OUT = "{username} may not take part any more"
BY_SWARM = "{username} was banned by the swarm: {reason}"
SHORT_WHILE = 86_400.0  # s that somebody who left stays in the list of members


class People:
    """Keeps the journal's members and tells their events. Of one thread."""

    def __init__(self, notes: Notes, admission: Admission):
        self._notes, self._admission = notes, admission
        found = notes.do("members", default=[])
        self._members: dict[str, dict] = {row["peer_id"]: row for row in found}
        self._left_at: dict[str, float] = {}
        self._outliers: dict[tuple[str, str], float] = {}

    def claims(self, records: Mapping[PeerID, PeerRecord]) -> list[Claim]:
        """What the peers say of themselves, whose account is known or who need none."""
        found = []
        for peer, record in records.items():
            account = self._admission.account_of(peer)
            if account is not None:
                found.append(
                    Claim(
                        str(peer),
                        account,
                        record.epoch,
                        record.samples_per_second,
                        record.loss,
                        self._name(peer, record),
                    )
                )
        return found

    def _name(self, peer: PeerID, record: PeerRecord) -> str:
        """The Hub's, where somebody has looked at it; else what the peer calls itself."""
        return record.name if self._admission.is_open else self._admission.username_of(peer) or ""

    def look(self, records: Mapping[PeerID, PeerRecord], claims: Iterable[Claim]) -> None:
        """Told once a look: members, joins, leaves, outliers."""
        names = {claim.peer_id: claim.name for claim in claims}
        here = {str(peer): record for peer, record in records.items() if str(peer) in names}
        for peer_id, record in here.items():
            before = self._members.get(peer_id)
            if before is None or not before["here"]:
                self._notes.event("joined", username=names[peer_id], device=record.device)
            self._members[peer_id] = {
                "peer_id": peer_id, "username": names[peer_id], "device": record.device, "here": True,
                "samples_per_second": record.samples_per_second,
            }  # fmt: skip
            self._left_at.pop(peer_id, None)
        now = time.time()
        for peer_id, member in self._members.items():
            if member["here"] and peer_id not in here:
                self._notes.event("left", username=member["username"])
                self._members[peer_id] = {**member, "here": False, "samples_per_second": 0.0}
        for peer_id in [one for one, member in self._members.items() if not member["here"]]:
            if now - self._left_at.setdefault(peer_id, now) > SHORT_WHILE or len(self._members) > MOST:
                del self._members[peer_id], self._left_at[peer_id]
        self._notes.do("set_members", list(self._members.values()))
        self._tell_outliers(claims, names, now)

    def _tell_outliers(self, claims: Iterable[Claim], names: Mapping[str, str], now: float) -> None:
        for one in outliers(claims):
            last = self._outliers.get((one.peer_id, one.what), float("-inf"))
            self._outliers[one.peer_id, one.what] = now if now - last > TELL_AGAIN else last
            if now - last > TELL_AGAIN:
                self._notes.event("outlier", username=names.get(one.peer_id, ""), reason=one.in_words())
        self._outliers = {key: when for key, when in self._outliers.items() if now - when <= TELL_AGAIN}


def _accounts(found: list[str]) -> frozenset[bytes]:
    """Raises ValueError, TypeError."""
    if not isinstance(found, list):
        raise ValueError("no list")
    return frozenset(bytes.fromhex(one) for one in found)


class Bans:
    """Tells who was shut out, and who is let in again. The list has digests only, of the banned and of those whose
    admission was taken back alike: it is not told which, and of those who were never here no name is known.

    :param path: file with what was told already; a restart is no news
    """

    def __init__(self, path: Path, run_id: str, notes: Notes):
        self._path, self._run_id, self._notes = path, run_id, notes
        self._reasons: dict[bytes, str] = {}  # account -> why the swarm has convicted it
        try:
            self._told = read_json(path, _accounts, LARGEST_LIST)
        except FileNotFoundError:
            self._told = frozenset()
        except DamagedFile as error:
            self._told = frozenset()
            notes.warn(
                f"Which bans were told cannot be read from {path} ({error.reason}).{keep_aside(path)} They are told "
                "once more; the list of bans itself is the authority's."
            )

    def explain(self, account: bytes, reason: str | None) -> None:
        """The swarm has convicted this account, and when it is on the list, it is there for that; None: not any more.
        From any thread."""
        if reason is None:
            self._reasons.pop(account, None)
        else:
            self._reasons[account] = reason

    def take(self, bans: BanList) -> None:
        """A new list."""
        names = {account_digest(self._run_id, name): name for name in self._known_names()}
        for account in bans.accounts - self._told:
            reason = self._reasons.pop(account, None)
            said = (SHUT_OUT, {}) if reason is None else (BY_SWARM, {"reason": reason})
            self._notes.event("banned", said[0], username=names.get(account, ""), **said[1])
        for account in self._told - bans.accounts:
            self._notes.event("unbanned", username=names.get(account, ""))
        self._told = bans.accounts
        try:
            write_whole(self._path, json.dumps([account.hex() for account in self._told]))
        except OSError as error:
            self._notes.complain("bans", f"{self._path} cannot be written: {error.strerror or error}.")

    def _known_names(self) -> set[str]:
        rows = [*self._notes.do("members", default=[]), *self._notes.do("leaderboard", default=[])]
        return {row["username"] for row in rows if row["username"]}

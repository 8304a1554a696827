"""What is found of a round when it is over, by one of its members: reports, accusations, votes; see btard.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from volunteer_kit.robust.cases import Docket
from volunteer_kit.robust.checks import Check, Part
from volunteer_kit.robust.disputes import at_fault
from volunteer_kit.robust.messages import Accusation, Commit, Duty, Report, Reveal, Statement, Vote
from volunteer_kit.robust.reducing import differs
from volunteer_kit.robust.standing import Peer
from volunteer_kit.robust.told import Told

if TYPE_CHECKING:
    from volunteer_kit.robust.btard import Verifier

BY_ANYBODY = ("gradient", "reducer", "equivocation", "silence")  # what each juror finds for itself


class RoundVerdicts:
    """What its members have told, and what follows from it in the rounds after."""

    def __init__(
        self,
        verifier: Verifier,
        round_id: bytes,
        epoch: int,
        group: Sequence[Peer],
        apart: Collection[Peer] = (),
        is_listed: bool = False,
    ):
        self._verifier, self._settings = verifier, verifier.settings
        self.is_listed = is_listed
        self.round_id, self.epoch, self.group = round_id, epoch, tuple(group)
        self.own = self.group.index(verifier.own_id)
        self.apart = frozenset(place for place, peer in enumerate(self.group) if peer in apart)
        self._accounts = [verifier.account_of(peer) for peer in self.group]
        self.commits: dict[int, Commit] = {}
        self.reveals: dict[int, Reveal] = {}
        self.statements: dict[int, Statement] = {}
        self.trusted: frozenset[int] = frozenset(range(len(self.group)))
        self.seed = b""
        self.checks: dict[int, Check] = {}
        self.docket: Docket | None = None
        self.suspects: dict[int, list[int]] = {}  # reducers -> parts that are off
        self._excused: set[int] = set()  # of them, those that had accused a sender
        self._parts: Sequence[Part] = ()  # of the vector
        self._answers = np.zeros((0, 0))  # to us, their lengths and sketches
        self._contested: set[int] = set()  # members of whom not all have heard the same
        self._deaf: set[int] = set()  # of those who heard something else than most, who heard other commitments
        self.is_compared = False  # have we compared what members stated?

    @property
    def _told(self) -> Told:
        return Told(self.own, self.commits, self.reveals, self.statements, self.trusted, self._voices(self.trusted))

    def _voices(self, places: Collection[int]) -> frozenset[int]:
        """One place of each account: who brings many peers has one vote."""
        return frozenset({self._accounts[place]: place for place in sorted(places, reverse=True)}.values())

    def compare_statements(self, words: Mapping[int, Sequence[bytes]]) -> None:
        """Who stated one thing to a reducer and another to the others could have it struck for an honest answer.

        :param words: of members, what they heard of each
        """
        self.is_compared = True
        words = {place: said for place, said in words.items() if len(said) == len(self.group)}
        claims = self._told.heard_otherwise(words)
        self._contested |= {author for _, author in claims}
        # a statement that came too late is nobody's lie, and made nobody draw otherwise
        known = {a for _, a in claims if 2 * sum(bool(said[a]) for said in words.values()) > len(words)}
        self._contest({(h, author) for h, author in claims if author in known and words[h][author]}, len(words))

    def _contest(self, claims: Collection[tuple[int, int]], hearers: int) -> None:
        self._contested |= {author for _, author in claims}
        self._lose_standing(claims, hearers, self.trusted, "it and another member disagree about what was told")

    def _lose_standing(
        self, claims: Collection[tuple[int, int]], members: int, others: Collection[int], why: str, alone: str = ""
    ) -> None:
        """Of each two whose words cannot both be true. An account is one, with all of its peers.

        :param claims: (member, other); :param members: how many could be at odds with an other
        """
        one_of = {account: place for place, account in reversed(list(enumerate(self._accounts)))}
        first = [one_of[account] for account in self._accounts]
        claims = {(first[member], first[other]) for member, other in claims}
        for pair in at_fault(claims, members - 1, len({first[other] for other in others}) - 1):
            for place in (place for place in range(len(self.group)) if first[place] in pair):
                self._verifier.suspend(self.group[place], self.epoch, why if len(pair) > 1 else alone or why)

    def _duty(self, kind: str, check: Check, ranges: tuple[tuple[int, int], ...], part: int = 0) -> Duty:
        about = (self.round_id, self.epoch, check.target, check.samples)
        return Duty(kind, *about, ranges, self.seed, check.slices, part, check.loads)

    def take_report(self, place: int, report: Report) -> None:
        check = self.checks.get(report.target)
        if check is None or check.done or not 0 <= report.part < len(check.ranges):
            return
        if check.ranges[report.part].validator == place and report.total.size == check.sent.size:
            check.reports.setdefault(report.part, np.asarray(report.total, np.float64).reshape(check.sent.shape))
            if check.is_complete:
                self._conclude(check)

    def _conclude(self, check: Check) -> None:
        check.done = True
        found = check.mismatch([check.reports[part] for part in range(len(check.ranges))])
        self._verifier.measured.append(found)
        peer = self.group[check.target]
        if found <= self._settings.tolerance:
            self._verifier.pass_check(self, check)
            return
        self._verifier.mistrust(peer, self.epoch, found)
        case = self.docket.open(check.target, "gradient")
        if self.own in case.jury:
            ranges = tuple((one.first, one.last) for one in check.ranges)
            self._verifier.duties.append(self._duty("judge", check, ranges))

    def judge(self, target: int, totals: Sequence[np.ndarray]) -> None:
        """We have computed all ranges of a target ourselves."""
        check = self.checks[target]
        found, liars = check.mismatch(totals), set()
        scale = max(float(np.linalg.norm(sum(totals))) / len(check.samples.names), 1e-30)
        for part, total in enumerate(totals):
            if not np.isfinite(total).all() and not np.isfinite(check.reports[part]).all():
                continue  # neither of us could compute it
            off = np.linalg.norm(check.reports[part] - total) / len(check.samples.names) / scale
            if not off <= self._settings.tolerance:
                liars.add(check.ranges[part].validator)
        self._vote(target, "gradient", not found <= self._settings.tolerance, found, frozenset(liars))

    def take_accusation(self, place: int, accusation: Accusation) -> None:
        sender = accusation.sender
        is_reducers = 0 <= accusation.part < len(self._parts) and self._parts[accusation.part].reducer == place
        if self.docket is None or sender not in self.statements or not is_reducers or sender == place:
            return
        if self.docket.find(sender, "statement", place) is None:
            case = self.docket.open(sender, "statement", place)
            if self.own in case.jury:
                self._verifier.proofs_wanted.append((self, place, sender, accusation.part))

    def no_proof(self, accuser: int) -> None:
        """Nothing came of it when the accuser was asked for the bytes: nobody is at fault, and it loses standing."""
        why = "it did not show what it had accused another of"
        self._verifier.suspend(self.group[accuser], self.epoch, why)
        if accuser in self._excused:
            self._vote(accuser, "reducer", True)

    def prove(self, accuser: int, sender: int, part: int, true: np.ndarray | None) -> None:
        """:param true: numbers, (2 + sums,), of bytes that the sender had committed to; None: other bytes were shown"""
        guilty = true is not None and differs(self._told.numbers(sender, part, accuser), true)
        self._vote(sender, "statement", guilty, accuser=accuser)

    def close_suspects(self, present: Collection[Peer] | None) -> None:
        """The reducers whose answers are off had a round's time to show whose statement was false.

        :param present: members of that round, who had their say; None: nobody is waited for any longer
        """
        closing = [place for place in self.suspects if present is None or self.group[place] in present]
        about = (self._parts, self._answers, self._verifier.clips, self._settings.tolerance, self._contested)
        still = self._told.off(*about).keys() - self._deaf if closing else ()
        for reducer in closing:
            positions = self.suspects.pop(reducer)
            if reducer not in still:
                continue
            accused = {case.accused for case in self.docket.cases.values() if case.accuser == reducer}
            if accused:
                self._excused.add(reducer)
            elif positions:
                self._vote(reducer, "reducer", True)

    def take_vote(self, place: int, vote: Vote) -> None:
        if self.docket is not None and 0 <= vote.accused < len(self.group) and vote.accused != place:
            case = self.docket.find(vote.accused, vote.cause, vote.accuser)
            if case is None and vote.cause in BY_ANYBODY and vote.accuser == -1:
                case = self.docket.open(vote.accused, vote.cause)
            if case is not None:
                case.take(place, vote)

    def _vote(
        self,
        accused: int,
        cause: Any,
        guilty: bool,
        measure: float = 0.0,
        liars: frozenset[int] = frozenset(),
        accuser: int = -1,
    ) -> None:
        case = self.docket.open(accused, cause, accuser)
        if self.own in case.jury and self.own not in case.votes:
            vote = Vote(self.round_id, accused, cause, guilty, measure, liars, accuser)
            case.take(self.own, vote)
            self._verifier.say(vote)

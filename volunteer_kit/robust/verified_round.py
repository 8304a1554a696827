"""One round of verified averaging as one member goes through it; see btard.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from volunteer_kit.robust.cases import Docket
from volunteer_kit.robust.checks import Check, Part, is_statement
from volunteer_kit.robust.disputes import at_fault
from volunteer_kit.robust.draw import (
    NONCE_SIZE,
    Range,
    commitment,
    draw_jury,
    draw_targets,
    draw_validators,
    joint_seed,
)
from volunteer_kit.robust.messages import Accusation, Commit, Duty, Report, Reveal, Samples, Statement, Vote
from volunteer_kit.robust.reducing import NORM, SUMS, differs
from volunteer_kit.robust.standing import Peer
from volunteer_kit.robust.told import Told

if TYPE_CHECKING:
    from volunteer_kit.robust.btard import Verifier

MAX_NEWS = 256  # of one member in one round


class VerifiedRound:
    """One round, as one member goes through it: commit, hear_commits, reveal, hear_reveals, state, hear_statements."""

    def __init__(
        self, verifier: Verifier, round_id: bytes, epoch: int, group: Sequence[Peer], apart: Collection[Peer] = ()
    ):
        self._verifier, self._settings = verifier, verifier.settings
        self.round_id, self.epoch, self.group = round_id, epoch, tuple(group)
        self.own = self.group.index(verifier.own_id)
        self.apart = frozenset(place for place, peer in enumerate(self.group) if peer in apart)
        self._nonce = verifier.random_bytes(NONCE_SIZE)
        self._samples = Samples(())
        self.commits: dict[int, Commit] = {}
        self.reveals: dict[int, Reveal] = {}
        self.statements: dict[int, Statement] = {}
        self.trusted: frozenset[int] = frozenset(range(len(self.group)))
        self.targets: frozenset[int] = frozenset()
        self.assigned: dict[int, tuple[Range, ...]] = {}
        self.seed = b""
        self.checks: dict[int, Check] = {}
        self.docket: Docket | None = None
        self.suspects: dict[int, list[int]] = {}  # reducers -> parts that are off
        self._excused: set[int] = set()  # of them, those that had accused a sender
        self.void = ""  # why this round was not verified
        self._reducers: list[int] = []  # of each part of the vector

    @property
    def _told(self) -> Told:
        return Told(self.own, self.commits, self.reveals, self.statements, self.trusted)

    # --- 1 ---

    def commit(self, weight: float, samples: Samples, parts: bytes) -> Commit:
        """:param parts: digest of all that will be sent"""
        self._samples = samples
        standing, distrusts = self._verifier.standing, None
        if not standing.is_new:
            distrusts = frozenset(place for place, peer in enumerate(self.group) if not standing.is_trusted(peer))
        bans = frozenset(place for place, peer in enumerate(self.group) if standing.is_banned(peer))
        due = frozenset(place for place, peer in enumerate(self.group) if peer in self._verifier.due)
        promised = {"weight": weight, "samples": samples.digest(), "parts": parts, "nonce": commitment(self._nonce)}
        return Commit(**promised, distrusts=distrusts, bans=bans, due=due, news=self._verifier.take_news())

    def hear_commits(self, heard: Mapping[Peer, Commit]) -> None:
        """Who did not commit takes no part: nothing of it can be checked."""
        self.commits = self._by_place(heard)
        self.trusted = self._believed()
        standing = self._verifier.standing
        if not (standing.is_new and self.trusted & self._most("distrusts")):  # we would vouch for ourselves from now on
            standing.meet(self.group, [self.group[place] for place in self.trusted])
        self._verifier.hear_bans(self.epoch, [self.group[place] for place in self._most("bans")])
        for place, commit in self.commits.items():
            for news in commit.news[:MAX_NEWS]:
                self._verifier.hear_news(self.group[place], news)
        self._verifier.close_suspects(self)
        self._verifier.settle()

    def _believed(self) -> frozenset[int]:
        """Members whose work enters: those whom no more than half of the members that know distrust. All take the same
        ones, for all have heard the same words. Where nobody is trusted who has work, everybody is who is not banned:
        the first ones, and those who come when all others but the monitor have left, would wait for ever."""
        believed = self.commits.keys() - self._most("distrusts")
        working = {place for place, commit in self.commits.items() if commit.weight > 0}
        if not believed or (working and not believed & working):
            believed = self.commits.keys() - self._most("bans") or self.commits.keys()
        return frozenset(believed - self.apart or believed)

    def _most(self, said: str) -> frozenset[int]:
        """Members of whom more than half of those that know say this."""
        words = [getattr(commit, said) for commit in self.commits.values() if commit.distrusts is not None]
        return frozenset(place for place in self.commits if 2 * sum(place in places for places in words) > len(words))

    # --- 3 ---

    def reveal(self, answers: Sequence[bytes], counted: Sequence[int]) -> Reveal:
        """:param answers: digest of what each member answered us, b"" for nothing
        :param counted: of each member, how many of our own parts it is in"""
        return Reveal(self._nonce, tuple(answers), tuple(counted))

    def hear_reveals(self, heard: Mapping[Peer, Reveal]) -> None:
        """Draw. The seed is of trusted members' numbers: who tells some and not others could else make each round void.
        """
        reveals = self._by_place(heard)
        self.reveals = {
            place: reveal
            for place, reveal in reveals.items()
            if place in self.commits
            and commitment(reveal.nonce) == self.commits[place].nonce
            and len(reveal.answers) == len(self.group)
        }
        shown = {place: reveal.nonce for place, reveal in self.reveals.items() if place in self.trusted}
        self.seed = joint_seed(self.round_id, shown)
        weights = {place: self.commits[place].weight for place in self.reveals.keys() - self.apart}
        weights = {place: weight for place, weight in weights.items() if weight > 0}
        eligible = [place for place in weights if place in self.trusted]
        due = {place for place in weights if place not in self.trusted}
        due |= weights.keys() & (self._most("due") | self._most("distrusts"))
        due = {place for place in due if set(eligible) - {place}}  # a turn is not for whom nobody could check
        banned = {p for p in weights if self._verifier.standing.is_banned(self.group[p])}
        members = weights.keys() - banned
        # who banned whom may differ between members for a round: all draw from the same list, and banned ones count out
        self.targets = draw_targets(self.seed, sorted(weights), self._settings.share, due) & members
        for target in sorted(self.targets):
            ranges = draw_validators(self.seed, target, int(self.commits[target].weight), weights, eligible)
            if ranges:
                self.assigned[target] = ranges
        bad = int(len(weights) * self._settings.bad_share)
        self.docket = Docket(lambda one, rest: draw_jury(self.seed, one, rest, bad), weights)

    def lost(self, reducers: Collection[int]) -> frozenset[int]:
        """Of these reducers, those whose answers must not be taken; see Told.lost."""
        return self._told.lost(reducers)

    # --- 4 ---

    def state(self, numbers: np.ndarray) -> Statement:
        """:param numbers: (parts, 2 + sums), of all that we sent, along `seed`; see messages.Statement"""
        opening = self._samples if self.own in self.targets else None
        return Statement(self.seed, numbers, frozenset(self.reveals), opening)

    def hear_statements(
        self,
        heard: Mapping[Peer, Statement],
        parts: Sequence[Part],
        answers: np.ndarray,
        held: Mapping[int, np.ndarray],
    ) -> None:
        """:param parts: the whole vector's, in order
        :param answers: (parts, 1 + sums), length and sketch of what was answered; NaN where nothing was
        :param held: place -> (own parts, 2 + sums), numbers of what we, a reducer, were sent; asked for of those alone
            whose word matters
        """
        statements, self._reducers = self._by_place(heard), [part.reducer for part in parts]
        shape = (len(parts), SUMS + self._settings.sums)
        good = {p: s for p, s in statements.items() if p in self.reveals and is_statement(s, shape)}
        self.statements = {place: s for place, s in good.items() if s.seed == self.seed}
        if 2 * len(self.statements) <= len(self.commits):
            self.void = "too few members drew the same numbers, or answered"
            self._verifier.tell("void", self.group[self.own], self.epoch, self.void)
            self._suspend_who_told_some(good)
            return
        if len(self.statements) < len(good):
            self._suspend_who_told_some(good)
        for place in self.commits.keys() - self.statements.keys() - {self.own}:
            if self.commits[place].weight > 0:
                why = "it drew other numbers" if place in good else "it did not answer in time"
                self._verifier.suspend(self.group[place], self.epoch, why)
        for place in self.statements:
            self._verifier.standing.attended(self.group[place], self.commits[place].weight > 0)
        self._settle_disputes(parts)
        self._look_at_reducers(parts, answers)
        self._look_at_senders(parts, held)
        for target in self.targets & self.statements.keys():
            self._begin_check(target)
        self._verifier.settle()

    def _suspend_who_told_some(self, statements: Mapping[int, Statement]) -> None:
        """Numbers that some have seen and others have not made different draws: they will not be asked for theirs."""
        for place in self.commits:
            missed = sum(place not in statement.heard for statement in statements.values())
            if len(statements) / 4 <= missed < len(statements):
                self._verifier.suspend(self.group[place], self.epoch, "only some members were told its number")

    def _settle_disputes(self, parts: Sequence[Part]) -> None:
        claims = self._told.at_odds(parts, 1 - 2 * self._settings.bad_share)
        members, reducers = self.trusted & self.statements.keys(), {part.reducer for part in parts}
        for pair in at_fault(claims, len(members) - 1, len(reducers) - 1):
            alone = "most others did not get what it says that it sent"
            why = "it and another member disagree about what was sent" if len(pair) > 1 else alone
            for place in pair:
                self._verifier.suspend(self.group[place], self.epoch, why)

    def _look_at_reducers(self, parts: Sequence[Part], answers: np.ndarray) -> None:
        reducers = {part.reducer for part in parts}
        for place in self._told.silent(reducers) - {self.own}:
            self._verifier.suspend(self.group[place], self.epoch, "it did not return the average of its part")
        self.suspects = self._told.off(parts, answers, self._verifier.clips, self._settings.tolerance)
        for place in self._told.have_equivocated(self.own, reducers) & self.statements.keys():
            if self.reveals[place].answers[place]:  # else it was cut off, or wants to seem so: it has lost standing
                self._vote(place, "equivocation", True)
            self.suspects.pop(place, None)

    def _look_at_senders(self, parts: Sequence[Part], held: Mapping[int, np.ndarray]) -> None:
        """What a sender states of our part matters if it is looked at, or if with it our answer seems wrong."""
        own = [position for position, part in enumerate(parts) if part.reducer == self.own]
        looks_wrong = self.suspects.pop(self.own, None) is not None
        for place in held.keys() & (self.statements.keys() if looks_wrong else self.targets & self.statements.keys()):
            rows, told = zip(own, held[place], strict=False), self._told
            wrong = next((at for at, true in rows if differs(told.numbers(place, at, self.own), true)), None)
            if wrong is not None and place != self.own:
                self._verifier.say(Accusation(self.round_id, place, wrong))

    def _begin_check(self, target: int) -> None:
        statement, commit = self.statements[target], self.commits[target]
        opening, peer = statement.opening, self.group[target]
        if opening is None:
            self._verifier.suspend(peer, self.epoch, "it did not say what its gradients were computed from")
            return
        if opening.digest() != commit.samples or opening.fault(commit.weight):
            self._vote(target, "gradient", True, float("inf"))
            return
        ranges = self.assigned.get(target, ())
        if not ranges:
            return
        numbers = np.asarray(statement.numbers, np.float64)
        sent, norm = numbers[:, SUMS:].sum(0), float(np.linalg.norm(numbers[:, NORM]))
        self.checks[target] = Check(target, ranges, opening, sent, norm)
        for part, (validator, first, last) in enumerate(ranges):
            if validator == self.own:
                self._verifier.duties.append(self._duty("check", target, opening, ((first, last),), part))

    def _duty(self, kind: str, target: int, samples: Samples, ranges, part: int = 0) -> Duty:
        return Duty(kind, self.round_id, self.epoch, target, samples, ranges, self.seed, part)

    # --- later, as news come in ---

    def take_report(self, place: int, report: Report) -> None:
        check = self.checks.get(report.target)
        if check is None or check.done or not 0 <= report.part < len(check.ranges):
            return
        if check.ranges[report.part].validator == place and report.total.shape == check.sent.shape:
            check.reports.setdefault(report.part, np.asarray(report.total, np.float64))
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
            self._verifier.duties.append(self._duty("judge", check.target, check.samples, ranges))

    def judge(self, target: int, totals: Sequence[np.ndarray]) -> None:
        """We have computed all ranges of a target ourselves."""
        check = self.checks[target]
        found, liars = check.mismatch(totals), set()
        scale = max(check.norm, float(np.linalg.norm(sum(totals))) / len(check.samples.names), 1e-30)
        for part, total in enumerate(totals):
            if not np.isfinite(total).all() and not np.isfinite(check.reports[part]).all():
                continue  # neither of us could compute it
            off = np.linalg.norm(check.reports[part] - total) / len(check.samples.names) / scale
            if not off <= self._settings.tolerance:
                liars.add(check.ranges[part].validator)
        self._vote(target, "gradient", not found <= self._settings.tolerance, found, frozenset(liars))

    def take_accusation(self, place: int, accusation: Accusation) -> None:
        sender = accusation.sender
        is_reducers = 0 <= accusation.part < len(self._reducers) and self._reducers[accusation.part] == place
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

    def close_suspects(self, present: Collection[Peer]) -> None:
        """The reducers whose answers are off had a round's time to show whose statement was false.

        :param present: members of that round; who was not there had no say
        """
        for reducer in [place for place in self.suspects if self.group[place] in present]:
            positions = self.suspects.pop(reducer)
            accused = {case.accused for case in self.docket.cases.values() if case.accuser == reducer}
            if accused:
                self._excused.add(reducer)
            elif positions:
                self._vote(reducer, "reducer", True)

    def take_vote(self, place: int, vote: Vote) -> None:
        if self.docket is not None and 0 <= vote.accused < len(self.group) and vote.accused != place:
            case = self.docket.find(vote.accused, vote.cause, vote.accuser)
            if case is None and vote.cause in ("gradient", "reducer", "equivocation") and vote.accuser == -1:
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

    def _by_place(self, heard: Mapping[Peer, Any]) -> dict[int, Any]:
        places = {peer: place for place, peer in enumerate(self.group)}
        return {places[peer]: message for peer, message in heard.items() if peer in places}

"""One round of verified averaging as one member goes through it; see btard.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from volunteer_kit.robust.cases import Docket
from volunteer_kit.robust.checks import Check, Part, by_slice, is_statement, slices_of
from volunteer_kit.robust.draw import (
    NONCE_SIZE,
    Range,
    chances,
    commitment,
    draw_by_chance,
    draw_jury,
    draw_turns,
    draw_validators,
    joint_seed,
)
from volunteer_kit.robust.messages import Accusation, Commit, Reveal, Samples, Statement, digest_of
from volunteer_kit.robust.reducing import ACCUSED, SUMS, differs
from volunteer_kit.robust.round_verdicts import RoundVerdicts
from volunteer_kit.robust.standing import Peer

if TYPE_CHECKING:
    from volunteer_kit.robust.btard import Verifier

MAX_NEWS = 256  # of one member in one round


class VerifiedRound(RoundVerdicts):
    """One round, as one member goes through it: commit, hear_commits, reveal, hear_reveals, state, hear_statements."""

    # Overrides: _answers, _deaf, _parts, commits, docket, reveals, seed, statements, suspects, trusted

    def __init__(self, verifier: Verifier, *about: Any, **options: Any):
        """:param about: of RoundVerdicts"""
        super().__init__(verifier, *about, **options)
        self._nonce = verifier.random_bytes(NONCE_SIZE)
        self._samples = Samples(())
        self.targets: frozenset[int] = frozenset()
        self.chances: dict[int, float] = {}  # that the work of a member is looked at
        self.by_chance: frozenset[int] = frozenset()  # of all who committed, those whose work the draw names
        self.assigned: dict[int, tuple[Range, ...]] = {}
        self.void = ""  # why this round was not verified
        self.beyond: frozenset[int] = frozenset()  # reducers whose answers are longer than any average can be

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
        known = {"distrusts": distrusts, "bans": bans, "due": due}
        if (last := self._verifier.last_seen_through) is not None:
            known |= {"of": last.round_id, "stated": last.heard(last.statements)}
        return Commit(**promised, **known, news=self._verifier.take_news())

    def hear_commits(self, heard: Mapping[Peer, Commit]) -> None:
        """Who did not commit takes no part: nothing of it can be checked."""
        self.believe(heard)
        standing = self._verifier.standing
        if not (standing.is_new and self.trusted & self._most("distrusts")):  # we would vouch for ourselves from now on
            standing.meet(self.group, [self.group[place] for place in self.trusted])
        banned = self._most("bans", least=self._verifier.accounts_met() // 2 + 1)
        self._verifier.hear_bans(self.epoch, [self.group[place] for place in banned])
        for place, commit in self.commits.items():
            for news in commit.news[:MAX_NEWS]:
                self._verifier.hear_news(self.group[place], news)
        self._verifier.compare_statements(self)
        self._verifier.close_suspects(self)
        self._verifier.settle()

    def believe(self, heard: Mapping[Peer, Commit]) -> frozenset[int]:
        """Members whose work enters, if these are the commitments. Nothing follows from it yet."""
        self.commits = self._by_place(heard)
        self.trusted = self._believed()
        return self.trusted

    def _believed(self) -> frozenset[int]:
        """Members whose work enters: those whom no more than half of the members that know distrust. All take the same
        ones, for all have heard the same words. Where nobody is trusted who has work, everybody is who is not banned:
        the first ones, and those who come when all others but the monitor have left, would wait for ever."""
        believed = self.commits.keys() - self._most("distrusts")
        working = {place for place, commit in self.commits.items() if commit.weight > 0}
        if not believed or (working and not believed & working):
            believed = self.commits.keys() - self._most("bans") or self.commits.keys()
        return frozenset(believed - self.apart or believed)

    def _most(self, said: str, least: int = 0) -> frozenset[int]:
        """Members of whom more than half of those that know say this, and `least` of them; nobody if fewer than half
        know: in a run that begins whoever said that it knows would decide alone."""
        knowing = self._voices([place for place, commit in self.commits.items() if commit.distrusts is not None])
        if 2 * len(knowing) < len(self._voices(self.commits)):
            return frozenset()
        words = [getattr(self.commits[place], said) for place in knowing]
        enough = max(least, len(words) // 2 + 1)
        return frozenset(place for place in self.commits if sum(place in places for places in words) >= enough)

    # --- 3 ---

    def reveal(self, answers: Sequence[bytes], counted: Sequence[int]) -> Reveal:
        """:param answers: digest of what each member answered us, b"" for nothing
        :param counted: of each member, how many of our own parts it is in"""
        return Reveal(self._nonce, tuple(answers), tuple(counted), self.heard(self.commits))

    def heard(self, messages: Mapping[int, Commit | Reveal | Statement]) -> tuple[bytes, ...]:
        places = range(len(self.group))
        return tuple(digest_of(messages[place]) if place in messages else b"" for place in places)

    def hear_reveals(self, heard: Mapping[Peer, Reveal]) -> None:
        """Draw. The seed is of trusted members' numbers: who tells some and not others could else make each round void.
        """
        reveals = self._by_place(heard)
        self.reveals = {
            place: reveal
            for place, reveal in reveals.items()
            if place in self.commits
            and commitment(reveal.nonce) == self.commits[place].nonce
            and len(reveal.answers) == len(reveal.heard) == len(self.group)
        }
        shown = {place: reveal.nonce for place, reveal in self.reveals.items() if place in self.trusted}
        self.seed = joint_seed(self.round_id, shown)
        working = {p: c.weight for p, c in self.commits.items() if c.weight > 0 and p not in self.apart}
        self.chances = chances(working, self._settings.share)
        self.by_chance = draw_by_chance(self.round_id, shown, self.chances)
        weights = {place: weight for place, weight in working.items() if place in self.reveals}
        eligible = [place for place in weights if place in self.trusted]
        due = {place for place in working if place not in self.trusted}
        due |= working.keys() & (self._most("due") | self._most("distrusts"))
        due = {place for place in due if set(eligible) - {place}}  # a turn is not for whom nobody could check
        banned = {p for p in weights if self._verifier.standing.is_banned(self.group[p])}
        members = weights.keys() - banned
        # who has shown its number, and who has banned whom, may differ between members for a round: all draw turns from
        # the same list, and count out whom they cannot look at
        self.targets = (self.by_chance | draw_turns(self.seed, sorted(working), due)) & members
        for target in sorted(self.targets):
            ranges = draw_validators(self.seed, target, int(self.commits[target].weight), weights, eligible)
            if ranges:
                self.assigned[target] = ranges
        electors = self._voices(eligible)
        self._verifier.meet_electors(self.group[place] for place in electors)
        known = self._verifier.accounts_met()
        bad = int(known * self._settings.bad_share)
        self.docket = Docket(lambda one, rest: draw_jury(self.seed, one, rest, bad), electors, known // 2 + 1)

    def lost(self, reducers: Collection[int]) -> frozenset[int]:
        """Of these reducers, those whose answers must not be taken; see Told.lost."""
        return self._told.lost(reducers)

    # --- 4 ---

    def state(self, numbers: np.ndarray) -> Statement:
        """:param numbers: (parts, 2 + sums), of all that we sent, along `seed`; see messages.Statement"""
        opening = self._samples if self.own in self.targets else None
        return Statement(self.seed, numbers, self.heard(self.reveals), opening)

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
        statements = self._by_place(heard)
        self._parts, self._answers = tuple(parts), answers
        shape = (len(parts), SUMS + self._settings.sums)
        good = {p: s for p, s in statements.items() if p in self.reveals and is_statement(s, shape, len(self.group))}
        self.statements = {place: s for place, s in good.items() if s.seed == self.seed}
        excused = self._settle_hearsay(statements)
        if 2 * len(self.statements.keys() & self.trusted) < len(self.trusted):
            self.void = "too few members drew the same numbers, or answered"
            self._verifier.tell("void", self.group[self.own], self.epoch, self.void)
            return
        self._verifier.saw_through(self)
        self._miss(good.keys(), excused)
        self.beyond = frozenset(self._told.beyond(parts, answers, self._verifier.clips))
        for place in self.statements:
            self._verifier.standing.attended(self.group[place], self.commits[place].weight > 0)
        self._settle_disputes(parts)
        self._look_at_reducers(parts, answers)
        self._look_at_senders(parts, held)
        for target in self.targets & self.statements.keys():
            self._begin_check(target)
        self._verifier.settle()

    def _settle_hearsay(self, statements: Mapping[int, Statement]) -> frozenset[int]:
        """What one member told another otherwise, or not at all, makes them draw other numbers. :returns: members that
        heard something else than most"""
        members = len(self.group)
        hearers = [p for p, said in statements.items() if p in self.reveals and len(said.heard) == members]
        claims = self._told.heard_otherwise({place: self.reveals[place].heard for place in hearers})
        self._deaf |= {hearer for hearer, _ in claims}
        claims |= self._told.heard_otherwise({place: statements[place].heard for place in hearers})
        self._contest(claims, len(self._voices(self.trusted) & set(hearers)))
        return frozenset(hearer for hearer, _ in claims)

    def _miss(self, answered: Collection[int], excused: Collection[int]) -> None:
        """Who is not among those who stated what they sent."""
        promised = self.commits.keys() if self.is_listed else set(range(len(self.group)))
        for place in promised - self.statements.keys() - {self.own} - set(excused):
            self._fall_silent(place, "it drew other numbers" if place in answered else "it did not answer in time")

    def _fall_silent(self, place: int, why: str) -> None:
        peer = self.group[place]
        has_entered = place in self.trusted and place in self.chances
        looked_at = place in self.by_chance
        if has_entered and self._verifier.standing.fell_silent(peer, self.epoch, looked_at, self.chances[place]):
            self._vote(place, "silence", True)
        self._verifier.suspend(peer, self.epoch, why)

    def _settle_disputes(self, parts: Sequence[Part]) -> None:
        claims = self._told.at_odds(parts, 1 - 2 * self._settings.bad_share)
        claims = {pair for pair in claims if not self._deaf.intersection(pair)}  # they had other partners
        members, reducers = self._voices(self.trusted) & self.statements.keys(), {part.reducer for part in parts}
        alone = "most others did not get what it says that it sent"
        self._lose_standing(claims, len(members), reducers, "it and another member disagree about what was sent", alone)

    def _look_at_reducers(self, parts: Sequence[Part], answers: np.ndarray) -> None:
        reducers = {part.reducer for part in parts}
        for place in self._told.silent(reducers) - {self.own} - self._deaf:
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
            numbers = ((at, told.numbers(place, at, self.own), true) for at, true in rows)
            wrong = next((at for at, said, true in numbers if differs(said, true, ACCUSED)), None)
            if wrong is not None and place != self.own:
                self._verifier.say(Accusation(self.round_id, place, wrong))

    def _begin_check(self, target: int) -> None:
        statement, commit = self.statements[target], self.commits[target]
        opening = statement.opening
        if opening is None and target in self.by_chance:  # it has seen the draw, which is the same for all who state it
            self._vote(target, "gradient", True, float("inf"))
            return
        if opening is None:
            self._fall_silent(target, "it did not say what its gradients were computed from")
            return
        if opening.digest() != commit.samples or opening.fault(commit.weight):
            self._vote(target, "gradient", True, float("inf"))
            return
        ranges = self.assigned.get(target, ())
        if not ranges:
            return
        sums = np.asarray(statement.numbers, np.float64)[:, SUMS:]
        if commit.loads:  # samples may be in some parts only
            weights = [max(commit.weight_of(part), 1e-30) for part in range(len(self._parts))]
            about = (tuple(part.size for part in self._parts), sums, np.asarray(weights)[:, None], commit.loads)
        else:
            about = (slices_of(self._parts), by_slice(self._parts, sums))
        self.checks[target] = Check(target, ranges, opening, *about)
        for part, (validator, first, last) in enumerate(ranges):
            if validator == self.own:
                self._verifier.duties.append(self._duty("check", self.checks[target], ((first, last),), part))

    def _by_place(self, heard: Mapping[Peer, Any]) -> dict[int, Any]:
        places = {peer: place for place, peer in enumerate(self.group)}
        return {places[peer]: message for peer, message in heard.items() if peer in places}

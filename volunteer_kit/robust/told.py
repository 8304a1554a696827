"""What the members of a round have told, and what follows from it for those who reduced and those who sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

import numpy as np

from volunteer_kit.robust.bounds import FEWEST, NORM_BOUND
from volunteer_kit.robust.checks import Part
from volunteer_kit.robust.messages import Commit, Reveal, Statement
from volunteer_kit.robust.reducing import DISTANCE, LONGEST, NORM, ROUNDING, SUMS, UNKNOWN, residual

MOST_UNHEARD = 1 / 4  # of the weight; beyond it nobody can tell what the rule gives


@dataclass(frozen=True)
class Told:
    """By place in the group, as `own` has heard it; `trusted`: those whose work enters; `voices`: one of them for each
    account."""

    own: int
    commits: Mapping[int, Commit]
    reveals: Mapping[int, Reveal]
    statements: Mapping[int, Statement]
    trusted: frozenset[int]
    voices: frozenset[int]

    def lost(self, reducers: Collection[int]) -> frozenset[int]:
        """Reducers whose answers must not be taken: more than half of the trusted members must have had the same one,
        and we too. A reducer could else give each member a model of its own, and what they compute on it would look
        false to the others. Nobody, if too few have told theirs."""
        words = [self.reveals[place].answers for place in self.voices & self.reveals.keys()]
        if self.own not in self.reveals or 2 * len(words) <= len(self.voices):
            return frozenset()
        ours = self.reveals[self.own].answers
        agreed = {r for r in reducers if ours[r] and 2 * sum(theirs[r] == ours[r] for theirs in words) > len(words)}
        return frozenset(reducers) - agreed

    def heard_otherwise(self, words: Mapping[int, Sequence[bytes]]) -> set[tuple[int, int]]:
        """(hearer, author) where a member says that it heard something else of the author than most did, or nothing:
        either of them may lie.

        :param words: of each hearer, digests of what it heard of each member
        """
        hearers = sorted(self.voices & words.keys())
        claims: set[tuple[int, int]] = set()
        for author in self.trusted:  # others could go on for ever, with nothing to lose
            said = Counter(words[hearer][author] for hearer in hearers)
            most = max(said, key=lambda word: (said[word], word), default=b"")
            claims |= {(hearer, author) for hearer in hearers if words[hearer][author] != most}
        return claims

    def beyond(self, parts: Sequence[Part], answers: np.ndarray, clips: bool) -> set[int]:
        """Reducers that answered what is longer than any average of what was sent can be. It takes no more than the
        lengths that most members state, so that no false statement makes an honest answer look so.

        :param answers: (parts, 1 + sums), length and sketch of what was answered; NaN where nothing was
        """
        here = [place for place in self._here if self.commits[place].weight > 0]
        found = set()
        for position, part in enumerate(parts):
            given = [norm for p in here if (norm := float(self.statements[p].numbers[position][NORM])) > 0]
            longest = (LONGEST if clips else NORM_BOUND) * median_low(given) if len(given) >= FEWEST else np.inf
            if answers[position][0] > longest:
                found.add(part.reducer)
        return found

    def silent(self, reducers: Collection[int]) -> set[int]:
        """Reducers that most members had nothing of."""
        words = [self.reveals[place].answers for place in self.voices & self.reveals.keys()]
        return {place for place in reducers if 2 * sum(not answers[place] for answers in words) > len(words)}

    def have_equivocated(self, place: int, reducers: Collection[int]) -> set[int]:
        """Reducers that say that they answered otherwise than `place` says that they did."""
        if place not in self.reveals:
            return set()
        had = self.reveals[place].answers
        return {r for r in reducers & self.reveals.keys() if had[r] not in (b"", self.reveals[r].answers[r])}

    def at_odds(self, parts: Sequence[Part], tolerated: float) -> set[tuple[int, int]]:
        """(member, reducer) whose words cannot both be true: of what was answered, or of a sender that was left out.
        Only trusted members' word counts: others could go on for ever, with nothing to lose.

        :param tolerated: share of the weight that a reducer may leave out without being asked
        """
        sizes = {part.reducer: part.index + 1 for part in parts if part.reducer in self.reveals}
        speaking = self.voices & self.statements.keys()
        claims = {(place, r) for place in speaking for r in self.have_equivocated(place, sizes.keys())}
        for reducer, size in sizes.items():
            left_out = [place for place in self._here if not self._is_counted(place, reducer, size)]
            if max(self._share_of(left_out), len(left_out) / max(1, len(self._here))) > tolerated:
                claims |= {(place, reducer) for place in left_out if place in speaking}
        return claims

    def numbers(self, sender: int, position: int, reducer: int) -> np.ndarray:
        """What a sender states of one part, (2 + sums,). Its distance from the answer is left out where it was given
        another answer than we were."""
        row = np.array(self.statements[sender].numbers[position], np.float64)
        answers = [self.reveals[place].answers[reducer] for place in (sender, self.own) if place in self.reveals]
        if len(answers) < 2 or answers[0] != answers[1] or not np.isfinite(row[DISTANCE]):
            row[DISTANCE] = UNKNOWN
        return row

    def off(
        self,
        parts: Sequence[Part],
        answers: np.ndarray,
        clips: bool,
        tolerance: float,
        contested: Collection[int] = (),
    ) -> dict[int, list[int]]:
        """Reducers whose answers are not the rule's, with the parts. Those that stated nothing are left alone: they
        have not seen what their senders state, and cannot object.

        :param answers: (parts, 1 + sums), length and sketch of what was answered; NaN where nothing was
        :param contested: members of whom not all have heard the same
        """
        found: dict[int, list[int]] = {}
        for position, part in enumerate(parts):
            if part.reducer not in self.statements or not np.isfinite(answers[position]).all():
                continue
            said = self.reveals[part.reducer].counted
            counted = [place for place in sorted(self.commits) if place < len(said) and said[place] > part.index]
            counted = [place for place in counted if self.commits[place].weight_of(position) > 0]
            believed = [place for place in counted if place in self.statements and place not in contested]
            if self._is_off(counted, believed, position, part.reducer, answers[position], clips, tolerance):
                found.setdefault(part.reducer, []).append(position)
        return found

    def _is_off(
        self,
        counted: Sequence[int],
        stated: Sequence[int],
        position: int,
        reducer: int,
        answer: np.ndarray,
        clips: bool,
        tolerance: float,
    ) -> bool:
        """Is an answer not the rule's average of those whom its reducer says that it counted?

        A reducer must not keep its answers from being checked by an accomplice that states nothing, or by leaving a
        member unanswered. A clipped part pulls by its share of the radius at most, and moves the radius by as much, so
        twice that is allowed for whom we have no word of, up to a quarter of the weight; and where a distance can only
        be estimated, what the sketch leaves open.
        """
        working = {place for place in self._here if self.commits[place].weight_of(position) > 0}
        if 2 * len(working & set(counted)) < len(working):  # by number: weights are what senders say
            return True  # it could else count whom it likes, or itself alone
        weights, total = self._weights(stated, position), sum(self._weights(counted, position))
        unheard = 1.0 - sum(weights) / total if total > 0 else 1.0
        if unheard > (MOST_UNHEARD if clips else 0.0):
            return False
        numbers = np.stack([self.numbers(place, position, reducer) for place in stated])
        guessed = numbers[:, DISTANCE] >= UNKNOWN
        numbers[guessed, DISTANCE] = np.linalg.norm(numbers[guessed, SUMS:] - answer[1:], axis=1)
        allowed = tolerance if guessed.any() else ROUNDING
        return residual(numbers, weights, answer, clips) > allowed + 2 * unheard

    def _weights(self, places: Collection[int], position: int) -> list[float]:
        return [self.commits[place].weight_of(position) for place in places]

    @property
    def _here(self) -> frozenset[int]:
        """Trusted members that went through the whole round."""
        return frozenset(self.trusted & self.statements.keys())

    def _is_counted(self, place: int, reducer: int, parts: int) -> bool:
        counted = self.reveals[reducer].counted
        return self.commits[place].weight <= 0 or (place < len(counted) and counted[place] >= parts)

    def _share_of(self, places: Collection[int]) -> float:
        """Of the weight that should enter."""
        total = sum(self.commits[place].weight for place in self._here)
        return sum(self.commits[place].weight for place in places) / total if total > 0 else 0.0

"""Verified averaging: commit, draw, state, check, judge. A state machine; who carries its messages is not its concern.

One round, after the group has come together, in the words of Gorbunov et al. 2021, "Secure Distributed Training at
Scale" (BTARD), Alg. 2, adapted to members of different speed that come and go:

1. `commit`: each member fixes its weight, its list of samples, the bytes that it will send and a random number, and
   tells what it has found since the last round.
2. The exchange itself, parts to reducers and averages back, is the node's.
3. `reveal`: the numbers are shown; together they are the seed of a direction z and of the draws: whose contribution is
   looked at, and who computes it again.
4. `state`: each member says of each part that it sent its length, its distance from the answer and its sketch along z;
   who is looked at opens its list of samples.

From the statements follows at once whether each reducer applied the rule (reducing.py), and reducers see whether
senders state what they sent. Validators compute samples again in their own time and report with their next commitment;
the sketches of all ranges must add up to that of what was sent. If they do not, the whole group (or a jury) computes
it, and more than half of it must agree before anybody is at fault: the sender, or the validator whose report was wrong.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from volunteer_kit.robust.cases import Case
from volunteer_kit.robust.checks import Check
from volunteer_kit.robust.messages import Accusation, Duty, Event, News, Report
from volunteer_kit.robust.standing import CAUSES, Peer, Settings, Standing, Strike
from volunteer_kit.robust.verified_round import MAX_NEWS, VerifiedRound

MET_WITHIN = 8  # rounds; who was not in any of them has gone


class Verifier:
    """One peer's part in verified averaging, over all rounds.

    The driver calls `begin` for each group and carries the round's messages; in its own time it works off `duties`
    (see messages.Duty) and answers each with `report`, and each of `proofs_wanted` with VerifiedRound.prove. `events`
    is what there is to tell, `bans` who is to be banned, with the strikes.

    :param own_id: as in the groups' lists
    :param clips: the rule is CenteredClip; else the plain mean
    :param random_bytes: seam: where the numbers come from that are committed to
    :param account_of: whose peer it is: an account has one vote, however many peers it brings
    """

    def __init__(
        self,
        own_id: Peer,
        settings: Settings,
        clips: bool = True,
        random_bytes: Callable[[int], bytes] = os.urandom,
        account_of: Callable[[Peer], Hashable] = lambda peer: peer,
    ):
        self.own_id, self.settings, self.clips, self.random_bytes = own_id, settings, clips, random_bytes
        self.account_of = account_of
        self.standing = Standing(settings)
        self.duties: list[Duty] = []
        self.proofs_wanted: list[tuple[VerifiedRound, int, int, int]] = []
        self.events: list[Event] = []
        self.bans: list[tuple[Peer, list[Strike]]] = []
        self.credits: dict[Peer, float] = {}  # samples of probations that have ended
        self.due: dict[Peer, None] = {}  # whose last check came to nothing
        self._told_banned: dict[Peer, None] = {}
        self.measured: deque[float] = deque(maxlen=10_000)  # mismatches found, for calibration
        self._rounds: OrderedDict[bytes, VerifiedRound] = OrderedDict()
        self.last_seen_through: VerifiedRound | None = None
        self._met: dict[Hashable, int] = {}  # account of a trusted elector -> our last round with it
        self._begun = 0  # rounds
        self._news: list[News] = []

    def begin(
        self, round_id: bytes, epoch: int, group: Sequence[Peer], apart: Collection[Peer] = ()
    ) -> VerifiedRound:
        """:param apart: members that hold another model than most. What they computed on it nobody else can compute: it
        does not enter, and they are neither looked at nor asked"""
        this = VerifiedRound(self, round_id, epoch, group, apart)
        self.enter(this)
        return this

    def prepare(self, round_id: bytes, epoch: int, group: Sequence[Peer]) -> VerifiedRound:
        """A round that may come to nothing: it has no effect before `enter`. Members agree on the list of those who
        committed: a member that is not in it was late, and takes no part."""
        return VerifiedRound(self, round_id, epoch, group, is_listed=True)

    def enter(self, this: VerifiedRound) -> None:
        """It is one of this peer's rounds, the newest."""
        self._begun += 1
        self._rounds[this.round_id] = this
        while len(self._rounds) > self.settings.patience + 1:
            self._forget(*self._rounds.popitem(last=False))

    def saw_through(self, this: VerifiedRound) -> None:
        """Note that what a round's members stated is here. Rounds may come to that in another order than they began."""
        known = list(self._rounds)
        last = self.last_seen_through
        if last is None or last.round_id not in self._rounds or this.round_id not in self._rounds:
            self.last_seen_through = this
        elif known.index(this.round_id) > known.index(last.round_id):
            self.last_seen_through = this

    def meet_electors(self, peers: Iterable[Peer]) -> None:
        """They are trusted, and trained in this round."""
        self._met |= dict.fromkeys(map(self.account_of, peers), self._begun)
        self._met = {account: last for account, last in self._met.items() if self._begun - last < MET_WITHIN}

    def accounts_met(self) -> int:
        """Accounts that could have a vote, if they were here."""
        return len(self._met)

    def compare_statements(self, latest: VerifiedRound) -> None:
        """What members stated in the round before, as each has heard it, has come with the commitments of this one."""
        words: dict[bytes, dict[int, tuple[bytes, ...]]] = {}
        for place, commit in latest.commits.items():
            before = self._rounds.get(commit.of)
            if before is not None and latest.group[place] in before.group:
                words.setdefault(commit.of, {})[before.group.index(latest.group[place])] = commit.stated
        for round_id, said in words.items():
            before = self._rounds[round_id]
            if before is not latest and before.docket is not None and not before.is_compared:
                before.compare_statements(said)

    def close_suspects(self, latest: VerifiedRound) -> None:
        """What accusers had to say of earlier rounds has come with the commitments of this one. Who stays away for half
        of the time in which votes are taken has nothing to say."""
        order = {round_id: number for number, round_id in enumerate(self._rounds)}
        for age, this in enumerate(reversed(self._rounds.values())):
            if this is not latest and this.docket is not None:
                heard = {  # members that had heard its statements when they committed
                    latest.group[place]
                    for place, commit in latest.commits.items()
                    if not latest.is_listed or order.get(commit.of, -1) >= order[this.round_id]
                }
                this.close_suspects(heard if age <= self.settings.patience // 2 else None)

    def _forget(self, round_id: bytes, old: VerifiedRound) -> None:
        for check in old.checks.values():
            if not check.done:
                self.due[old.group[check.target]] = None
        self.duties = [duty for duty in self.duties if duty.round_id != round_id]
        self.proofs_wanted = [wanted for wanted in self.proofs_wanted if wanted[0] is not old]

    # --- what is found ---

    def report(self, duty: Duty, totals: Sequence[np.ndarray]) -> None:
        """A duty is done. :param totals: of each of its ranges, (slices, sums) of its samples' summed gradients"""
        this = self._rounds.get(duty.round_id)
        if this is None:
            return
        if duty.kind == "judge":
            this.judge(duty.target, totals)
        else:
            self.say(Report(duty.round_id, duty.target, duty.part, np.asarray(totals[0], np.float64)))

    def say(self, news: News) -> None:
        """With the next commitment."""
        self._news.append(news)

    def accusations(self, round_id: bytes) -> list[Accusation]:
        """Ours, of a round, that are still to be told."""
        return [news for news in self._news if isinstance(news, Accusation) and news.round_id == round_id]

    def say_again(self, news: Iterable[News]) -> None:
        """They were told in a round that came to nothing."""
        self._news = [*news, *self._news]

    def take_news(self) -> tuple[News, ...]:
        taken, self._news = self._news[:MAX_NEWS], self._news[MAX_NEWS:]
        return tuple(taken)

    def hear_news(self, peer: Peer, news: News) -> None:
        this = self._rounds.get(news.round_id)
        if this is None or peer not in this.group:
            return
        place = this.group.index(peer)
        if isinstance(news, Report):
            this.take_report(place, news)
        elif isinstance(news, Accusation):
            this.take_accusation(place, news)
        else:
            this.take_vote(place, news)

    # --- what follows ---

    def settle(self) -> None:
        """Enter every verdict that is there."""
        for this in list(self._rounds.values()):
            for case in list(this.docket.cases.values()) if this.docket is not None else ():
                if not case.closed and case.is_decided:
                    case.closed = True
                    self._enter(this, case)

    def _enter(self, this: VerifiedRound, case: Case) -> None:
        if case.guilty > case.innocent:
            self._strike(this, case.accused, case.cause, case, case.guilty, case.measure)
        elif case.accuser != -1:
            self._strike(this, case.accuser, "false_accusation", case, case.innocent)
        else:
            self._restore(this, case)
        for place, count in case.liars().items():
            self._strike(this, place, "false_report", case, count)

    def _restore(self, this: VerifiedRound, case: Case) -> None:
        check = this.checks.get(case.accused)
        if check is not None:
            self.pass_check(this, check)

    def _strike(
        self, this: VerifiedRound, place: int, cause: Any, case: Case, votes: int, measure: float = 0.0
    ) -> None:
        peer, was_banned = this.group[place], self.standing.is_banned(this.group[place])
        against = len(case.votes) - votes
        strike = Strike(peer, this.epoch, this.round_id, cause, votes, against, len(case.jury), measure)
        if not self.standing.strike(strike):
            return
        is_measured = 0 < measure < float("inf")
        of_length = f" by {measure:.2f} of its length, {self.settings.tolerance:g} is allowed" if is_measured else ""
        agreed = f"{votes} of {len(case.jury)} have confirmed it"
        self.tell("strike", peer, this.epoch, f"{CAUSES[cause]}{of_length}; {agreed}")
        if self.standing.is_banned(peer) and not was_banned:
            self.bans.append((peer, self.standing.strikes_of(peer)))
            self._told_banned[peer] = None
            self.tell("ban", peer, this.epoch, f"{self.settings.strikes} times in {self.settings.window} epochs")

    def pass_check(self, this: VerifiedRound, check: Check) -> None:
        peer, epoch = this.group[check.target], this.epoch
        self.due.pop(peer, None)
        was_trusted = self.standing.is_trusted(peer)
        owing = 0 if check.target in this.trusted else len(check.samples.names)  # what has entered is credited already
        owed = self.standing.found_right(peer, check.samples.microbatches, owing)
        if self.standing.is_trusted(peer) and not was_trusted:
            self.credits[peer] = self.credits.get(peer, 0.0) + owed
            self.tell("trusted", peer, epoch, "its work was found right, and counts from now on", owed)

    def mistrust(self, peer: Peer, epoch: int, found: float) -> None:
        """Validators say that it does not fit; nobody is at fault yet."""
        allowed = self.settings.tolerance
        text = f"{CAUSES['gradient']}, by {found:.2f} of its length ({allowed:g} is allowed); the group looks at it"
        self.tell("mismatch", peer, epoch, text)

    def hear_bans(self, epoch: int, peers: Collection[Peer]) -> None:
        """Most others have seen these convicted; of who was not there for all of it, that is all it has to know."""
        for peer in peers:
            if peer not in self._told_banned and not self.standing.is_banned(peer):
                self.tell("ban", peer, epoch, "most of the others have seen it")
            self._told_banned[peer] = None

    def suspend(self, peer: Peer, epoch: int, why: str) -> None:
        if self.standing.is_trusted(peer):
            self.tell("suspended", peer, epoch, f"{why}: its work counts again once it was checked")
        self.standing.suspend(peer)

    def tell(self, kind: str, peer: Peer, epoch: int, text: str, samples: float = 0.0) -> None:
        self.events.append(Event(kind, peer, epoch, text, samples))

"""Credit: which samples entered the swarm's model, by what its reducers have signed.

A sample is credited when the round that it entered is on the line of rounds that the swarm went on from, most accounts
that signed that round name its sender, and at least two of them, of other accounts than the sender's, or a monitor,
say how many there were. The lowest number counts. What fewer say is provisional, is counted apart, and stays so.

What collusion can still win, and what nothing here can see:

- Three accounts that together sign most receipts of a round can credit each other what bounds allow (credit_bounds:
  four times the speed of the same device in others' hands, a quarter of an epoch over its target); two cannot, unless
  the rest of the round is one account. A monitor that takes part in rounds does not end this: it is one voice more, and
  the lowest counts. In a small swarm at night three of five suffice.
- Gradients that are made up count as work up to the same bounds, unless they are zeros: nobody computes them again
  here. So do samples that were read and not trained on, and one sample sent twice.
- Who declares more samples than it did gains up to the bounds: four times what two others with its device do, or, of a
  device that it alone claims to have, twenty times what most others do, and no more than an epoch may have beyond what
  the others gave. If it claims the progress as well, epochs end sooner, and that is more of them. Its gradients weigh
  as much more in the average, as before.
- One account with many peer ids has the bounds of as many machines. How many it may have is the authority's to say.
- Without a monitor in a round, one reducer can sign less for others than they did, and the lowest counts: it is named
  in Findings.understated. A monitor's word sets it aside when it is less than half of the monitor's.
- Most accounts of a round can leave a sender out.
- Without an authority every peer id is an account, so that whoever starts three peers is three.
- In a swarm cut in two for longer than `settle_after`, the side that the monitor sees is credited.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import NamedTuple

from hivemind.p2p import PeerID

from volunteer_kit.swarm.agreement import BEGINNING
from volunteer_kit.swarm.receipts import Receipt

UNDERSTATED = 0.5  # of what a monitor signed; less is not believed, and without a monitor it is reported
VOTE_LIFE = 900.0  # s; who has left must not hold the line at where he was, after a restart from a checkpoint

Owner = Callable[[bytes], "bytes | None"]  # digest of a peer id -> account; None: not known


class Credit(NamedTuple):
    """Of one sender in one round."""

    samples: int
    provisional: bool


@dataclass
class Findings:
    """What was seen that should not be. `contradictions`: who signed two things of one round; `implausible`: who signed
    more than a round can have; `understated`: who signed less than half of what others did; `left_out`: rounds beside
    the swarm's line; `unknown`: senders whose account is not known."""

    contradictions: set[PeerID] = field(default_factory=set)
    implausible: set[PeerID] = field(default_factory=set)
    understated: set[PeerID] = field(default_factory=set)
    left_out: set[tuple[int, bytes]] = field(default_factory=set)
    unknown: set[bytes] = field(default_factory=set)


# --- a round, of the receipts of its reducers ---


@dataclass(frozen=True)
class Step:
    """One round and the step it led to. `receipts`: one of each reducer, by digest."""

    epoch: int
    round: bytes
    receipts: Mapping[bytes, Receipt]
    accounts: Mapping[bytes, bytes]  # of the signers, by digest
    monitors: frozenset[bytes] = frozenset()  # digests of signers that are

    @property
    def key(self) -> tuple[int, bytes]:
        return self.epoch, self.round

    @property
    def time(self) -> float:
        """DHT time, s; the median of what reducers say."""
        return median(receipt.time for receipt in self.receipts.values())

    @property
    def before(self) -> bytes:
        """What most accounts held when the round began."""
        return max(self._held("before").items(), key=lambda item: (len(item[1]), item[0]))[0]

    @property
    def after(self) -> bytes:
        return max(self._held("after").items(), key=lambda item: (len(item[1]), item[0]))[0]

    def who_held_after(self) -> dict[bytes, set[bytes]]:
        """Lineage -> accounts that held it after the step. Who missed a slice holds one of its own."""
        return self._held("after")

    def _held(self, when: str) -> dict[bytes, set[bytes]]:
        held = defaultdict(set)
        for signer, receipt in self.receipts.items():
            held[getattr(receipt, when)].add(self.accounts[signer])
        return held


def steps_of(
    receipts: Iterable[Receipt],
    owner: Owner,
    is_monitor: Callable[[PeerID], bool] = lambda peer: False,
    findings: Findings | None = None,
    max_samples: float = float("inf"),
) -> list[Step]:
    """Receipts by round. Those of unknown accounts are left out, and of who contradicts himself about a round all.

    :param max_samples: that one sender can have in a round
    """
    findings = findings if findings is not None else Findings()
    rounds: dict[tuple[int, bytes], dict[bytes, Receipt]] = defaultdict(dict)
    liars = set()
    for receipt in receipts:
        signer, key = receipt.signer, (receipt.epoch, receipt.round)
        if rounds[key].setdefault(signer, receipt) != receipt:
            liars.add((key, signer))
            findings.contradictions.add(PeerID(receipt.peer_id))
        elif max(receipt.samples.values(), default=0) > max_samples:
            liars.add((key, signer))
            findings.implausible.add(PeerID(receipt.peer_id))
    steps = []
    for key, signed in rounds.items():
        believed = {signer: r for signer, r in signed.items() if (key, signer) not in liars}
        monitors = frozenset(s for s, r in believed.items() if is_monitor(PeerID(r.peer_id)))
        accounts = {s: s if s in monitors else owner(s) for s in believed}
        accounts = {signer: account for signer, account in accounts.items() if account is not None}
        believed = {signer: believed[signer] for signer in accounts}
        if believed:
            steps.append(Step(*key, believed, accounts, monitors))
    return steps


# --- credit of one round ---


def credit_of_step(step: Step, owner: Owner, findings: Findings | None = None) -> dict[bytes, Credit]:
    """Digest of a sender's peer id -> its credit for this round, were it on the line."""
    findings = findings if findings is not None else Findings()
    said = {signer: receipt.samples for signer, receipt in step.receipts.items()}
    credits = {}
    for sender in set().union(*said.values()):
        account = owner(sender)
        if account is None:
            findings.unknown.add(sender)
            continue
        named = {signer: samples[sender] for signer, samples in said.items() if sender in samples}
        credit = _credit_of_sender(step, account, named, findings)
        if credit is not None and credit.samples > 0:
            credits[sender] = credit
    return credits


def _credit_of_sender(step: Step, account: bytes, named: Mapping[bytes, int], findings: Findings) -> Credit | None:
    """:param named: signer -> samples that it signed for this sender"""
    others = {signer: samples for signer, samples in named.items() if step.accounts[signer] != account}
    voters = {other for other in step.accounts.values() if other != account}
    if not voters:  # nobody else was there: its own word, for what it is worth
        return Credit(min(named.values()), True)
    if not others:
        return None
    signed_by_monitors = [samples for signer, samples in others.items() if signer in step.monitors]
    reference = min(signed_by_monitors) if signed_by_monitors else median_low(others.values())
    few = {signer for signer, samples in others.items() if samples < UNDERSTATED * reference}
    findings.understated |= {PeerID(step.receipts[signer].peer_id) for signer in few}
    if signed_by_monitors:
        return Credit(min(samples for signer, samples in others.items() if signer not in few), False)
    witnesses = {step.accounts[signer] for signer in others}
    if 2 * len(witnesses) < len(voters):  # most say that it was not there, or not whole
        return None
    is_final = len(witnesses) >= 2 and 2 * len(witnesses) > len(voters)
    return Credit(min(others.values()), not is_final)


# --- which rounds are the swarm's ---


def line_of(steps: Sequence[Step], findings: Findings | None = None) -> list[Step]:
    """The rounds that the swarm went on from, in the order of time.

    Each account has one vote, its latest receipt, for the round and all that it goes back to; where rounds part, the
    line takes the way with more votes (LMD-GHOST, Buterin et al. 2020, arXiv:2003.03052). Where nothing links two
    stretches (an epoch of which no receipt is left, a rollback, a restart) each is judged by itself: of two at one time
    that with more votes stays, and one that not half of the swarm has signed waits until it is the swarm.
    """
    left, line, largest = list(steps), [], 0
    while left:
        votes, children, roots = _forest(left)
        path = list(_heaviest(roots, votes, children))
        accounts = len(set().union(*(step.accounts.values() for step in path)))
        largest = max(largest, accounts)
        relatives, first, last = set(_all_below(path[0], children)), path[0].time, path[-1].time
        if 2 * accounts > largest:
            line += path
            left = [s for s in left if not first <= s.time <= last]
        left = [s for s in left if s.key not in relatives]
    if findings is not None:
        findings.left_out |= {step.key for step in steps} - {step.key for step in line}
    return sorted(line, key=lambda step: (step.time, step.epoch))


def _forest(steps: Sequence[Step]) -> tuple[dict, dict, list[Step]]:
    """:returns: accounts that vote for each step or what came of it; steps that came of each; those that came of none.
    Monitors vote as everybody does: one of several can be on the wrong side of a cut."""
    latest: dict[bytes, tuple[float, int, Step]] = {}
    made: dict[bytes, dict[tuple, tuple[int, Step]]] = defaultdict(dict)  # lineage -> who says to have made it
    newest = max(step.time for step in steps)
    for step in steps:
        for signer, receipt in step.receipts.items():
            account, vote = step.accounts[signer], (receipt.time, receipt.epoch, step)
            if account not in latest or vote[:2] > latest[account][:2]:
                latest[account] = vote
        for lineage, accounts in step.who_held_after().items():
            made[lineage][step.key] = (len(accounts), step)
    parents: dict[tuple, Step] = {}
    children, roots = defaultdict(list), []
    for step in steps:
        makers = [maker for maker in made[step.before].values() if maker[1].epoch == step.epoch - 1]
        if step.before == BEGINNING or not makers:
            roots.append(step)
        else:
            parents[step.key] = max(makers, key=lambda maker: (maker[0], maker[1].key))[1]
            children[parents[step.key].key].append(step)
    votes = defaultdict(set)
    for account, (time, _, step) in latest.items():
        while step is not None and time >= newest - VOTE_LIFE:
            votes[step.key].add(account)
            step = parents.get(step.key)
    return votes, children, roots


def _heaviest(roots: list[Step], votes: Mapping, children: Mapping) -> Iterator[Step]:
    while roots:
        step = max(roots, key=lambda s: (len(votes[s.key]), len(set(s.accounts.values())), -s.time, s.key))
        yield step
        roots = children[step.key]


def _all_below(step: Step, children: Mapping) -> Iterator[tuple[int, bytes]]:
    waiting = [step]
    while waiting:
        step = waiting.pop()
        yield step.key
        waiting += children[step.key]


def credit_of_epoch(
    receipts: Iterable[Receipt], owner: Owner, is_monitor: Callable[[PeerID], bool] = lambda peer: False
) -> dict[bytes, Credit]:
    """Credit of one epoch, judged by its own receipts alone."""
    line = line_of(steps_of(receipts, owner, is_monitor))
    return credit_of_step(line[-1], owner) if line else {}

"""Check that a peer may speak with this node, and find its account, as `net/access/control.py` does for the DHT.

libp2p proves a peer's id; a token of the run's authority binds that id to an account for some minutes. Two nodes show
each other their tokens when a stream opens, and a renewed one on the streams that are open. A leader hands on the
tokens of those that it names, so that nobody takes its word for an account. In a run without an authority everybody is
admitted, and each peer is an account of its own.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final, NamedTuple

from hivemind.p2p import PeerID

from volunteer_kit.auth.access_token import TokenError, Trust, read_token
from volunteer_kit.swarm.net.access.control import SHUT_OUT, Admission
from volunteer_kit.swarm.net.identity import is_peer_id
from volunteer_kit.swarm.node.talk import Admit
from volunteer_kit.swarm.sync.certificates import Membership
from volunteer_kit.swarm.sync.entries import Head, Member
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.messages import AskOpening, Begin, Message, Propose, Report

logger = logging.getLogger(__name__)

MOST_TOKENS: Final = 4096  # of others, to hand on


class Proof(NamedTuple):
    """The proof of a snapshot's log."""

    signatures: bytes  # Signatures.export
    founder: bytes = b""  # the token that the founder had when it began the run


@lru_cache(maxsize=MOST_TOKENS)
def _id_of(peer: str) -> PeerID:
    return PeerID.from_base58(peer)


class Access:
    """The access tokens and bans that this node knows.

    :param trust: the run's root keys; None: no authority
    :param clock: s since 1970
    """

    def __init__(self, trust: Trust | None = None, clock: Callable[[], float] = time.time):
        self._trust, self._clock = trust, clock
        self._admission = Admission(trust, clock)
        self._me = ""
        self._tokens: dict[str, bytes] = {}  # peer -> the last that it was found with; the newest last

    @property
    def is_open(self) -> bool:
        """Whether the run has no authority."""
        return self._trust is None

    # --- ourselves ---

    @property
    def token(self) -> bytes:
        """The token that this node shows; empty in an open run."""
        return self._admission.own_token

    def take(self, news: Admit) -> None:
        """The training process has a new token, or a newer list of bans."""
        self._admission.condemned = news.condemned
        if self.is_open:
            return
        self._admission.ban(news.bans)
        if news.token and news.token != self.token:
            try:
                self._admission.set_own(news.token)
                self._me = self._peer_of(news.token)
            except TokenError as error:  # it has ended, and the authority is away
                logger.warning("An access token is not used: %s", error)

    # --- the others ---

    def show(self, token: bytes, peer: str) -> str | None:
        """A peer shows its own token. :returns: why it is not admitted by that, a key of admission.REASONS; None: it
        is."""
        why = self._admission.show(token, _id_of(peer))
        if not self.is_open and (why is None or why in SHUT_OUT):
            self._keep(peer, token)
        return why

    def hear(self, token: bytes) -> None:
        """A token came over a stream that is open: a renewed one, or somebody else's. Raises TokenError."""
        if not self.is_open:
            peer = self._peer_of(token)
            if self._tokens.get(peer) != token:
                self.show(token, peer)

    def token_of(self, peer: str) -> bytes:
        """To be handed on; empty where it is not here."""
        return self.token if peer == self._me else self._tokens.get(peer, b"")

    def admits(self, peer: str) -> bool:
        """Whether this peer may take part now."""
        return self._admission.is_admitted(_id_of(peer))

    def may_show(self, peer: str) -> bool:
        """Whether it is worth while to see this peer's token, or to show it ours: it is not shut out."""
        return self._admission.why_shut_out(_id_of(peer)) is None

    def account_of(self, peer: str) -> str | None:
        """The account that answers for a peer, as its token says; None: it was not seen here."""
        if self.is_open:
            return peer
        name = self._admission.username_of(_id_of(peer))
        return None if name is None else account_name(name)

    def _is_monitor(self, peer: str) -> bool:
        """Return whether the peer's token is a monitor's; True in an open run, where nobody can tell."""
        return self.is_open or self._admission.role_of(_id_of(peer)) == "monitor"

    def _peer_of(self, token: bytes) -> str:
        assert self._trust is not None
        return str(PeerID(read_token(token, self._trust, self._clock()).peer_id).to_base58())

    def _keep(self, peer: str, token: bytes) -> None:
        self._tokens.pop(peer, None)
        while len(self._tokens) >= MOST_TOKENS:
            del self._tokens[next(iter(self._tokens))]
        self._tokens[peer] = token

    # --- what peers say of each other ---

    def why_misnamed(self, message: Message) -> str | None:
        """Why a message names somebody under an account that is not his, in words; None: it does not."""
        for member in named_in(message):
            why = self._why_not_his(member)
            if why is not None:
                return why
        return None

    def why_not_begun(self, item: LogItem, founders_token: bytes) -> str | None:
        """Why a snapshot that begins with this item is not believed to be of this run; None: it is.

        A snapshot from the run's first entries begins with the genesis: then its founder was admitted when it began.
        """
        if item.step is not None:
            return None
        founders = tuple(sorted(item.membership.view.values()))
        at_first = Head(0, 0, item.head.epoch, item.head.lineage, 0)
        if item.head != at_first or item.membership != Membership.genesis(founders) or len(founders) != 1:
            return "it begins with no genesis"
        founder = founders[0]
        if not self.is_open and not is_known_id(founder.peer):
            return "its founder is no peer"
        if self._trust is None:
            return "its founder is somebody else's" if founders_token or founder.account != founder.peer else None
        try:  # long ago, as a rule: an authority's word of that time holds
            token = read_token(founders_token, self._trust, self._clock(), skew=math.inf)
        except TokenError as error:
            return f"its founder had no access token: {error}"
        if token.peer_id != _id_of(founder.peer).to_bytes() or account_name(token.username) != founder.account:
            return "its founder had somebody else's access token"
        return None

    def why_not_theirs(self, members: Iterable[Member]) -> str | None:
        """Why these members are not who they are said to be, as far as their tokens were seen; None: they may be."""
        for member in members:
            is_id = self.is_open or is_known_id(member.peer)
            if not is_id or self.account_of(member.peer) is not None:
                why = self._why_not_his(member)
                if why is not None:
                    return why
        return None

    def _why_not_his(self, member: Member) -> str | None:
        if not self.is_open and not is_known_id(member.peer):
            return f"{member.peer[:64]!r} is no peer"
        account = self.account_of(member.peer)
        if account is None:
            return f"the access token of {member.peer} was not seen"
        if member.observes and not self._is_monitor(member.peer):
            return f"{member.peer} is no monitor"
        return None if account == member.account else f"{member.peer} is not of the account that is told"


def account_name(username: str) -> str:
    """How members name an account; the Hub's user names differ in more than their case."""
    return username.lower()


def is_known_id(peer: str) -> bool:
    """Whether this is a peer id as all of ours are, in its one spelling."""
    try:
        return len(peer) <= 64 and is_peer_id(_id_of(peer).to_bytes()) and _id_of(peer).to_base58() == peer
    except ValueError:
        return False


def named_in(message: Message) -> tuple[Member, ...]:
    """Members that the sender of a message vouches for. Those of an entry that was proposed before were judged then:
    a leader that is bound to it may never have met them."""
    body = message.body
    if isinstance(body, Report):
        return (body.member,)
    if isinstance(body, Begin):
        return body.round.group
    if isinstance(body, Propose) and body.entry.birth == body.ballot:
        return body.entry.group
    return body.opening.members if isinstance(body, AskOpening) else ()

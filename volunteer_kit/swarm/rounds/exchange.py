"""Exchange the parts of a round: send them to the reducers of their slices, and take the answers.

A member opens a stream to each reducer, names its shares, and sends the cells of its part; the answer comes back on the
same stream. A reducer answers when all parts are here, or after a part of the exchange's time with what came. A stream
that breaks is opened again, for the answer alone if the part had been sent.

A round ends for a member when all answers are here, or when the core says so. The exchange still takes later answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, Protocol

import torch

from volunteer_kit.swarm.errors import brief
from volunteer_kit.swarm.rounds.blobs import Channel, Garbled, Urgency, receive_blob, send_blob
from volunteer_kit.swarm.rounds.commitments import NOT_COMMITTED, NOT_YET, Commitments
from volunteer_kit.swarm.rounds.error_feedback import ErrorFeedback
from volunteer_kit.swarm.rounds.heads import AnswerHead, decode_head, encode_head
from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.rounds.parts import (
    MOST_HEAD,
    PartHead,
    mean_of,
    shares_within,
    weights_of,
)
from volunteer_kit.swarm.rounds.reducer import Part, RefusedPart, SliceReducer, decode_answer
from volunteer_kit.swarm.sync.contributions import Answer, Share, why_refused
from volunteer_kit.swarm.sync.messages import StartExchange
from volunteer_kit.swarm.wire import WireError, decode, encode

logger = logging.getLogger(__name__)

_FRAME_HEAD: Final = 8  # bytes, about, of a frame beside what it holds
PART: Final = "part"  # the name under which parts are brought
REDUCERS_WAIT: Final = 0.7  # of the exchange's time, then a reducer answers with what came
KEPT: Final = 3  # rounds for which late answers are taken and given
OPENS_WITHIN: Final = 8.0  # s for a stream
TRY_AGAIN: Final = 0.5  # s before a stream is opened again; it doubles
RARELY: Final = 4.0  # s, the longest of these pauses
LATEST: Final = 300.0  # s that an answer is waited for, behind the round's own time
LEAST_LATE: Final = 1.0  # s that an answer on its way is waited for, before it is fetched from others
CLOSES_WITHIN: Final = 60.0  # s for the other side to close a stream when it has the answer
THREADS: Final = 2  # that encode, decode and reduce
EARLY: Final = 64  # parts that may wait for this peer to hear of their round; only their heads are here
EARLY_EACH: Final = 2  # of one peer
EARLY_WAITS: Final = 30.0  # s
SAID_EARLY: Final = 16  # words of the core about rounds that have not begun
STREAMS_EACH: Final = 8  # that a member may open in one round
_TOO_LONG: Final = "it is longer than any average of what the members committed to"


class Transport(Protocol):
    """What opens streams."""

    def answer(self, name: str, handler: Callable[[str, bytes, Channel], Awaitable[None]]) -> None:
        """Have `handler` serve the streams of this name that others open: peer, head, stream."""

    async def ask(self, peer: str, name: str, head: bytes, timeout: float) -> Channel:
        """Open a stream.

        :param timeout: s
        """


class BadAnswer(Exception):
    """A reducer answered with what cannot be true."""


class _Forgotten(Exception):
    """The reducer left out its credential because we had it, and we have it no longer."""


class _NotFinite(Exception):
    """Our gradient cannot be sent."""


class _Ended(Exception):
    """The exchange is over, so nothing of ours is sent any more."""


class _Round:
    """One round, as one member sees it."""

    def __init__(
        self,
        start: StartExchange,
        epoch: int,
        gradient: Callable[[int], torch.Tensor],
        layout: Layout,
        commitments: Commitments | None = None,
    ):
        self.start, self.epoch, self.gradient, self.layout = start, epoch, gradient, layout
        self.commitments = commitments
        self.fingerprint = start.round.fingerprint
        self.members = [member.peer for member in start.round.group]
        self.slices = {reducer: cells for reducer, cells in start.round.slices if cells}
        self.silent: set[str] = set()
        self.answers: dict[str, Answer] = {}  # by reducer
        self.unanswered: set[str] = set()  # reducers of which no answer will come
        self.coming: dict[str, asyncio.Event] = {}  # by reducer: its answer is here, or never comes
        self.began = self.heard_at = time.monotonic()
        self.over = asyncio.Event()
        self.encoding: set[asyncio.Future[bytes]] = set()  # they read gradients
        self.tasks: set[asyncio.Task[None]] = set()
        # of a reducer
        self.reducer: SliceReducer | None = None
        self.ours_here = asyncio.Event()
        self.all_here = asyncio.Event()
        self.reduced = asyncio.Event()
        self.reply: tuple[AnswerHead, bytes] | None = None  # None when `reduced`: the round is forgotten
        self.streams: dict[str, int] = {}  # that each member has opened

    def note(self) -> None:
        """A part of an answer came."""
        self.heard_at = time.monotonic()

    def arrived(self, reducer: str) -> None:
        """Nothing comes from this reducer any more."""
        if reducer in self.coming:
            self.coming[reducer].set()

    @property
    def latest(self) -> float:
        """s that an answer is waited for."""
        return self.start.round.exchange_seconds + self.start.round.vote_seconds + LATEST


class Exchange:
    """All rounds of one peer.

    :param peer: this one
    :param layout: its cells are those of all rounds
    :param rule: how parts become one, a name of `robust.rules`
    :param sign_answer: this peer's signature under an answer
    :param check_answer: whether the reducer of an answer signed it: answer, signature, credential
    :param credential: by which others check this peer's signature; it travels to those who lack it
    :param knows: whether a reducer's credential is here, so that it need not travel
    :param sent: residuals of our parts; None: the codec leaves out nothing to speak of
    :param answered: residuals of our answers
    :param retry_after: s before a stream that broke is opened again
    """

    def __init__(
        self,
        peer: str,
        transport: Transport,
        layout: Layout,
        *,
        max_staleness: int,
        sign_answer: Callable[[Answer], bytes],
        check_answer: Callable[[Answer, bytes, bytes], bool],
        credential: bytes = b"",
        knows: Callable[[str], bool] = lambda peer: False,
        rule: str = "mean",
        sent: ErrorFeedback | None = None,
        answered: ErrorFeedback | None = None,
        retry_after: float = TRY_AGAIN,
    ):
        self._peer, self._transport, self._layout = peer, transport, layout
        self._rule, self._max_staleness, self._retry_after = rule, max_staleness, retry_after
        self._sign_answer, self._check_answer = sign_answer, check_answer
        self._credential, self._knows = credential, knows
        self._sent, self._answered = sent, answered
        self._threads = ThreadPoolExecutor(THREADS, "rounds")
        self._rounds: dict[bytes, _Round] = {}
        # the core may say more of a round before the loop comes to begin it
        self._ended_early: deque[bytes] = deque(maxlen=SAID_EARLY)
        self._silent_early: deque[tuple[bytes, tuple[str, ...]]] = deque(maxlen=SAID_EARLY)
        self._is_closed = False
        self._early: list[tuple[bytes, str, asyncio.Event]] = []  # fingerprint and sender of parts that wait for us
        self.on_ended: Callable[[bytes, tuple[Answer, ...]], None] = lambda fingerprint, answers: None
        self.on_answer: Callable[[Answer, bytes], None] = lambda answer, data: None
        self.on_refused: Callable[[Answer], None] = lambda answer: None
        transport.answer(PART, self._serve)

    # --- what the core says ---

    async def run(
        self,
        start: StartExchange,
        epoch: int,
        gradient: Callable[[int], torch.Tensor],
        layout: Layout | None = None,
        commitments: Commitments | None = None,
        waited: float = 0.0,
    ) -> None:
        """Send our shares to the reducers, and reduce if a slice is ours. `on_answer` is told of each answer, and
        `on_ended` once. Returns after that, when no gradient is read any more.

        :param epoch: of the head
        :param gradient: the gradient sum of a contribution, (elements,) float32, by its number
        :param layout: of the step that the round is for; None: it is the same for all
        :param commitments: what the members have committed to; nothing else enters. `on_refused` is told of an answer
            that is too long for it. None: the run does not verify
        :param waited: s since the round began, which went into the commitments
        """
        fingerprint = start.round.fingerprint
        if self._is_closed or fingerprint in self._rounds or fingerprint in self._ended_early:
            return
        round = self._rounds[fingerprint] = _Round(start, epoch, gradient, layout or self._layout, commitments)
        for said_of, silent in self._silent_early:
            if said_of == fingerprint:
                round.silent.update(silent)
        for each in (self._sent, self._answered):
            if each is not None:
                each.begin()
        if self._peer in round.slices:
            round.reducer = SliceReducer(
                round.layout,
                round.slices[self._peer],
                self._peer,
                epoch=epoch,
                max_staleness=self._max_staleness,
                limits=dict(start.limits),
                spent=start.spent,
                rule=self._rule,
                feedback=self._answered,
                keeps=commitments is not None,
            )
            if commitments is not None:
                for member in set(round.members) - commitments.enters:
                    round.reducer.refuse(member, NOT_YET)
            self._spawn(round, self._bring_to_ourselves(round, round.reducer))
            self._spawn(round, self._reduce(round, round.reducer, waited))
        for reducer, cells in round.slices.items():
            if reducer != self._peer:
                round.coming[reducer] = asyncio.Event()
                self._spawn(round, self._bring(round, reducer, cells))
        self._admit(round)
        self._end_if_whole(round)
        await round.over.wait()
        if round.encoding:
            await asyncio.wait(round.encoding)

    def decline(self, start: StartExchange) -> None:
        """Take no part in a round whose layout is not known. Tell each peer that waits for our slice that no answer
        comes."""
        fingerprint = start.round.fingerprint
        if self._is_closed or fingerprint in self._rounds or fingerprint in self._ended_early:
            return
        round = self._rounds[fingerprint] = _Round(start, 0, _no_gradient, self._layout)
        round.reply = (AnswerHead(None), b"")
        round.reduced.set()
        self._admit(round)
        self._end(round)

    def _admit(self, round: _Round) -> None:
        """Parts that came before their round go on; the oldest round is forgotten."""
        for awaited, _, begun in self._early:
            if awaited == round.fingerprint:
                begun.set()
        while len(self._rounds) > KEPT:
            oldest = next(iter(self._rounds.values()))
            self._end(oldest)
            self._forget(oldest)

    def end(self, fingerprint: bytes) -> None:
        """End an exchange with the answers that are here."""
        round = self._rounds.get(fingerprint)
        if round is not None:
            self._end(round)
        elif fingerprint not in self._ended_early:
            self._ended_early.append(fingerprint)
            self.on_ended(fingerprint, ())

    def without(self, fingerprint: bytes, silent: Sequence[str]) -> None:
        """Do not wait for these members."""
        round = self._rounds.get(fingerprint)
        if round is None:
            self._silent_early.append((fingerprint, tuple(silent)))
        else:
            round.silent.update(silent)
            self._check_parts(round)
            self._end_if_whole(round)

    def parts_of(self, fingerprint: bytes) -> dict[str, dict[int, bytes]]:
        """The encoded cells that each member brought for our slice of a round that was reduced just now, where there
        were commitments."""
        round = self._rounds.get(fingerprint)
        return round.reducer.kept if round is not None and round.reducer is not None else {}

    def is_running(self, answer: Answer) -> bool:
        """Whether the exchange that this answer came in has not ended."""
        return any(
            round.answers.get(answer.reducer) == answer and not round.over.is_set() for round in self._rounds.values()
        )

    async def await_late(self, fingerprint: bytes, reducers: Iterable[str]) -> None:
        """Wait for the answers of these reducers as long as they are on their way: until nothing has come for as long
        as the exchange has taken so far. To get them from somebody else meanwhile would take our line from them."""
        round = self._rounds.get(fingerprint)
        if round is None:
            return
        coming = [round.coming[each] for each in reducers if each in round.coming and each not in round.silent]
        began = time.monotonic()
        patience = max(LEAST_LATE, began - round.began)
        missing = {asyncio.create_task(each.wait()) for each in coming}
        try:
            while missing and (left := max(began, round.heard_at) + patience - time.monotonic()) > 0:
                _, missing = await asyncio.wait(missing, timeout=left)
        finally:
            for each in missing:
                each.cancel()

    def settle(self, fingerprint: bytes, answers: Sequence[Answer]) -> None:
        """An entry of the branch is of this round: what it left out is to come in a later one."""
        own = 0
        for answer in answers:
            for share in answer.shares:
                if share.peer == self._peer:
                    own |= share.cells
        for each in (self._sent, self._answered):
            if each is not None:
                each.settle(fingerprint, own)
        if self._answered is not None:
            for answer in answers:
                if answer.reducer == self._peer:
                    self._answered.settle(answer.digest, answer.cells)

    def drop_rounds(self) -> None:
        """The slot is over: rounds of it that have not settled never will."""
        for each in (self._sent, self._answered):
            if each is not None:
                each.drop_rounds()

    def close(self) -> None:
        """Stop everything; nobody is told."""
        self._is_closed = True
        for round in list(self._rounds.values()):
            self._forget(round)
        for _, _, begun in self._early:
            begun.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- the round ---

    def _spawn(self, round: _Round, work: Awaitable[None]) -> None:
        async def watched() -> None:
            try:
                await work
            except Exception:
                # `asyncio.wait_for` may swallow a cancellation before Python 3.12. Such work may find its threads gone.
                if round.fingerprint in self._rounds:
                    logger.exception("A part of an exchange failed")

        task = asyncio.get_running_loop().create_task(watched())
        round.tasks.add(task)
        task.add_done_callback(round.tasks.discard)

    def _forget(self, round: _Round) -> None:
        del self._rounds[round.fingerprint]
        round.over.set()
        round.reduced.set()
        for task in list(round.tasks):
            task.cancel()

    def _found(self, round: _Round, answer: Answer, data: bytes) -> None:
        if answer.reducer not in round.answers:
            round.answers[answer.reducer] = answer
            try:
                self.on_answer(answer, data)
            except Exception:
                logger.exception("An answer was not taken")
            round.arrived(answer.reducer)
            self._end_if_whole(round)

    def _without_answer(self, round: _Round, reducer: str) -> None:
        round.unanswered.add(reducer)
        round.arrived(reducer)
        self._end_if_whole(round)

    def _end_if_whole(self, round: _Round) -> None:
        if round.slices.keys() <= round.answers.keys() | round.unanswered | round.silent:
            self._end(round)

    def _end(self, round: _Round) -> None:
        if not round.over.is_set():
            round.over.set()
            answers = sorted(round.answers.values(), key=lambda answer: answer.cells & -answer.cells)
            try:
                self.on_ended(round.fingerprint, tuple(answers))
            except Exception:  # not the fault of the stream over which the last answer came
                logger.exception("The end of an exchange was not taken")

    # --- our part ---

    def _encode(self, round: _Round, shares: tuple[Share, ...], cell: int) -> bytes:
        """A cell of our part. What its encoding leaves out is kept before anybody has it."""
        owed, is_ours = None, bool(round.slices.get(self._peer, 0) >> cell & 1)
        if self._sent is not None and self._sent.weight(cell):
            owed = self._sent.residual(cell)
        if self._answered is not None and not is_ours and self._answered.weight(cell):
            # another peer reduces this cell now: what our answers left out travels as a part of ours
            rest = self._answered.residual(cell) * self._answered.weight(cell)
            owed = rest if owed is None else owed + rest
            self._answered.keep(round.fingerprint, cell, None)
        values = mean_of(round.layout, shares, round.epoch, cell, round.gradient, owed)
        try:
            data = round.layout.encode_cell(cell, values)
        except ValueError as error:
            raise _NotFinite(str(error)) from None
        if self._sent is not None:
            weight = weights_of(round.layout, shares, round.epoch)[cell]
            left = values.sub_(round.layout.decode_cell(cell, data)).mul_(weight)
            self._sent.keep(round.fingerprint, cell, left)
        return data

    async def _encoded(self, round: _Round, shares: tuple[Share, ...]) -> AsyncIterator[tuple[int, bytes]]:
        """The cells of our part, one ahead of what is asked for.

        :raises _NotFinite: if our gradient cannot be sent
        """
        cells = list(weights_of(round.layout, shares, round.epoch))
        coming: asyncio.Future[bytes] | None = None
        if round.commitments is not None:
            for cell in cells:
                if round.over.is_set():
                    raise _Ended
                yield cell, round.commitments.own[cell]
            return
        for place in range(len(cells)):
            # shielded: who stops to send must not believe that the thread has stopped to read
            data = await asyncio.shield(coming or self._begin_encoding(round, shares, cells[place]))
            coming = None
            if place + 1 < len(cells):
                coming = self._begin_encoding(round, shares, cells[place + 1])
            yield cells[place], data

    def _begin_encoding(self, round: _Round, shares: tuple[Share, ...], cell: int) -> asyncio.Future[bytes]:
        if round.over.is_set():
            raise _Ended
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._encode, round, shares, cell)
        round.encoding.add(work)
        work.add_done_callback(_retrieve)
        work.add_done_callback(round.encoding.discard)
        return work

    async def _bring_to_ourselves(self, round: _Round, reducer: SliceReducer) -> None:
        loop = asyncio.get_running_loop()
        shares = self._shares_for(round, reducer.cells)
        if self._peer in reducer.refused:
            round.ours_here.set()
            self._check_parts(round)
            return
        try:
            part = reducer.begin(self._peer, shares)
            async for cell, data in self._encoded(round, shares):
                await loop.run_in_executor(self._threads, reducer.read, part, cell, data)
            reducer.take(part)
        except _Ended:
            reducer.refuse(self._peer, "the exchange ended")
        except (ValueError, RefusedPart, _NotFinite) as error:
            logger.warning("Our own part does not count: %s", error)
            reducer.refuse(self._peer, str(error))
        finally:
            round.ours_here.set()
        self._check_parts(round)

    def _shares_for(self, round: _Round, cells: int) -> tuple[Share, ...]:
        """Return the shares that we bring to a slice."""
        if round.commitments is not None:
            return round.commitments.shares_of(self._peer, cells)
        return shares_within(round.start.shares, cells)

    async def _bring(self, round: _Round, reducer: str, cells: int) -> None:
        """Bring a reducer our part, and take its answer; again if the stream breaks."""
        try:
            await self._bring_until_over(round, reducer, cells)
        finally:
            round.arrived(reducer)

    async def _bring_until_over(self, round: _Round, reducer: str, cells: int) -> None:
        shares, pause = self._shares_for(round, cells), self._retry_after
        while True:
            try:
                shares = await self._bring_once(round, reducer, cells, shares)
            except (BadAnswer, Garbled, WireError) as error:
                logger.warning("%s answered with what cannot be true: %s", reducer, error)
                self._without_answer(round, reducer)
                return
            except Exception as error:  # the transport's, whatever they are
                logger.debug("The stream to %s broke: %s", reducer, brief(error))
            if reducer in round.answers or reducer in round.unanswered or round.over.is_set():
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, RARELY)

    async def _bring_once(
        self, round: _Round, reducer: str, cells: int, shares: tuple[Share, ...]
    ) -> tuple[Share, ...]:
        """Over one stream. :returns: the shares to bring over the next one, should no answer have come"""
        knows = self._knows(reducer)
        head = encode(PartHead(round.fingerprint, shares, knows))
        channel = await self._transport.ask(reducer, PART, head, OPENS_WITHIN)
        channel.urgency = Urgency.PARTS
        loop = asyncio.get_running_loop()
        sending = loop.create_task(self._send_part(round, channel, shares))
        answering = loop.create_task(self._take_answer(round, channel, reducer, cells, knows))
        try:
            await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                await sending
                shares = ()
            await answering
            if sending.done():
                await asyncio.wait_for(_until_closed(channel), CLOSES_WITHIN)  # the stream serves the next round
            return ()
        except (BadAnswer, Garbled, WireError):
            raise
        except _NotFinite as error:
            logger.warning("Our part cannot be sent: %s", error)
            return ()
        except Exception as error:  # the transport's, whatever they are
            logger.debug("The stream to %s broke: %s", reducer, brief(error))
            return shares
        finally:
            for task in (sending, answering):
                task.cancel()
                task.add_done_callback(_retrieve)
            channel.close()

    async def _send_part(self, round: _Round, channel: Channel, shares: tuple[Share, ...]) -> None:
        """Until the exchange is over: the reducer sees then that it is not whole. A frame that was begun is sent to its
        end, for the answer may still come over the same stream."""
        try:
            async for _, data in self._encoded(round, shares):
                await send_blob(channel, data, round.over.is_set, more=True)
        except _Ended:
            pass
        await channel.end()

    async def _take_answer(self, round: _Round, channel: Channel, reducer: str, cells: int, knew: bool) -> None:
        head = decode_head(await channel.receive(round.latest), round.members)
        answer = head.answer
        if answer is None:
            self._without_answer(round, reducer)
            return
        why = self._why_bad(round, answer, reducer, cells)
        if why is None and knew and not head.credential and not self._knows(reducer):
            raise _Forgotten
        if why is None and not self._check_answer(answer, head.signature, head.credential):
            why = "the signature does not hold"
        if why is not None:
            raise BadAnswer(why)
        data = await receive_blob(channel, round.layout.most_answer_bytes(cells), round.latest, lambda _: round.note())
        why = await asyncio.get_running_loop().run_in_executor(self._threads, self._why_no_answer, round, answer, data)
        if why is not None:
            if why == _TOO_LONG:
                self.on_refused(answer)
            raise BadAnswer(why)
        self._found(round, answer, data)

    def _why_bad(self, round: _Round, answer: Answer, reducer: str, cells: int) -> str | None:
        if answer.reducer != reducer or answer.cells != cells:
            return "an answer for another slice"
        if tuple(sorted(answer.shares)) != answer.shares:
            return "its shares are not in order"
        if round.commitments is not None:
            for share in answer.shares:
                if share not in round.commitments.shares_of(share.peer, cells):
                    return f"a share of {share.peer} is in it, and {NOT_COMMITTED}"
        return why_refused(
            (answer,),
            round.start.spent,
            round.epoch,
            frozenset(round.members),
            self._max_staleness,
            self._layout.num_cells,
        )

    def _why_no_answer(self, round: _Round, answer: Answer, data: bytes) -> str | None:
        if hashlib.sha256(data).digest() != answer.digest:
            return "its bytes have another hash"
        try:
            averages = decode_answer(round.layout, answer.cells, data)
        except ValueError as error:
            return str(error)
        if round.commitments is not None and round.commitments.is_too_long(averages):
            return _TOO_LONG
        return None

    # --- our slice ---

    def _check_parts(self, round: _Round) -> None:
        if round.reducer is not None and set(round.members) <= round.reducer.done | (round.silent - {self._peer}):
            round.all_here.set()

    async def _reduce(self, round: _Round, reducer: SliceReducer, waited: float = 0.0) -> None:
        self._check_parts(round)
        patience = max(0.0, REDUCERS_WAIT * round.start.round.exchange_seconds - waited)
        try:
            await asyncio.wait_for(round.all_here.wait(), patience)
        except asyncio.TimeoutError:
            await round.ours_here.wait()  # no line delays it
        reducer.close()
        for member, why in reducer.refused.items():
            logger.info("The part of %s does not count: %s", member, why)
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, reducer.reduce)
        except ValueError as error:
            logger.warning("The average of our slice cannot be told: %s", error)
            found = None
        if found is None:
            round.reply = (AnswerHead(None), b"")
            round.reduced.set()
            self._without_answer(round, self._peer)
        else:
            answer, data = found
            round.reply = (AnswerHead(answer, self._sign_answer(answer), self._credential), data)
            round.reduced.set()
            self._found(round, answer, data)

    async def _serve(self, peer: str, head: bytes, channel: Channel) -> None:
        """A member brings its part, or asks for the answer again."""
        channel.urgency = Urgency.ANSWERS
        try:
            said: PartHead = decode(PartHead, head, MOST_HEAD)
            round = await self._round_of(said.fingerprint, peer)
            if round is None or peer not in round.members or peer == self._peer:
                return
            if round.reducer is None and round.reply is None:  # no slice is ours
                return
            round.streams[peer] = round.streams.get(peer, 0) + 1
            if round.streams[peer] <= STREAMS_EACH:
                if round.reducer is not None:
                    await self._receive_until_reduced(round, round.reducer, said.shares, channel)
                await self._reply(round, channel, said.knows)
        except WireError as error:
            logger.debug("%s brings a part that makes no sense: %s", peer, error)
        except Exception as error:  # the transport's
            logger.debug("The stream of %s broke: %s", peer, brief(error))
        finally:
            channel.close()

    async def _round_of(self, fingerprint: bytes, peer: str) -> _Round | None:
        """The round of this name. Others may hear of it before we do: their parts wait, with only their heads read."""
        if fingerprint in self._rounds:
            return self._rounds[fingerprint]
        waiting = [sender for _, sender, _ in self._early]
        if len(waiting) >= EARLY or waiting.count(peer) >= EARLY_EACH:
            return None
        waits = (fingerprint, peer, asyncio.Event())
        self._early.append(waits)
        try:
            await asyncio.wait_for(waits[2].wait(), EARLY_WAITS)
        except asyncio.TimeoutError:
            pass
        finally:
            self._early.remove(waits)
        return self._rounds.get(fingerprint)

    async def _receive_until_reduced(
        self, round: _Round, reducer: SliceReducer, shares: tuple[Share, ...], channel: Channel
    ) -> None:
        """Take a part, until it is too late for it. Who brings a part that does not count gets the answer as well."""
        loop = asyncio.get_running_loop()
        receiving: asyncio.Task[Any] = loop.create_task(self._receive_part(round, reducer, shares, channel))
        reduced: asyncio.Task[Any] = loop.create_task(round.reduced.wait())
        try:
            await asyncio.wait({receiving, reduced}, return_when=asyncio.FIRST_COMPLETED)
            await reduced
        finally:
            for task in (receiving, reduced):
                task.cancel()
                task.add_done_callback(_retrieve)
            await asyncio.wait({receiving})

    async def _receive_part(
        self, round: _Round, reducer: SliceReducer, shares: tuple[Share, ...], channel: Channel
    ) -> None:
        loop, peer, timeout = asyncio.get_running_loop(), channel.peer, round.latest
        part: Part | None = None
        try:
            commitments = round.commitments
            if commitments is not None and shares and shares != commitments.shares_of(peer, reducer.cells):
                raise ValueError(NOT_COMMITTED)
            part = reducer.begin(peer, shares)
            for cell in part.weights:
                data = await receive_blob(channel, round.layout.most_bytes(cell), timeout)
                if commitments is not None and not commitments.is_committed(peer, cell, data):
                    raise ValueError(NOT_COMMITTED)
                await loop.run_in_executor(self._threads, reducer.read, part, cell, data)
            reducer.take(part)
        except ValueError as error:
            reducer.refuse(peer, str(error))
        except RefusedPart as error:
            logger.debug("The part of %s is refused: %s", peer, error)
        finally:
            if part is not None:
                reducer.drop(part)
        self._check_parts(round)
        left = round.layout.most_answer_bytes(reducer.cells)
        while left > 0:  # the sender of a part that does not count does not know it, and would wait for us
            left -= _FRAME_HEAD + len(await channel.receive(timeout))

    async def _reply(self, round: _Round, channel: Channel, knows: bool) -> None:
        if round.reply is None:
            return
        head, data = round.reply
        if knows:
            head = head._replace(credential=b"")
        await channel.send(encode_head(head, round.members), more=True)
        if head.answer is not None:
            await send_blob(channel, data, more=True)
        await channel.end()
        # its end says that all is there; a stream that we close may lose what is on its way
        await asyncio.wait_for(_until_closed(channel), CLOSES_WITHIN)


async def _until_closed(channel: Channel) -> None:
    with suppress(Exception):  # the transport's word for it
        while True:
            await channel.receive(CLOSES_WITHIN)


def _no_gradient(number: int) -> torch.Tensor:
    raise KeyError(number)


def _retrieve(work: asyncio.Future[Any]) -> None:
    """A future whose exception nobody asks for is no news."""
    if not work.cancelled():
        work.exception()

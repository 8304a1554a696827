"""Rounds over a transport in memory: parts, answers, and what can go wrong on their way."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

import pytest
import torch

from tests.memory_network import Closed, Hub, Stream, Wire
from volunteer_kit.swarm.codecs.registry import make_codec
from volunteer_kit.swarm.rounds.blobs import send_blob
from volunteer_kit.swarm.rounds.error_feedback import ErrorFeedback
from volunteer_kit.swarm.rounds.exchange import EARLY_EACH, KEPT, PART, Exchange
from volunteer_kit.swarm.rounds.heads import AnswerHead, decode_head, deflate_once, encode_head
from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.rounds.parts import PartHead
from volunteer_kit.swarm.rounds.reducer import SliceReducer, decode_answer
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.contributions import Accounts, Answer, Share
from volunteer_kit.swarm.sync.entries import Member
from volunteer_kit.swarm.sync.leading import make_round
from volunteer_kit.swarm.sync.messages import Round, StartExchange
from volunteer_kit.swarm.wire import MOST, encode

CELLS, EPOCH, SAMPLES = 4, 6, 10
SHAPES = [torch.Size([900]), torch.Size([30, 20]), torch.Size([7])]
ALL = (1 << CELLS) - 1
PATIENCE = 60.0  # s
MADE: list[Exchange] = []  # within a story


# --- a swarm ---


class Peer:
    """One member with its exchange, and what it was told."""

    def __init__(self, hub: Hub, name: str, layout: Layout, **kwargs):
        self.name, self.layout, self.hub = name, layout, hub
        self.gradients: dict[int, torch.Tensor] = {}
        self.ended: dict[bytes, tuple[Answer, ...]] = {}
        self.data: dict[bytes, bytes] = {}  # of answers, by digest
        self.changed = asyncio.Condition()
        self.tasks: set[asyncio.Task] = set()
        self.known: set[str] = set()  # peers whose credentials it has
        self.exchange = Exchange(
            name,
            Wire(hub, name),
            layout,
            max_staleness=2,
            sign_answer=lambda answer: b"signed by " + name.encode() + answer.digest,
            check_answer=self.check_answer,
            credential=name.encode(),
            knows=self.known.__contains__,
            retry_after=0.001,
            **kwargs,
        )
        MADE.append(self.exchange)
        self.exchange.on_answer = self.on_answer
        self.exchange.on_ended = self.on_ended

    def check_answer(self, answer: Answer, signature: bytes, credential: bytes) -> bool:
        if credential == answer.reducer.encode():
            self.known.add(answer.reducer)
        return answer.reducer in self.known and signature == b"signed by " + answer.reducer.encode() + answer.digest

    def on_answer(self, answer: Answer, data: bytes) -> None:
        assert hashlib.sha256(data).digest() == answer.digest
        self.data[answer.digest] = data
        self._note()

    def on_ended(self, fingerprint: bytes, answers: tuple[Answer, ...]) -> None:
        assert fingerprint not in self.ended
        self.ended[fingerprint] = answers
        self._note()

    def _note(self) -> None:
        async def note():
            async with self.changed:
                self.changed.notify_all()

        self.keep(asyncio.ensure_future(note()))

    def keep(self, task: asyncio.Task) -> None:
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def start(self, round: Round, shares: tuple[Share, ...] | None = None, limit: float = 100.0, **kwargs):
        if shares is None:
            shares = (Share(self.name, 0, EPOCH, SAMPLES, ALL),)
        limits = tuple((member.peer, limit) for member in round.group)
        start = StartExchange(round, shares, limits, kwargs.get("spent", Accounts()))
        self.keep(asyncio.ensure_future(self.exchange.run(start, EPOCH, self.gradients.__getitem__)))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(condition), PATIENCE)

    async def answers(self, round: Round) -> tuple[Answer, ...]:
        await self.until(lambda: round.fingerprint in self.ended)
        return self.ended[round.fingerprint]

    async def average(self, round: Round) -> torch.Tensor:
        """The whole vector; NaN where no answer came."""
        vector = torch.full((self.layout.elements,), torch.nan)
        for answer in await self.answers(round):
            for cell, values in decode_answer(self.layout, answer.cells, self.data[answer.digest]).items():
                vector[self.layout.cell(cell)] = values
        return vector


def layout_of(codec: str = "none", shapes=SHAPES) -> Layout:
    return Layout(shapes, CELLS, make_codec(codec, codec, 0))


def swarm(*names: str, codec: str = "none", shapes=SHAPES, hub: Hub | None = None, **kwargs) -> dict[str, Peer]:
    hub, layout = hub or Hub(), layout_of(codec, shapes)
    peers = {name: Peer(hub, name, layout, **kwargs) for name in names}
    for seed, peer in enumerate(peers.values()):
        peer.gradients[0] = torch.randn(layout.elements, generator=torch.Generator().manual_seed(seed)) * SAMPLES
    return peers


def round_of(*names: str, attempt: int = 1, seconds: float = 1000.0, client: str = "", idle: str = "") -> Round:
    group = [(Member(name, name, name != client), SAMPLES, 0.0 if name in (client, idle) else 10.0) for name in names]
    return make_round(b"slot", Ballot(0, names[0]), attempt, group, CELLS, seconds, 10.0)


def mean(*peers: Peer) -> torch.Tensor:
    return sum(peer.gradients[0] for peer in peers) / (SAMPLES * len(peers))


def play(story: Callable) -> None:
    async def whole():
        try:
            await story()
        finally:
            while MADE:
                MADE.pop().close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    asyncio.run(whole())


def parts_of(hub: Hub, sender: str, reducer: str) -> list[Stream]:
    return [each for each in hub.streams if each.opened and (each.owner, each.peer) == (sender, reducer)]


# --- rounds that go well ---


@pytest.mark.parametrize("names", [("a",), ("a", "b"), ("a", "b", "c", "d")])
def test_everybody_gets_the_mean_of_all(names):
    async def story():
        peers, round = swarm(*names), round_of(*names)
        for peer in peers.values():
            peer.start(round)
        for peer in peers.values():
            torch.testing.assert_close(await peer.average(round), mean(*peers.values()))
        assert len({peer.ended[round.fingerprint] for peer in peers.values()}) == 1
        answers = peers["a"].ended[round.fingerprint]
        assert sum(answer.cells for answer in answers) == ALL
        assert {share.peer for answer in answers for share in answer.shares} == set(names)

    play(story)


@pytest.mark.parametrize("rule", ["median", "centered_clip"])
def test_a_robust_rule_bears_a_member_that_sends_something_else(rule):
    async def story():
        names = ("a", "b", "c", "d", "e")
        peers, round = swarm(*names, rule=rule), round_of(*names)
        for peer in peers.values():
            peer.gradients[0] = peers["a"].gradients[0] + torch.randn_like(peers["a"].gradients[0])
        peers["e"].gradients[0] = peers["e"].gradients[0] * -20
        for peer in peers.values():
            peer.start(round)
        average = await peers["b"].average(round)
        assert (average - mean(peers["a"])).norm() < 0.5 * mean(peers["a"]).norm()

    play(story)


def test_a_client_and_an_observer_get_the_answers_too():
    async def story():
        peers, round = swarm("a", "b", "c"), round_of("a", "b", "c", client="c")
        assert {reducer for reducer, _ in round.slices} == {"a", "b"}
        peers["a"].start(round)
        peers["b"].start(round, shares=())
        peers["c"].start(round)
        for peer in peers.values():
            torch.testing.assert_close(await peer.average(round), mean(peers["a"], peers["c"]))

    play(story)


def test_late_contributions_and_settled_cells_are_weighed_for_each_cell():
    async def story():
        peers, round = swarm("a", "b"), round_of("a", "b")
        a, b = peers.values()
        a.gradients[7] = torch.randn(a.layout.elements)
        a.start(round, shares=(Share("a", 0, EPOCH, SAMPLES, ALL), Share("a", 7, EPOCH - 1, 8, 0b0101)))
        b.start(round, shares=(Share("b", 0, EPOCH, SAMPLES, 0b0011),))
        average = await b.average(round)
        for cell, sums, weight in [
            (0, a.gradients[0] + a.gradients[7] / 2 + b.gradients[0], 24),
            (1, a.gradients[0] + b.gradients[0], 20),
            (2, a.gradients[0] + a.gradients[7] / 2, 14),
            (3, a.gradients[0], 10),
        ]:
            place = b.layout.cell(cell)
            torch.testing.assert_close(average[place], sums[place] / weight)

    play(story)


def test_rounds_after_each_other():
    async def story():
        peers = swarm("a", "b", "c")
        for attempt in range(2 * KEPT):
            round = round_of("a", "b", "c", attempt=attempt)
            for peer in peers.values():
                peer.gradients[0] = torch.randn(peer.layout.elements)
                peer.start(round)
            for peer in peers.values():
                torch.testing.assert_close(await peer.average(round), mean(*peers.values()))
        assert all(len(peer.ended) == 2 * KEPT for peer in peers.values())

    play(story)


def test_cells_that_take_many_frames():
    async def story():
        shapes = [torch.Size([600_000]), torch.Size([3])]
        peers, round = swarm("a", "b", shapes=shapes), round_of("a", "b")
        for peer in peers.values():
            peer.start(round)
        for peer in peers.values():
            torch.testing.assert_close(await peer.average(round), mean(*peers.values()))

    play(story)


def test_a_reducer_that_hears_of_the_round_last_has_missed_nothing():
    async def story():
        peers, round = swarm("a", "b", "c"), round_of("a", "b", "c")
        peers["a"].start(round)
        peers["b"].start(round)
        await asyncio.wait_for(asyncio.gather(*(peers[n].until(lambda: True) for n in "ab")), PATIENCE)
        while len(peers["c"].hub.streams) < 8:  # a and b have asked each other, and c
            await asyncio.sleep(0)
        peers["c"].start(round)
        for peer in peers.values():
            torch.testing.assert_close(await peer.average(round), mean(*peers.values()))

    play(story)


def test_parts_that_come_early_are_bounded():
    async def story():
        peers = swarm("a")
        wire, streams = Wire(peers["a"].hub, "stranger"), []
        for number in range(EARLY_EACH + 3):
            streams.append(await wire.ask("a", PART, encode(PartHead(bytes([number]), ())), 1.0))
        for stream in streams[EARLY_EACH:]:
            with pytest.raises(Closed):
                await stream.receive(PATIENCE)
        assert not any(stream.other.gone.is_set() for stream in streams[:EARLY_EACH])
        for stream in streams:
            stream.close()

    play(story)


# --- members that fail ---


def test_a_member_that_dies_within_its_part_is_left_out():
    async def story():
        hub = Hub()
        peers, round = swarm("a", "b", "c", hub=hub, shapes=[torch.Size([800_000])]), round_of("a", "b", "c", idle="c")
        frames = []

        async def die(data):
            hub.kill("c")
            return data

        def tamper(stream, data):
            if (stream.owner, stream.peer) == ("c", "a"):
                frames.append(len(data))
                if len(frames) == 3:
                    return die(data)
            return data

        hub.tamper = tamper
        for peer in peers.values():
            peer.start(round)
        while "c" not in hub.down:
            await asyncio.sleep(0.001)
        for name in "ab":
            peers[name].exchange.without(round.fingerprint, ("c",))
        averages = [await peers[name].average(round) for name in "ab"]
        assert torch.equal(*averages)
        answer = next(each for each in peers["a"].ended[round.fingerprint] if each.reducer == "a")
        assert {share.peer for share in answer.shares} == {"a", "b"}
        cells = peers["a"].layout.cells_of(answer.cells)
        for cell in cells:
            place = peers["a"].layout.cell(cell)
            torch.testing.assert_close(averages[0][place], mean(peers["a"], peers["b"])[place])

    play(story)


def test_a_reducer_does_not_wait_for_ever():
    async def story():
        peers, round = swarm("a", "b"), round_of("a", "b", seconds=3.0, idle="b")
        peers["a"].start(round)  # b has not heard of it
        torch.testing.assert_close(await peers["a"].average(round), mean(peers["a"]))
        peers["b"].start(round)  # too late for its part, and not for the answer
        torch.testing.assert_close(await peers["b"].average(round), mean(peers["a"]))

    play(story)


def test_a_stream_that_breaks_is_opened_again():
    async def story():
        hub = Hub()
        peers, round = swarm("a", "b", hub=hub, shapes=[torch.Size([500_000])]), round_of("a", "b")
        broken = []

        def tamper(stream, data):
            if len(broken) < 3 and stream.opened and stream.owner == "b" and len(data) > 8:
                broken.append(stream)
                stream.close()
                raise Closed("broken")
            return data

        hub.tamper = tamper
        for peer in peers.values():
            peer.start(round)
        for peer in peers.values():
            torch.testing.assert_close(await peer.average(round), mean(*peers.values()))
        assert len(broken) == 3

    play(story)


def test_a_stream_that_breaks_before_the_answer_is_opened_again_for_the_answer():
    async def story():
        hub = Hub()
        peers, round = swarm("a", "b", hub=hub), round_of("a", "b", idle="b")
        broken = []

        def tamper(stream, data):
            if not broken and stream.owner == "a":
                broken.append(stream)
                stream.close()
                raise Closed("broken")
            return data

        hub.tamper = tamper
        for peer in peers.values():
            peer.start(round)
        for peer in peers.values():
            torch.testing.assert_close(await peer.average(round), mean(*peers.values()))
        assert broken

    play(story)


def bad_share(**changes) -> tuple[Share, ...]:
    return (Share("b", 0, EPOCH, SAMPLES, ALL)._replace(**changes),)


@pytest.mark.parametrize(
    "shares",
    [
        bad_share(samples=101),
        bad_share(birth=EPOCH + 1),
        bad_share(birth=EPOCH - 3),
        bad_share(peer="a"),
        (*bad_share(), *bad_share()),
    ],
)
def test_shares_that_cannot_be_true_cost_their_sender_its_part_and_nobody_the_answer(shares):
    async def story():
        peers, round = swarm("a", "c"), round_of("a", "b", "c", idle="b")
        for peer in peers.values():
            peer.start(round)
        streams = []
        for name, cells in round.slices:
            within = tuple(share._replace(cells=share.cells & cells) for share in shares)
            stream = await Wire(peers["a"].hub, "b").ask(name, PART, encode(PartHead(round.fingerprint, within)), 1.0)
            for cell in peers["a"].layout.cells_of(cells):
                place = peers["a"].layout.cell(cell)
                values = torch.full((place.stop - place.start,), 1e6)
                await send_blob(stream, peers["a"].layout.encode_cell(cell, values))
            streams.append(stream)
        for stream in streams:
            assert len(await stream.receive(PATIENCE)) > 1  # the answer's head
            stream.close()
        for peer in peers.values():
            torch.testing.assert_close(await peer.average(round), mean(*peers.values()))

    play(story)


def test_what_is_committed_does_not_enter_again():
    async def story():
        peers, round = swarm("a", "b"), round_of("a", "b")
        spent = Accounts().after([Answer(1, "a", b"", (Share("b", 0, EPOCH, SAMPLES, 1),))], EPOCH, 2)
        for peer in peers.values():
            peer.start(round, spent=spent)
        average = await peers["a"].average(round)
        for cell in range(CELLS):
            place = peers["a"].layout.cell(cell)
            slice_of_cell = next(cells for _, cells in round.slices if cells >> cell & 1)
            expected = mean(peers["a"]) if slice_of_cell & 1 else mean(*peers.values())
            torch.testing.assert_close(average[place], expected[place])

    play(story)


@pytest.mark.parametrize("wrong", ["nan", "longer", "shorter", "size", "empty", "noise"])
def test_values_that_make_no_sense_do_not_enter(wrong):
    async def story():
        hub = Hub()
        peers, round = swarm("a", "b", "c", hub=hub), round_of("a", "b", "c", idle="c")

        def tamper(stream, data):
            if stream.owner != "c" or (wrong != "size" and len(data) == 8):
                return data
            return {
                "nan": b"\xff" * len(data),
                "longer": data + bytes(4),
                "shorter": data[:-4],
                "size": (2**40).to_bytes(8, "little"),
                "empty": b"",
                "noise": bytes(2**20),
            }[wrong]

        hub.tamper = tamper
        for peer in peers.values():
            peer.start(round)
        if wrong == "shorter":  # nobody can tell that nothing more comes, before the stream ends
            for peer in peers.values():
                peer.exchange.without(round.fingerprint, ("c",))
        for peer in peers.values():
            torch.testing.assert_close(await peer.average(round), mean(peers["a"], peers["b"]))

    play(story)


def test_our_own_gradient_with_no_numbers_is_not_sent():
    async def story():
        peers, round = swarm("a", "b", "c"), round_of("a", "b", "c")
        peers["b"].gradients[0][:] = torch.nan
        for peer in peers.values():
            peer.start(round)
        for peer in peers.values():
            torch.testing.assert_close(await peer.average(round), mean(peers["a"], peers["c"]))

    play(story)


def test_where_nobody_has_a_part_that_counts_there_is_no_answer():
    async def story():
        peers, round = swarm("a", "b"), round_of("a", "b")
        for peer in peers.values():
            peer.start(round, shares=())
        for peer in peers.values():
            assert await peer.answers(round) == ()

    play(story)


def test_a_second_part_of_a_member_is_refused_and_it_still_gets_the_answer():
    async def story():
        peers, round = swarm("a", "b", "c"), round_of("a", "b", "c", idle="b")
        a, b = peers["a"], peers["b"]
        a.start(round)
        b.start(round)
        cells = dict(round.slices)["a"]
        part = parts_of(a.hub, "b", "a")
        while not part or not part[0].other.saw_end:
            await asyncio.sleep(0.001)
            part = parts_of(a.hub, "b", "a")
        shares = (Share("b", 0, EPOCH, SAMPLES, cells),)
        again = await Wire(a.hub, "b").ask("a", PART, encode(PartHead(round.fingerprint, shares)), 1.0)
        for cell in a.layout.cells_of(cells):
            values = torch.full_like(b.gradients[0], 1e6)[a.layout.cell(cell)]
            await send_blob(again, a.layout.encode_cell(cell, values))
        peers["c"].start(round)
        torch.testing.assert_close(await a.average(round), mean(*peers.values()))
        assert await again.receive(PATIENCE)  # the answer's head
        again.close()

    play(story)


@pytest.mark.parametrize("stranger", ["not in the group", "no such round", "garbage"])
def test_strangers_are_sent_away(stranger):
    async def story():
        peers, round = swarm("a", "b"), round_of("a", "b")
        a = peers["a"]
        a.start(round)
        shares = (Share("x", 0, EPOCH, SAMPLES, 1),)
        head = encode(PartHead(round.fingerprint if stranger == "not in the group" else b"x", shares))
        if stranger == "garbage":
            head = b"\xff" * 100
        stream = await Wire(a.hub, "x").ask("a", PART, head, 1.0)
        if stranger == "no such round":
            assert not stream.other.gone.is_set()
        else:
            with pytest.raises(Closed):
                await stream.receive(PATIENCE)
        peers["b"].start(round)
        torch.testing.assert_close(await a.average(round), mean(*peers.values()))

    play(story)


# --- reducers that fail ---


def test_the_answers_of_the_others_stay_when_a_reducer_dies():
    async def story():
        peers, round = swarm("a", "b", "c"), round_of("a", "b", "c")
        peers["a"].start(round)
        peers["b"].start(round)
        peers["c"].hub.kill("c")
        for name in "ab":
            peers[name].exchange.without(round.fingerprint, ("c",))
        for name in "ab":
            assert {answer.reducer for answer in await peers[name].answers(round)} == {"a", "b"}
            average = await peers[name].average(round)
            known = ~average.isnan()
            torch.testing.assert_close(average[known], mean(peers["a"], peers["b"])[known])

    play(story)


def test_a_reducer_that_dies_after_it_answered_one_member():
    async def story():
        hub = Hub()
        peers, round = swarm("a", "b", "c", hub=hub), round_of("a", "b", "c")
        held = asyncio.Event()

        async def hold(data):
            await held.wait()
            raise Closed("dead")

        def tamper(stream, data):
            is_answer = (stream.owner, stream.peer) == ("a", "c") and not stream.opened
            return hold(data) if is_answer else data

        hub.tamper = tamper
        for peer in peers.values():
            peer.start(round)
        assert len(await peers["b"].answers(round)) == 3
        hub.kill("a")
        held.set()
        peers["c"].exchange.without(round.fingerprint, ("a",))
        assert {answer.reducer for answer in await peers["c"].answers(round)} == {"b", "c"}

    play(story)


LIES = ["none", "digest", "signature", "key", "slice", "reducer", "samples", "order", "nan", "size", "garbage", "bomb"]


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_cannot_be_true_is_as_good_as_none(lie):
    async def story():
        b = swarm("b")["b"]
        round = round_of("a", "b", idle="b")

        async def lie_once(peer, head, stream):
            size = b.layout.most_bytes(0)
            data = bytes(4 * CELLS)
            if lie == "nan":
                data = size.to_bytes(4, "little") + b"\xff" * size + data[4:]
            shares = tuple(Share(name, 0, EPOCH, SAMPLES, ALL) for name in "ab")
            answer = Answer(ALL, "a", hashlib.sha256(data).digest(), shares)
            answer = {
                "slice": answer._replace(cells=1),
                "reducer": answer._replace(reducer="b"),
                "order": answer._replace(shares=shares[::-1]),
                "samples": answer._replace(shares=(shares[0]._replace(samples=0),)),
                "digest": answer._replace(digest=bytes(32)),
            }.get(lie, answer)
            signed = AnswerHead(answer, b"signed by " + answer.reducer.encode() + answer.digest, b"a")
            lies = {"signature": signed._replace(signature=b""), "key": signed._replace(credential=b"")}
            signed = lies.get(lie, signed)
            garbage = {"garbage": b"\xff", "bomb": deflate_once(bytes(MOST + 1), b"")}
            await stream.send(garbage.get(lie) or encode_head(signed, ("a", "b")))
            await send_blob(stream, bytes(10**6) if lie == "size" else data)

        b.hub.handlers["a", PART] = lie_once
        b.start(round)
        if lie == "none":
            torch.testing.assert_close(await b.average(round), torch.zeros(b.layout.elements))
        else:
            assert await b.answers(round) == () and b.data == {}

    play(story)


def heads_of(hub: Hub, reducer: str, members: tuple[str, ...]) -> list[AnswerHead]:
    """Collect the heads that this reducer sends before its answers, from here on."""
    found = []

    def tamper(stream, data):
        if stream.owner == reducer and not stream.opened and stream not in told:
            told.append(stream)
            found.append(decode_head(data, members))
        return data

    told: list[Stream] = []
    hub.tamper = tamper
    return found


def test_a_credential_travels_to_those_who_lack_it():
    async def story():
        hub = Hub()
        peers, round = swarm("a", "b", "c", hub=hub), round_of("a", "b", "c", idle="c")
        peers["b"].known.add("a")
        heads = heads_of(hub, "a", tuple(peers))
        for attempt in (1, 2):
            round = round_of("a", "b", "c", attempt=attempt)
            for peer in peers.values():
                peer.start(round)
            for peer in peers.values():
                torch.testing.assert_close(await peer.average(round), mean(*peers.values()))
            assert sorted(head.credential for head in heads) == ([b"", b"a"] if attempt == 1 else [b"", b""])
            heads.clear()

    play(story)


def test_a_member_that_forgets_a_credential_asks_for_the_answer_again():
    async def story():
        hub = Hub()
        peers, round = swarm("a", "b", hub=hub), round_of("a", "b", idle="b")
        b = peers["b"]
        b.known.add("a")
        heads = heads_of(hub, "a", tuple(peers))
        b.start(round)
        while not parts_of(hub, "b", "a"):
            await asyncio.sleep(0.001)
        b.known.clear()
        peers["a"].start(round)
        torch.testing.assert_close(await b.average(round), mean(*peers.values()))
        assert [head.credential for head in heads] == [b"", b"a"]

    play(story)


def test_an_answer_that_comes_after_the_end_is_still_taken():
    async def story():
        hub = Hub()
        peers, round = swarm("a", "b", hub=hub), round_of("a", "b", idle="b")
        a, b = peers.values()
        go = asyncio.Event()

        async def hold(data):
            await go.wait()
            return data

        hub.tamper = lambda stream, data: hold(data) if stream.owner == "a" else data
        for peer in peers.values():
            peer.start(round)
        (answer,) = await a.answers(round)
        b.exchange.end(round.fingerprint)
        assert await b.answers(round) == ()
        go.set()
        await b.until(lambda: set(b.data) == {answer.digest})
        assert b.ended[round.fingerprint] == ()

    play(story)


def test_whoever_ends_a_round_stops_sending_and_reads_no_gradient_any_more():
    async def story():
        hub = Hub()
        peers, round = swarm("a", "b", hub=hub, shapes=[torch.Size([400_000])]), round_of("a", "b", idle="b")

        async def stuck(data):
            await asyncio.Event().wait()

        hub.tamper = lambda stream, data: stuck(data) if stream.owner == "b" else data
        b = peers["b"]
        start = StartExchange(round, (Share("b", 0, EPOCH, SAMPLES, ALL),), (("b", 100.0),), Accounts())
        running = asyncio.ensure_future(b.exchange.run(start, EPOCH, b.gradients.__getitem__))
        peers["a"].start(round)
        while not parts_of(hub, "b", "a"):
            await asyncio.sleep(0.001)
        b.exchange.end(round.fingerprint)
        await asyncio.wait_for(running, PATIENCE)
        assert await b.answers(round) == ()
        peers["a"].exchange.without(round.fingerprint, ("b",))
        torch.testing.assert_close(await peers["a"].average(round), mean(peers["a"]))
        await b.until(lambda: len(b.data) == 1)  # the answer comes late

    play(story)


def test_the_end_of_a_round_that_has_not_begun():
    async def story():
        peers, round = swarm("a"), round_of("a")
        peers["a"].exchange.end(round.fingerprint)
        assert await peers["a"].answers(round) == ()
        peers["a"].start(round)
        peers["a"].exchange.end(round.fingerprint)
        await asyncio.gather(*peers["a"].tasks)
        assert peers["a"].data == {}

    play(story)


def test_an_exchange_that_closes_as_its_last_part_comes_fails_quietly(monkeypatch, caplog):
    """The cancellation comes when the wait for parts has just ended."""

    async def story():
        peers, round = swarm("a", "b"), round_of("a", "b", idle="b")
        taken, take = asyncio.Event(), SliceReducer.take
        monkeypatch.setattr(SliceReducer, "take", lambda reducer, part: (take(reducer, part), taken.set())[0])
        exchange = peers["a"].exchange
        peers["a"].start(round)
        await asyncio.wait_for(taken.wait(), PATIENCE)
        exchange.without(round.fingerprint, ("b",))
        await asyncio.sleep(0)
        exchange.close()
        await asyncio.gather(*peers["a"].tasks)
        assert not [record for record in caplog.records if record.name.startswith("volunteer_kit.swarm.rounds")]

    play(story)


def test_a_running_answer_is_told_from_a_late_one():
    async def story():
        peers, round = swarm("a", "b"), round_of("a", "b")
        told = []
        a = peers["a"]
        a.exchange.on_answer = lambda answer, data: told.append(a.exchange.is_running(answer))
        for peer in peers.values():
            peer.start(round)
        answers = await a.answers(round)
        assert told == [True, True]
        assert not a.exchange.is_running(answers[0])

    play(story)


# --- error feedback ---


def feedback_of(folder, name: str, layout: Layout) -> dict[str, ErrorFeedback]:
    return {kind: ErrorFeedback(folder / f"{name}-{kind}.bin", layout) for kind in ("sent", "answered")}


def test_with_a_sparse_codec_nothing_is_lost_over_rounds(tmp_path):
    """Some rounds fail, the slices change hands, and a peer starts again between two rounds."""
    names = ("a", "b", "c")
    layout = layout_of("sparse")

    async def story():
        generator = torch.Generator().manual_seed(0)
        hub = Hub()
        peers = {name: Peer(hub, name, layout, **feedback_of(tmp_path, name, layout)) for name in names}
        computed = {name: torch.zeros(layout.elements) for name in names}
        told = torch.zeros(layout.elements)
        for attempt in range(12):
            round = round_of(*names, attempt=attempt, idle=names[attempt % 3])
            for name, peer in peers.items():
                peer.gradients = {attempt: torch.randn(layout.elements, generator=generator) * SAMPLES}
                peer.start(round, shares=(Share(name, attempt, EPOCH, SAMPLES, ALL),))
            averages = [await peer.average(round) for peer in peers.values()]
            assert torch.equal(averages[0], averages[1]) and torch.equal(averages[0], averages[2])
            if attempt % 4 != 2:
                told += averages[0] * SAMPLES * len(names)
                for name, peer in peers.items():
                    computed[name] += peer.gradients[attempt]
                    peer.exchange.settle(round.fingerprint, peer.ended[round.fingerprint])
            for peer in peers.values():
                peer.exchange.drop_rounds()
            if attempt == 7:
                peers["b"].exchange.close()
                peers["b"] = Peer(hub, "b", layout, **feedback_of(tmp_path, "b", layout))
        rest = torch.zeros(layout.elements)
        for name in names:
            kept = feedback_of(tmp_path, name, layout)
            for cell in range(CELLS):
                for each in kept.values():
                    rest[layout.cell(cell)] += each.residual(cell) * each.weight(cell)
        assert rest.norm() > 0.1 * told.norm()
        torch.testing.assert_close(told + rest, sum(computed.values()), rtol=1e-3, atol=1e-2)

    play(story)


def test_only_the_cells_that_entered_settle():
    async def story():
        layout = layout_of("sparse")
        hub = Hub()
        sent = {name: ErrorFeedback(None, layout) for name in "ab"}
        peers = {name: Peer(hub, name, layout, sent=sent[name]) for name in "ab"}
        round = round_of("a", "b")
        for peer in peers.values():
            peer.gradients[0] = torch.randn(layout.elements)
            peer.start(round)
        answers = await peers["a"].answers(round)
        entered = answers[0].cells
        peers["a"].exchange.settle(round.fingerprint, answers[:1])
        for cell in range(CELLS):
            assert bool(sent["a"].residual(cell).any()) == bool(entered >> cell & 1)

    play(story)


def test_the_same_round_again_sends_the_same(tmp_path):
    """A process that dies within a round, and is told of it again."""
    layout = layout_of("sparse")
    sent: list[list[bytes]] = [[], []]

    async def story(life: int):
        hub = Hub()
        peer = Peer(hub, "b", layout, **feedback_of(tmp_path, "b", layout))
        peer.gradients[0] = torch.randn(layout.elements, generator=torch.Generator().manual_seed(1))
        whole = asyncio.Event()

        async def reducer(name, head, stream):
            while True:
                try:
                    sent[life].append(await stream.receive(PATIENCE))
                except Closed:
                    break
            whole.set()

        hub.handlers["a", PART] = reducer
        peer.start(round_of("a", "b", idle="b"))
        await asyncio.wait_for(whole.wait(), PATIENCE)

    for life in range(2):
        play(lambda life=life: story(life))
    assert sent[0] == sent[1] and len(sent[0]) == 2 * CELLS


def test_a_round_is_bounded_by_what_the_codec_sends():
    async def story():
        numel = 400_000
        hub = Hub()
        sent = []
        hub.tamper = lambda stream, data: sent.append(len(data)) or data
        peers, round = swarm("a", "b", codec="blockwise8", shapes=[torch.Size([numel])], hub=hub), round_of("a", "b")
        for peer in peers.values():
            peer.start(round)
        for peer in peers.values():
            await peer.answers(round)
        assert sum(sent) < 2 * numel * 1.006  # each sends half as a part, and half as an answer

    play(story)

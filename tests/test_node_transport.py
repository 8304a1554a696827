"""The node's transport over a real p2pd: what is said arrives in order or not at all, and strangers are bounded."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from volunteer_kit.addressing import loopback_maddr
from volunteer_kit.swarm.net.streams import StreamBounds
from volunteer_kit.swarm.node.daemon import Daemon
from volunteer_kit.swarm.node.deflate import Deflater, most_deflated
from volunteer_kit.swarm.node.transport import MAX_FRAME, MAX_MESSAGE, Channel, Closed, Ended, Transport, protocol

BOUNDS = StreamBounds(first_message_within=600, per_peer=6, silent=4, total=12)
HOLDS = 60.0  # s


class Node:
    """A transport with what it was told."""

    def __init__(self, p2p: P2P, transport: Transport):
        self.p2p, self.transport, self.id = p2p, transport, transport.peer_id
        self.told: list[tuple[str, bytes]] = []
        transport.on_message = lambda peer, data: self.told.append((peer, data))

    def words(self, peer: Node | str) -> list[bytes]:
        name = peer if isinstance(peer, str) else peer.id
        return [data for sender, data in self.told if sender == name]


class Nodes:
    """Makes nodes that know the first one."""

    def __init__(self, stack: AsyncExitStack):
        self._stack = stack
        self._first: list[Any] = []

    async def daemon(self, **options: Any) -> P2P:
        options = {"host_maddrs": [loopback_maddr()], **options}
        p2p = await P2P.create(initial_peers=self._first or None, startup_timeout=HOLDS, **options)
        self._stack.push_async_callback(p2p.shutdown)
        if self._first:
            await p2p.wait_for_at_least_n_peers(1, attempts=60)
        else:
            self._first = await p2p.get_visible_maddrs()
        return p2p

    async def attach(self, p2p: P2P, **options: Any) -> Node:
        transport = await Transport.start(str(p2p.daemon_listen_maddr), **{"run_key": "run", **options})
        self._stack.push_async_callback(transport.close)
        return Node(p2p, transport)

    async def node(self, **options: Any) -> Node:
        return await self.attach(await self.daemon(), **options)

    async def client(self, **options: Any) -> Node:
        """One that nobody can call but over connections that it has opened itself."""
        return await self.attach(await self.daemon(host_maddrs=None, no_listen=True, dht_mode="client"), **options)

    async def stranger(self) -> Daemon:
        """Somebody who opens streams and says what he likes."""
        daemon = await Daemon.attach(str((await self.daemon()).daemon_listen_maddr))
        self._stack.push_async_callback(daemon.close)
        return daemon


def run(story: Callable[[Nodes], Coroutine[Any, Any, None]]) -> None:
    async def told() -> None:
        async with AsyncExitStack() as stack:
            await story(Nodes(stack))

    asyncio.run(asyncio.wait_for(told(), 300))


async def until(true: Callable[[], object], timeout: float = HOLDS) -> None:
    async def look() -> None:
        while not true():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(look(), timeout)


async def insist(node: Node, peer: str, true: Callable[[], object], data: bytes = b"?") -> None:
    """Say something to a peer again and again until it has had its effect."""
    while not true():
        node.transport.send(peer, data)
        with suppress(asyncio.TimeoutError):
            await until(true, 0.2)


async def ends(reader: asyncio.StreamReader) -> bool:
    with suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), HOLDS)
    return True


async def echo(peer: str, head: bytes, channel: Channel) -> None:
    """A handler that answers with all that it was sent, when all is there."""
    frames = []
    with suppress(Ended):
        while True:
            frames.append(await channel.receive(HOLDS))
    for frame in (head, *frames):
        await channel.send(frame)


async def all_of(channel: Channel) -> list[bytes]:
    frames = []
    with suppress(Ended):
        while True:
            frames.append(await channel.receive(HOLDS))
    return frames


# --- messages ---


def test_messages_go_both_ways_in_order():
    async def story(nodes: Nodes):
        a, b = await nodes.node(), await nodes.node()
        words = [b"%d" % i for i in range(500)]
        for word in words:
            a.transport.send(b.id, word)
        await until(lambda: len(b.words(a)) == 500)
        for word in words:
            b.transport.send(a.id, word)
        await until(lambda: len(a.words(b)) == 500)
        assert a.words(b) == words == b.words(a)
        assert a.transport.connected == {b.id} and b.transport.connected == {a.id}
        sent, received = a.transport.traffic
        assert sent >= 500 and received >= 500
        await until(lambda: a.transport.round_trip(b.id) is not None and b.transport.round_trip(a.id) is not None)
        assert 0 < a.transport.round_trip(b.id) < HOLDS

    run(story)


def test_both_may_speak_first_at_the_same_time():
    async def story(nodes: Nodes):
        a, b = await nodes.node(), await nodes.node()
        for _ in range(5):
            a.told.clear(), b.told.clear()
            for i in range(50):
                a.transport.send(b.id, b"%d" % i)
                b.transport.send(a.id, b"%d" % i)
            await until(lambda: len(b.told) == len(a.told) == 50)
            assert sorted(a.words(b)) == sorted(b.words(a)) == sorted(b"%d" % i for i in range(50))
            a.told.clear(), b.told.clear()
            for i in range(50):
                a.transport.send(b.id, b"%d" % i)
                b.transport.send(a.id, b"%d" % i)
            await until(lambda: len(b.told) == len(a.told) == 50)
            assert a.words(b) == b.words(a) == [b"%d" % i for i in range(50)]
            a.transport.forget(b.id), b.transport.forget(a.id)

    run(story)


def test_a_message_may_have_a_megabyte_and_no_byte_more():
    async def story(nodes: Nodes):
        a, b = await nodes.node(), await nodes.node()
        whole = os.urandom(MAX_MESSAGE)
        a.transport.send(b.id, whole + b"x")
        a.transport.send(b.id, whole)
        a.transport.send(b.id, b"")
        await until(lambda: len(b.told) == 2)
        assert b.words(a) == [whole, b""]

    run(story)


def test_what_was_said_before_costs_few_bytes():
    async def story(nodes: Nodes):
        a, b = await nodes.node(), await nodes.node()
        message = os.urandom(20_000)
        a.transport.send(b.id, message)
        await until(lambda: len(b.told) == 1)
        before = a.transport.traffic[0]
        for _ in range(4):
            a.transport.send(b.id, message)
        await until(lambda: len(b.told) == 5)
        assert [data for _, data in b.told] == [message] * 5
        assert a.transport.traffic[0] - before < 10_000

    run(story)


def test_what_waits_for_a_peer_is_bounded_and_the_oldest_gives_way():
    async def story(nodes: Nodes):
        a, late = await nodes.node(), await nodes.daemon()
        for i in range(7):
            a.transport.send(late.peer_id.to_base58(), bytes([i]) * MAX_MESSAGE)
        b = await nodes.attach(late)
        await until(lambda: len(b.told) == 4)
        assert [word[:1] for word in b.words(a)] == [b"\3", b"\4", b"\5", b"\6"]

    run(story)


def test_a_handler_that_fails_stops_no_message():
    async def story(nodes: Nodes):
        a, b = await nodes.node(), await nodes.node()
        taken = []

        def fail(peer: str, data: bytes) -> None:
            taken.append(data)
            raise ValueError("no")

        b.transport.on_message = fail
        a.transport.send(b.id, b"1")
        a.transport.send(b.id, b"2")
        await until(lambda: taken == [b"1", b"2"])

    run(story)


def test_peers_of_another_run_do_not_meet():
    async def story(nodes: Nodes):
        a, b, c = await nodes.node(), await nodes.node(run_key="other"), await nodes.node()
        a.transport.send(b.id, b"?")
        b.transport.send(a.id, b"?")
        with pytest.raises(Closed):
            await a.transport.ask(b.id, "echo", b"", HOLDS)
        a.transport.send(c.id, b"!")
        await until(lambda: c.told)
        assert not b.told and not a.told

    run(story)


def test_a_run_has_one_process_at_a_daemon():
    async def story(nodes: Nodes):
        a = await nodes.node()
        with pytest.raises(P2PDaemonError):
            await nodes.attach(a.p2p)
        await a.transport.close()
        await nodes.attach(a.p2p)

    run(story)


def test_what_is_said_to_oneself_goes_nowhere():
    async def story(nodes: Nodes):
        a = await nodes.node()
        a.transport.send(a.id, b"?")
        assert not a.transport.connected

    run(story)


# --- who may speak ---


def test_who_is_banned_is_cut_off_and_stays_out():
    async def story(nodes: Nodes):
        a, b = await nodes.node(), await nodes.node()
        a.transport.answer("echo", echo)
        await insist(b, a.id, lambda: a.told)
        channel = await b.transport.ask(a.id, "echo", b"", HOLDS)
        a.transport.ban(b.id)
        await until(lambda: not b.transport.connected)
        with pytest.raises(Closed):
            await channel.receive(HOLDS)
        with pytest.raises(Closed):
            await b.transport.ask(a.id, "echo", b"", HOLDS)
        with pytest.raises(Closed):
            await a.transport.ask(b.id, "echo", b"", HOLDS)
        heard = len(a.told)
        a.transport.send(b.id, b"?")
        b.transport.send(a.id, b"?")
        with pytest.raises(Closed):
            await b.transport.ask(a.id, "echo", b"", HOLDS)
        assert not b.told and len(a.told) == heard and not a.transport.connected

    run(story)


def test_who_is_forgotten_may_come_back():
    async def story(nodes: Nodes):
        a, b = await nodes.node(), await nodes.node()
        await insist(b, a.id, lambda: a.told)
        a.transport.forget(b.id)
        await until(lambda: not b.transport.connected)
        a.told.clear()
        await insist(b, a.id, lambda: a.told)

    run(story)


# --- peers that nobody can call, and those that go away ---


def test_a_peer_that_only_dials_out_is_called_over_its_own_connection():
    async def story(nodes: Nodes):
        public = await nodes.node()
        client = await nodes.client()
        client.transport.answer("echo", echo)
        public.transport.send(client.id, b"first")
        await until(lambda: client.words(public) == [b"first"])
        client.transport.send(public.id, b"second")
        await until(lambda: public.words(client) == [b"second"])
        channel = await public.transport.ask(client.id, "echo", b"head", HOLDS)
        await channel.send(b"a")
        await channel.end()
        assert await all_of(channel) == [b"head", b"a"]

    run(story)


class Other:
    """A node in a process of its own, which answers each message with the same."""

    def __init__(self, process: asyncio.subprocess.Process, maddrs: list[str]):
        self.process, self.maddrs = process, maddrs
        self.id = maddrs[0].rpartition("/")[2]

    @classmethod
    async def start(cls, identity: Path, listen: str, first: Iterable[object]) -> Other:
        settings = {"identity": str(identity), "listen": listen, "first": [str(maddr) for maddr in first]}
        command = [sys.executable, "-m", "tests.node_transport_peer", json.dumps(settings)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        return cls(process, json.loads(await process.stdout.readline()))

    @property
    def port(self) -> str:
        """Where it listens, as a multiaddr."""
        return self.maddrs[0].partition("/p2p/")[0]

    async def kill(self) -> None:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            child.kill()
        self.process.kill()
        await self.process.wait()


@pytest.mark.slow
def test_a_peer_that_was_killed_is_missed_and_found_again(tmp_path):
    async def story(nodes: Nodes):
        a = await nodes.node()
        first = await a.p2p.get_visible_maddrs()
        other = await Other.start(tmp_path / "key", loopback_maddr(), first)
        await insist(a, other.id, lambda: a.words(other.id))
        await other.kill()
        await until(lambda: not a.transport.connected)
        a.transport.send(other.id, b"lost")
        again = await Other.start(tmp_path / "key", other.port, first)
        assert again.id == other.id
        await insist(a, again.id, lambda: b"back" in a.words(again.id), b"back")
        await again.kill()

    run(story)


@pytest.mark.slow
def test_a_peer_that_has_stopped_is_missed_and_found_again(tmp_path):
    async def story(nodes: Nodes):
        a = await nodes.node()
        other = await Other.start(tmp_path / "key", loopback_maddr(), await a.p2p.get_visible_maddrs())
        await insist(a, other.id, lambda: a.words(other.id))
        os.kill(other.process.pid, signal.SIGSTOP)  # its p2pd goes on, and holds all streams open
        await until(lambda: not a.transport.connected)
        assert a.transport.round_trip(other.id) is None
        os.kill(other.process.pid, signal.SIGCONT)
        await insist(a, other.id, lambda: b"back" in a.words(other.id), b"back")
        await other.kill()

    run(story)


def test_a_peer_that_lost_its_stream_is_heard_on_the_new_one():
    """It opens another one before the old one has been missed here."""

    async def story(nodes: Nodes):
        a, b = await nodes.node(), await nodes.node()
        await insist(a, b.id, lambda: b.told)
        a.transport.forget(b.id)
        a.transport.send(b.id, b"anew")
        await until(lambda: b"anew" in b.words(a))
        b.transport.send(a.id, b"seen")
        await until(lambda: b"seen" in a.words(b))

    run(story)


def test_the_end_of_p2pd_is_told():
    async def story(nodes: Nodes):
        a, b = await nodes.node(), await nodes.node()
        await insist(a, b.id, lambda: b.told)
        assert not a.transport.lost.done()
        await b.p2p.shutdown()
        assert "p2pd" in await asyncio.wait_for(b.transport.lost, HOLDS)
        await until(lambda: not a.transport.connected)
        b.transport.send(a.id, b"?")
        with pytest.raises(Closed):
            await b.transport.ask(a.id, "echo", b"", HOLDS)
        assert not a.transport.lost.done()

    run(story)


# --- bulk ---


def test_a_side_that_has_ended_still_receives():
    async def story(nodes: Nodes):
        a, b = await nodes.node(), await nodes.node()
        b.transport.answer("echo", echo)
        channel = await a.transport.ask(b.id, "echo", b"head", HOLDS)
        assert channel.peer == b.id and channel.head == b"head"
        frames = [os.urandom(size) for size in (0, 1, 16_380, 16_384, 100_000, MAX_FRAME)]
        for frame in frames:
            await channel.send(memoryview(bytearray(frame)))
        await channel.end()
        await channel.end()
        with pytest.raises(Closed):
            await channel.send(b"more")
        assert await all_of(channel) == [b"head", *frames]
        with pytest.raises(Ended):
            await channel.receive(HOLDS)
        with pytest.raises(ValueError):
            await channel.send(bytes(MAX_FRAME + 1))

    run(story)


def test_small_frames_travel_with_what_follows(monkeypatch):
    """Each write costs headers on the line. A large frame does not wait, and nothing waits behind the end."""
    written, write = [], asyncio.StreamWriter.write

    def note(writer: asyncio.StreamWriter, data: bytes) -> None:
        written.append(bytes(data))
        write(writer, data)

    monkeypatch.setattr(asyncio.StreamWriter, "write", note)

    async def story(nodes: Nodes):
        a, b = await nodes.node(), await nodes.node()
        b.transport.answer("echo", echo)
        frames = [b"first", b"second", b"3" * 100_000, b"fourth", b"fifth", b"sixth"]
        channel = await a.transport.ask(b.id, "echo", b"", HOLDS)
        for frame, more in zip(frames, (True, True, True, True, False, True), strict=True):
            await channel.send(frame, more)
        before = [*written]
        await channel.end()
        mine = [data for data in before if any(frame[:100] in data for frame in frames)]
        assert [[frame[:5] in data for frame in frames].count(True) for data in mine[:1] + mine[-1:]] == [3, 2]
        assert not any(b"sixth" in data for data in before)
        assert await all_of(channel) == [b"", *frames]

    run(story)


def test_a_stream_carries_one_request_after_the_other(monkeypatch):
    opened, opens = [], Daemon.open

    async def open_one(daemon: Daemon, peer: str, name: str, timeout: float):
        opened.append(name)
        return await opens(daemon, peer, name, timeout)

    monkeypatch.setattr(Daemon, "open", open_one)

    async def exchange(a: Node, b: Node, word: bytes) -> list[bytes]:
        channel = await a.transport.ask(b.id, "echo", word, HOLDS)
        await channel.send(b"more")
        await channel.end()
        told = await all_of(channel)
        channel.close()  # does nothing: the stream is another request's by now
        return told

    async def story(nodes: Nodes):
        a, b = await nodes.node(), await nodes.node()
        b.transport.answer("echo", echo)
        for number in range(5):
            assert await exchange(a, b, b"%d" % number) == [b"%d" % number, b"more"]
        assert len(opened) == 1
        both = await asyncio.gather(exchange(a, b, b"x"), exchange(a, b, b"y"))
        assert both == [[b"x", b"more"], [b"y", b"more"]] and len(opened) == 2
        broken = await a.transport.ask(b.id, "echo", b"", HOLDS)
        broken.close()
        a.transport.forget(b.id)
        assert await exchange(a, b, b"z") == [b"z", b"more"] and len(opened) == 3

    run(story)


def test_bulk_opens_a_control_stream_to_be_paced_by_and_a_small_request_none():
    async def story(nodes: Nodes):
        a, b = await nodes.node(), await nodes.node()
        b.transport.answer("echo", echo)
        for size, connected in [(1_000, set()), (300_000, {b.id})]:
            channel = await a.transport.ask(b.id, "echo", b"", HOLDS)
            await channel.send(bytes(size))
            await channel.end()
            assert len((await all_of(channel))[-1]) == size
            while a.transport.connected < connected:  # it is opened beside the bulk, which does not wait for ever
                await asyncio.sleep(0.05)
            assert a.transport.connected == connected

    run(story)


def test_bulk_to_a_peer_that_takes_no_control_stream_goes_on_without(monkeypatch):
    opens = Daemon.open

    async def open_bulk_only(daemon: Daemon, peer: str, name: str, timeout: float):
        if name.endswith("control"):
            raise P2PDaemonError("it takes none")
        return await opens(daemon, peer, name, timeout)

    monkeypatch.setattr(Daemon, "open", open_bulk_only)

    async def story(nodes: Nodes):
        a, b = await nodes.node(), await nodes.node()
        b.transport.answer("echo", echo)
        channel = await a.transport.ask(b.id, "echo", b"", HOLDS)
        for _ in range(5):
            await channel.send(bytes(300_000))
        await channel.end()
        assert [len(frame) for frame in await all_of(channel)] == [0, *[300_000] * 5]
        assert not a.transport.connected

    run(story)


def test_a_stream_that_the_other_side_has_lost_meanwhile_is_opened_anew():
    async def story(nodes: Nodes):
        a, b = await nodes.node(), await nodes.node()
        for word in (b"1", b"2"):
            b.transport.answer("echo", echo)
            channel = await a.transport.ask(b.id, "echo", word, HOLDS)
            await channel.end()
            assert await all_of(channel) == [word]
            await b.transport.close()
            b = await nodes.attach(b.p2p)

    run(story)


def test_many_requests_at_once():
    async def story(nodes: Nodes):
        a, b = await nodes.node(), await nodes.node()
        b.transport.answer("echo", echo)

        async def one(i: int) -> list[bytes]:
            channel = await a.transport.ask(b.id, "echo", b"%d" % i, HOLDS)
            await channel.send(b"x" * 10_000)
            await channel.end()
            return await all_of(channel)

        for i, answer in enumerate(await asyncio.gather(*(one(i) for i in range(40)))):
            assert answer == [b"%d" % i, b"x" * 10_000]

    run(story)


def test_a_request_that_nobody_answers_and_one_that_fails():
    async def story(nodes: Nodes):
        a, b = await nodes.node(), await nodes.node()

        async def fail(peer: str, head: bytes, channel: Channel) -> None:
            raise ValueError("no")

        b.transport.answer("fail", fail)
        with pytest.raises(Closed):
            await a.transport.ask(b.id, "unknown", b"", HOLDS)
        channel = await a.transport.ask(b.id, "fail", b"", HOLDS)
        with pytest.raises(Closed) as caught:
            await channel.receive(HOLDS)
        assert not isinstance(caught.value, Ended)
        with pytest.raises(ValueError):
            await a.transport.ask(b.id, "fail", bytes(2**19), HOLDS)

    run(story)


def test_a_frame_that_comes_late_is_received_all_the_same():
    async def story(nodes: Nodes):
        a, b = await nodes.node(), await nodes.node()
        go_on = asyncio.Event()

        async def late(peer: str, head: bytes, channel: Channel) -> None:
            await go_on.wait()
            await channel.send(b"late")

        b.transport.answer("late", late)
        channel = await a.transport.ask(b.id, "late", b"", HOLDS)
        with pytest.raises(asyncio.TimeoutError):
            await channel.receive(0.05)
        go_on.set()
        assert await all_of(channel) == [b"late"]

    run(story)


def test_a_handler_that_reads_nothing_does_not_take_its_answer_back():
    async def story(nodes: Nodes):
        a, b = await nodes.node(), await nodes.node()

        async def answer(peer: str, head: bytes, channel: Channel) -> None:
            await channel.send(b"x" * 300_000)

        b.transport.answer("deaf", answer)
        channel = await a.transport.ask(b.id, "deaf", b"", HOLDS)
        for _ in range(8):
            await channel.send(b"y" * 100_000)
        await channel.end()
        assert await all_of(channel) == [b"x" * 300_000]

    run(story)


def test_a_message_waits_behind_one_write_of_bulk_at_most():
    async def story(nodes: Nodes):
        a, b = await nodes.node(max_mbps=0.06), await nodes.node()  # a write takes 2 s
        order: list[str] = []

        async def take(peer: str, head: bytes, channel: Channel) -> None:
            with suppress(Ended):
                while True:
                    await channel.receive(HOLDS)
                    order.append("bulk")

        b.transport.answer("take", take)
        b.transport.on_message = lambda peer, data: order.append("message")
        await insist(a, b.id, lambda: order)
        order.clear()
        channel = await a.transport.ask(b.id, "take", b"", HOLDS)
        sent = 0

        async def send_bulk() -> None:
            nonlocal sent
            for _ in range(12):
                await channel.send(bytes(16_380))  # with its length, one write
                sent += 1
            await channel.end()

        sending = asyncio.create_task(send_bulk())
        await until(lambda: order.count("bulk") >= 3)
        before = sent
        a.transport.send(b.id, b"!")
        await until(lambda: "message" in order)
        assert order.index("message") <= before + 1
        sending.cancel()

    run(story)


def test_a_receiver_that_takes_nothing_holds_up_nobody_else():
    async def story(nodes: Nodes):
        a, stuck, b = await nodes.node(), await nodes.node(), await nodes.node()
        go_on = asyncio.Event()

        async def take_nothing(peer: str, head: bytes, channel: Channel) -> None:
            await go_on.wait()

        stuck.transport.answer("nothing", take_nothing)
        b.transport.answer("echo", echo)
        jammed = await a.transport.ask(stuck.id, "nothing", b"", HOLDS)

        async def jam() -> None:
            with suppress(Closed):
                while True:
                    await jammed.send(bytes(MAX_FRAME))

        jamming = asyncio.create_task(jam())
        channel = await a.transport.ask(b.id, "echo", b"", HOLDS)
        for _ in range(8):
            await channel.send(bytes(MAX_FRAME))
        await channel.end()
        assert len(await all_of(channel)) == 9
        assert not jamming.done()
        a.transport.send(stuck.id, b"!")
        await until(lambda: stuck.told)
        jammed.close()
        await jamming
        go_on.set()

    run(story)


# --- strangers ---


async def say(stranger: Daemon, node: Node, kind: str, data: bytes) -> tuple[asyncio.StreamReader, Any]:
    reader, writer = await stranger.open(node.id, protocol("run", kind), HOLDS)
    writer.write(data)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff\x01", b"\0\0\0\x19\0" + bytes(25), b"\0\0\0\x01\x01x", b"\0\0\0\x19\x09" + bytes(25)],
    ids=["huge", "of another version", "no greeting", "of no kind"],
)
def test_a_control_stream_that_begins_badly_is_closed(data):
    async def story(nodes: Nodes):
        a, stranger = await nodes.node(), await nodes.stranger()
        reader, _ = await say(stranger, a, "control", data)
        assert await ends(reader)
        assert not a.transport.connected

    run(story)


def bomb(size: int) -> bytes:
    """A message of so many zeros, as it travels."""
    data = Deflater().deflate(bytes(size))
    return len(data).to_bytes(4, "big") + b"\x01" + data


@pytest.mark.parametrize(
    "frame",
    [
        (most_deflated(MAX_MESSAGE) + 1).to_bytes(4, "big") + b"\x01",
        bomb(MAX_MESSAGE + 1),
        bomb(50 * MAX_MESSAGE),
        b"\0\0\0\x03\x01\xff\xff\xff",
        b"\0\0\0\x02\x01\x03\0",
    ],
    ids=["long", "a byte too long", "a bomb", "not compressed", "an end"],
)
def test_a_message_that_makes_no_sense_or_is_huge_is_not_heard(frame):
    async def story(nodes: Nodes):
        a, stranger = await nodes.node(), await nodes.stranger()
        hello = b"\0\0\0\x19\0\x02" + b"stranger" + b"\0\0\0\x01" + bytes(12)
        reader, writer = await say(stranger, a, "control", hello)
        assert await asyncio.wait_for(reader.readexactly(30), HOLDS), "a greeting"
        assert a.transport.connected == {stranger.peer_id}
        writer.write(frame)
        assert await ends(reader)
        await until(lambda: not a.transport.connected)
        assert not a.told

    run(story)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff",
        b"\0\0\xff\xff\xff\xff",
        b"\0\0\0\0\0\0",
        b"\0\0\0\0\0\x02\x40x",
        b"\0\0\0\0\0\x03\x02\xff\xff",
    ],
    ids=str,
)
def test_a_request_that_begins_badly_is_closed(data):
    async def story(nodes: Nodes):
        a, stranger = await nodes.node(), await nodes.stranger()
        reader, _ = await say(stranger, a, "bulk", data)
        assert await ends(reader)

    run(story)


def test_silent_streams_give_way_to_new_ones():
    async def story(nodes: Nodes):
        a, stranger, b = await nodes.node(bounds=BOUNDS), await nodes.stranger(), await nodes.node()
        a.transport.answer("echo", echo)
        silent = [await say(stranger, a, "bulk", b"") for _ in range(BOUNDS.per_peer)]
        ending = [asyncio.create_task(ends(reader)) for reader, _ in silent]
        await until(lambda: sum(task.done() for task in ending) == BOUNDS.per_peer - BOUNDS.silent)
        channel = await b.transport.ask(a.id, "echo", b"head", HOLDS)
        await channel.end()
        assert await all_of(channel) == [b"head"]
        await until(lambda: sum(task.done() for task in ending) == BOUNDS.per_peer - BOUNDS.silent + 1)
        for task in ending:
            task.cancel()

    run(story)


def test_a_peer_has_so_many_streams_and_no_more():
    async def story(nodes: Nodes):
        a, stranger, b = await nodes.node(bounds=BOUNDS), await nodes.stranger(), await nodes.node()
        a.transport.answer("echo", echo)
        request, kept = b"\0\0\0\0\0\x05\x04echo", []
        for _ in range(BOUNDS.per_peer):
            kept.append(await say(stranger, a, "bulk", request))
            assert await asyncio.wait_for(kept[-1][0].readexactly(4), HOLDS) == b"\xff\xff\xff\xfe"
        reader, _ = await say(stranger, a, "bulk", request)
        assert await ends(reader)
        channel = await b.transport.ask(a.id, "echo", b"head", HOLDS)
        await channel.end()
        assert await all_of(channel) == [b"head"]

    run(story)


def test_a_stream_that_says_nothing_is_closed():
    async def story(nodes: Nodes):
        short = BOUNDS._replace(first_message_within=0.5)
        a, stranger = await nodes.node(bounds=short), await nodes.stranger()
        for kind in ("control", "bulk"):
            reader, _ = await say(stranger, a, kind, b"")
            assert await ends(reader)

    run(story)


def test_a_frame_that_claims_to_be_huge_is_not_read():
    async def story(nodes: Nodes):
        a, stranger = await nodes.node(), await nodes.stranger()
        failed: list[BaseException] = []

        async def take(peer: str, head: bytes, channel: Channel) -> None:
            try:
                await channel.receive(HOLDS)
            except Closed as error:
                failed.append(error)

        a.transport.answer("take", take)
        reader, writer = await say(stranger, a, "bulk", b"\0\0\0\0\0\x05\x04take")
        writer.write(b"\0\x10\0\x01")
        assert await ends(reader)
        await until(lambda: failed)
        assert not isinstance(failed[0], Ended)

    run(story)


# --- the peer's own p2pd ---


def test_a_peers_daemon_keeps_the_connections_of_a_large_swarm_and_takes_a_transport(peer):
    [daemon] = [child for child in psutil.Process(peer.dht.pid).children() if "p2pd" in child.name()]
    options = dict(word.split("=", 1) for word in daemon.cmdline() if "=" in word)
    assert int(options["-connHi"]) > int(options["-connLo"]) >= 4000

    async def story():
        transport = await Transport.start(options["-listen"], run_key="run")
        assert transport.peer_id == peer.peer_id.to_base58()
        await transport.close()

    asyncio.run(asyncio.wait_for(story(), HOLDS))

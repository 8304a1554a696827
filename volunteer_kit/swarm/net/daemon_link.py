"""End a forked process that has lost its connection to p2pd, and say why.

hivemind's reader of p2pd's answers ends without a word, and every call after that waits for ever.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
from hivemind.utils.multiaddr import Multiaddr, protocols

from volunteer_kit.storage.socket_folders import SocketFolder
from volunteer_kit.swarm.net.children import LOOK_EVERY, LastWords, end_in_words, socket_lost
from volunteer_kit.swarm.net.sockets import SocketGuard, sockets_of_multiprocessing

DAEMON = "The program that carries this peer's connections (p2pd)"
# p2pd cuts connections above the higher number down to the lower one, also those with open streams, and without a
# connection manager it loses more. Its own numbers, 512 and 256, are below the size of a swarm
KEEP_CONNECTIONS = ("-connHi=5000", "-connLo=4000", "-connGrace=10m0s")
ENDS_WITHIN = 1.0  # s from the end of its connection to the end of p2pd, if that is why


class DaemonLink:
    """Watches what this process needs of p2pd: the connection, the program itself if it is our child, the sockets.

    To be made first in a forked process, of which there is one to a process.
    """

    def __init__(self, last_words: LastWords, sockets: SocketFolder):
        self._last_words = last_words
        self._daemon: asyncio.subprocess.Process | None = None
        self._watching: set[asyncio.Task] = set()
        P2P._UNIX_SOCKET_PREFIX = sockets.prefix
        self._watch_clients()

    def _watch_clients(self) -> None:
        create = Client.create

        async def create_watched(*args: Any, **kwargs: Any) -> Client:
            client, guard = await create(*args, **kwargs), SocketGuard()
            listen = client.listen

            @asynccontextmanager
            async def listen_watched() -> AsyncIterator[Client]:
                async with listen():  # one removed before the first look would never be missed
                    guard.find_lost([_path_of(client.control.listen_maddr)])
                    yield client

            client.listen = listen_watched
            task = asyncio.create_task(self._watch(client.control, guard))
            self._watching.add(task)
            task.add_done_callback(self._watching.discard)
            return client

        Client.create = create_watched

    async def start_daemon(self, *command: str, **settings: Any) -> asyncio.subprocess.Process:
        """asyncio's create_subprocess_exec, for p2pd. Ctrl-C reaches all of a process group, where p2pd would end at
        once, and no peer could say goodbye: it gets a session of its own."""
        self._daemon = await asyncio.create_subprocess_exec(
            *command, *KEEP_CONNECTIONS, start_new_session=True, **settings
        )
        return self._daemon

    async def _watch(self, control: ControlClient, guard: SocketGuard) -> None:
        """Until the client is closed, as it is at the end of its P2P."""
        tasks = {control._read_task, control._write_task}
        daemons, own = _path_of(control.daemon_connector.control_maddr), _path_of(control.listen_maddr)
        while True:
            lost = guard.find_lost([daemons, *sockets_of_multiprocessing()], may_come=[own])
            done, _ = await asyncio.wait(tasks, timeout=LOOK_EVERY, return_when=asyncio.FIRST_COMPLETED)
            if any(task.cancelled() for task in done):
                return
            if done:
                self._end(await self._how_daemon_ended())
            if lost is not None:
                self._end(socket_lost(lost))

    async def _how_daemon_ended(self) -> str:
        if self._daemon is not None:
            with suppress(asyncio.TimeoutError):
                return f"{DAEMON} {end_in_words(await asyncio.wait_for(self._daemon.wait(), ENDS_WITHIN))}"
        return f"{DAEMON} has closed its connection to another process of this peer"

    def _end(self, why: str) -> NoReturn:
        self._last_words.write(why)
        if self._daemon is not None:
            with suppress(ProcessLookupError):
                self._daemon.kill()
        os._exit(1)


def _path_of(maddr: Multiaddr) -> str:
    return maddr.value_for_protocol(protocols.P_UNIX)

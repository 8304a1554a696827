"""The monitor's own peer: its key, its right to be in the run, its DHT, and the key that it signs with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hivemind.p2p import PeerID

from volunteer_kit.addressing import LISTEN
from volunteer_kit.auth.access_token import BanList, Signer
from volunteer_kit.auth.keys import KeyFolder
from volunteer_kit.home import Home
from volunteer_kit.monitor.errors import MonitorError
from volunteer_kit.runs import RunConfig, run_key_of
from volunteer_kit.swarm.net.access.control import Admission
from volunteer_kit.swarm.net.peer import Peer, PeerConfig, start_peer
from volunteer_kit.swarm.records.host_credentials import HostMembership
from volunteer_kit.swarm.records.peer_record import PeerBoard


@dataclass(frozen=True)
class Addresses:
    """As in PeerConfig."""

    initial_peers: Sequence[str] = ()
    host_maddrs: Sequence[str] = LISTEN
    announce_maddrs: Sequence[str] = ()
    startup_timeout: float = field(default=90.0)


class OwnPeer:
    """`peer` and `board` are there from start() on.

    :param keys: folder of the run's keys; None: no authority, and nothing is signed
    Raises MonitorError, KeysError.
    """

    peer: Peer
    board: PeerBoard

    def __init__(self, run: RunConfig, home: Home, keys: Path | None):
        self._run_id, self._home = run.run_id, home
        self.run_key = run_key_of(run)
        self._keys = KeyFolder(keys) if keys is not None and run.authority is not None else None
        self.membership = _membership(run, home, keys)
        self.admission = self.membership.admission if self.membership else Admission()

    def start(self, addresses: Addresses, on_bans: Callable[[BanList], None], on_broken: Callable[[str], None]) -> None:
        """Start p2pd and the DHT; in the main thread.

        :param on_bans: told of each new list
        :param on_broken: called with the reason when one of this peer's processes has died, in a thread of its own; it
            should end the program
        Raises SwarmError.
        """
        self.peer = start_peer(
            PeerConfig(
                initial_peers=list(addresses.initial_peers),
                host_maddrs=list(addresses.host_maddrs),
                announce_maddrs=list(addresses.announce_maddrs),
                identity_path=str(self._home.identity),
                startup_timeout=addresses.startup_timeout,
                check_identity=False,  # a lock keeps the folder to one monitor
            ),
            self.admission,
        )
        self.peer.processes.when_broken(on_broken)
        self.board = PeerBoard(self.peer.dht, self._run_id)
        try:
            if self.membership:
                self.membership.keep(self.peer, on_bans=on_bans)
        except BaseException:
            self.peer.shutdown()
            raise

    @property
    def signs(self) -> bool:
        return self._keys is not None

    def signer(self) -> Signer:
        """Raises KeysError."""
        assert self._keys is not None
        return self._keys.signer("monitor")

    def is_monitor(self, peer: PeerID) -> bool:
        return peer == self.peer.peer_id or (not self.admission.is_open and self.admission.role_of(peer) == "monitor")

    def account_of(self, peer: PeerID) -> bytes | None:
        """As Admission's."""
        return self.admission.account_of(peer)

    def close(self) -> None:
        """End DHT and p2pd; some seconds."""
        if self.membership is not None:
            self.membership.close()
        self.peer.shutdown()


def _membership(run: RunConfig, home: Home, keys: Path | None) -> HostMembership | None:
    if run.authority is None:
        return None
    if keys is None:
        raise MonitorError(
            f"The run {run.run_id!r} has an authority: its monitor needs the run's keys to be let in and to sign.\n"
            f"1. Name their folder: --keys {run.run_id}-host/keys"
        )
    return HostMembership(run.run_id, run.authority.url, run.authority.public_key, keys, home.identity, "monitor")

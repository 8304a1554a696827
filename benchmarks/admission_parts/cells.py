"""RPC kind x attack: each call really made, at a peer of a running swarm or by it, and refused or not."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from benchmarks.admission_parts.swarm import Run, forgers_keys, keys_of_another_run, token
from tests.local_swarm import LocalPeer
from volunteer_kit.auth.access_token import SKEW
from volunteer_kit.swarm.node.transfers import ANSWERS, CHECKPOINT, CHUNKS, OFFER, WITNESS
from volunteer_kit.swarm.rounds.exchange import PART

LIFETIME = 25.0  # s of the token that is good, is shown, and then ends: the victim remembers it


@dataclass(frozen=True)
class Kind:
    """A call. `counted`: what the victim's DHT calls it, one of admission.CALLS; "": nobody counts it."""

    name: str
    servicer: str  # dht, or node
    rpc: str
    counted: str = ""
    request: str = ""  # of a bulk stream
    is_ours: bool = True  # to the victim; False: by the victim


INCOMING = [
    *(Kind(f"DHT {rpc}", "dht", f"rpc_{rpc}", rpc) for rpc in ("ping", "store", "find")),
    Kind("node: messages", "node", "control"),
    *(
        Kind(f"node: {name}", "node", "bulk", request=name)
        for name in (PART, ANSWERS, OFFER, CHUNKS, WITNESS, CHECKPOINT)
    ),
]
OUTGOING = [
    Kind(f"out: DHT {rpc}", "dht", f"rpc_{rpc}", "outgoing", is_ours=False) for rpc in ("ping", "store", "find")
]

# how a token is shown -> why it is refused, where the token itself is looked at
ATTACKS = {
    "no token": "no_token",
    "forged": "forged",
    "expired": "expired",
    "other run": "other_run",
    "other run, same root": "other_run",
    "other peer's": "other_peer",
    "ended since": "expired",
    "banned": "banned",
}
REMEMBERED = ("ended since", "banned")  # tokens that were good once, and that the victim has noted
IMPOSSIBLE = {
    "out: a node's streams": "a node calls only whom others name, with the token that it showed them; "
    "tests/test_node_access.py has both directions of each stream",
}


@dataclass
class Cell:
    """`attack` may be "good", the control. `why`: what went otherwise than it should, in words."""

    kind: str
    attack: str
    why: str = ""

    @property
    def as_it_should(self) -> bool:
        return not self.why


@dataclass
class Attackers:
    """`stranger` was never admitted; the tokens of `ended` and `banned` were good, and shown; `friend`'s is."""

    processes: dict[str, LocalPeer]
    tokens: dict[str, bytes] = field(default_factory=dict)  # by attack, "good" among them

    def who(self, attack: str) -> LocalPeer:
        return self.processes[{"ended since": "ended", "banned": "banned", "good": "friend"}.get(attack, "stranger")]

    def showing(self, attack: str) -> LocalPeer:
        """The process, which shows from now on what the attack shows."""
        process = self.who(attack)
        process.ask(do="show", token=self.tokens[attack].hex())
        return process


def id_of(process: LocalPeer) -> str:
    return process.wait_event("connected")["peer_id"]


def attackers(run: Run) -> Attackers:
    """Ready: the ban has reached the victim, and the token that ends has ended there."""
    found = Attackers({name: run.add_stranger(name) for name in ("stranger", "ended", "banned", "friend")})
    keys, ids = run.authority.keys, {name: id_of(process) for name, process in found.processes.items()}
    stranger, victim = ids["stranger"], run.peers[1]
    ours = {name: run.join(name) for name in ("banned", "friend")}
    found.tokens = {
        "no token": b"",
        "forged": token(forgers_keys(run.folder / "forger"), stranger, "stranger", 600),
        "expired": token(keys, stranger, "stranger", -60),
        "other run": token(keys_of_another_run(run.folder / "other"), stranger, "stranger", 600, "another-run"),
        "other run, same root": token(
            keys_of_another_run(run.folder / "twin", keys), stranger, "stranger", 600, "another-run"
        ),
        "other peer's": ours["friend"],
        "ended since": token(keys, ids["ended"], "ended", LIFETIME),
        "banned": ours["banned"],
        "good": ours["friend"],
    }
    ended_at = time.monotonic() + LIFETIME + SKEW + 1
    for name in REMEMBERED:
        got = found.showing(name).ask(do="call", servicer="dht", kind="rpc_ping", peer=run.ids[1])
        assert got["got"], f"{name}: its token is good at first, and was refused: {got}"
    run.ban("banned")
    wait_for_verdict(victim, ids["banned"], "banned")
    time.sleep(max(0.0, ended_at - time.monotonic()))
    wait_for_verdict(victim, ids["ended"], "expired")
    return found


def wait_for_verdict(victim: LocalPeer, peer: str, reason: str | None, patience: float = 60.0) -> None:
    deadline = time.monotonic() + patience
    while victim.ask(ask="verdicts", peers=[peer])["verdicts"][peer] != reason:
        assert time.monotonic() < deadline, f"{peer} is not {reason} at the victim; {victim.story()}"
        time.sleep(0.25)


def refusals(victim: LocalPeer) -> dict[tuple[str, str], int]:
    return {(call, reason): count for call, reason, count in victim.ask(ask="refused")["refused"]}


def reason_at(attack: str) -> str:
    """Return the reason for which a call with this token will be refused."""
    return ATTACKS[attack]


def all_cells(run: Run, those: Attackers) -> list[Cell]:
    """The controls among them: a call that a good token does not open shows nothing when it is refused."""
    cells = []
    for kind in INCOMING:
        cells += [try_incoming(run, those, kind, attack) for attack in (*ATTACKS, "good")]
    for kind in OUTGOING:
        cells += [try_outgoing(run, those, kind, attack) for attack in (*ATTACKS, "good")]
    return cells


def try_incoming(run: Run, those: Attackers, kind: Kind, attack: str) -> Cell:
    attacker, victim, key = those.showing(attack), run.peers[1], f"junk of {attack}"
    before = refusals(victim)
    more = {"key": key} if kind.servicer == "dht" else {"name": kind.request}
    got = attacker.ask(do="call", servicer=kind.servicer, kind=kind.rpc, peer=run.ids[1], **more)
    grown = growth(before, refusals(victim))
    kept = kind.rpc == "rpc_store" and victim.ask(ask="kept", key=key)["kept"]
    if attack == "good":
        counted = any(call == kind.counted for call, _ in grown)
        fine = got["got"] is not None and not counted and kept == (kind.rpc == "rpc_store")
        return Cell(kind.name, attack, "" if fine else f"the good token opens nothing: {got}, {grown}")
    cell = kind.counted, reason_at(attack)
    refused = got["got"] is None and not kept and (not kind.counted or grown.get(cell, 0) == 1)
    return Cell(kind.name, attack, "" if refused else f"{got}; kept: {kept}; counted: {grown}, not {cell}")


def try_outgoing(run: Run, those: Attackers, kind: Kind, attack: str) -> Cell:
    attacker, victim = those.showing(attack), run.peers[1]
    before, called = refusals(victim), attacker.ask(do="called")["called"].get(kind.rpc, 0)
    got = victim.ask(ask="call", kind=kind.rpc, peer=id_of(attacker))["outcome"]
    grown = growth(before, refusals(victim))
    reached = attacker.ask(do="called")["called"].get(kind.rpc, 0) > called
    if attack == "good":
        fine = got == "answered" and reached
        return Cell(kind.name, attack, "" if fine else f"the good token opens nothing: {got}")
    cell = "outgoing", reason_at(attack)
    # a DHT node shows its token with its answer: it is asked, and what it says does not count
    held_back = not reached or attack != "banned"
    refused = "NotAdmitted" in got and held_back and grown.get(cell, 0) >= 1
    return Cell(kind.name, attack, "" if refused else f"{got}; called: {reached}; counted: {grown}, not {cell}")


def growth(before: dict, after: dict) -> dict:
    return {cell: after[cell] - before.get(cell, 0) for cell in after if after[cell] > before.get(cell, 0)}

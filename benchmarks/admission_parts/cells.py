"""RPC kind x attack: each call really made, at a peer of a running swarm or by it, and refused or not."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from benchmarks.admission_parts.swarm import Run, forgers_keys, keys_of_another_run, token
from tests.local_swarm import LocalPeer
from volunteer_kit.auth.access_token import SKEW

LIFETIME = 25.0  # s of the token that is good, is shown, and then ends: the victim remembers it
SETTLE = 4.0  # s; those who followed the last leader are refused late, and would be counted for the next
ENOUGH = 8  # followers of the good leader, that the victim is among them
FOLLOW_WITHIN = 40.0  # s in which the victim meets a leader who has been declared; a round takes a few


@dataclass(frozen=True)
class Kind:
    """A call. `counted`: what the victim calls it, one of admission.CALLS."""

    name: str
    servicer: str  # dht, state or grad
    rpc: str
    counted: str
    is_ours: bool = True  # to the victim; False: by the victim


INCOMING = [
    *(Kind(f"DHT {rpc}", "dht", f"rpc_{rpc}", rpc) for rpc in ("ping", "store", "find")),
    *(
        Kind(f"{rpc} ({where})", servicer, f"rpc_{rpc}", rpc)
        for servicer, where in (("grad", "gradients"), ("state", "state"))
        for rpc in ("introduce", "join_group", "aggregate_part")
    ),
    Kind("download_state", "state", "rpc_download_state", "download_state"),
    Kind("get_chunk", "state", "rpc_get_chunk", "get_chunk"),
    Kind("get_told", "state", "rpc_get_told", "get_chunk"),
    Kind("tell", "grad", "rpc_tell", "tell"),
    Kind("show_part", "grad", "rpc_show_part", "show_part"),
]
OUTGOING = [
    *(Kind(f"out: DHT {rpc}", "dht", f"rpc_{rpc}", "outgoing", False) for rpc in ("ping", "store", "find")),
    Kind("out: leader (gradients)", "grad", "rpc_join_group", "outgoing", False),
    Kind("out: leader (state)", "state", "rpc_join_group", "outgoing", False),
    Kind("out: reducer (gradients)", "grad", "rpc_aggregate_part", "outgoing", False),
    Kind("out: reducer (state)", "state", "rpc_aggregate_part", "outgoing", False),
    Kind("out: donor of state", "state", "rpc_download_state", "outgoing", False),
    Kind("out: donor of chunks", "state", "rpc_get_chunk", "outgoing", False),
    Kind("out: witness", "state", "rpc_get_told", "outgoing", False),
    Kind("out: member who is told", "grad", "rpc_tell", "outgoing", False),
    Kind("out: member who shows a part", "grad", "rpc_show_part", "outgoing", False),
]
GROUP = Kind("out: member named by leader", "grad", "rpc_aggregate_part", "group", False)

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
    "download_state (gradients), all": "the gradients' averager shares its state with nobody; the good token gets none",
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
        got = found.showing(name).ask(do="call", servicer="state", kind="rpc_introduce", peer=run.ids[1])
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


def reason_at(kind: Kind, attack: str) -> str:
    """Why it will be refused. A token is looked at where it is shown: with each DHT call, and in introductions; other
    calls are judged by what was shown before, and nobody's bad token is noted."""
    shown_here = kind.servicer == "dht" or kind.counted == "introduce" or kind.counted == "outgoing"
    if kind.rpc == "rpc_aggregate_part":
        shown_here = False  # a reducer is not asked who it is: its group has shown its token
    return ATTACKS[attack] if shown_here or attack in REMEMBERED else "no_token"


def all_cells(run: Run, those: Attackers) -> list[Cell]:
    """The controls among them: a call that a good token does not open shows nothing when it is refused."""
    cells = []
    for kind in INCOMING:
        cells += [try_incoming(run, those, kind, attack) for attack in (*ATTACKS, "good")]
    for kind in OUTGOING:
        cells += [try_outgoing(run, those, kind, attack) for attack in (*ATTACKS, "good")]
    return cells + [try_group(run, those, attack) for attack in (*ATTACKS, "good")]


def try_incoming(run: Run, those: Attackers, kind: Kind, attack: str) -> Cell:
    attacker, victim, key = those.showing(attack), run.peers[1], f"junk of {attack}"
    if kind.servicer != "dht" and kind.counted != "introduce":  # as any peer, it shows its token first
        attacker.ask(do="call", servicer=kind.servicer, kind="rpc_introduce", peer=run.ids[1])
    before = refusals(victim)
    more = {"key": key} if kind.servicer == "dht" else {}
    got = attacker.ask(do="call", servicer=kind.servicer, kind=kind.rpc, peer=run.ids[1], **more)
    grown = growth(before, refusals(victim))
    kept = kind.rpc == "rpc_store" and victim.ask(ask="kept", key=key)["kept"]
    if attack == "good":
        counted = any(call == kind.counted for call, _ in grown)
        fine = got["got"] is not None and not counted and kept == (kind.rpc == "rpc_store")
        return Cell(kind.name, attack, "" if fine else f"the good token opens nothing: {got}, {grown}")
    cell = kind.counted, reason_at(kind, attack)
    refused = got["got"] is None and not kept and grown.get(cell, 0) == 1
    return Cell(kind.name, attack, "" if refused else f"{got}; kept: {kept}; counted: {grown}, not {cell}")


def try_outgoing(run: Run, those: Attackers, kind: Kind, attack: str) -> Cell:
    attacker, victim = those.showing(attack), run.peers[1]
    if kind.rpc == "rpc_aggregate_part":
        attacker.ask(do="call", servicer=kind.servicer, kind="rpc_introduce", peer=run.ids[1])
    before, called = refusals(victim), attacker.ask(do="called")["called"].get(kind.rpc, 0)
    got = victim.ask(ask="call", averager=kind.servicer, kind=kind.rpc, peer=id_of(attacker))["outcome"]
    grown = growth(before, refusals(victim))
    reached = attacker.ask(do="called")["called"].get(kind.rpc, 0) > called
    if attack == "good":
        fine = got == "answered" and reached
        return Cell(kind.name, attack, "" if fine else f"the good token opens nothing: {got}")
    cell = "outgoing", reason_at(kind, attack)
    # a DHT node shows its token with its answer: it is asked, and what it says does not count
    held_back = not reached or (kind.servicer == "dht" and attack != "banned")
    refused = "NotAdmitted" in got and held_back and grown.get(cell, 0) >= 1
    return Cell(kind.name, attack, "" if refused else f"{got}; called: {reached}; counted: {grown}, not {cell}")


def try_group(run: Run, those: Attackers, attack: str) -> Cell:
    """An admitted leader, in league with the attacker, names it as a member with the token that the attack shows."""
    accomplice, victim = those.showing("good"), run.peers[1]
    member = those.who(attack) if attack != "good" else run.peers[2]
    words = those.tokens[attack].hex() if attack != "good" else ""  # a peer that the victim knows
    peer = id_of(member)
    cell = ("group", reason_at(GROUP, attack)) if attack != "good" else None
    time.sleep(SETTLE)
    before, deadline = refusals(victim), time.monotonic() + FOLLOW_WITHIN
    followed, came = accomplice.ask(do="called")["called"].get("rpc_join_group", 0), 0
    grown: dict = {}
    while time.monotonic() < deadline and cell not in grown and not (attack == "good" and came >= ENOUGH):
        told = accomplice.ask(do="lead", through=run.ids, member=peer, words=words)
        came = told["called"].get("rpc_join_group", 0) - followed
        grown = growth(before, refusals(victim))
        time.sleep(0.2)
    accomplice.ask(do="lead", through=[], member=None)
    if attack == "good":
        fine = came >= ENOUGH and not any(call == "group" for call, _ in grown)
        return Cell(GROUP.name, attack, "" if fine else f"{came} followed; counted: {grown}")
    return Cell(GROUP.name, attack, "" if cell in grown else f"{came} followed; counted: {grown}, not {cell}")


def growth(before: dict, after: dict) -> dict:
    return {cell: after[cell] - before.get(cell, 0) for cell in after if after[cell] > before.get(cell, 0)}

"""`hivemind_config={"dht": {...}, "opt": {...}}`, as trahiv takes it, read and checked.

"dht" holds arguments of hivemind.DHT, "opt" those of hivemind.Optimizer, and four of the kit's: max_mbps, what
this peer's line may be used for; wait_for_peers, how many have to be here before the first step; max_staleness, epochs
that a gradient may be late; grad_rank, of "grad_compression": "powersgd". The kit says what it does in its own way,
and refuses what it cannot do; it drops nothing in silence.
"""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil
from hivemind import DHT
from hivemind import Optimizer as HivemindOptimizer
from hivemind.compression import CompressionBase
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P

from volunteer_kit.swarm.codecs.registry import CODECS, identity_of
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.net.peer import PeerConfig
from volunteer_kit.swarm.options import SwarmOptions

if TYPE_CHECKING:
    import torch

    from volunteer_kit.swarm.net.access.control import Admission
    from volunteer_kit.swarm.net.peer import Peer
    from volunteer_kit.swarm.node.member import NodeOptimizer
    from volunteer_kit.swarm.records.peer_record import PeerBoard
    from volunteer_kit.training.hf_nodes import NodeTerms

OWN_OF_PEER = {field.name for field in fields(PeerConfig)}
NOT_OURS = {"p2p", "node_id", "validate", "strict"}  # a DHT of the kit's own would not stand them
EVERYWHERE = {"ip4": "0.0.0.0", "ip6": "::"}
MADDRS = ("initial_peers", "host_maddrs", "announce_maddrs")
SAME = {"allreduce_timeout", "delay_grad_averaging", "verbose"}  # that SwarmOptions has under the same name
ALONE_AFTER = 60.0  # s; who fine-tunes with one friend goes on when the friend has gone home
MEETING = 15.0  # s, hivemind's matchmaking_time
OURS = {"max_mbps", "wait_for_peers", "commits", "max_staleness", "grad_rank"}  # beside hivemind's
MOST_STALENESS, MOST_RANK, USUAL_RANK = 16, 1024, 4  # as in a run file
LOW_RANK = "powersgd"  # beside the names of CODECS
BUILT_HERE = {"optimizer", "params", "scheduler", "dht"}
# what the kit always does, and therefore needs no saying
AS_HERE = {
    "reuse_grad_buffers": False, "offload_optimizer": True, "delay_state_averaging": True, "use_local_updates": False,
    "auxiliary": False, "average_opt_statistics": (), "extra_tensors": (),
}  # fmt: skip
WHY_NOT = {
    "use_local_updates": "every step is of the whole swarm",
    "auxiliary": "a Trainer trains",
    "extra_tensors": "only what is trained travels",
    "average_opt_statistics": "statistics are equal on all peers without it",
    "reuse_grad_buffers": "a Trainer clears the gradients after each of its own steps, of which a step of the swarm "
    "has several; the kit sums them in buffers of its own",
}
REFUSED = tuple(WHY_NOT)


class Door(Protocol):
    """Of a run from a file, whose authority lets peers in. Called in this order, from the beginning of training on."""

    fingerprint: str  # the run's

    def ask(self) -> Admission: ...

    def keep(self, peer: Peer) -> None: ...

    def node_terms(self, board: PeerBoard) -> NodeTerms: ...

    def enter(self, optimizer: NodeOptimizer, board: PeerBoard) -> None: ...

    @property
    def why_sent_away(self) -> str | None: ...

    def leave(self) -> None: ...


@dataclass(frozen=True)
class HivemindConfig:
    """What a Trainer was told of its swarm.

    `run_id` and `options.target_batch_size` are its own; `words` are to be said to whoever started it.
    """

    run_id: str
    peer: PeerConfig
    options: SwarmOptions  # its run_key is the run_id alone, until the model is known
    name: str = "trainer"  # of this peer, for the others
    wait_for_peers: int = 1  # ourselves among them, before the first step
    max_staleness: int = 4  # epochs that a gradient may be late and still count
    codec: tuple[str, str, int, float] | None = None  # of a run from a file: talk.NodeSpec's
    longest: int | None = None  # words of a full sample; None: what the model can read
    door: Door | None = None  # of a run from a file; options.run_key is the run's then
    initial_buffers: Mapping[str, torch.Tensor] | None = None  # of such a run's model: beside.initial_buffers
    words: tuple[str, ...] = ()


def read_hivemind_config(config: Mapping[str, Any]) -> HivemindConfig:
    """Raises SwarmError (bad_config, bad_address), with the nearest right name for a wrong one."""
    if not isinstance(config, Mapping):
        raise _wrong(f"hivemind_config is {type(config).__name__}; it should be a dictionary.")
    for name in config:
        if name not in ("dht", "opt"):
            raise _unknown("hivemind_config", str(name), ("dht", "opt"))
    words: list[str] = []
    known = _arguments(DHT.__init__, DHTNode.create, P2P.create) | OWN_OF_PEER - {"dht_options"}
    dht = _check("dht", config.get("dht"), known - NOT_OURS)
    opt = _check("opt", config.get("opt"), _arguments(HivemindOptimizer.__init__) | OURS)
    run_id, target = _run_id(opt.pop("run_id", None)), _target(opt.pop("target_batch_size", None))
    peer = _read_peer(dht, opt.pop("client_mode", None), words)
    wait_for_peers = opt.pop("wait_for_peers", 1)
    if isinstance(wait_for_peers, bool) or not isinstance(wait_for_peers, int) or wait_for_peers < 1:
        raise _wrong(f'"wait_for_peers" is {wait_for_peers!r}; it should say how many peers begin, such as 2.')
    max_staleness = _read_staleness(opt)
    rank = _read_rank(opt)
    options = replace(_read_options(run_id, target, opt, words), grad_rank=rank)
    codec_name(options.grad_codec)
    return HivemindConfig(
        run_id, peer, options, words=tuple(words), wait_for_peers=wait_for_peers, max_staleness=max_staleness,
    )  # fmt: skip


def codec_name(codec: CompressionBase) -> str:
    """Return the codec's name in CODECS. Raises SwarmError (bad_config) for one that gradients cannot travel in."""
    for name, known in CODECS.items():
        if identity_of(known) == identity_of(codec):
            return name
    raise _wrong(
        f'"grad_compression" is a {type(codec).__name__}, in which no gradients travel; name one of '
        f"{', '.join(CODECS)}, {LOW_RANK}."
    )


def read_json(text: str) -> Any:
    """The same from a command line: JSON, or the path of a file with it. Raises SwarmError."""
    try:
        return json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _wrong(
            f"hivemind_config {text[:100]!r} is neither JSON nor a file with it: {error}.\n"
            """1. Write it as '{"dht": {}, "opt": {"run_id": "ours", "target_batch_size": 256}}'."""
        ) from None


# --- "dht" ---


def _read_peer(dht: dict[str, Any], client_mode: bool | None, words: list[str]) -> PeerConfig:
    given = {name: [_with_quic_v1(m, words) for m in _maddrs(name, dht.pop(name, None))] for name in MADDRS}
    given["host_maddrs"], announced = _listen_here(given["host_maddrs"], words)
    given["announce_maddrs"] += announced
    values = {name: value for name, value in given.items() if value}
    values |= {name: dht.pop(name) for name in OWN_OF_PEER & dht.keys()}
    if "check_if_identity_free" in dht:
        values["check_identity"] = dht.pop("check_if_identity_free")
    if client_mode is not None:
        values["client_mode"] = client_mode
    dht.pop("start", None)
    values["dht_options"] = dht
    return PeerConfig(**values)


def _maddrs(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):  # one address, or a line of several, as they are passed round
        value = value.replace(",", " ").split()
    try:
        return [str(maddr) for maddr in value]
    except TypeError:
        raise _wrong(f'hivemind_config["dht"]["{name}"] is {value!r}; it should be a list of addresses.') from None


def _with_quic_v1(maddr: str, words: list[str]) -> str:
    """libp2p listens on the older form without a word, and nowhere."""
    parts = maddr.split("/")
    if "quic" not in parts:
        return maddr
    parts[parts.index("quic")] = "quic-v1"
    words.append(f"{maddr} is read as {'/'.join(parts)}: the older quic is no longer spoken.")
    return "/".join(parts)


def _listen_here(maddrs: list[str], words: list[str]) -> tuple[list[str], list[str]]:
    """(where to listen, what to announce): an address that is not this machine's belongs to the router before it."""
    own = {entry.address.split("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    listen, announce = [], []
    for maddr in maddrs:
        parts = maddr.split("/")
        kind, host = (parts[1], parts[2]) if len(parts) > 2 else ("", "")
        if kind in EVERYWHERE and host not in own | set(EVERYWHERE.values()) and not host.startswith("127."):
            everywhere = "/".join(["", kind, EVERYWHERE[kind], *parts[3:]])
            words.append(f"{host} is not an address of this machine: it is announced, and {everywhere} listens.")
            listen.append(everywhere)
            announce.append(maddr)
        else:
            listen.append(maddr)
    return list(dict.fromkeys(listen)), announce


# --- "opt" ---


def _run_id(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _wrong('hivemind_config["opt"] needs a "run_id": the name of the run, equal on all peers.')
    return value


def _target(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(
            'hivemind_config["opt"] needs a "target_batch_size": samples of all peers together that make one step, '
            f"such as 256; it is {value!r}."
        )
    return value


def _read_staleness(opt: dict[str, Any]) -> int:
    commits, staleness = opt.pop("commits", None), opt.pop("max_staleness", None)
    if commits not in (None, True):
        raise _wrong(f'"commits" is {commits!r}; peers always vote on each step. Leave it out.')
    staleness = HivemindConfig.max_staleness if staleness is None else staleness
    if isinstance(staleness, bool) or not isinstance(staleness, int) or not 1 <= staleness <= MOST_STALENESS:
        raise _wrong(f'"max_staleness" is {staleness!r}; it should be from 1 to {MOST_STALENESS}, such as 4.')
    return staleness


def _read_rank(opt: dict[str, Any]) -> int | None:
    """Return the rank of gradients' factors; None: they do not travel as factors. With a rank their codec is that of
    the factors from here on."""
    rank = opt.pop("grad_rank", None)
    if opt.get("grad_compression") != LOW_RANK:
        if rank is not None:
            raise _wrong(f'"grad_rank" needs "grad_compression": "{LOW_RANK}".')
        return None
    rank = USUAL_RANK if rank is None else rank
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MOST_RANK:
        raise _wrong(f'"grad_rank" is {rank!r}; it should be from 1 to {MOST_RANK}, such as {USUAL_RANK}.')
    opt["grad_compression"] = "float16"
    return rank


def _read_options(run_id: str, target: int, opt: dict[str, Any], words: list[str]) -> SwarmOptions:
    for name in sorted(BUILT_HERE & opt.keys()):
        raise _wrong(f'hivemind_config["opt"]["{name}"]: the Trainer makes it. Leave it out.')
    if opt.pop("average_state_every", None) not in (None, 0, 1):  # 1 is hivemind's default
        raise _wrong('hivemind_config["opt"]["average_state_every"]: models are equal without it. Leave it out.')
    values = {name: opt.pop(name) for name in SAME & opt.keys() if opt[name] is not None}
    values["max_mbps"] = opt.pop("max_mbps", None)
    if (codec := opt.pop("grad_compression", None)) is not None:
        values["grad_codec"] = _codec(codec)
    delayed = opt.pop("delay_optimizer_step", None)
    values["delay_optimizer_step"] = values.get("delay_grad_averaging", False) if delayed is None else bool(delayed)
    if values.get("delay_grad_averaging") and not values["delay_optimizer_step"]:
        raise _wrong('"delay_grad_averaging" needs "delay_optimizer_step": True, since the step waits for the average.')
    for name in REFUSED:
        if opt.get(name) and opt[name] != AS_HERE[name]:
            raise _wrong(f'hivemind_config["opt"]["{name}"] cannot be had here: {WHY_NOT[name]}. Leave it out.')
    if "allreduce_timeout" not in values and opt.get("averaging_timeout"):  # which hivemind's rounds begin with meeting
        whole, meeting = opt.pop("averaging_timeout"), opt.pop("matchmaking_time", None) or MEETING
        values |= {"allreduce_timeout": whole - meeting} if whole > meeting else {}
    for name, value in opt.items():
        if value is not None and (name not in AS_HERE or value != AS_HERE[name]):
            words.append(f'hivemind_config["opt"]["{name}"] has no use here: the kit sees to it.')
    return SwarmOptions(run_id, target, alone_after=ALONE_AFTER, **values)


def _codec(value: Any) -> CompressionBase:
    """Return the codec of gradients, given by name or by an object of hivemind's: ours, which is right on every numpy,
    comes in the object's place."""
    if isinstance(value, str):
        if value not in CODECS:
            raise _unknown('hivemind_config["opt"]["grad_compression"]', value, [*CODECS, LOW_RANK])
        return CODECS[value]
    if isinstance(value, CompressionBase):
        kind = getattr(value, "compression_type", None)
        return next((codec for codec in CODECS.values() if codec.compression_type == kind), value)
    raise _wrong(f'hivemind_config["opt"]["grad_compression"] is {value!r}; name one of {", ".join(CODECS)}.')


# --- words ---


def _check(section: str, values: Any, known: Collection[str]) -> dict[str, Any]:
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise _wrong(f'hivemind_config["{section}"] is {type(values).__name__}; it should be a dictionary.')
    for name in values:
        if name not in known:
            raise _unknown(f'hivemind_config["{section}"]', str(name), known)
    return dict(values)


def _arguments(*functions: Any) -> set[str]:
    names = [one for function in functions for one in inspect.signature(function).parameters.values()]
    return {one.name for one in names if one.kind is not one.VAR_KEYWORD} - {"self", "cls"}


def _unknown(where: str, name: str, known: Collection[str]) -> SwarmError:
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.4)
    fix = f"The nearest is {near[0]!r}." if near else f"There are: {', '.join(sorted(known))}."
    return _wrong(f"{where} has no {name!r}. {fix}")


def _wrong(message: str) -> SwarmError:
    return SwarmError(message, kind="bad_config")

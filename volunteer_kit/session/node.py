"""A worker's node, and what it tells of itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from volunteer_kit.robust.standing import Settings
from volunteer_kit.run_optimizers import build_local_steps
from volunteer_kit.runs import RunConfig, run_key_of
from volunteer_kit.session.node_parts import NodeParts, codec_of, node_parts, sync_settings, units_per_sample
from volunteer_kit.session.trust import Judge, judge_of_states
from volunteer_kit.swarm.local_sgd import LocalStepsConfig
from volunteer_kit.swarm.net.access.control import Admission
from volunteer_kit.swarm.net.connectivity import Reach
from volunteer_kit.swarm.net.identity import give_up_key, load_private_key
from volunteer_kit.swarm.net.peer import Peer
from volunteer_kit.swarm.node.access import account_name
from volunteer_kit.swarm.node.beside import judge_trained
from volunteer_kit.swarm.node.credentials import peer_id_of, public_der
from volunteer_kit.swarm.node.discovery import Discovery
from volunteer_kit.swarm.node.link import Link, start_node
from volunteer_kit.swarm.node.member import NodeOptimizer
from volunteer_kit.swarm.node.process import layout_of
from volunteer_kit.swarm.node.slots import Slots
from volunteer_kit.swarm.node.store import NodeStore
from volunteer_kit.swarm.node.talk import CHECKED_FIRST, Admit, NodeSpec
from volunteer_kit.swarm.records.device_speeds import MAX_SAMPLES_PER_SECOND, Limits, believed_speeds
from volunteer_kit.swarm.records.peer_record import PeerBoard
from volunteer_kit.swarm.rounds.reducer import decode_answer
from volunteer_kit.training.callbacks import Emit

if TYPE_CHECKING:
    import torch

    from volunteer_kit.session import Session
    from volunteer_kit.swarm.rounds.layout import Layout

NEWS = {  # topics of sync.messages.Topic that a volunteer should hear of
    "round failed": "A round came to no step and is tried again ({about}). Nothing is lost by it.",
    "proposal refused": "A step was refused ({about}).",
    "branch opened": "More than half of the swarm has been away for long. Those that are here go on without them "
    "({about}); when they are back, all take the model of the side that trained more.",
    "branch lost": "Others had trained more meanwhile, and this machine takes their model ({about}).",
    "rolled back": "The run's host has ordered everybody back to an earlier model ({about}).",
    "drifted": "This machine's model was no longer the others', and theirs takes its place ({about}). If it comes "
    "again, look at this machine's memory, its heat, and overclocking.",
    "banned": "{about} is shut out: it was found lying about a step.",
    "warning": "{about}",
    CHECKED_FIRST: "This machine's samples do not count yet: {about}.",
}


def renew_if_left(session: Session, groups: list[dict[str, Any]], identity_path: str) -> None:
    """Give up a key that has promised never to vote again, or whose votes are lost: identity and votes belong together.

    To be called before the peer starts. Raises StoreError where the node's folder cannot be used.
    """
    elements = sum(parameter.numel() for group in groups for parameter in group["params"])
    folder = node_folder(session, identity_path)
    renew_key_if_left(
        folder, identity_path, elements, lambda text: session.emit("warning", kind="identity", message=text)
    )


def renew_key_if_left(folder: Path, identity_path: str | Path, elements: int, warn: Callable[[str], None]) -> None:
    """As renew_if_left.

    :param folder: of the node
    :param elements: of all parameters
    """
    if not Path(identity_path).exists():
        shutil.rmtree(folder, ignore_errors=True)
        return
    if not folder.exists():
        return
    peer_id = peer_id_of(public_der(load_private_key(Path(identity_path).read_bytes())))
    store = NodeStore(folder, elements)
    try:
        left, trouble = store.goodbye is not None, store.trouble
        is_ours = store.belongs_to(peer_id)
    finally:
        store.close()
    if trouble:
        warn(trouble)
    if left or trouble or not is_ours:
        give_up_key(identity_path)
        shutil.rmtree(folder, ignore_errors=True)


def build_node(session: Session) -> NodeOptimizer:
    """The optimizer of a session whose peer is up. Its node is started when it joins.

    Raises StoreError where the node's folder cannot be used.
    """
    peer, membership, settings = session.peer, session.membership, session.spec
    assert peer is not None and membership is not None
    parts = node_parts(session.run, session.model)
    spec = node_spec(
        session.run,
        peer,
        parts,
        identity_path=membership.identity_path,
        folder=node_folder(session, membership.identity_path),
        initial_peers=settings.initial_peers,
        max_mbps=settings.max_mbps,
    )
    judge = None if peer.admission.is_open else judge_of_states(session)
    node = make_node(
        session.run, peer, session.board, parts, spec, session.launched, judge, build_local_steps(session.run)
    )
    membership.on_news = node.tell_admission
    node.on_told = partial(tell, session.emit)
    return node


def make_node(
    run: RunConfig,
    peer: Peer,
    board: PeerBoard,
    parts: NodeParts,
    spec: NodeSpec,
    launched: Link | None,
    judge: Judge | None = None,
    local_steps: LocalStepsConfig | None = None,
) -> NodeOptimizer:
    """A peer's optimizer whose node is started when it joins.

    :param board: where peers say what they are
    :param launched: a node's process that waits for its spec
    :param judge: of a stranger's state; None: nobody asks
    :param local_steps: of a peer that trains; None: the run has none, or this peer does not train
    Raises StoreError where the node's folder cannot be used.
    """
    spec.folder.mkdir(parents=True, exist_ok=True)
    layout, vector = layout_of(spec), parts.vector
    assert layout.elements == parts.elements

    def decode(cells: int, data: bytes, at_step: Layout = layout) -> Mapping[int, torch.Tensor]:
        averages = decode_answer(at_step, cells, data)
        return averages if vector is None else vector.means(averages)

    admission = peer.admission
    return NodeOptimizer(
        spec=spec,
        start=partial(start_node, launched=launched, watched_by=peer.processes),
        params=parts.groups,
        optimizer=parts.optimizer,
        scheduler=parts.scheduler,
        names=parts.names,
        slots=Slots(spec.folder / "gradients.bin", layout.elements),
        layout=layout if vector is None else vector,
        decode=decode,
        fill=None if vector is None else vector.fill,
        codec=layout if layout.goes_by_steps else None,
        reach=Reach(peer.dht),
        discover=partial(
            Discovery,
            peer.dht,
            run_key=spec.run_key,
            public=not peer.client_mode,
            is_first=not spec.initial_peers,
            username_of=admission.username_of,
            believe=None if admission.is_open else partial(speeds_among, run, board, admission),
        ),
        admission=lambda: Admit(admission.own_token, admission.bans, admission.condemned),
        judge=judge and judge_trained(judge, parts.num_trained),
        local_steps=local_steps,
        cause_of=peer.processes.cause_of,
    )


def node_folder(session: Session, identity_path: str) -> Path:
    """Return the folder of this session's node."""
    return (session.home.path if session.home else Path(identity_path).parent) / "node"


def node_spec(
    run: RunConfig,
    peer: Peer,
    parts: NodeParts,
    *,
    identity_path: str,
    folder: Path,
    initial_peers: Sequence[str] = (),
    max_mbps: float | None = None,
    observes: bool = False,
) -> NodeSpec:
    """Return the spec of a peer's node; see NodeSpec."""
    return NodeSpec(
        daemon=peer.daemon_address(),
        identity_path=identity_path,
        client_mode=peer.client_mode,
        initial_peers=tuple(initial_peers),
        folder=folder,
        run_key=run_key_of(run),
        sync=sync_settings(run),
        shapes=parts.shapes,
        origins=parts.origins,
        most_weight=parts.most_weight,
        codec=codec_of(run),
        rank=parts.rank,
        ends=parts.ends,
        rule=run.swarm.aggregation,
        account=account_name(peer.admission.username_of(peer.peer_id) or ""),
        trust=peer.admission.trust,
        verification=Settings(**run.verification.model_dump()) if run.verification is not None else None,
        max_mbps=max_mbps,
        observes=observes,
        averages_ways=run.swarm.local_steps is not None,
    )


def speeds_among(run: RunConfig, board: PeerBoard, admission: Admission) -> Limits:
    """Samples/s that strangers are believed to do, by what all say of themselves, in the units of the run's nodes."""
    speeds = believed_speeds(board.fetch(), admission.account_of, MAX_SAMPLES_PER_SECOND)
    return speeds.times(units_per_sample(run))


def tell(emit: Emit, topic: str, about: str) -> None:
    """News of the node, as a warning for the volunteer; what is no trouble is not told."""
    if topic in NEWS:
        kind = "verification" if topic == CHECKED_FIRST else "round"
        emit("warning", kind=kind, message=NEWS[topic].format(about=about))

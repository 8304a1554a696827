"""Run the node process: build it from a `NodeSpec`, and end it with its parent or with p2pd."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch

from volunteer_kit.swarm.codecs.registry import check_codecs, make_codec
from volunteer_kit.swarm.net.identity import load_private_key
from volunteer_kit.swarm.net.peer import raise_file_limit
from volunteer_kit.swarm.node.access import Access
from volunteer_kit.swarm.node.engine import Engine
from volunteer_kit.swarm.node.signatures import Signatures
from volunteer_kit.swarm.node.slots import Slots
from volunteer_kit.swarm.node.store import NodeStore, StoreError
from volunteer_kit.swarm.node.talk import ROLE, Broken, NodeSpec, Told, Up
from volunteer_kit.swarm.node.transport import Transport
from volunteer_kit.swarm.rounds.error_feedback import ErrorFeedback
from volunteer_kit.swarm.rounds.exchange import Exchange
from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.sync.config import SyncConfig

logger = logging.getLogger(__name__)

LAST_WORDS: Final = 1.0  # s for the goodbye to leave this machine


def layout_of(spec: NodeSpec) -> Layout:
    """Return the layout of the run's first step, which cuts the parameter vector in the same way on every peer."""
    small, large, threshold, density = spec.codec
    shapes = [torch.Size(shape) for shape in spec.shapes]
    codec = make_codec(small, large, threshold, density)
    cells = SyncConfig(**spec.sync).cells
    return Layout(shapes, cells, codec, spec.origins, spec.most_weight, spec.rank, spec.ends)


async def serve(spec: NodeSpec, connection: Connection) -> None:
    """Run the node until its parent closes the pipe."""
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()

    def tell(message: Any) -> None:
        try:
            connection.send(message)
        except OSError:
            gone.set()

    layout = layout_of(spec)
    access = Access(spec.trust)
    access.take(spec.admit)
    transport = await Transport.start(
        spec.daemon, access=access, run_key=spec.run_key, max_mbps=spec.max_mbps
    )
    store = NodeStore(spec.folder, layout.elements)
    store.belongs_to(transport.peer_id)
    if store.trouble:
        tell(Told("warning", store.trouble))
    slots = Slots(store.slots_path, layout.elements)
    key = load_private_key(Path(spec.identity_path).read_bytes())
    signatures = Signatures(key, transport.peer_id, spec.run_key, trust=spec.trust)
    config = SyncConfig(**spec.sync)
    exchange = Exchange(
        transport.peer_id,
        transport,
        layout,
        max_staleness=config.max_staleness,
        sign_answer=signatures.sign_answer,
        check_answer=signatures.check_answer,
        credential=signatures.credential,
        knows=signatures.knows,
        rule=spec.rule,
        sent=ErrorFeedback(spec.folder / "sent.bin", layout) if layout.leaves_out else None,
        answered=ErrorFeedback(spec.folder / "answered.bin", layout) if layout.answers_leave_out else None,
    )
    engine = Engine(spec, transport, store, slots, layout, signatures, exchange, tell, access)
    tell(Up(transport.peer_id))

    def listen() -> None:
        while True:
            try:
                message = connection.recv()
            except (OSError, EOFError):
                break
            loop.call_soon_threadsafe(engine.on_trainer, message)
        loop.call_soon_threadsafe(gone.set)

    threading.Thread(target=listen, name="training process", daemon=True).start()
    engine.start()
    ends: set[asyncio.Future[Any]] = {loop.create_task(gone.wait()), transport.lost}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if not gone.is_set():
        tell(Broken(transport.lost.result()))
    engine.stop()
    if engine.left.is_set():
        await asyncio.sleep(LAST_WORDS)
    exchange.close()
    await transport.close()
    store.close()


def main() -> int:
    """`python -m volunteer_kit.swarm.node FD`, started by `link.start_node`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all of a terminal; the goodbye comes after it
    level = os.environ.get("VOLUNTEER_KIT_NODE_LOG", "INFO")
    logging.basicConfig(level=level, format="%(asctime)s node %(levelname)s %(message)s", stream=sys.stderr)
    torch.set_num_threads(1)
    raise_file_limit()
    check_codecs()
    connection = Connection(int(sys.argv[1]))
    try:
        spec = connection.recv()
    except (OSError, EOFError):
        return 0
    try:
        asyncio.run(serve(spec, connection))
    except Exception as error:
        with suppress(OSError):
            connection.send(Broken(str(error) if isinstance(error, StoreError) else f"{ROLE} has ended: {error!r}"))
        raise
    return 0

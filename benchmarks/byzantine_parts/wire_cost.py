"""Bytes of verified averaging beside those of the gradients, from the kit's own messages and codecs."""

from __future__ import annotations

import msgpack
import numpy as np
import torch

from volunteer_kit.robust.messages import Commit, Reveal, Samples, Statement
from volunteer_kit.robust.reducing import SUMS
from volunteer_kit.robust.standing import Settings
from volunteer_kit.runs import RunConfig
from volunteer_kit.swarm.verify_wire import PART_DIGEST, pack

SIGNATURE, KEY, PEER_ID, FRAME = 256, 372, 34, 60  # bytes of an envelope beside its message
PART_BYTES = 2**19  # hivemind's


def extra_bytes(run: RunConfig, shapes: torch.nn.Module, peers: int, settings: Settings) -> tuple[float, int]:
    """:returns: percent of what a peer sends and receives in a round, and the parts that the vector is cut into"""
    parts, gradients = 0, 0
    for parameter in shapes.parameters():
        each = 1 if parameter.numel() > run.swarm.compress_above else 2  # 8 bits above, fp16 below
        parts += -(-parameter.numel() * each // PART_BYTES)
        gradients += parameter.numel() * each
    samples = run.target_batch_size // peers
    names = Samples(tuple((3, 120, 400 + i) for i in range(samples)), microbatches=8)
    opening = len(_packed(Statement(b"", np.zeros((0, SUMS)), frozenset(), names)))
    commit = Commit(float(samples), bytes(16), bytes(PART_DIGEST * parts), bytes(16))
    reveal = Reveal(bytes(16), (bytes(16),) * peers, (parts // peers,) * peers)
    numbers = np.zeros((parts, SUMS + settings.sums), np.float32)
    statement = Statement(bytes(32), numbers, frozenset(range(peers)))
    said = sum(len(_packed(message)) for message in (commit, reveal, statement)) + settings.share * opening
    said += 3 * (SIGNATURE + FRAME) + KEY + 2 * PEER_ID
    return 100 * said * (peers - 1) * 2 / (2 * 2 * gradients * (peers - 1) / peers), parts


def _packed(message: Commit | Reveal | Statement) -> bytes:
    return msgpack.packb(pack(message), use_bin_type=True)

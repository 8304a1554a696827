"""Bytes of verified averaging beside those of the gradients, from the kit's own messages and codecs."""

from __future__ import annotations

import numpy as np
import torch
from hivemind.utils.crypto import RSAPrivateKey

from volunteer_kit.robust.draw import draw_validators
from volunteer_kit.robust.messages import DIGEST_SIZE, Commit, Report, Reveal, Samples, Statement
from volunteer_kit.robust.reducing import SUMS
from volunteer_kit.robust.standing import Settings
from volunteer_kit.runs import RunConfig
from volunteer_kit.swarm.verify_wire import ANSWER_DIGEST, PART_DIGEST, STAGES, seal

FRAME = 60  # bytes that protobuf and libp2p put around an envelope
ROUND_ID = 36  # bytes
PART_BYTES = 2**19  # hivemind's
MICROBATCHES = 8


def messages(target: int, parts: int, peers: int, settings: Settings) -> tuple[Commit, Reveal, Statement]:
    """What an honest member tells in one round, of a target batch so large: with a list of samples and a report, which
    it has once in 1 / share rounds."""
    names = Samples(tuple((3, 120, 400 + i) for i in range(target // peers)), microbatches=MICROBATCHES)
    report = Report(bytes(ROUND_ID), 3, 0, np.random.default_rng(0).standard_normal((peers, settings.sums)))
    commit = Commit(target / peers, bytes(16), bytes(PART_DIGEST * parts), bytes(16), news=(report,))
    heard = (bytes(DIGEST_SIZE),) * peers
    reveal = Reveal(bytes(16), (bytes(ANSWER_DIGEST),) * peers, (parts // peers,) * peers, heard)
    statement = Statement(bytes(32), np.zeros((parts, SUMS + settings.sums), np.float32), heard, names)
    return commit, reveal, statement


def extra_bytes(run: RunConfig, shapes: torch.nn.Module, peers: int, settings: Settings) -> tuple[float, int]:
    """:returns: percent of what a peer sends and receives in a round, and the parts that the vector is cut into"""
    parts, gradients = 0, 0
    for parameter in shapes.parameters():
        each = 1 if parameter.numel() > run.swarm.compress_above else 2  # 8 bits above, fp16 below
        parts += -(-parameter.numel() * each // PART_BYTES)
        gradients += parameter.numel() * each
    commit, reveal, statement = messages(run.target_batch_size, parts, peers, settings)
    key = RSAPrivateKey()

    def size(stage: int, message: Commit | Reveal | Statement) -> int:
        return len(seal(key, bytes(ROUND_ID), stage, message)) + FRAME

    plain = (Commit(**{**vars(commit), "news": ()}), reveal, Statement(**{**vars(statement), "opening": None}))
    said = sum(size(stage, message) for stage, message in zip(STAGES, plain, strict=True))
    samples = run.target_batch_size // peers
    alike = {place: float(samples) for place in range(peers)}
    validators = len(draw_validators(bytes(32), 0, samples, alike, range(peers)))
    said += settings.share * validators * (size(STAGES[0], commit) - size(STAGES[0], plain[0]))
    said += settings.share * (size(STAGES[2], statement) - size(STAGES[2], plain[2]))
    return 100 * said * (peers - 1) * 2 / (2 * 2 * gradients * (peers - 1) / peers), parts

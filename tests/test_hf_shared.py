"""What peers of a fine-tune must have alike."""

from __future__ import annotations

import torch

from volunteer_kit.swarm.codecs.registry import CODECS, make_codec
from volunteer_kit.swarm.options import SwarmOptions
from volunteer_kit.training.hf_shared import fingerprint_of


def fingerprint(**options) -> str:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    shared = SwarmOptions(run_key="key", target_batch_size=8, **options)
    how = {"schedule": "constant", "max_steps": 10, "max_grad_norm": None, "max_staleness": 4}
    return fingerprint_of(model, optimizer, shared, **how)


def test_peers_with_other_codecs_do_not_meet():
    """Of 8 and of 4 bits, say: they would cut tensors at different places, and give their slices to other members."""
    codecs = [*CODECS.values(), *(make_codec("float16", large, 10, 1 / 8) for large in ("sparse", "blockwise4"))]
    codecs += [make_codec("sparse", "sparse", 10, density) for density in (1 / 8, 1 / 16)]
    assert len({fingerprint(grad_codec=codec) for codec in codecs}) == len(codecs)
    assert fingerprint(grad_codec=make_codec("float16", "sparse", 10, 1 / 8)) == fingerprint(
        grad_codec=make_codec("float16", "sparse", 10, 1 / 8)
    )

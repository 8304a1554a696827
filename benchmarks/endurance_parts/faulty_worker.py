"""The kit's worker, which keeps a ledger, and whose memory runs out when it gets SIGUSR1: the next microbatch does not
fit."""

from __future__ import annotations

import signal
import sys
import threading

import torch
from endurance_parts.ledger import keep

import volunteer_kit.session as session
from volunteer_kit.worker import main

runs_out = threading.Event()
compute_loss = session.compute_loss


def faulty(model, batch):
    if runs_out.is_set():
        runs_out.clear()
        raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
    return compute_loss(model, batch)


if __name__ == "__main__":
    session.compute_loss = faulty
    keep()
    signal.signal(signal.SIGUSR1, lambda *_: runs_out.set())
    sys.exit(main())

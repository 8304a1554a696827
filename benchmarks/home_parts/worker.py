"""One machine of the bench, a process of its own: a worker of the kit, of plain hivemind or of DDP, or the swarm's
first peer, which trains nothing.

stdin: settings, one line of JSON, then "go", and "leave" or its end. stdout: one JSON event a line: "connected",
"ready", then "beat" (once a second: where the seconds went, and losses) and "step" (each global step); "finished".

Settings: system ("kit", "stock", "ddp", "bootstrap"), address,
initial_peers, client_mode, identity_path, run (as load_run takes it), pool (file), speed (samples/s), batch, real,
real_every, seed; "kit": folder, where its state is stored and found again; "stock", "ddp": see there.
"""

from __future__ import annotations

import json
import logging
import os
import traceback

import torch

from benchmarks.home_parts import ddp, kit, stock
from benchmarks.home_parts.device import Device, Words
from benchmarks.home_parts.material import load_pool
from volunteer_kit.worker import own_stdin

SYSTEMS = {"kit": kit.train, "stock": stock.train, "ddp": ddp.train}


def main() -> None:
    torch.set_num_threads(1)
    logging.basicConfig(format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("volunteer_kit").setLevel(os.environ.get("HIVEMIND_LOGLEVEL", "INFO"))
    stdin = own_stdin()
    line = b""
    while not line.endswith(b"\n"):
        line += stdin.readline()
    settings = json.loads(line)
    words = Words(stdin)
    if settings["system"] == "bootstrap":
        peer = kit.start(settings)
        words.leave.wait()
        peer.shutdown()
        return
    names = ("speed", "batch", "real", "real_every", "seed")
    device = Device(load_pool(settings["pool"]), **{name: settings[name] for name in names})
    SYSTEMS[settings["system"]](settings, device, words)


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # hivemind's threads and processes would keep this one alive for ever
        traceback.print_exc()
        os._exit(1)

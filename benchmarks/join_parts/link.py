"""Joining over a home link: from the start of the process until the first microbatch begins, beside what the line alone
would take.

    python benchmarks/join_parts/link.py [--run dalle-laion] [--down 20] [--up 10] [--rtt 40]

A donor and a joiner, each with the run's whole model and optimizer, live in network namespaces that this program makes
and removes (it takes root); the line between them is shaped to the joiner's Mbit/s. The donor has taken one step, so
there is a state to take, parameters and statistics. Data are random codes: what is measured is the way of the state.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.netlab import Line, Netlab, NoNetlab

ROLES = {"donor": 1, "joiner": 2}  # and their machines
PATIENCE = 1200.0  # s for everything


# --- a peer, in a process of its own ---


def be_peer(role: str, run_name: str, initial_peers: list[str]) -> None:
    """One JSON event a line: "connected" (the donor's addresses), "parameters", "microbatch", "ready"."""
    started, lock = time.monotonic(), threading.Lock()

    def say(event: str, **fields) -> None:
        with lock:
            print(json.dumps({"event": event, "seconds": time.monotonic() - started, **fields}), flush=True)

    from volunteer_kit.run_sizes import state_bytes
    from volunteer_kit.runs import build_model, load_run
    from volunteer_kit.session.node import make_node, node_spec
    from volunteer_kit.session.node_parts import node_parts
    from volunteer_kit.swarm.net.peer import PeerConfig, start_peer
    from volunteer_kit.swarm.node.link import launch_node
    from volunteer_kit.swarm.records.peer_record import PeerBoard

    launched, config = launch_node(), load_run(run_name)
    model = build_model(config)
    parts = node_parts(config, model)
    maddrs = [f"/ip4/{Netlab.address(ROLES[role])}/tcp/0"]
    with tempfile.TemporaryDirectory(prefix="join-link-") as name:
        identity = str(Path(name, "identity.key"))
        own = PeerConfig(
            initial_peers=initial_peers, host_maddrs=maddrs, client_mode=role == "joiner", identity_path=identity
        )  # fmt: skip
        peer = start_peer(own)
        say("connected", maddrs=peer.visible_maddrs(), rtt=round_trip(initial_peers))
        spec = node_spec(
            config, peer, parts, identity_path=identity, folder=Path(name, "node"), initial_peers=initial_peers
        )  # fmt: skip
        optimizer = make_node(config, peer, PeerBoard(peer.dht, config.run_id), parts, spec, launched)
        parameters = sum(4 * parameter.numel() for parameter in model.parameters())
        if role == "donor":
            optimizer.join(patience=PATIENCE)
            step_once(optimizer, list(model.parameters()), config.target_batch_size)
            say("ready", digest=optimizer.lineage.hex(), epoch=optimizer.local_epoch)
        else:
            optimizer.on_download = tenths(say)
            taken = optimizer.join(patience=PATIENCE)
            say("parameters", taken=taken, bytes=parameters, all_bytes=state_bytes(config))
            say("microbatch")
            seconds = compute_microbatch(model, config)
            say("computed", took=seconds)
            say("finished", digest=optimizer.lineage.hex(), traffic=optimizer.traffic())
        sys.stdin.readline()
        optimizer.shutdown()
        peer.shutdown()


def step_once(optimizer, parameters: list, samples: int) -> None:
    """A global step alone, on gradients out of nowhere."""
    import torch

    torch.manual_seed(0)
    while not any(report.samples for report in optimizer.reports):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter).mul_(1e-3)
        optimizer.step(batch_size=samples)
        optimizer.await_step(1.0)
    optimizer.settle()


def compute_microbatch(model, config) -> float:
    """Forward and backward of one sample of random codes. :returns: s."""
    import torch

    started, shape = time.monotonic(), config.model
    text = torch.randint(1, shape.num_text_tokens, (1, shape.text_seq_len))  # (B, T)
    codes = torch.randint(0, shape.num_image_tokens, (1, shape.image_seq_len))  # (B, I)
    model(text, codes).loss.backward()
    return time.monotonic() - started


def tenths(say: Callable) -> Callable[[int, int], None]:
    last = -1

    def tell(done: int, total: int) -> None:
        nonlocal last
        if (tenth := 10 * done // total) > last:
            last = tenth
            say("downloaded", share=done / total)

    return tell


def round_trip(maddrs: list[str]) -> float | None:
    """ms to open a TCP connection, the least of five."""
    if not maddrs:
        return None
    _, _, host, _, port, *_ = maddrs[0].split("/")
    times = []
    for _ in range(5):
        started = time.perf_counter()
        socket.create_connection((host, int(port)), timeout=5).close()
        times.append(time.perf_counter() - started)
    return 1000 * min(times)


# --- both ---


class PeerProcess:
    """A peer on its side of the line, and what it says."""

    def __init__(self, lab: Netlab, role: str, run_name: str, initial_peers: list[str]):
        arguments = ["--role", role, "--run", run_name, "--peers", *initial_peers]
        self.role, self.said = role, {}
        self.process = subprocess.Popen(
            [*lab.inside(ROLES[role]), sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def wait_for(self, name: str) -> dict:
        for text in self.process.stdout:
            if not text.startswith("{"):
                continue
            event = self.said[json.loads(text)["event"]] = json.loads(text)
            self.said.setdefault(f"{event['event']} first", event)
            print(f"{event['seconds']:7.1f} s  {self.role}: {describe(event)}")
            if event["event"] == name:
                return event
        raise SystemExit(f"the {self.role} ended before it was {name}")

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def describe(event: dict) -> str:
    words = {key: value for key, value in event.items() if key not in ("event", "seconds", "digest", "maddrs")}
    return f"{event['event']} {words or ''}"


def measure(run_name: str, down: float, up: float, rtt: float) -> dict:
    """Join once. :returns: the figures of the last line."""
    peers: list[PeerProcess] = []
    with Netlab([Line(), Line(down, up, rtt)]) as lab:
        alarm = threading.Timer(PATIENCE, lambda: [peer.process.kill() for peer in peers])
        alarm.start()
        try:
            peers.append(donor := PeerProcess(lab, "donor", run_name, []))
            maddrs = [m for m in donor.wait_for("connected")["maddrs"] if lab.address(ROLES["donor"]) in m]
            held = donor.wait_for("ready")["digest"]
            peers.append(joiner := PeerProcess(lab, "joiner", run_name, maddrs))
            joiner.wait_for("finished")
        finally:
            alarm.cancel()
            for peer in reversed(peers):
                peer.close()
    return {"down_mbps": down, "up_mbps": up, **figures(joiner.said, down), "state_equal": is_equal(joiner, held)}


def is_equal(joiner: PeerProcess, held: str) -> bool:
    return joiner.said["parameters"]["taken"] and joiner.said["finished"]["digest"] == held


def figures(said: dict[str, dict], down: float) -> dict[str, float | bool | None]:
    sizes = said["parameters"]
    whole_floor = sizes["all_bytes"] * 8e-6 / down
    return {
        "rtt_ms": said["connected"]["rtt"],
        "parameters_mb": sizes["bytes"] / 1e6,
        "state_mb": sizes["all_bytes"] / 1e6,
        "connected_s": said["connected"]["seconds"],
        "join_s": said["microbatch"]["seconds"],
        "first_microbatch_done_s": said["computed"]["seconds"],
        "floor_s": whole_floor,
        "over_floor": said["microbatch"]["seconds"] / whole_floor,
        "download_began_s": said["downloaded first"]["seconds"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="dalle-laion", help="a run's name or file")
    parser.add_argument("--down", type=float, default=20, help="Mbit/s to the joiner")
    parser.add_argument("--up", type=float, default=10, help="Mbit/s from it")
    parser.add_argument("--rtt", type=float, default=40, help="ms, where the kernel has netem")
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--peers", nargs="*", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        be_peer(options.role, options.run, options.peers)
        return 0
    try:
        found = measure(options.run, options.down, options.up, options.rtt)
    except NoNetlab as e:
        sys.exit(str(e))
    print(json.dumps({key: float(f"{v:.4g}") if isinstance(v, float) else v for key, v in found.items()}))
    return 0 if found["state_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())

"""Are a Netlab's lines what they were asked to be? Rates, delays and losses, each measured from inside two machines."""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.netlab import Line, Netlab

ASKED = (
    Line(down=20, up=10, rtt=40), Line(down=50, up=25), Line(down=5, up=1), Line(rtt=30, loss=0.1, nat=True), Line()
)  # fmt: skip
PORT, SECONDS = 4000, 6.0
PATIENCE = 30.0  # s for a caller to come through
PINGS, EVERY = 500, 0.01  # packets and s between two
WITHIN_RATE, WITHIN_DELAY, WITHIN_LOSS = 0.05, 5.0, 0.05  # share, ms, share of the packets (3 sigma of 10 %: 0.04)


# --- in the machines ---


def pour(address: str) -> None:
    """Send for as long as this process lives."""
    with socket.create_connection((address, PORT)) as pipe:
        while True:
            pipe.sendall(bytes(2**16))


def drain() -> None:
    """Take what one comes to send."""
    with socket.create_server(("", PORT)) as door:
        door.settimeout(PATIENCE)
        print("open", flush=True)
        pipe, _ = door.accept()
        while pipe.recv(2**20):
            pass


def echo(address: str) -> None:
    """Call there, so that a machine behind NAT can be asked as well, and send back each byte that comes."""
    with socket.create_connection((address, PORT)) as pipe:
        pipe.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while heard := pipe.recv(1):
            pipe.sendall(heard)


def ask(pings: str) -> None:
    """Wait for the caller, send it a byte so many times, and print ms of each way there and back."""
    with socket.create_server(("", PORT)) as door:
        door.settimeout(PATIENCE)
        print("open", flush=True)
        pipe, _ = door.accept()
        pipe.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(int(pings)):
            began = time.perf_counter()
            pipe.sendall(b".")
            pipe.recv(1)
            times.append(1000 * (time.perf_counter() - began))
        print(json.dumps(times), flush=True)


def count() -> None:
    """How many datagrams come until none has for 2 s."""
    with socket.socket(type=socket.SOCK_DGRAM) as door:
        door.bind(("", PORT))
        print("open", flush=True)
        heard = 0
        try:
            while door.recv(2000):
                door.settimeout(2.0)
                heard += 1
        except TimeoutError:
            print(heard, flush=True)


def scatter(address: str) -> None:
    """Datagrams, one after the other."""
    with socket.socket(type=socket.SOCK_DGRAM) as pipe:
        for _ in range(PINGS):
            pipe.sendto(bytes(100), (address, PORT))
            time.sleep(EVERY / 5)


ROLES = {role.__name__: role for role in (pour, drain, echo, ask, count, scatter)}


class Two:
    """A process on each of two machines, the first of which listens; both ended afterwards."""

    def __init__(self, lab: Netlab, listener: tuple[int, ...], caller: tuple[int, ...]):
        self.lab, self.processes = lab, []
        self.listening = self._start(*listener)
        self.listening.stdout.readline()
        self._start(*caller)

    def _start(self, number: int, *words) -> subprocess.Popen:
        command = [*self.lab.inside(number), sys.executable, __file__, *map(str, words)]
        self.processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
        return self.processes[-1]

    def __enter__(self) -> Two:
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


# --- from outside ---


def rate(lab: Netlab, sender: int, receiver: int) -> float:
    """Mbit/s on the sender's line, once its buffers are full."""
    with Two(lab, (receiver, "drain"), (sender, "pour", lab.address(receiver))):
        time.sleep(1.0)
        began, before = time.monotonic(), lab.traffic(receiver).received
        time.sleep(SECONDS)
        return 8e-6 * (lab.traffic(receiver).received - before) / (time.monotonic() - began)


def round_trip(lab: Netlab, caller: int, listener: int, pings: int = 50) -> float:
    """ms, median."""
    with Two(lab, (listener, "ask", pings), (caller, "echo", lab.address(listener))) as two:
        return statistics.median(json.loads(two.listening.stdout.readline() or "[NaN]"))


def lost(lab: Netlab, sender: int, receiver: int) -> float:
    """Share of datagrams that do not arrive."""
    with Two(lab, (receiver, "count"), (sender, "scatter", lab.address(receiver))) as two:
        return 1 - int(two.listening.stdout.readline() or 0) / PINGS


def can_connect(lab: Netlab, caller: int, listener: int) -> bool:
    with Two(lab, (listener, "ask", 1), (caller, "echo", lab.address(listener))) as two:
        time.sleep(1.0)
        return two.listening.poll() is not None


def main() -> int:
    far = len(ASKED)  # its own line is as fast as the kernel, and without delay
    rates, delays, losses, walls = [], [], [], []
    with Netlab(ASKED) as lab:
        print(f"{'line':>4}  {'what':<10}{'asked':>8}{'measured':>10}", flush=True)

        def tell(number: int, what: str, asked: float, found: float, unit: str) -> float:
            print(f"{number:>4}  {what:<10}{asked:>8g}{found:>10.4g}   {unit}", flush=True)
            return abs(found - asked)

        busy = []
        for number, line in enumerate(ASKED[:-1], start=1):
            for what, asked, ends in (("down", line.down, (far, number)), ("up", line.up, (number, far))):
                if asked:
                    spent = relay_seconds(lab)
                    rates.append(tell(number, what, asked, rate(lab, *ends), "Mbit/s") / asked)
                    busy += [(relay_seconds(lab) - spent) / (SECONDS + 1) / asked] if line.rtt else []
            if line.rtt:
                delays.append(tell(number, "there, back", line.rtt, round_trip(lab, number, far), "ms"))
            if line.loss:
                losses.append(tell(number, "loss", line.loss, lost(lab, number, far), "of the packets"))
            if line.nat:
                walls = [not can_connect(lab, far, number), can_connect(lab, number, far)]
                print(f"{number:>4}  behind NAT: calls from outside {'end there' if walls[0] else 'COME IN'}, its own "
                      f"{'go out' if walls[1] else 'DO NOT GO OUT'}")  # fmt: skip
        relayed = lab.relayed
    figures = {
        "largest_error": max(rates), "delay_error_ms": max(delays), "loss_error": max(losses), "nat": all(walls),
        "relayed": relayed, "relay_core_share_at_10_mbps": 10 * max(busy),
    }  # fmt: skip
    print(json.dumps({key: round(v, 4) if isinstance(v, float) else v for key, v in figures.items()}))
    is_right = max(rates) <= WITHIN_RATE and max(delays) <= WITHIN_DELAY and max(losses) <= WITHIN_LOSS and all(walls)
    return 0 if is_right else 1


def relay_seconds(lab: Netlab) -> float:
    """s of a core that the relay has taken so far."""
    if lab._relay is None:
        return 0.0
    return sum(psutil.Process(lab._relay.pid).cpu_times()[:2])


if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])

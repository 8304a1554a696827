"""`volunteer-kit monitor`: keeps a monitor up until SIGTERM, and asks one that runs to roll back."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch

from volunteer_kit.auth.process_token import keep_token
from volunteer_kit.home import Home
from volunteer_kit.monitor import asked
from volunteer_kit.monitor.errors import MonitorError
from volunteer_kit.monitor.member import Addresses
from volunteer_kit.monitor.recording import find_tracker
from volunteer_kit.monitor.watch import CHECKPOINT_EVERY, Monitor
from volunteer_kit.runs import RunConfig, load_run

TURN = 0.1  # s between two turns of the loop
FAREWELL = 8.0  # s from the order to stop until the process ends, whatever it waits for
ANSWER_WITHIN = 240.0  # s; a monitor answers between two rounds
SERVE_FOR = 90.0  # s that a monitor of the command's own stays up after its order: others fetch the state from it
TROUBLES = 20  # turns that may fail one after another


def monitor_run(
    run: str | Path | RunConfig,
    *,
    folder: str | Path | None = None,
    keys: str | Path | None = None,
    initial_peers: Sequence[str] = (),
    host_maddrs: Sequence[str] = (),
    announce_maddrs: Sequence[str] = (),
    push_to: str | None = None,
    tracker: str | None = None,
    checkpoint_every: int = CHECKPOINT_EVERY,
    say: Callable[[str], None] = print,
    done: Callable[[Monitor], bool] = lambda monitor: False,
) -> None:
    """Watch a run until SIGTERM or Ctrl-C; says one JSON line {"ready": {"peer_id", "maddrs"}} when it is up.

    :param folder: of all that it keeps, and goes on from; default: ./RUN_ID-host/monitor
    :param keys: the run's keys; default: `keys` beside the folder, if it is there
    :param initial_peers: default: the run file's
    :param push_to: org/name on the Hub, for checkpoints; the token comes from the environment or `hf auth login`
    :param tracker: "trackio" or "wandb"
    :param checkpoint_every: epochs
    :param done: asked after each turn whether it is enough
    Raises RunError, MonitorError, KeysError, SwarmError. Must be called in the main thread.
    """
    config = run if isinstance(run, RunConfig) else load_run(run)
    home = Home(monitor_folder(config, folder))
    found = find_tracker(tracker) if tracker else None
    token = _take_token(push_to)
    if not home.lock("monitor"):
        raise MonitorError(
            f"Another monitor runs in {home.path}.\n1. See which: fuser -v {home.path}/monitor.lock\n"
            "2. A second one of the same run needs a folder of its own: --folder PATH"
        )
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    addresses = Addresses(
        tuple(initial_peers) or config.initial_peers,
        tuple(host_maddrs) or Addresses.host_maddrs,
        tuple(announce_maddrs),
    )
    try:
        monitor = Monitor(
            config, home, _keys(config, home, keys), addresses,
            push_to=push_to, token=token, tracker=found, checkpoint_every=checkpoint_every,
        )  # fmt: skip
        stop = _Stop()
        peer = monitor.member.peer
        if config.authority is None:
            print("This run has no authority: checkpoints are kept, but not signed, and nobody can be ordered back to "
                  "one.", file=sys.stderr)  # fmt: skip
        say(json.dumps({"ready": {"peer_id": str(peer.peer_id), "maddrs": peer.visible_maddrs()}}))
        try:
            _keep_up(monitor, stop, done)
        finally:
            stop.set()
            monitor.close()
            stop.is_over()
    finally:
        home.unlock()


def _keep_up(monitor: Monitor, stop: _Stop, done: Callable[[Monitor], bool]) -> None:
    """Raises what a turn raises when it does so again and again: a new start may be better."""
    troubles = 0
    while not stop.is_set and not done(monitor):
        try:
            monitor.turn()
            troubles = 0
        except Exception:
            troubles += 1
            traceback.print_exc()
            if troubles >= TROUBLES or not monitor.member.peer.dht.is_alive():
                raise
            time.sleep(1.0)
        time.sleep(TURN)


class _Stop:
    """SIGTERM and SIGINT; from then on the process has FAREWELL s. Made after all processes were forked."""

    def __init__(self) -> None:
        self.is_set = False
        self._timer: threading.Timer | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.set())

    def set(self) -> None:
        if not self.is_set:
            self.is_set = True
            self._timer = threading.Timer(FAREWELL, _end)
            self._timer.daemon = True
            self._timer.start()

    def is_over(self) -> None:
        """All has ended by itself."""
        if self._timer is not None:
            self._timer.cancel()


def _end() -> None:
    """A round that is waited for may take minutes. Journal, credit and checkpoints are whole at any time."""
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.Error:
            continue
    os._exit(0)


# --- by hand ---


def roll_back(
    run: str | Path | RunConfig,
    to_epoch: int,
    *,
    folder: str | Path | None = None,
    keys: str | Path | None = None,
    initial_peers: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> None:
    """Order a run back to a checkpoint, by the monitor that runs in `folder`, or by one for this purpose.

    Says what was done. Raises MonitorError with the reason if nothing was, and what monitor_run raises.
    """
    config = run if isinstance(run, RunConfig) else load_run(run)
    home = Home(monitor_folder(config, folder))
    if not home.path.is_dir():
        raise MonitorError(
            f"There is no monitor's folder {home.path}.\n1. Name it: --folder PATH\n"
            "2. Or run this on the host's machine, in the folder where the host was started."
        )
    if home.lock("monitor"):
        home.unlock()
        say("No monitor runs here; one is started for the order.")
        answer = _with_a_monitor(config, to_epoch, folder=home.path, keys=keys, initial_peers=initial_peers)
    else:
        answer = asked.ask(home.path, to_epoch, ANSWER_WITHIN)
    if answer is None:
        raise MonitorError(
            f"The monitor in {home.path} did not answer within {ANSWER_WITHIN:.0f} s.\n"
            "1. Look at its log.\n2. End it, and give the command again: it then acts by itself."
        )
    if not answer["done"]:
        raise MonitorError(answer["text"])
    say(answer["text"])


def _with_a_monitor(config: RunConfig, to_epoch: int, **options) -> dict | None:
    """A monitor of our own, for as long as volunteers need it to fetch the state."""
    answers: list[tuple[bool, str]] = []
    until = float("inf")

    def done(monitor: Monitor) -> bool:
        nonlocal until
        if not answers:
            answers.append(monitor.go_back_by_hand(to_epoch))
            until = time.monotonic() + (SERVE_FOR if answers[0][0] else 0.0)
        return time.monotonic() >= until

    monitor_run(config, say=lambda line: None, done=done, **options)
    return {"done": answers[0][0], "text": answers[0][1]} if answers else None


def monitor_folder(config: RunConfig, folder: str | Path | None) -> Path:
    return Path(folder) if folder else Path(f"{config.run_id}-host") / "monitor"


def _keys(config: RunConfig, home: Home, keys: str | Path | None) -> Path | None:
    if keys is not None or config.authority is None:
        return Path(keys) if keys is not None else None
    beside = home.path.parent / "keys"
    return beside if beside.is_dir() else None


def _take_token(push_to: str | None) -> str | None:
    """The Hub's token, out of the environment: children have no use for it."""
    token = os.environ.pop("HF_TOKEN", None) or None
    keep_token(token)
    if push_to is None or token:
        return token
    from huggingface_hub import get_token

    found = get_token()
    if not found:
        raise MonitorError(
            "Checkpoints are to be brought to the Hub, and nobody is logged in there.\n"
            "1. hf auth login  (a token that may write to that repository)\n2. Or leave --push-to out."
        )
    return found

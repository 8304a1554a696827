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
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from volunteer_kit import output, packages
from volunteer_kit.auth.process_token import keep_token
from volunteer_kit.home import Home
from volunteer_kit.monitor import asked
from volunteer_kit.monitor.errors import MonitorError
from volunteer_kit.monitor.own_peer import Addresses
from volunteer_kit.monitor.recording import find_tracker
from volunteer_kit.monitor.watch import CHECKPOINT_EVERY, Monitor
from volunteer_kit.run_reader import find_run_file, read_small, read_yaml
from volunteer_kit.runs import RunConfig, load_run
from volunteer_kit.swarm.net.children import end_program

TURN = 0.1  # s between two turns of the loop
FAREWELL = 8.0  # s from the order to stop until the process ends, whatever it waits for
ANSWER_WITHIN = 240.0  # s; a monitor answers between two rounds
MEET_WITHIN = 45.0  # s in which a monitor of the command's own has to see another peer
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
    say: Callable[[str], None] = output.say,
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
    Raises MissingDependency, RunError, MonitorError, KeysError, SwarmError. Must be called in the main thread.
    """
    config = run if isinstance(run, RunConfig) else load_run(run)
    packages.require("train" if config.draws else "finetune")
    home = Home(monitor_folder(config.run_id, folder))
    found = find_tracker(tracker) if tracker else None
    token = _take_token(push_to)
    if not home.lock("monitor"):
        raise MonitorError(
            f"Another monitor runs in {home.path}.\n1. See which: fuser -v {home.path}/monitor.lock\n"
            "2. A second one of the same run needs a folder of its own: --folder PATH"
            + (f"\n3. {holder}" if (holder := home.who_holds("monitor")) else "")
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
            on_broken=lambda why: end_program(lambda: _say_broken(why, say), 1),
            say=say,
        )  # fmt: skip
        stop = _Stop()
        peer = monitor.member.peer
        if config.authority is None:
            print("This run has no authority: checkpoints are kept, but not signed, and nobody can be ordered back to "
                  "one.", file=sys.stderr)  # fmt: skip
        say(json.dumps({"ready": {"peer_id": str(peer.peer_id), "maddrs": peer.visible_maddrs()}}))
        try:
            _keep_up(monitor, stop, done)
        except BaseException as error:
            stop.error = None if stop.is_set else error
            raise
        finally:
            stop.set()
            monitor.close()
            stop.is_over()
    finally:
        home.unlock()


def _say_broken(why: str, say: Callable[[str], None]) -> None:
    """A new start mends it: a host makes one by itself."""
    print(f"{why}. Start the monitor again: it goes on from its folder.", file=sys.stderr, flush=True)
    say(json.dumps({"error": f"{why}."}))
    sys.stdout.flush()


def _keep_up(monitor: Monitor, stop: _Stop, done: Callable[[Monitor], bool]) -> None:
    """Raises what a turn raises when it does so again and again: a new start may be better. Raises MonitorError where
    another monitor has its key."""
    troubles = 0
    while not stop.is_set and not done(monitor):
        if monitor.why_over is not None:
            raise MonitorError(monitor.why_over)
        try:
            monitor.turn()
            troubles = 0
        except Exception:
            troubles += 1
            traceback.print_exc()
            if troubles >= TROUBLES:
                raise
            time.sleep(1.0)
        time.sleep(TURN)


class _Stop:
    """SIGTERM, SIGINT, and SIGHUP unless it is ignored, as under nohup; from then on the process has FAREWELL s. Made
    after all processes were forked.

    :ivar error: why it ends, if nobody told it to: said when the process is ended by force
    """

    def __init__(self) -> None:
        self.is_set = False
        self.error: BaseException | None = None
        self._timer: threading.Timer | None = None
        hang_up = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL else []
        for number in (signal.SIGTERM, signal.SIGINT, *hang_up):
            signal.signal(number, lambda *_: self.set())

    def set(self) -> None:
        if not self.is_set:
            self.is_set = True
            self._timer = threading.Timer(FAREWELL, lambda: _end(self.error))
            self._timer.daemon = True
            self._timer.start()

    def is_over(self) -> None:
        """All has ended by itself."""
        if self._timer is not None:
            self._timer.cancel()


def _end(error: BaseException | None) -> None:
    """A round that is waited for may take minutes. Journal, credit and checkpoints are whole at any time.

    Nothing is printed after this, so the error is said here. Exit code 0: as it was told; 2: MonitorError; 1: a bug.
    """
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.Error:
            continue
    if isinstance(error, MonitorError):
        print(error, file=sys.stderr)
    elif error is not None:
        traceback.print_exception(error)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0 if error is None else 2 if isinstance(error, MonitorError) else 1)


# --- by hand ---


def roll_back(
    run: str | Path | RunConfig,
    to_epoch: int,
    *,
    folder: str | Path | None = None,
    keys: str | Path | None = None,
    initial_peers: Sequence[str] = (),
    say: Callable[[str], None] = output.say,
) -> None:
    """Order a run back to a checkpoint, by the monitor that runs in `folder`, or by one for this purpose.

    :param run: the host's own file does: addresses and key come from the one that `volunteer-kit host` wrote, if any
    Says what was done. Raises MonitorError with the reason if nothing was, and what monitor_run raises.
    """
    config = _as_written(run, folder)
    home = Home(monitor_folder(config.run_id, folder))
    if not home.path.is_dir():
        raise MonitorError(
            f"There is no monitor's folder {home.path}.\n1. Name it: --folder PATH\n"
            "2. Or run this on the host's machine, in the folder where the host was started."
        )
    if home.lock("monitor"):
        home.unlock()
        say("No monitor runs here; one is started for the order.")
        peers = tuple(initial_peers) or config.initial_peers
        _by_one_of_our_own(config, to_epoch, say, folder=home.path, keys=keys, initial_peers=peers)
        return
    answer = asked.ask(home.path, to_epoch, ANSWER_WITHIN)
    if answer is None:
        raise MonitorError(
            f"The monitor in {home.path} did not answer within {ANSWER_WITHIN:.0f} s.\n"
            "1. Look at its log.\n2. End it, and give the command again: it then acts by itself."
        )
    if not answer["done"]:
        raise MonitorError(answer["text"])
    say(answer["text"])


def _as_written(run: str | Path | RunConfig, folder: str | Path | None) -> RunConfig:
    """The run as its volunteers know it."""
    if isinstance(run, RunConfig):
        run_id = run.run_id
    else:
        path = find_run_file(str(run))
        run_id = read_yaml(read_small(path), str(path)).values.get("run_id")
    if isinstance(run_id, str):
        written = monitor_folder(run_id, folder).parent / "run.yaml"
        if written.is_file() and (config := load_run(written)).run_id == run_id:
            return config
    return run if isinstance(run, RunConfig) else load_run(run)


def _by_one_of_our_own(
    config: RunConfig, to_epoch: int, say: Callable[[str], None], *, initial_peers: Sequence[str], **options
) -> None:
    """It stays for as long as volunteers need it to fetch the state. Raises MonitorError if nobody would hear it."""
    if not initial_peers:
        raise MonitorError(
            f"No peer of the run {config.run_id!r} is known, so nobody would hear the order.\n"
            f"1. Start the host, and give the command again: its monitor then gives the order.\n"
            "2. Or name a peer that is in the run: --initial-peers /ip4/ADDRESS/tcp/PORT/p2p/PEER_ID"
        )
    give_up_at = until = float("inf")

    def done(monitor: Monitor) -> bool:
        """What is said, is said here: the goodbye after it may take longer than the process lives."""
        nonlocal give_up_at, until
        if until < float("inf"):
            return time.monotonic() >= until
        give_up_at = min(give_up_at, time.monotonic() + MEET_WITHIN)
        if not _is_heard(monitor):
            if time.monotonic() < give_up_at:
                return False
            raise MonitorError(
                f"No other peer of the run {config.run_id!r} was seen within {MEET_WITHIN:.0f} s, so nobody would "
                "hear the order.\n1. Is anybody training? The dashboard shows it.\n"
                "2. Or start the host first, and give the command again."
            )
        is_done, text = monitor.go_back_by_hand(to_epoch)
        if not is_done:
            raise MonitorError(text)
        say(text)
        until = time.monotonic() + SERVE_FOR
        return False

    monitor_run(config, say=lambda line: None, done=done, initial_peers=initial_peers, **options)
    if until == float("inf"):
        raise MonitorError("It was stopped before the order was given.")


def _is_heard(monitor: Monitor) -> bool:
    """Somebody else is in this run now."""
    own, fingerprint = monitor.member.peer.peer_id, monitor.run.fingerprint
    found = monitor.member.board.fetch()
    return any(record.fingerprint == fingerprint for peer, record in found.items() if peer != own)


def monitor_folder(run_id: str, folder: str | Path | None) -> Path:
    return Path(folder) if folder else Path(f"{run_id}-host") / "monitor"


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

"""A Trainer's place in its swarm: peer, optimizer and record, from train_begin to train_end."""

from __future__ import annotations

import logging
import re
import shlex
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hivemind.p2p import PeerID

from volunteer_kit.output import say
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.net.connectivity import is_private
from volunteer_kit.swarm.net.identity import give_up_key
from volunteer_kit.swarm.net.peer import Peer, once_more, start_peer
from volunteer_kit.swarm.net.same_key import CLONED, HOW_COME, KeyWatch, Sharing, TwinWatch
from volunteer_kit.swarm.node.link import Link
from volunteer_kit.swarm.options import StepReport
from volunteer_kit.swarm.records.failures import RoundCounts, nobody_can_be_called
from volunteer_kit.swarm.records.kits import kit_words
from volunteer_kit.swarm.records.peer_record import PeerBoard, PeerRecord
from volunteer_kit.swarm.rounds.beside import SharedBuffers
from volunteer_kit.training.hf_config import HivemindConfig, codec_name
from volunteer_kit.training.hf_nodes import (
    EXACT,
    NodeSettings,
    NodeSide,
    NodeTerms,
    elements_of,
    launch,
    renew_if_left,
)
from volunteer_kit.training.hf_optimizer import Clip, Count, FirstRates, SwarmStep, hand_over, parameters_of
from volunteer_kit.training.hf_shared import fingerprint_of, require_sharable

JOIN_PATIENCE = 60.0  # s for a first donor of the state
LINGER = 60.0  # s at the end in which others may still take our state
RECORD_EVERY = 15.0  # s
ALL_TRAINERS = "trainers"  # the board on which each says which run it trains
HIVEMIND = logging.getLogger("hivemind")
WHY_SHARED = f"{HOW_COME}, or two programs use one file"
LONGEST = 2**17  # words of a sample, where the model does not say


class Member:
    """One peer of a run that a Trainer trains.

    The later one of two under one key has to take another. Where it finds that out at its start, it does so by itself;
    later on `must_change_key` says so, and it has to leave and come back.

    :param model: as it trains; only what requires gradients travels
    :param shown: the Trainer's optimizer, over the model's parameters
    :param scheduler: its schedule, counted in the swarm's steps from now on
    :param count: -> (samples, weight, names of the samples) of the gradients at hand
    :param epoch: the swarm's steps that are in the model already
    :param first: the schedule at the swarm's first step, where it is further
    :param on_report: told of each of the swarm's steps that we took
    :param ends_pass: -> are the samples at hand the last of a pass over our data?
    """

    def __init__(
        self,
        config: HivemindConfig,
        model: torch.nn.Module,
        shown: torch.optim.Optimizer,
        scheduler: Any,
        count: Count,
        *,
        max_grad_norm: float | None,
        max_steps: int,
        epoch: int,
        schedule: str,
        first: FirstRates | None = None,
        on_report: Callable[[StepReport], None] = lambda report: None,
        ends_pass: Callable[[], bool] = lambda: False,
    ):
        self.config, self.model, self._shown, self._scheduler, self._count = config, model, shown, scheduler, count
        self._on_report, self._ends_pass, self._first = on_report, ends_pass, first
        require_sharable(shown, scheduler)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        held = {id(parameter): place for place, parameter in enumerate(parameters_of(shown))}
        self.clip = Clip(max_grad_norm, [held[one] for one in names if one in held])
        door, options = config.door, config.options
        self._buffers = SharedBuffers(model, config.initial_buffers)
        self.fingerprint = door.fingerprint if door is not None else fingerprint_of(
            model, shown, options, schedule=schedule, max_steps=max_steps, max_grad_norm=max_grad_norm,
            buffers=self._buffers.shapes, max_staleness=config.max_staleness,
        )  # fmt: skip
        self._epoch, self._last_epoch = epoch, max_steps
        self.peer: Peer | None = None
        self._side: NodeSide | None = None
        self._launched: Link | None = None  # a node's process that waits for its orders
        self.swarm: Any = None  # what takes the gradients
        self.comes_back = False  # set before close(): this peer is here again at once
        self.last: StepReport | None = None
        self.rounds = RoundCounts()
        self.samples, self.loss = 0, None  # of ours that are in the model; ours, as last logged
        self.swarm_loss: float | None = None
        self._cut_off: str | None = None
        self._num_uncallable = 0  # others, as last told: neither they nor we can be called
        self._told_of_mismatch = self._told_of_turns = self._told_of_sleep = False
        self._told_of_slowness = False
        self._loudness: int | None = None  # of hivemind's log, before us
        self.must_change_key = False
        self._is_first = not config.peer.initial_peers  # others join by its key
        self._twins: TwinWatch | None = None
        self._twin = Sharing.ALONE  # how we stand to another program under our key
        self._closing, self._news = threading.Event(), threading.Event()
        self._recording = threading.Thread(target=self._keep_record, name="record", daemon=True)

    @property
    def longest(self) -> int:
        """Words of a full sample. What a loss is a mean over is counted in these: nobody has more of them than
        samples."""
        about = getattr(self.model, "config", None)
        return self.config.longest or getattr(about, "max_position_embeddings", None) or LONGEST

    def weight_of(self, samples: int, items: float | None) -> float:
        """What gradients weigh in the swarm's mean, in full samples.

        At most their samples, and at most a step of all peers: others take more for a lie. Rows that are longer than
        the model says it can read weigh as full ones.

        :param samples: examples that they are of
        :param items: words that the loss is a mean over; None: it is one over samples
        """
        most = float(min(samples, self.config.options.target_batch_size))
        return most if items is None else min(most, items / self.longest)

    @property
    def epoch(self) -> int:
        return self._side.epoch

    # --- coming ---

    def start(self) -> None:
        """Meet the others, take their state. Raises SwarmError."""
        for word in self.config.words:
            say(word)
        if not self.config.options.verbose:
            self._loudness = HIVEMIND.level
            HIVEMIND.setLevel(logging.ERROR)  # its processes inherit it
        interrupt = signal.getsignal(signal.SIGINT) if _in_main_thread() else None
        try:
            self._prepare()
            door = self.config.door
            self.peer = self._start_peer()
            say(invitation(self.peer.visible_maddrs()))
            self.board = PeerBoard(self.peer.dht, self.config.run_id)
            self._trainers = PeerBoard(self.peer.dht, ALL_TRAINERS)
            if door is not None:
                door.keep(self.peer)
            self._check_same_run()
            self._make_side()
            self.swarm = self._side.swarm
            self.step = SwarmStep(
                self._shown, self.swarm, lambda: self._side.behind, self._count, self._ends_pass, self._last_epoch
            )
            self._side.join(JOIN_PATIENCE if self.config.peer.initial_peers else 0.0)
            if self.epoch > self._epoch and not self.config.peer.initial_peers:
                say(f"This peer goes on from the step where it was: {self.epoch}.")
            self.peer.processes.raise_if_broken()
            self._recording.start()
            if self.config.peer.identity_path is not None:  # else the key is made for this stay
                key = KeyWatch(self.peer.dht, self.config.run_id, self.peer.peer_id)
                self._twins = TwinWatch(key, self._take_twin, lambda: not self._side.reach.waits_for_itself)
            self._wait_for_others()
        except BaseException:
            self.close()
            raise
        finally:
            if interrupt is not None:  # hivemind has taken Ctrl-C away
                signal.signal(signal.SIGINT, interrupt)

    def _prepare(self) -> None:
        """Do what has to be done before the peer starts."""
        self._launched = launch(self.config.options.verbose)
        path = self.config.peer.identity_path
        if path is not None:
            elements = elements_of(parameters_of(self._shown), self._buffers)
            if words := renew_if_left(path, elements):
                say(words)

    def _start_peer(self) -> Peer:
        """Under a new key where another peer has ours."""
        door = self.config.door
        try:
            return start_peer(self.config.peer, door.ask() if door is not None else None)
        except SwarmError as error:
            path = self.config.peer.identity_path
            if error.kind != "identity_taken" or path is None or (aside := give_up_key(path)) is None:
                raise
            say(f"Another peer takes part under the key of this one: {WHY_SHARED}. {self._new_key(aside)}")
        if door is not None:
            door.leave()  # it let the old key in
        return start_peer(self.config.peer, door.ask() if door is not None else None)

    def _new_key(self, aside: Path) -> str:
        return f"This one takes a key of its own; the old one is kept as {aside}."

    def _take_twin(self, sharing: Sharing) -> None:
        """In a thread of its own."""
        if sharing is Sharing.CLONED and self._is_first:
            say(f"{CLONED} Others reach now one and now the other.\n1. End one of the two.")
        elif sharing.must_yield:
            self._twin, self.must_change_key = sharing, True
        else:
            say(
                f"Another peer takes part under the key of this one: {WHY_SHARED}. It came later, and takes a key of "
                "its own; nothing has to be done here."
            )

    def give_up_key(self) -> str:
        """Another peer takes part under it, and did not come later: the next stay is under a new one.

        :returns: that, in words
        Raises SwarmError (identity_taken) where that cannot be.
        """
        path = self.config.peer.identity_path
        found = f"Another peer takes part under the key of this one, and was here before: {WHY_SHARED}."
        if self._twin is Sharing.CLONED:
            found = CLONED
        if self._is_first:
            raise SwarmError(
                f"{found} Others join by this peer's key, so it cannot take another one while it runs.\n"
                f"1. End the other one, or\n2. give this one a key of its own: mv {shlex.quote(path)} "
                f"{shlex.quote(path)}.shared\n3. Start this program again; others then need the new invitation.",
                kind="identity_taken",
            )
        if (aside := give_up_key(path)) is None:
            raise SwarmError(
                f"{found} The key's file cannot be moved: {path}\n"
                '1. Name another file: "identity_path" in hivemind_config["dht"]',
                kind="identity_taken",
            )
        return f"{found} {self._new_key(aside)}"

    def _wait_for_others(self) -> None:
        wanted = self.config.wait_for_peers
        if not self._side.has_met(wanted):
            say(f"Waiting until {wanted} peers are here.")
        while not self._side.has_met(wanted):
            self.peer.processes.raise_if_broken()
            time.sleep(0.2)
        self._side.swarm.begins_with(wanted)

    def _check_same_run(self) -> None:
        others = self._others(self.board)
        if not others:
            runs = sorted({record.name for record in self._others(self._trainers)})
            if runs:
                say(
                    f"Nobody here trains {self.config.run_id!r} yet; others train {', '.join(map(repr, runs[:5]))}. "
                    "Only peers of one run_id average with each other."
                )
        if problem := self._mismatch(others):
            raise SwarmError(problem, kind="wrong_run")

    def _mismatch(self, others: Sequence[PeerRecord]) -> str | None:
        if not others or any(record.fingerprint == self.fingerprint for record in others):
            return None
        another_kit = kit_words(record.kit for record in others)
        return (
            f"The others train {self.config.run_id!r} with another model or other settings (theirs "
            f"{others[0].fingerprint[:8]}, yours {self.fingerprint[:8]}): gradients would not fit.\n"
            + (f"{another_kit}\nIf that is not the cause:\n" if another_kit else "")
            + "1. Use the same model, adapters, optimizer, learning rate, schedule, max_steps, max_grad_norm and "
            "target_batch_size as they.\n2. Or give yours another run_id."
        )

    def _others(self, board: PeerBoard) -> list[PeerRecord]:
        return [record for peer, record in board.fetch().items() if peer != self.peer.peer_id]

    def _make_side(self) -> None:
        config, options = self.config, self.config.options
        if config.door is None:
            key = f"{config.run_id}-{self.fingerprint[:16]}".replace(".", "-")  # hivemind's keys may hold no dots
            options = replace(options, run_key=key)
        parameters = parameters_of(self._shown)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        codec, terms = config.codec, NodeTerms()
        if config.door is not None:
            terms = config.door.node_terms(self.board)
        if codec is None:
            density = getattr(options.grad_codec, "density", None) or 1.0
            codec = ("none", codec_name(options.grad_codec), EXACT, density)
        settings = NodeSettings(options.run_key, options, codec, config.max_staleness, self.longest)
        self._side = NodeSide(
            self.peer, settings, self._shown, self._scheduler, self.clip, [names[id(p)] for p in parameters],
            self._buffers, identity_path=config.peer.identity_path, initial_peers=config.peer.initial_peers,
            first=self._first, epoch=self._epoch, last_epoch=self._last_epoch, others=lambda: len(self._same_run()),
            wants_out=self._wants_out, launched=self._launched, terms=terms,
        )  # fmt: skip
        self._launched = None
        if config.door is not None:
            config.door.enter(self._side.swarm.node, self.board)

    def _wants_out(self) -> bool:
        """Does something need this peer to leave, so that it should wait for no step any more?"""
        sent_away = self.config.door is not None and self.why_sent_away is not None
        return bool(self.why_broken or self.must_change_key or sent_away or self.why_anew)

    def _same_run(self) -> list[PeerRecord]:
        """Records of the others that are of our run."""
        return [record for record in self._others(self.board) if record.fingerprint == self.fingerprint]

    def go_on_from(self, before: Member) -> None:
        """Count on from what the same peer had given when it was here last."""
        self.samples, self.rounds, self.loss, self.last = before.samples, before.rounds, before.loss, before.last
        self._is_first = before._is_first

    # --- being here ---

    @property
    def why_broken(self) -> str | None:
        """Which of this peer's processes has died, and how; it takes no more part in the swarm."""
        return self.peer.processes.why_broken if self.peer is not None else None

    @property
    def why_anew(self) -> str:
        """Why this peer should leave and come back, in words; "" where that would mend nothing."""
        return self._side.reach.why_anew

    @property
    def config_once_more(self) -> HivemindConfig:
        """For the same peer when it comes back, to those whom it has met."""
        maddrs = [] if self.peer.client_mode else [str(maddr) for maddr in self.peer.dht.get_visible_maddrs()]
        again = once_more(self.config.peer, maddrs, self._side.reach.known_peers())
        return replace(self.config, peer=again, wait_for_peers=1, words=())

    @property
    def why_sent_away(self) -> str | None:
        """The authority's reason, once it will have us no longer."""
        return self.config.door.why_sent_away if self.config.door is not None else None

    def finish_updates(self) -> None:
        """What runs in the background is done, and in the model."""
        self._side.finish_updates()

    def up_to_date(self) -> AbstractContextManager[Any]:
        """While it is open, model and statistics are of one moment."""
        return self._side.up_to_date()

    def figures(self) -> dict[str, float]:
        """Of the swarm, for the log."""
        self.take_reports()
        found: dict[str, float] = {"swarm_peers": self._side.num_peers}
        if self.clip.norm is not None:
            found |= {"grad_norm": self.clip.norm, "learning_rate": self.clip.rate}
        if self.last is not None:
            found |= {"group_size": self.last.group_size, "own_samples": self.samples}
        if self.swarm_loss is not None:
            found["swarm_loss"] = self.swarm_loss
        return found

    def take_reports(self) -> None:
        """What became of our last steps, and of our line, in words where somebody has to know."""
        while self._side.reports:
            report = self._side.reports.popleft()
            self.last = report
            if self.samples == 0:  # whoever signs for us has to know how fast we are
                self._news.set()
            self.samples += report.samples
            self.rounds.count(report)
            self._on_report(report)
        if self._side.num_uncallable != self._num_uncallable:
            self._num_uncallable = self._side.num_uncallable
            if self._num_uncallable:
                say(nobody_can_be_called(self._num_uncallable))
        if self._side.takes_turns and not self._told_of_turns:
            self._told_of_turns = True
            say(self._side.turns.format(target=self.config.options.target_batch_size))
        too_slow = self.swarm.why_too_slow
        if too_slow and not self._told_of_slowness:
            say(too_slow)
        self._told_of_slowness |= bool(too_slow)
        woke = self._side.reach.woke
        if woke and not self._told_of_sleep:
            say(woke)
        self._told_of_sleep = woke is not None
        cut_off, before = self._side.cut_off, self._cut_off
        self._cut_off = cut_off
        if _kind(cut_off) != _kind(before):
            patience = None if self._side.reach.waits_for_itself else self.config.options.alone_after
            alone = f" After {patience:g} s of silence this one goes on alone." if patience else ""
            say(f"{cut_off}{alone}" if cut_off else "Steps are committed here again.")

    def _keep_record(self) -> None:
        while not self._closing.is_set():
            with suppress(Exception):  # a busy DHT; the next time comes
                if not self._side.reach.waits_for_itself:  # what a wrong clock dates stands as long as it is ahead
                    self.board.publish(self._record(self.config.name))
                    self._trainers.publish(self._record(self.config.run_id[:64]))
                others = self._others(self.board)
                speeds = [one.samples_per_second for one in others if one.fingerprint == self.fingerprint]
                self._side.swarm.saw(self.step.samples_per_second, speeds)
                self._look_at(others)
            self._news.wait(RECORD_EVERY)
            self._news.clear()

    def _look_at(self, others: Sequence[PeerRecord]) -> None:
        same = [one.loss for one in others if one.fingerprint == self.fingerprint and one.loss is not None]
        losses = same if self.loss is None else [*same, self.loss]
        self.swarm_loss = sum(losses) / len(losses) if losses else None
        problem = self._mismatch(others)
        if problem and not self._told_of_mismatch:  # who came at the same moment as they could not be refused
            say(problem)
        self._told_of_mismatch = problem is not None

    def _record(self, name: str) -> PeerRecord:
        device = next(self.model.parameters()).device
        return PeerRecord(
            peer_id=self.peer.peer_id.to_bytes(),
            fingerprint=self.fingerprint,
            name=name,
            device=device_name(device)[:64],
            epoch=self.epoch,
            total_samples=self.samples,
            samples_per_second=self.step.samples_per_second,
            loss=self.loss,
            client_mode=self.peer.client_mode,
            rounds=self.rounds.as_dict(),
        )

    # --- going ---

    def settle(self) -> None:
        """All peers that have come to the end hold the same model."""
        self._side.settle(patience=LINGER / 2)

    def linger(self) -> None:
        """Others may still take the last state from us; whoever has just come is on the board before it has samples."""
        self._news.set()
        self._side.linger(
            LINGER,
            lambda: {PeerID(one.peer_id) for one in self._same_run() if one.epoch < self.epoch},
            lambda: self.why_broken is not None,
        )

    def close(self) -> None:
        """Leave; the Trainer's optimizer gets its statistics back. For these seconds Ctrl-C has no effect: what is
        interrupted here would stay, processes and all."""
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN) if _in_main_thread() else None
        try:
            self._close()
        finally:
            if interrupt is not None:
                signal.signal(signal.SIGINT, interrupt)

    def _close(self) -> None:
        if self._loudness is not None:
            HIVEMIND.setLevel(self._loudness)
        self._closing.set()
        self._news.set()
        if self._twins is not None:
            self._twins.close()
        if self._recording.is_alive():
            self._recording.join(timeout=10.0)  # it must not talk to a DHT that has ended
        if self._side is not None:
            with self._side.up_to_date():
                self._hand_back(self._side.behind)
            if self.why_broken is None:
                for board in (self.board, self._trainers):
                    board.publish(None)
            self._side.close(self.comes_back)
        if self._launched is not None:
            self._launched.close()
            self._launched = None
        if self.config.door is not None:
            self.config.door.leave()
        if self.peer is not None:
            self.peer.shutdown()
        self._side = self.swarm = self.peer = None

    def _hand_back(self, behind: torch.optim.Optimizer) -> None:
        """Statistics, learning rates and schedule to the Trainer's optimizer."""
        for theirs, ours in zip(parameters_of(behind), parameters_of(self._shown), strict=True):
            self._shown.state[ours] = {
                k: v.to(ours.device) if torch.is_tensor(v) and v.ndim else v
                for k, v in behind.state.get(theirs, {}).items()
            }
        for theirs, ours in zip(behind.param_groups, self._shown.param_groups, strict=True):
            ours |= {name: value for name, value in theirs.items() if name not in ("params", "capturable")}
        hand_over(self._scheduler, self._shown)


def invitation(maddrs: list[str]) -> str:
    """The line for those who are to join: public addresses if there are any."""
    public = [maddr for maddr in maddrs if not is_private(maddr)]
    shown = public or maddrs
    if not shown:
        return "This peer calls others and cannot be called: others join by the address that it joined by."
    return f"To join the training, use initial_peers = {shown}"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _kind(reason: str | None) -> str:
    """Words without their numbers: a clock that goes on, or a count, is no news."""
    return re.sub(r"\d+", "", reason or "")

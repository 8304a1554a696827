"""A real swarm on one machine: volunteers train, one is killed, one comes late; then pictures and the truth.

    run_demo(minutes=4.5)    # what `volunteer-kit demo` and `make demo` do

Every volunteer is a worker process of its own under a Supervisor of its own, as on a machine of its own; they meet
over loopback through a first peer that does not train.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from volunteer_kit import output, packages
from volunteer_kit.checkpoint import Checkpoint
from volunteer_kit.demo.state import DemoState, first_and_last_loss
from volunteer_kit.demo.swarm import DemoError, DemoSwarm
from volunteer_kit.demo.view import View, counted, duration, make_view
from volunteer_kit.process_group import sigterm_as_interrupt, stops_as_one
from volunteer_kit.runs import RunConfig, load_run, require_ready, with_data

__all__ = ["DemoError", "run_demo"]

STARTUP = 240.0  # s for the first epoch to be applied, on a busy machine
LOOK_EVERY = 0.1  # s between two looks at the events
KILL_AT, LATE_AT = 0.3, 0.45  # parts of the training time
FIRST_WAIT = 0.25  # part of the training time that the second act waits for the first to be over
NOTICE = 3.0  # s in which all volunteers hear which epoch is the last
GRACE = 120.0  # s beyond the training time for volunteers that are not back yet, on a busy machine


@output.kept_up()
def run_demo(
    run: str | Path | RunConfig = "demo",
    data: str | Sequence[str] | None = None,
    peers: int = 3,
    minutes: float = 4.5,
    out: str | Path | None = None,
    *,
    batch_size: int | None = None,
    threads: int | None = None,
):
    """Train a swarm of `peers` volunteers on this machine for `minutes`, counted from the first applied epoch.

    One volunteer is killed and one more is added on the way. Curve, pictures, summary and the trained model go to
    `out` (default ./demo-out/RUN-TIME). Prints as it goes, and one line of JSON last; returns a DemoResult.
    `data` names shards for runs that read shards; `batch_size` and `threads` are each volunteer's (None: chosen).
    Raises MissingDependency or RunError before anything starts, DemoError if a volunteer cannot go on. Ctrl-C and
    SIGTERM leave in good order and raise KeyboardInterrupt; a second one ends everything at once.
    """
    packages.require("demo")
    config = with_data(run if isinstance(run, RunConfig) else load_run(run), data)
    require_ready(config, draws=True)
    folder = _make_folder(out, config.run_id)
    view = make_view()
    view.note(f"Run {config.run_id}: {config.description}" if config.description else f"Run {config.run_id}")
    view.note(
        f"{counted(peers, 'volunteer')} will train together on this machine for {duration(60 * minutes)};"
        " one will be killed, one more will come late."
    )
    view.note(f"Files, and the volunteers' logs, go to {folder}")
    with tempfile.TemporaryDirectory(prefix="volunteer-kit-demo-", ignore_cleanup_errors=True) as scratch:
        state = DemoState()
        threads = threads or max(1, _cores() // peers)
        swarm = DemoSwarm(config, state, Path(scratch), folder / "logs", batch_size=batch_size, threads=threads)
        try:
            seconds = _train(swarm, view, peers, 60 * minutes)
        except BaseException:
            _rescue(swarm, folder)
            raise
        return _conclude(config, swarm, folder, seconds)


def _train(swarm: DemoSwarm, view: View, peers: int, budget: float) -> float:
    """The life of the swarm, from its first process to its last. Returns the seconds it trained."""
    with sigterm_as_interrupt(), stops_as_one(view.note), _left_behind_by_nobody(swarm, view):
        view.start()
        try:
            swarm.start(peers)
            script = _Script(swarm, view, budget)
            script.wait_for_first_epoch()
            script.kill_and_join()
            script.finish()
            return script.elapsed
        finally:
            view.stop()


@contextmanager
def _left_behind_by_nobody(swarm: DemoSwarm, view: View) -> Iterator[None]:
    """Volunteers leave in good order when the body ends or is interrupted; an interrupt of that ends them at once."""
    try:
        try:
            yield
        except KeyboardInterrupt:
            view.note("Stopping: the volunteers say goodbye to each other (once more Ctrl-C ends them at once).")
            raise
        finally:
            swarm.leave()
    finally:
        swarm.close()


class _Script:
    """What happens when."""

    def __init__(self, swarm: DemoSwarm, view: View, budget: float) -> None:
        self.swarm, self.state, self.view, self.budget = swarm, swarm.state, view, budget
        self.elapsed = 0.0  # s since the first applied epoch
        self._began: float | None = None  # monotonic s

    def look(self, phase: str) -> None:
        """Take in what the volunteers say, show it, and wait a moment. Raises DemoError if one cannot go on."""
        self.swarm.take_events()
        if self._began is None and self.state.first_epoch_at is not None:
            self._began = time.monotonic()
        self.elapsed = time.monotonic() - self._began if self._began is not None else 0.0
        self.view.update(self.state, phase, self.elapsed, self.budget)
        if self.state.error:
            raise DemoError(self.state.error)
        time.sleep(LOOK_EVERY)

    def wait_for_first_epoch(self) -> None:
        deadline = time.monotonic() + STARTUP
        while self._began is None:
            self.look("starting")
            if time.monotonic() > deadline:
                raise DemoError(
                    f"The swarm did not get through its first epoch within {STARTUP:.0f} s.\n"
                    f"1. See the ends of the volunteers' logs: tail {self.swarm.logs}/*.log\n"
                    "2. On a small or busy machine, use fewer volunteers: volunteer-kit demo --peers 2"
                )

    def kill_and_join(self) -> None:
        """The two mishaps, and training between them and after, until it is time for the last epochs."""
        alone = len(self.swarm.names) == 1  # then nobody would be left to go on: the newcomer comes first
        kill_at, late_at = (LATE_AT, KILL_AT) if alone else (KILL_AT, LATE_AT)
        killed = joined = False
        while not self._is_time_to_finish():
            self.look("training")
            if not killed and self._is_time(kill_at, after=alone):
                self.swarm.kill()
                killed = True
            if not joined and self._is_time(late_at, after=not alone):
                self.swarm.add_late()
                joined = True

    def _is_time(self, part: float, after: bool) -> bool:
        """Whether `part` of the budget is over and, if `after`, the other act as well.

        A killed volunteer is not waited for very long; a newcomer is, for without it the kill would end everything.
        """
        if self.elapsed < part * self.budget:
            return False
        if not after:
            return True
        if self.swarm.late:
            return self.swarm.is_late_one_in
        return self.swarm.is_back or self.elapsed > (part + FIRST_WAIT) * self.budget

    def _is_time_to_finish(self) -> bool:
        last_epochs = min(2.5 * self.state.seconds_an_epoch, 0.3 * self.budget)
        if self.elapsed + last_epochs < self.budget:
            return False
        return (self.swarm.is_back and self.swarm.is_late_one_in) or self.elapsed > self.budget + GRACE

    def finish(self) -> None:
        """Everybody trains up to one and the same epoch and saves."""
        self.swarm.take_events()
        last = self.swarm.newest_epoch + max(2, math.ceil(NOTICE / max(0.1, self.state.seconds_an_epoch)))
        self.swarm.finish_at(last)
        self.state.news.append(f"The time is up: everybody stops together after epoch {last}.")
        deadline = time.monotonic() + 60.0 + 4 * self.state.seconds_an_epoch
        while not self.state.all_finished and time.monotonic() < deadline:
            self.look("finishing")
        self.look("finished")


def _conclude(config: RunConfig, swarm: DemoSwarm, folder: Path, seconds: float):
    """Measure, draw, write, print."""
    from volunteer_kit.demo import report
    from volunteer_kit.demo.eval import MAX_GAP, compare
    from volunteer_kit.demo.pictures import make_pictures

    state = swarm.state
    output.say("The volunteers have left. Measuring what they made ...")
    checkpoints = swarm.final_checkpoints()
    complete = len(checkpoints) == len(swarm.names)
    late = swarm.late if swarm.late in checkpoints else None
    agreement = compare(checkpoints, swarm.names[0], late) if complete else None
    gap = agreement.max_param_gap if agreement else None
    in_sync = bool(agreement and late and agreement.late_gap <= MAX_GAP and agreement.is_close and swarm.is_late_one_in)
    recovered = bool(agreement and agreement.is_close and swarm.is_back)
    model = next(iter(checkpoints.values()), None)
    if model is None:
        raise DemoError(f"No volunteer saved its model in time. Their logs: {swarm.logs}")
    kept = _keep(model, folder)
    who = counted(len(swarm.names), "volunteer")
    title = f"{config.run_id}: {who}, {counted(model.epoch, 'epoch')}, {state.samples:,} samples"
    curve = report.draw_curve(state.curve, state.marks, folder / "loss.png", title)
    shown = make_pictures(config, model, folder / "pictures.png", threads=_cores())
    first, last = first_and_last_loss(state.curve)
    scores = shown.scores
    epochs = agreement.epochs if agreement else ()
    problems = report.find_problems(
        state, recovered=recovered, in_sync=in_sync, gap=gap, max_gap=MAX_GAP, epochs=epochs
    )
    result = report.DemoResult(
        peers=len(swarm.names),
        epochs=model.epoch,
        samples=state.samples,
        loss_first=first,
        loss_last=last,
        colour_match=scores.colour_match if scores else None,
        caption_match=scores.caption_match if scores else None,
        caption_match_shuffled=scores.caption_match_shuffled if scores else None,
        checker_accuracy=scores.checker_accuracy if scores else None,
        killed_peer_recovered=recovered,
        joined_late_in_sync=in_sync,
        max_param_gap=gap,
        loss_curve=str(curve),
        images=str(shown.path),
        skipped=dict(state.skipped) if config.data.kind != "scenes" else None,
        reconstruction_error=shown.reconstruction_error,
        problems=tuple(problems),
    )
    output.say("")
    lines = report.summary(
        result, state, seconds=seconds, level=config.data.level if scores else None,
        same_bytes=bool(agreement and agreement.same_bytes),
    )  # fmt: skip
    for line in lines:
        output.say(line)
    (folder / "summary.txt").write_text("\n".join([*lines, result.json_line(), ""]), encoding="utf-8")
    output.say("")
    output.say(f"Loss curve   {curve}\nPictures     {shown.path}\nThe model    {kept}")
    output.say(f"Summary      {folder / 'summary.txt'}\nLogs         {swarm.logs}")
    output.say(result.json_line())
    return result


def _keep(checkpoint: Checkpoint, folder: Path) -> Path:
    """Copy a checkpoint out of the scratch folder."""
    return Path(shutil.copytree(checkpoint.path, folder / "model" / checkpoint.path.name, dirs_exist_ok=True))


def _rescue(swarm: DemoSwarm, folder: Path) -> None:
    """The demo ends early: what was trained so far is kept."""
    saved = swarm.newest_saved()
    if saved is not None:
        output.say(f"The model of epoch {saved.epoch} is kept in {_keep(saved, folder)}")


def _make_folder(out: str | Path | None, run_id: str) -> Path:
    folder = Path(out) if out else Path("demo-out") / f"{run_id}-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DemoError(
            f"The demo cannot write to {folder}: {error.strerror}.\nName another folder: volunteer-kit demo --out PATH"
        ) from None
    return folder


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1

"""What `volunteer-kit encode` does, from the run's name to the report."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from volunteer_kit import output, packages
from volunteer_kit.data.errors import DataError
from volunteer_kit.data.shards import expand_shards, shown
from volunteer_kit.data.source import Limits
from volunteer_kit.device import detect_device, usable_cores, usable_memory
from volunteer_kit.encode.folder import locked, refuse_other_settings, targets, write_report
from volunteer_kit.encode.pool import Plan, encode_shards
from volunteer_kit.encode.progress import EncodeProgress, in_words
from volunteer_kit.encode.settings import Settings
from volunteer_kit.model.image_tokenizer_config import image_tokenizer_config
from volunteer_kit.run_reader import RunError
from volunteer_kit.run_tokenizers import image_identity, require_tokenizers
from volunteer_kit.runs import RunConfig, load_run, require_pictures
from volunteer_kit.storage.places import adopt_home, expanded

WORKER_MEMORY = 2 * 2**30  # bytes; with the published VQGAN a worker grows to 1.4 GB
MAX_TOLD = 5  # shards that cannot be read, named in the last message


class Encoded(NamedTuple):
    """What became of the shards that were named."""

    shards: int
    finished: int
    interrupted: bool


def encode(
    shards: str | Sequence[str],
    out: str | Path,
    *,
    run: str | Path | RunConfig,
    workers: int | None = None,
    threads: int | None = None,
    say: Callable[[str], None] = output.say,
) -> Encoded:
    """Make code shards of image shards, in the folder `out`, for runs with the image tokenizer and filters of `run`.

    The same command goes on where an earlier one was stopped, however it was stopped. `workers` are processes (None:
    one a core, if memory allows; one where there is a GPU), `threads` of each decode and compute (None: one; all cores
    with a GPU); more workers are faster than more threads. Ctrl-C ends it in good order. Raises RunError; DataError
    for shards that cannot be found, a folder of other shards, a full disk, and, after all others are finished, shards
    that cannot be read; ImageTokenizerError.
    """
    packages.require("encode")
    adopt_home(out)
    config = run if isinstance(run, RunConfig) else load_run(run)
    require_pictures(config)
    settings = settings_of(config)
    plan = plan_of(workers, threads)
    found, folder = expand_shards(shards), expanded(out)
    goals = targets(found, folder)
    with locked(folder) as lock, EncodeProgress(len(goals), say) as progress:
        refuse_other_settings(folder, settings)
        try:
            with closing(encode_shards(goals, settings, plan, lock)) as events:
                for event in events:
                    progress.follow(event)
        except KeyboardInterrupt:
            interrupted = True
        else:
            interrupted = False
            write_report(folder, settings)
    if progress.unreadable and not interrupted:
        raise _some_unreadable(progress, len(goals), folder)
    _say_result(len(goals), progress, interrupted, folder, say)
    return Encoded(len(goals), progress.finished, interrupted)


def settings_of(config: RunConfig) -> Settings:
    """What of a run decides how its code shards look. Raises RunError, ImageTokenizerError."""
    if config.data.kind == "scenes":
        raise RunError(
            f"The run {config.run_id!r} makes its own data (scenes), so code shards have no use in it.\n"
            "1. Name a run that reads pictures: --run emoji, or the path of your own."
        )
    require_tokenizers(config)
    sizes = image_tokenizer_config(config.image_tokenizer)
    data = config.data
    return Settings(
        tokenizer=config.image_tokenizer,
        identity=image_identity(config.image_tokenizer),
        image_size=sizes.image_size,
        codes=sizes.fmap**2,
        num_codes=sizes.num_codes,
        filters=data.filters,
        columns=data.columns,
        limits=Limits(data.timeout, data.retries, int(data.max_member_mb * 2**20)),
    )


def plan_of(workers: int | None, threads: int | None) -> Plan:
    """What this machine does at once."""
    cores = usable_cores()
    if detect_device().kind == "cuda":
        return Plan(workers or 1, threads or min(cores, 16), "cuda")
    fitting = min(cores // (threads or 1), usable_memory()[1] // WORKER_MEMORY)
    return Plan(workers or max(1, fitting), threads or 1, "cpu")


def _some_unreadable(progress: EncodeProgress, shards: int, folder: Path) -> DataError:
    told = [f"   {shown(each.shard)} ({each.cause}): {each.message}" for each in progress.unreadable[:MAX_TOLD]]
    more = len(progress.unreadable) - len(told)
    return DataError(
        "\n".join(
            [
                f"{len(progress.unreadable)} of {shards} shards cannot be read now; {progress.finished} are finished "
                f"in {folder} ({progress.records} records{in_words(progress.counts)}):",
                *told,
                *([f"   ... and {more} more"] if more else []),
                "1. Look at the files or the network, and run the same command again: it makes what is missing.",
                "2. Or name only the shards that are there.",
            ]
        )
    )


def _say_result(
    shards: int, progress: EncodeProgress, interrupted: bool, folder: Path, say: Callable[[str], None]
) -> None:
    if interrupted:
        say(
            f"Stopped: {progress.finished} of {shards} shards are finished in {folder}, and what was made of the "
            "others stays.\n"
            "To go on, run the same command again."
        )
        return
    pattern = shlex.quote(f"{folder}/*.tar")
    say(
        f"{progress.finished} shards are finished in {folder}: {progress.records} records"
        f"{in_words(progress.counts)}; {folder / 'report.json'} says what was left out.\n"
        f"To train on them, write into section `data` of the run file: kind: codes, shards: {pattern}"
    )

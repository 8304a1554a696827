"""One worker's reading: the stream, its leases in the swarm, and where to go on after a restart."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from hivemind.dht import DHT

from volunteer_kit.data.leases import Lease
from volunteer_kit.data.ledger import Ledger
from volunteer_kit.data.stream import Batch, SampleStream
from volunteer_kit.storage import DamagedFile, keep_aside, read_json, write_whole
from volunteer_kit.swarm.leases.client import SwarmLeases
from volunteer_kit.swarm.options import StepReport
from volunteer_kit.training.callbacks import Emit

MAX_STATE = 256 * 1024  # bytes of the file


class Reading:
    """What stands between the stream and the trainer.

    :param path: file for the stream's state as of the last global step; None: a restart begins elsewhere
    :param fingerprint: of the run; a state of another run is not used
    """

    def __init__(self, stream: SampleStream, path: str | Path | None, fingerprint: str, emit: Emit):
        self._stream, self._path, self._fingerprint, self._emit = stream, path and Path(path), fingerprint, emit
        self._leases: SwarmLeases | None = None
        self._ledger = Ledger()
        self._earned_nothing, self._saved_leases = 0, {}
        self._unnamed = 0  # samples in steps that were not all of any batch of ours: its name comes with the last part
        self._load()

    def share(self, dht: DHT, run_key: str) -> None:
        """Lease from the swarm from now on."""
        self._leases = SwarmLeases(dht, f"{run_key}_{self._stream.source.catalogue}", Lease)
        with contextlib.suppress(ValueError, TypeError, AttributeError):  # then others, or the DHT, may know
            self._leases.load_state_dict(self._saved_leases)
        self._stream.lease_from(self._leases)

    def next_batch(self, batch_size: int) -> Batch:
        return self._ledger.given(self._stream.next_batch(batch_size))

    def applied(self, report: StepReport) -> int:
        """A global step was taken. :returns: samples of ours in it that earn credit: those with a lease that was
        ours."""
        found = self._ledger.applied(report.names, report.waiting)
        if found.after is not None:
            self._stream.applied(found.after)
            self._save(self._stream.state_dict(found.after))
        if self._leases is None:
            return report.samples
        earned = sum(count for lease, count in found.samples.items() if self._leases.earns(lease))
        self._earned_nothing += sum(found.samples.values()) - earned
        self._unnamed += report.samples
        counted = min(earned, self._unnamed)
        self._unnamed = max(0, self._unnamed - sum(found.samples.values()))
        return counted

    def keep(self) -> None:
        """Renew the leases where it is time; does not wait."""
        if self._leases is not None:
            self._leases.keep()

    def counts(self) -> dict[str, int]:
        """What was left out, lost or read twice, by cause."""
        more = {"samples_lost": self._ledger.lost, "samples_without_credit": self._earned_nothing}
        if self._leases is not None:
            more["ranges_read_twice"] = self._leases.counts["duplicate"]
        return {cause: n for cause, n in {**self._stream.counts, **more}.items() if n}

    def close(self) -> None:
        """Leave to others what is left of our leases."""
        self._stream.close()
        if self._leases is not None:
            self._leases.close()

    def _load(self) -> None:
        if self._path is None:
            return
        try:
            read_json(self._path, self._take, MAX_STATE)
        except FileNotFoundError:
            return
        except DamagedFile as error:
            text = f"How far the data had been read cannot be told from {self._path} ({error.reason}); it begins anew."
            self._emit("warning", kind="stream", message=text + keep_aside(self._path))

    def _take(self, saved: dict) -> None:
        if saved["fingerprint"] == self._fingerprint:
            self._stream.load_state_dict(saved["stream"])
            self._saved_leases = saved.get("leases", {})

    def _save(self, state: dict) -> None:
        if self._path is None:
            return
        try:
            leases = self._leases.state_dict() if self._leases else {}
            saved = {"fingerprint": self._fingerprint, "stream": state, "leases": leases}
            write_whole(self._path, json.dumps(saved), durable=False)  # each step: a power cut costs the last ones
        except OSError as error:
            message = f"How far the data were read could not be saved in {self._path}: {error.strerror or error}."
            self._emit("warning", kind="stream", message=message)
            self._path = None  # told once; training goes on

"""A run's folder on the host's machine: all that a start after a reboot goes on from."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from volunteer_kit.home import Home
from volunteer_kit.host.settings import HostError
from volunteer_kit.process_group import find
from volunteer_kit.storage import DamagedFile, read_json, write_whole
from volunteer_kit.storage.places import expanded

NO_GROUP = 2**22 + 1  # no process has this id
LEFTOVERS_END_WITHIN = 13.0  # s; a part gives itself 10 once the host is gone


class HostFolder:
    """Where everything of a run lies. What may be lost is only logs/. Into a backup belong keys/, identity.key,
    authority.sqlite (members and bans) and monitor/ with credit.sqlite (what everybody has done)."""

    def __init__(self, path: str | Path):
        self.path = expanded(path).absolute()
        self._lock = Home(self.path)

    @property
    def run_file(self) -> Path:
        """What volunteers get."""
        return self.path / "run.yaml"

    @property
    def keys(self) -> Path:
        return self.path / "keys"

    @property
    def identity(self) -> Path:
        return self.path / "identity.key"

    @property
    def monitor(self) -> Path:
        return self.path / "monitor"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name.replace(' ', '-')}.log"

    @property
    def mark(self) -> str:
        """NAME=value that all processes of this folder carry."""
        return f"VOLUNTEER_KIT_HOST={hashlib.sha256(os.fsencode(self.path)).hexdigest()[:32]}"

    def lock(self) -> None:
        """Be its only host. Raises HostError."""
        try:
            if self._lock.lock("host"):
                return
        except OSError as error:
            raise HostError(
                f"The folder {self.path} cannot be used: {error.strerror or error}.\n1. Name another one: --folder PATH"
            ) from None
        raise HostError(
            f"Another host runs in {self.path}.\n"
            "1. See which: ps x | grep volunteer-kit\n"
            "2. End that one (Ctrl-C), or give this one a folder of its own: --folder PATH"
            + (f"\n3. {holder}" if (holder := self._lock.who_holds("host")) else "")
        )

    def unlock(self) -> None:
        self._lock.unlock()

    def end_leftovers(self, patience: float = LEFTOVERS_END_WITHIN) -> int:
        """Wait for what a killed host left behind, then end it: it has our ports, identity and database.

        Only with the lock, so that it is nobody's. Returns how many processes there were.
        """
        left = find(NO_GROUP, self.mark)
        count, deadline = len(left), time.monotonic() + patience
        while left:
            if time.monotonic() > deadline:
                for pid in left:
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
            left = find(NO_GROUP, self.mark)
        return count

    def read(self) -> dict[str, Any]:
        """host.json; {} if there is none. Raises HostError where it cannot be understood: guessing would cost the
        address that volunteers know."""
        path = self.path / "host.json"
        try:
            saved = read_json(path)
            wrong = "" if isinstance(saved, dict) else "it holds something else"
            if isinstance(saved, dict) and not isinstance(saved.get("run_id", ""), str):
                wrong = "its run_id is no text"
            if isinstance(saved, dict) and not isinstance(saved.get("peer_id") or "", str):
                wrong = "its peer_id is no text"
        except FileNotFoundError:
            return {}
        except DamagedFile as error:
            wrong = error.reason
        if wrong:
            file = shlex.quote(str(path))
            raise HostError(
                f"{path} cannot be read ({wrong}).\n"
                "1. Put back its backup.\n"
                f"2. Or move it away, and say the ports and addresses again: mv {file} {file}.damaged"
            )
        return saved

    def save(self, values: Mapping[str, Any]) -> None:
        """host.json, whole or not at all, for its owner's eyes: a database's address may have a password in it.
        Raises OSError."""
        write_whole(self.path / "host.json", json.dumps(values, indent=1) + "\n", mode=0o600)

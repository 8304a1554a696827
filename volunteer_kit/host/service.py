"""The text of a systemd unit that starts a host again after a reboot. It is printed, never installed."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from volunteer_kit.storage.places import user_name

UNIT = """\
# 1. Put this into /etc/systemd/system/{name}.service
#      volunteer-kit host ... --install-service | sudo tee /etc/systemd/system/{name}.service
# 2. sudo systemctl daemon-reload && sudo systemctl enable --now {name}
# 3. What it says:   journalctl -fu {name}
[Unit]
Description=volunteer-kit: host of the run {run_id}
Wants=network-online.target
After=network-online.target time-sync.target

[Service]
User={user}
WorkingDirectory={folder}
ExecStart={command}
Restart=on-failure
RestartSec=10
# The host alone gets SIGTERM and ends its processes in order, within 15 s.
KillMode=mixed
TimeoutStopSec=30
LimitNOFILE=65536
NoNewPrivileges=true

[Install]
WantedBy=multi-user.target
"""


def service_unit(run_id: str, arguments: Sequence[str], *, user: str | None = None, folder: Path | None = None) -> str:
    """A unit that runs `volunteer-kit host` with these arguments, as this user, in this folder."""
    command = [sys.executable, "-u", "-m", "volunteer_kit.cli", "host", *arguments]
    return UNIT.format(
        name=f"volunteer-kit-{re.sub(r'[^A-Za-z0-9_.-]', '-', run_id)}",
        run_id=run_id,
        user=user or user_name(),
        folder=str(folder or Path.cwd()).replace("%", "%%"),
        command=" ".join(_quoted(word) for word in command),
    )


def _quoted(word: str) -> str:
    """For ExecStart=: systemd expands % and $ in quotes as well."""
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return word if re.fullmatch(r"[A-Za-z0-9_./:=,@+%$-]+", word) else f'"{word}"'

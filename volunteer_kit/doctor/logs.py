"""Do log files stay small? The kit cuts its own while it runs; what another program appends to them stays."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from volunteer_kit.doctor.finding import Finding
from volunteer_kit.home import MAX_LOG

NAME = "logs"
MB = 1e6
LARGE = 3 * MAX_LOG  # bytes; a log that is appended to is cut once a minute


def logs(folders: Sequence[Path]) -> Finding:
    """:param folders: of volunteers and hosts; their logs lie in them and in logs/"""
    files = [file for folder in folders for place in (folder, folder / "logs") for file in _files(place)]
    return verdict({str(file): file.stat().st_size for file in files})


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.log") if file.is_file()) if folder.is_dir() else []


def verdict(sizes: dict[str, int]) -> Finding:
    """:param sizes: of log files, bytes"""
    large = {name: size for name, size in sizes.items() if size > LARGE}
    if large:
        told = ", ".join(f"{name} ({size / MB:,.0f} MB)" for name, size in large.items())
        ways = "\n".join(f"truncate -s 0 {shlex.quote(name)}" for name in large)
        return Finding(NAME, "warning", f"grown far over {MAX_LOG / MB:.0f} MB, where the kit cuts them: {told}", ways)
    if not sizes:
        return Finding(NAME, "ok", "none yet")
    count = f"{len(sizes)} files" if len(sizes) > 1 else "1 file"
    return Finding(NAME, "ok", f"{count}, {sum(sizes.values()) / MB:.1f} MB; cut at {MAX_LOG / MB:.0f} MB each")

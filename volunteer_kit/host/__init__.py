"""Hosting a run: one file, one command, one folder.

`python -m volunteer_kit.host.child` passes through here: nothing heavy is imported.
"""

from __future__ import annotations

from volunteer_kit.host.door import host_run
from volunteer_kit.host.plain import invitation
from volunteer_kit.host.settings import HostError, HostSettings

__all__ = ["HostError", "HostSettings", "host_run", "invitation"]

"""`python -m tests.hosted RUN.yaml FOLDER`: a host whose processes are stand-ins (tests/host_part.py), where
REAL_PEER=1 its first peer is a real one."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from volunteer_kit.host import HostError, HostSettings, door, host_run, parts, watch

PATIENCE = watch.Patience


def main() -> int:
    for name in ("authority", "monitor", "dashboard"):
        assert name in parts.STOP_ORDER[0] + parts.STOP_ORDER[1]
    parts.CLI = "tests.host_part"
    if not os.environ.get("REAL_PEER"):
        made = parts.first_peer

        def stand_in(*arguments):
            part = made(*arguments)
            return part._replace(command=("tests.host_part", "first-peer", *part.command[1:]))

        parts.first_peer = stand_in
    watch.Patience = lambda: PATIENCE(most=3, first=0.1, slow=2.0)
    door.STAGES = (8.0, 10.0, 14.0)
    ports = [int(word) for word in os.environ.get("PORTS", "").split()]
    settings = HostSettings(push_to=os.environ.get("PUSH_TO"))
    if ports:
        settings = replace(settings, port=ports[0], dashboard_port=ports[1])
    maddrs = [f"/ip4/127.0.0.1/tcp/{ports[2]}"] if ports else []
    try:
        host_run(
            sys.argv[1], folder=sys.argv[2], settings=settings, host_maddrs=maddrs, say=lambda t: print(t, flush=True)
        )
    except HostError as error:
        print(error, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

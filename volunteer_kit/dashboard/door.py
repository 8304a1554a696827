"""`volunteer-kit dashboard`: serves until Ctrl-C or SIGTERM."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
from pathlib import Path

from volunteer_kit import output
from volunteer_kit.addressing import EVERYWHERE, LOCALHOST, listen, loopback, shown
from volunteer_kit.bounded_http import LOOPBACK, BoundedServer, HttpLimits
from volunteer_kit.dashboard.app import make_app
from volunteer_kit.dashboard.board import Board
from volunteer_kit.dashboard.errors import DashboardError
from volunteer_kit.dashboard.state import run_info
from volunteer_kit.runs import RunConfig, load_run

LIMITS = HttpLimits(connections=900)
FAREWELL = 3  # s for answers that are under way; then they are cut off


def serve(
    run: str | Path | RunConfig,
    *,
    folder: str | Path | None = None,
    host: str = LOCALHOST,
    port: int = 0,
    limits: HttpLimits = LIMITS,
) -> None:
    """Show a run's journal at http://host:port until SIGTERM or Ctrl-C. Prints one line of JSON when it listens.

    :param folder: the monitor's; it need not be there yet. Default: ./RUN_ID-host/monitor
    :param host: as of addressing.listen
    :param port: 0 takes a free one
    Raises RunError, DashboardError.
    """
    config = run if isinstance(run, RunConfig) else load_run(run)
    board = Board(monitor_folder(config, folder), run_info(config))
    listening = _listen(host, port)
    # Who connects from this machine is a proxy, as a rule: the dashboard itself speaks no TLS.
    run_file = None if isinstance(run, RunConfig) or not Path(run).is_file() else Path(run).absolute()
    server = BoundedServer(
        make_app(board, run_file), limits, proxies=LOOPBACK, log_level="error", timeout_graceful_shutdown=FAREWELL
    )
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again once it has stopped
            signal.signal(number, lambda *_: None)
    url = f"http://{shown(host)}:{listening[0].getsockname()[1]}/"
    print(json.dumps({"ready": {"url": url}}), flush=True)
    try:
        server.run(sockets=listening)
    finally:
        board.close()
        for one in listening:
            one.close()


def monitor_folder(config: RunConfig, folder: str | Path | None) -> Path:
    """Where the monitor of this run keeps its journal, unless told."""
    return Path(folder) if folder else Path(f"{config.run_id}-host") / "monitor"


def _listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that take connections from now on. Raises DashboardError."""
    try:
        return listen(host, port, backlog=256)
    except OSError as error:
        raise DashboardError(
            f"The dashboard cannot listen at {host}, port {port}: {error.strerror or error}.\n"
            f"1. See who has the port: ss -ltnp 'sport = :{port}'\n2. Take another: --port 0 takes any that is free\n"
            f"3. An address must be this machine's: {loopback()} (this machine only) or {EVERYWHERE} (everybody)"
        ) from None
    except OverflowError:
        raise DashboardError(f"{port} is no port: 1 to 65535, or 0 for any that is free") from None


def _main() -> None:  # python -m volunteer_kit.dashboard.door RUN FOLDER PORT: for tests, without the command line
    output.keep_up()
    run, folder, port = sys.argv[1:4]
    serve(run, folder=folder, port=int(port))


if __name__ == "__main__":
    _main()

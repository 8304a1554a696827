"""The monitor of a swarm whose credit is judged: `python -m credit_parts.monitor SETTINGS`. stdin: any line: the swarm
has ended, collect what is left and go."""

from __future__ import annotations

import contextlib
import json
import sys
import threading

from credit_parts.peer import node, run_of
from volunteer_kit.swarm.credit.accounting import EntryCollector, StepFeed
from volunteer_kit.swarm.credit.ledger import CreditLedger
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.worker import own_stdin

PERIOD = 1.0  # s between two looks


def main() -> None:
    settings = json.loads(sys.argv[1])
    end, stdin = threading.Event(), own_stdin()
    peer, _, optimizer, _ = node(
        settings, run_of(settings["target_batch_size"]), settings["identity"], settings["folder"], observes=True
    )
    threading.Thread(target=lambda: (stdin.readline(), end.set(), optimizer.stop_waiting()), daemon=True).start()
    accounts, feed = settings["accounts"], StepFeed()
    optimizer.on_steps = feed
    collector = EntryCollector(
        feed,
        CreditLedger(settings["ledger"]),
        account_of=lambda account, peer_id: accounts[peer_id].encode() if peer_id in accounts else b"nobody",
        name_of=lambda peer_id: accounts.get(str(peer_id)),
        warn=lambda text: print(text, flush=True),
    )
    joined = False
    while not end.wait(PERIOD):
        if not joined:
            with contextlib.suppress(SwarmError):  # the machines may not be there yet
                optimizer.join(patience=PERIOD)
                joined = True
        entered = collector.collect(optimizer.local_epoch)
        print(json.dumps({"epoch": optimizer.local_epoch, "entered": entered}), flush=True)
    optimizer.settle(patience=5.0)
    collector.close()
    optimizer.shutdown()
    peer.shutdown()


if __name__ == "__main__":
    main()

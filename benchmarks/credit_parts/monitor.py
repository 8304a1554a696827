"""The monitor of a swarm whose credit is judged: `python -m credit_parts.monitor SETTINGS`. stdin: any line: the swarm
has ended, collect what is left and go."""

from __future__ import annotations

import json
import sys
import threading
import time

from hivemind.p2p import PeerID

from credit_parts.peer import RUN
from volunteer_kit.swarm.credit_collector import CreditCollector
from volunteer_kit.swarm.credit_ledger import CreditLedger
from volunteer_kit.swarm.peer import PeerConfig, start_peer
from volunteer_kit.swarm.receipts import ReceiptBoard
from volunteer_kit.swarm.records import PeerBoard
from volunteer_kit.worker import own_stdin

PERIOD = 2.0  # s between two looks; an epoch takes five times as long
SETTLE_AFTER, GIVE_UP_AFTER = 12.0, 25.0  # s


def main() -> None:
    settings = json.loads(sys.argv[1])
    end, stdin = threading.Event(), own_stdin()
    threading.Thread(target=lambda: (stdin.readline(), end.set()), daemon=True).start()
    config = PeerConfig(initial_peers=settings["initial_peers"], host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    peer = start_peer(config)
    accounts = {PeerID.from_base58(peer_id): name for peer_id, name in settings["accounts"].items()}
    ledger, records = CreditLedger(settings["ledger"]), PeerBoard(peer.dht, RUN)
    collector = CreditCollector(
        ReceiptBoard(peer.dht, RUN),
        ledger,
        account_of=lambda peer_id: accounts[peer_id].encode() if peer_id in accounts else None,
        username_of=accounts.get,
        known_peers=lambda: accounts,
        max_samples=2 * settings["target_batch_size"],
        settle_after=SETTLE_AFTER,
        give_up_after=GIVE_UP_AFTER,
    )
    epoch, last = 0, None
    while last is None or time.monotonic() < last:
        if end.is_set() and last is None:
            last = time.monotonic() + GIVE_UP_AFTER + 3 * PERIOD
        epoch = max([epoch, *(record.epoch for record in records.fetch().values())])
        collected = collector.collect(epoch + 1)
        for step in collected.steps:
            print(json.dumps({"entered": step.epoch, "signers": len(step.receipts)}), flush=True)
        findings = collected.findings
        print(json.dumps({"epoch": epoch, "left_out": len(findings.left_out)}), flush=True)
        time.sleep(PERIOD)
    ledger.close()
    peer.shutdown()


if __name__ == "__main__":
    main()

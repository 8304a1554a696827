"""The synchronization core: how peers that come, go and fail agree on each optimizer step.

It is pure: no clock, no network, no files, no tensors, no threads. `SyncCore.handle(event, now)` takes what happened
and returns what to do, in order. `docs/protocol.md` describes the protocol, `tests/simulation` proves it under faults.

Read `phases`, `contributions`, `ballots`, `entries`, `certificates`, `log`, `messages`, then `core`.
"""

"""This machine as a peer: libp2p daemon, DHT node, identity, and bounds on strangers.

Read `peer`, then `fork_safety` and `connectivity`. `access` admits callers.
"""

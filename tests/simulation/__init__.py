"""A deterministic simulator of the swarm: real cores, a virtual clock, and everything that can go wrong.

One seed is one schedule of faults. Read `simulation`, then `process`, `network`, `exchange` and `invariants`.
`python -m tests.simulation --help` says how to run it.
"""

"""States of a run: signed manifests, chunks on the disk, and the schedule of requests to donors.

The nodes transfer states (`node/states.py`); these modules know no network.
"""

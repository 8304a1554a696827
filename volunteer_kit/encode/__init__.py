"""Image shards -> code shards: `volunteer-kit encode SHARDS... OUT --run RUN`.

door.py is what the command calls; it starts workers (pool.py), each of which makes one shard at a time (shard.py) and
writes it so that it can be killed at any moment (part.py). What lies in OUT, and who may write there, is folder.py's.
Imports nothing itself: a worker needs neither the run nor its swarm.
"""

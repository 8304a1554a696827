"""Parts of staleness.py: who is late and what is done about it, the data, and one training of an emulated swarm."""

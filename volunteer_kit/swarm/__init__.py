"""The swarm: the DHT peer, records, codecs, rounds, the synchronization core, and the node around it."""

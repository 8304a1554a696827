"""Everything that speaks to other peers: the DHT peer, records, codecs, averaging and the optimizer over it."""

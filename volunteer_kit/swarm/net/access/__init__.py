"""Access control: `control` decides on every call whether the peer may take part; `dht_auth` does so in the DHT."""

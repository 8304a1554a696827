"""Leases of ranges of the data, through the DHT: `records` defines the records, `client` takes and renews leases."""

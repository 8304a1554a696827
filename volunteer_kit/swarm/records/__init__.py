"""Records of peers, the authority and monitors in the DHT: signed, typed, bounded.

Read `peer_record`, then `signed`.
"""

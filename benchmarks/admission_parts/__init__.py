"""What benchmarks/admission.py is made of: a swarm with an authority, strangers, bans, and rounds with and without."""

"""Parts of reachability.py."""

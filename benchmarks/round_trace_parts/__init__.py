"""Parts of round_trace.py."""

"""Parts of protocol_goodput.py."""

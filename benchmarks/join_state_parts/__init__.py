"""Parts of join_state.py."""

"""Data: where text and pictures come from and how one sample becomes a batch."""

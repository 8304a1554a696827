"""The data room's one exception."""


class DataError(OSError):
    """Shards, captions or tokenizers that cannot be read: what happened, and what to do about it."""

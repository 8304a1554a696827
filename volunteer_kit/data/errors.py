"""The data room's exceptions."""


class DataError(OSError):
    """Shards, captions or tokenizers that cannot be read: what happened, and what to do about it."""


class NoSuchSample(DataError):
    """A name that no usable sample of this data has, whoever asks and whenever."""

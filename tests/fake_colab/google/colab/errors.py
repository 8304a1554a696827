"""The exceptions' home on Colab."""


class Error(Exception):
    """Of google.colab."""


class TimeoutException(Exception):
    """The page did not answer in time."""

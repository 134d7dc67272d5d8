"""The one error that this package raises."""


class RecorderError(Exception):
    """A recording cannot be made; the text says why and what to do."""

"""What this package raises."""


class RecorderError(Exception):
    """A recording cannot be made; the text says why and what to do."""


class EndOfRecording(Exception):
    """The recording cannot continue after the steps so far; the text states why."""

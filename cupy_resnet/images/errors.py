"""What goes wrong with a single image."""


class ImageError(ValueError):
    """One input cannot become an image; the message names it and says why.

    Attributes:
        name: the path or URL as given, or ``image 3`` for an input that has neither.
        reason: what was wrong and, where that is known, what would be right.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)  # both, so that the error survives pickling between processes
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class RefusedError(Exception):
    """A reason without a name: raised where the input's name is not known, and turned into `ImageError` by `decode`."""

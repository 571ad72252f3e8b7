"""What is wrong with a constraint."""


class GrammarError(ValueError):
    """A constraint that cannot be served; the message says what to change.

    path: where in a JSON value the blame lies, as in ``properties.a.uniqueItems``; "": all of it.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path

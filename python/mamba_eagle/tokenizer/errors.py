"""Why a request is not taken."""


class EngineDead(RuntimeError):
    """The engine is gone, or the server is being stopped."""


class QueueFull(RuntimeError):
    """More requests than the server holds at a time."""


class DuplicateRid(ValueError):
    """A live request has this name already."""

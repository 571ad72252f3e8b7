"""Pauses: what a trainer that is about to change the weights stops, and what it leaves as it is."""

from mamba_eagle.core import DEFAULT_VERSION
from mamba_eagle.message import ChangeModel, PauseMode
from mamba_eagle.scheduler.request import Request


class Pauses:
    """Whether requests may run, and those that came while none may begin.

    A change of the model is a pause of its own: it takes every slot from its requests, which begin
    again with their output so far, so that no state of the old weights is read with the new ones.
    """

    def __init__(self) -> None:
        self.mode: PauseMode | None = None  # None: no pause
        self.later: list[Request] = []  # they wait for the end of a pause
        self.change: ChangeModel | None = None  # under way
        self.released: set[str] = set()  # memory that was given back, by tag
        self.version = DEFAULT_VERSION  # of the weights

    @property
    def stops_all(self) -> bool:
        """Whether no step may be planned, but for releases."""
        held = self.mode in ("keep", "retract")
        return held or self.change is not None or bool(self.released)

    @property
    def any(self) -> bool:
        """Whether requests wait that nothing is wrong with."""
        return self.stops_all or self.mode is not None

    def holds_back(self, request: Request) -> bool:
        """Whether a request that has just come is kept here."""
        if self.mode is not None:
            self.later.append(request)
        return self.mode is not None

    def forget(self, request: Request) -> None:
        """It has ended."""
        if request in self.later:
            self.later.remove(request)

    def end(self) -> list[Request]:
        """The pause is over; returns those that may begin now."""
        self.mode, later, self.later = None, self.later, []
        return later

    def problem(self, change: ChangeModel) -> str:
        """Why a change cannot begin; "" if it can."""
        if self.change is not None:
            return "the model is being changed already: wait for the answer to that call"
        if doubly := self.released.intersection(change.release):
            return f"memory of {', '.join(sorted(doubly))} was released already: resume it first"
        if change.resume and self.released.isdisjoint(change.resume):
            return f"memory of {', '.join(change.resume)} was not released: nothing to resume"
        return ""

    def changed(self, worked: bool) -> None:
        """The runner has answered."""
        change, self.change = self.change, None
        assert change is not None
        if worked:
            self.released = self.released.union(change.release).difference(change.resume)
            if change.weights is not None:
                self.version = change.weights.version or self.version

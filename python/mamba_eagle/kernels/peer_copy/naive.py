"""A ring of messages from one sender to one receiver, each of which goes on as it likes."""

from torch import Tensor


class Ring:
    def __init__(self, places: int) -> None:
        self.messages: list[Tensor | None] = [None] * places
        self.posted = self.taken = 0  # messages so far

    @property
    def is_full(self) -> bool:
        """The sender waits."""
        return self.posted - self.taken == len(self.messages)

    def send(self, message: Tensor) -> None:
        assert not self.is_full
        self.messages[self.posted % len(self.messages)] = message.clone()
        self.posted += 1

    def receive(self) -> Tensor:
        """The oldest one."""
        message = self.messages[self.taken % len(self.messages)]
        assert self.taken < self.posted and message is not None, "the receiver waits"
        self.taken += 1
        return message

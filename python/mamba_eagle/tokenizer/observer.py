"""Who learns what becomes of requests; metrics/recorder.py is one."""

from typing import Protocol

from mamba_eagle.tokenizer.sample import LiveRequest, Sample


class Observer(Protocol):
    """Called for each event of a request, on the event loop; must not block."""

    def started(self, live: LiveRequest) -> None:
        """A request was accepted."""

    def progressed(self, sample: Sample, new_tokens: int, now: float) -> None:
        """``new_tokens`` of a sample came at time ``now``."""

    def finished(self, sample: Sample) -> None:
        """A sample ended, also when it was aborted."""

    def reset_averages(self) -> None:
        """The cache was flushed: averages start again."""

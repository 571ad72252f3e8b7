"""Counters of the scheduler."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

RECENT_SECONDS = 5.0


@dataclass
class Stats:
    """Since the start, except ``recent``."""

    num_requests: int = 0
    num_aborted: int = 0
    num_retracted: int = 0
    prompt_tokens: int = 0  # of requests that started
    cached_tokens: int = 0
    generation_tokens: int = 0
    decode_tokens: int = 0  # of which decode steps made
    verify_steps: int = 0  # decode steps, counted once a request
    num_steps: int = 0
    recent: deque[tuple[float, int]] = field(default_factory=deque)  # (when, output tokens)

    def generated(self, count: int) -> None:
        self.generation_tokens += count
        now = time.monotonic()
        self.recent.append((now, count))
        self._forget(now)

    def _forget(self, now: float) -> None:
        while self.recent and self.recent[0][0] < now - RECENT_SECONDS:
            self.recent.popleft()

    @property
    def gen_throughput(self) -> float:
        """Output tokens a second, over the last seconds in which there were any."""
        now = time.monotonic()
        self._forget(now)
        if not self.recent:
            return 0.0
        return sum(count for _, count in self.recent) / max(now - self.recent[0][0], 0.1)

    def as_dict(self) -> dict[str, float]:
        return {
            "num_requests_total": self.num_requests,
            "num_aborted_requests_total": self.num_aborted,
            "num_retracted_reqs": self.num_retracted,
            "prompt_tokens_total": self.prompt_tokens,
            "cached_tokens_total": self.cached_tokens,
            "generation_tokens_total": self.generation_tokens,
            "verify_steps_total": self.verify_steps,
            "num_steps": self.num_steps,
            "cache_hit_rate": self.cached_tokens / max(self.prompt_tokens, 1),
            "spec_accept_length": self.decode_tokens / max(self.verify_steps, 1),
            "gen_throughput": self.gen_throughput,
        }

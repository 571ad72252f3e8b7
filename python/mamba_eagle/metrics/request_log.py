"""--log-requests: a line when a request starts and one when it ends."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from mamba_eagle.core import FinishReason, SamplingParams, shown
from mamba_eagle.limits import MAX_LOGGED_PROMPT
from mamba_eagle.message import Generate

if TYPE_CHECKING:
    from mamba_eagle.tokenizer.sample import Sample
    from mamba_eagle.tokenizer.text import TextTokenizer

_DEFAULT = SamplingParams()
log = logging.getLogger("mamba_eagle.requests")


class RequestLog:
    """All that clients may choose is escaped and cut; their texts are there only if asked for."""

    def __init__(self, prompts: bool = False) -> None:
        """prompts: --log-prompts, texts of clients as well."""
        self.prompts = prompts
        self.tokenizer: TextTokenizer | None = None  # set when loaded; for prompts

    def started(self, sample: Sample) -> None:
        prompt = sample.prompt
        own = (shown(sample.rid), len(prompt.token_ids), sample.seed, self._described(prompt))
        log.info("start %s: %d prompt tokens, seed %d, %s", *own)

    def _described(self, prompt: Generate) -> str:
        """Sampling parameters other than defaults."""
        values = {
            name: value
            for name, value in msgspec.structs.asdict(prompt.sampling).items()
            if name not in ("stop", "seed") and value != getattr(_DEFAULT, name)
        }
        text = ", ".join(f"{name}={shown(value)}" for name, value in values.items())
        if prompt.sampling.stop:
            text += f", {len(prompt.sampling.stop)} stop strings"
        if self.prompts:
            written: Any = prompt.token_ids[:MAX_LOGGED_PROMPT]
            if self.tokenizer is not None:
                written = self.tokenizer.decode(written, skip_special_tokens=False)
            text += f", stop={shown(prompt.sampling.stop)}"
            text += f", prompt={shown(written, MAX_LOGGED_PROMPT)}"
        return text.removeprefix(", ")

    def ended(self, sample: Sample, seconds: float) -> None:
        assert sample.finish is not None
        own = (shown(sample.rid), len(sample.output_ids), seconds, self._end(sample.finish))
        fields = self._fields(sample, seconds)
        log.info("end %s: %d tokens in %.3f s, %s", *own, extra={"fields": fields})

    def _end(self, finish: FinishReason) -> str:
        if isinstance(finish.matched, str) and not self.prompts:
            return "stop string"
        return shown(finish.as_dict())

    def _fields(self, sample: Sample, seconds: float) -> dict[str, Any]:
        """The fields of an ended sample, for --log-format json."""
        assert sample.finish is not None
        return {
            "rid": shown(sample.rid)[1:-1],
            "finish": sample.finish.kind,
            "prompt_tokens": len(sample.prompt.token_ids),
            "cached_tokens": sample.last.cached_tokens,
            "completion_tokens": len(sample.output_ids),
            "queue_seconds": round(sample.last.queue_time, 4),
            "seconds": round(seconds, 4),
        }

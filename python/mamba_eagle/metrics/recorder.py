"""What is measured, under the names that SGLang's dashboards know (prefix ``mamba_eagle:``).

Counters and histograms are fed by the outputs that pass through the server process. Gauges are the
scheduler's, which is asked for them when /metrics is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mamba_eagle import __version__
from mamba_eagle.message import CacheUse, ShapeUse, StateReply
from mamba_eagle.metrics.request_log import RequestLog

if TYPE_CHECKING:
    from mamba_eagle.metrics.tracing import Tracer  # its packages are an extra
    from mamba_eagle.tokenizer.sample import Sample

# The same numbers under the names of other servers: SGLang's are ours with another prefix; of
# vLLM's those that load-aware routers read (Gateway API inference extension, llm-d, its own stack).
PREFIX = "mamba_eagle:"
PREFIXES = ("sglang", "vllm")
OF_VLLM = {
    "num_running_reqs": "num_requests_running",
    "num_queue_reqs": "num_requests_waiting",
    "token_usage": "kv_cache_usage_perc",
    "prompt_tokens_total": "prompt_tokens_total",
    "generation_tokens_total": "generation_tokens_total",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "queue_time_seconds": "request_queue_time_seconds",
}
# A line of a metric that vLLM has; what follows the name may begin with the part of a histogram.
_LINE = re.compile(
    rf"^(# \w+ )?{PREFIX}({'|'.join(OF_VLLM)})((?:_bucket|_sum|_count)?[ {{].*\n)", re.MULTILINE
)


def with_aliases(text: str, prefixes: Iterable[str]) -> str:
    """text: what Prometheus reads. prefixes: of PREFIXES."""
    made = [text]
    for prefix in prefixes:
        if prefix == "sglang":
            made.append(text.replace(PREFIX, "sglang:"))
        else:
            made += (f"{m[1] or ''}vllm:{OF_VLLM[m[2]]}{m[3]}" for m in _LINE.finditer(text))
    return "".join(made)


GAUGES = {
    "num_running_reqs": "requests that are being prefilled or decoded",
    "num_queue_reqs": "waiting requests",
    "num_used_tokens": "KV slots or tokens in use by running requests",
    "token_usage": "share of the KV slots in use",
    "gen_throughput": "output tokens per second over the last seconds",
    "num_cached_tokens": "KV slots of the prefix cache",
    "num_locked_tokens": "KV slots of the prefix cache that running requests read",
    "num_pinned_tokens": "KV slots that clients have pinned; common ones count for each pin",
    "num_free_kv_slots": "KV slots that no one has",
    "num_used_checkpoints": "state slots of running requests",
    "num_cached_checkpoints": "state slots of the prefix cache",
    "num_pinned_checkpoints": "states that clients have pinned",
    "num_free_checkpoints": "state slots that no one has",
    "num_cached_journals": "saved journals of the prefix cache",
    "num_free_journals": "journal slots that no one has",
    "num_host_tokens": "tokens whose keys and values are in host memory (--host-cache-gb)",
    "num_host_checkpoints": "states in host memory",
    "host_cache_usage": "share of --host-cache-gb in use",
    "num_disk_tokens": "tokens whose keys and values are in --cache-dir",
    "num_disk_checkpoints": "states in --cache-dir",
    "disk_cache_usage": "share of --disk-cache-gb in use",
    "cache_hit_rate": "share of prompt tokens found in the cache",
    "spec_accept_length": "output tokens per verify step",
    "spec_given_up": "1 if drafting is disabled because its acceptance rate is too low",
    "num_compiled_kernels": "kernels compiled and graphs captured while serving, each a stall",
    "num_retracted_reqs": "requests sent back to the queue because memory ran out",
}
F = TypeVar("F", Counter, Gauge, Histogram)
FAST = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
SLOW = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)

disable_created_metrics()  # they double the number of series, and no dashboard reads them


class _OfScheduler(Collector):
    """The scheduler's counters and gauges, as of its last reply."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.values: dict[str, float] = {}
        self.shapes: dict[str, ShapeUse] = {}
        self.cache = CacheUse()

    def collect(self) -> Iterator[Metric]:
        cache = self.cache
        steps = {shape: use.steps for shape, use in self.shapes.items()}
        by_tree = "decode steps by the tree they drafted: plain, or topk x steps x nodes"
        yield self._counter("spec_steps", by_tree, steps, "shape")
        for name, label, help_text, counts in (
            ("cache_hits", "kind", "requests that continued from a cached state", cache.hits),
            ("cache_saved_tokens", "kind", "prompt tokens not run again", cache.saved_tokens),
            ("cache_loaded_tokens", "tier", "prompt tokens brought up", cache.loaded_tokens),
            ("cache_lost_copies", "tier", "what a tier could not keep", cache.lost_copies),
        ):
            yield self._counter(name, f"{help_text}, by its {label}", counts, label)
        yield self._counter("cache_evicted_states", "states evicted", {"": cache.evicted_states})
        yield self._counter("cache_evicted_tokens", "KV slots evicted", {"": cache.evicted_tokens})
        for name, help_text in GAUGES.items():
            if name in self.values:
                gauge = GaugeMetricFamily(PREFIX + name, help_text, labels=["model_name"])
                gauge.add_metric([self.model], self.values[name])
                yield gauge

    def _counter(self, name: str, help_text: str, counts: Mapping[str, int], *label: str) -> Metric:
        """counts: by the label's values, if there is one."""
        family = CounterMetricFamily(PREFIX + name, help_text, labels=["model_name", *label])
        for value, count in counts.items():
            family.add_metric([self.model, value] if label else [self.model], count)
        return family


class Recorder:
    """Is called for each event of a request. A call takes microseconds."""

    def __init__(
        self,
        model: str,
        log: RequestLog | None = None,
        aliases: Sequence[str] = (),
        tracer: Tracer | None = None,
    ) -> None:
        """log: None without --log-requests. aliases: of PREFIXES."""
        self.aliases = aliases
        self.tracer = tracer
        self.registry = CollectorRegistry()
        self.log = log
        self._model = model
        self._scheduler = _OfScheduler(model)
        self.registry.register(self._scheduler)

        def counter(name: str, help_text: str) -> Counter:
            return self._family(Counter, name, help_text).labels(model)

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            return self._family(Histogram, name, help_text, buckets=buckets).labels(model)

        self.prompt_tokens = counter("prompt_tokens", "prompt tokens")
        self.generation_tokens = counter("generation_tokens", "output tokens")
        self.cached_tokens = counter("cached_tokens", "prompt tokens found in the cache")
        self.requests = counter("num_requests", "samples that have ended, including aborted ones")
        self.aborted = counter("num_aborted_requests", "samples that were aborted or failed")
        self.first_token = histogram(
            "time_to_first_token_seconds", "from arrival to the first output token", SLOW
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds", "between output tokens of a request", FAST
        )
        self.latency = histogram(
            "e2e_request_latency_seconds", "from arrival to the last token", SLOW
        )
        self.queue_time = histogram(
            "queue_time_seconds", "from arrival to the first prefill step", SLOW
        )
        self._register_by_label()
        self.simulates(0.0)
        self.reset_averages()

    def _register_by_label(self) -> None:
        """Those that have a label besides the model's name, and facts."""
        family = self._family
        self._finished_by_reason = family(
            Counter,
            "finished_requests",
            "samples that have ended, by the kind of their end: stop, length or abort",
            "reason",
        )
        self._http = family(
            Counter, "http_requests", "HTTP replies by route and status", "route", "status"
        )
        self._verify_steps_by_drafts = family(
            Counter,
            "spec_verify_steps",
            "decode steps of ended samples, by how many drafted tokens each accepted",
            "accepted_drafts",
        )
        self._simulated = family(
            Gauge,
            "simulated_accept_length",
            "length that --simulate-acc-len forces, texts mean nothing; 0: texts are the model's",
        )
        self._sizes = family(
            Gauge,
            "parallel_size",
            "parts that the model is split into: tp, of layers; pp, stages; nodes, machines",
            "kind",
        )
        family(Gauge, "build_info", "1", "version").labels(self._model, __version__).set(1)

    def _family(self, kind: type[F], name: str, help_text: str, *labels: str, **more: Any) -> F:
        return kind(
            PREFIX + name, help_text, ["model_name", *labels], registry=self.registry, **more
        )

    def simulates(self, accept_length: float) -> None:
        """Every step accepts this number of tokens on average, whatever the target says."""
        self._simulated.labels(self._model).set(accept_length)

    def split(self, sizes: Mapping[str, int]) -> None:
        """How the model is split: the number of parts of each kind."""
        for kind, size in sizes.items():
            self._sizes.labels(self._model, kind).set(size)

    def reset_averages(self) -> None:
        """Starts the averages anew, as benchmarks ask for with /flush_cache."""
        self._tokens = 0
        self._verify_steps = 0
        self._prompt = 0
        self._cached = 0

    @property
    def accept_length(self) -> float | None:
        """Output tokens per verify step over finished requests; None without speculation."""
        return self._tokens / self._verify_steps if self._verify_steps else None

    def started(self, sample: Sample) -> None:
        if self.log is not None:
            self.log.started(sample)

    def progressed(self, sample: Sample, new_tokens: int, now: float) -> None:
        """``new_tokens`` arrived at time ``now`` (time.time())."""
        if not new_tokens:
            return
        self.generation_tokens.inc(new_tokens)
        if sample.last_token_time:
            gap = (now - sample.last_token_time) / new_tokens
            for _ in range(new_tokens):
                self.inter_token.observe(gap)
        else:
            sample.first_token_time = now
            self.first_token.observe(now - sample.request.arrival)
            self.queue_time.observe(sample.last.queue_time)
        sample.last_token_time = now

    def finished(self, sample: Sample) -> None:
        assert sample.finish is not None
        prompt_tokens = len(sample.prompt.token_ids)
        seconds = sample.finish_time - sample.request.arrival
        self.requests.inc()
        self._finished_by_reason.labels(self._model, sample.finish.kind).inc()
        self.prompt_tokens.inc(prompt_tokens)
        self.cached_tokens.inc(sample.last.cached_tokens)
        if sample.last.queue_time and not sample.first_token_time:
            self.queue_time.observe(sample.last.queue_time)
        if sample.finish.kind == "abort":
            self.aborted.inc()
        else:
            self.latency.observe(seconds)
        if sample.last.verify_steps:
            self._tokens += len(sample.output_ids)
            self._verify_steps += sample.last.verify_steps
        for drafts, steps in enumerate(sample.last.accept_histogram):
            self._verify_steps_by_drafts.labels(self._model, drafts).inc(steps)
        if self.tracer is not None:
            self.tracer.ended(sample)
        self._prompt += prompt_tokens
        self._cached += sample.last.cached_tokens
        if self.log is not None:
            self.log.ended(sample, seconds)

    def replied(self, route: str, status: int) -> None:
        """An HTTP reply was begun."""
        self._http.labels(self._model, route, status).inc()

    def exposition(self, reply: StateReply | None) -> bytes:
        """The text of /metrics. The scheduler's gauges override those of the same name here;
        ``reply`` is None if it has not answered."""
        values: dict[str, float] = {}
        if self._prompt:
            values["cache_hit_rate"] = self._cached / self._prompt
        if self.accept_length is not None:
            values["spec_accept_length"] = self.accept_length
        state = reply.state if reply is not None else {}
        self._scheduler.values = values | {k: v for k, v in state.items() if k in GAUGES}
        if reply is not None:
            self._scheduler.shapes = reply.speculation.shapes
            self._scheduler.cache = reply.cache
            self._scheduler.values["spec_given_up"] = float(reply.speculation.disabled)
        text = generate_latest(self.registry).decode()
        return with_aliases(text, self.aliases).encode()

"""The same numbers under the names of other servers, for gateways and dashboards made for those.

``sglang:`` names are ours with another prefix. Of vLLM's, these are the ones that load-aware
routers read (Gateway API inference extension, llm-d, vLLM's production stack).
"""

from collections.abc import Iterable

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
_PARTS = ("_bucket", "_sum", "_count")  # of a histogram


def with_aliases(text: str, prefixes: Iterable[str]) -> str:
    """text: what Prometheus reads. prefixes: of PREFIXES."""
    made = [text]
    for prefix in prefixes:
        if prefix == "sglang":
            made.append(text.replace(PREFIX, "sglang:"))
        else:
            lines = (_of_vllm(line) for line in text.splitlines(keepends=True))
            made.append("".join(line for line in lines if line))
    return "".join(made)


def _of_vllm(line: str) -> str:
    """The line under vLLM's name; "" if it has none."""
    before, found, rest = line.partition(PREFIX)
    if not found:
        return ""
    end = min((i for i in (rest.find(mark) for mark in " {") if i >= 0), default=len(rest))
    name, tail = rest[:end], rest[end:]
    for part in ("", *_PARTS):
        if name.endswith(part) and (known := OF_VLLM.get(name.removesuffix(part))) is not None:
            return f"{before}vllm:{known}{part}{tail}"
    return ""

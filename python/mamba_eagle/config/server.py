"""What the server process needs to know, besides the engine's settings."""

import dataclasses
import math
import re
from dataclasses import dataclass

from mamba_eagle.config.engine import EngineConfig, engine_part
from mamba_eagle.config.flags import Settings, flag_of, setting
from mamba_eagle.core import POOLINGS
from mamba_eagle.limits import MAX_BODY_SIZE


@dataclass(frozen=True)
class NodeSettings(Settings):
    dist_timeout: int = setting(
        300,
        "seconds in which Ray must have found room for --nnodes machines",
        minimum=1,
        group="nodes",
    )


@dataclass(frozen=True)
class HttpSettings(Settings):
    host: str = setting("127.0.0.1", "address to listen on", group="HTTP")
    port: int = setting(30000, "port to listen on")
    root_path: str = setting(
        "", "path under which a proxy offers this server, such as /llm; with and without it works"
    )
    ssl_certfile: str = setting(
        "", "certificate chain in PEM; makes the server speak HTTPS", may_be_empty=False
    )
    ssl_keyfile: str = setting(
        "", "private key in PEM, if it is not in --ssl-certfile", may_be_empty=False
    )
    served_model_name: str = setting("", "model name in replies (default: --model-path)")
    api_key: str | tuple[str, ...] = setting(
        (),
        "key that clients must send, as 'Authorization: Bearer KEY' or 'x-api-key: KEY' (default: "
        "none); may be given several times; the list of processes shows it: prefer "
        "--api-key-file, or the variable MAMBA_EAGLE_API_KEY",
        may_be_empty=False,
        repeats=True,
    )
    api_key_file: str = setting(
        "", "file of keys, one per line; clients must send any of them", may_be_empty=False
    )
    admin_api_key: str = setting(
        "",
        "key of an operator, which is then needed for what changes the server for all: weights, "
        "adapters, pauses, prefixes of other servers, /flush_cache and abort_all; and in any case "
        "for profiles, and to see texts in GET /cache?text=1 (default: none)",
        may_be_empty=False,
    )
    skip_tokenizer_init: bool = setting(False, "load no tokenizer and serve token ids only")
    chat_template: str = setting(
        "",
        "Jinja file of the chat template, or the template itself (default: the tokenizer's)",
        may_be_empty=False,
    )
    tool_call_parser: str = setting(
        "auto",
        "how the model writes tool calls: nemotron_3, nemotron_nano_v2, granite_4, falcon_h1, "
        "qwen3, qwen3_coder, hermes, mamba2_math, or a JSON file like theirs; none: calls stay "
        "text; auto: the tokenizer's response_template, else what its chat template shows",
    )
    reasoning_parser: str = setting(
        "auto", "how it writes reasoning, by the same names; auto: as --tool-call-parser"
    )
    allow_unknown_fields: bool = setting(
        False, "accept fields of requests that no route has, which then have no effect"
    )
    constrained_json_whitespace_pattern: str = setting(
        "",
        "regex of what may stand between the tokens of JSON, such as [ \\n]{0,20}, where the "
        "request says nothing of it (default: a blank after each comma and colon at most)",
        may_be_empty=False,
    )
    pooling_method: str = setting(
        "last",
        "what /v1/embeddings makes a vector of: the hidden state of the last token, or the mean of "
        "all",
        POOLINGS,
    )
    max_queued_requests: int = setting(
        4096, "maximum number of waiting requests; further ones get status 503", minimum=0
    )
    max_body_size: int = setting(8, "maximum size of a request's body, in MiB", minimum=1)
    stream_interval: int = setting(
        1, "minimum number of tokens between two chunks of a stream", minimum=1
    )
    incremental_streaming_output: bool = setting(
        False,
        "let streams of /generate send what is new instead of all so far; a request's "
        "'incremental' comes first",
    )
    request_timeout: float = setting(
        0.0, "seconds that a request may take; then it gets status 504; 0: no limit"
    )
    log_requests: bool = setting(False, "log the metadata of each request, without its prompt")
    log_prompts: bool = setting(False, "with --log-requests, also log prompts and stop strings")
    cors_origins: str = setting(
        "auto",
        "web pages that may use the server, by origin (https://host[:port], with commas between): "
        "*: all; off: only the server's own; auto: all with --api-key, else those of this machine",
    )
    otlp_traces_endpoint: str = setting(
        "",
        "address of an OpenTelemetry collector that gets spans of requests, such as "
        "http://localhost:4318/v1/traces (default: none)",
    )
    metrics_prefix: str = setting(
        "sglang,vllm",
        "other servers under whose names /metrics shows the numbers too, with commas between: "
        "sglang, vllm; none",
    )
    max_connections: int = setting(
        4096, "maximum number of open connections; further ones get status 503", minimum=1
    )
    header_timeout: float = setting(10.0, "seconds in which a request's headers must arrive")
    body_timeout: float = setting(
        30.0, "seconds in which a request's body, or its next 64 KiB, must arrive"
    )
    write_timeout: float = setting(
        30.0, "seconds without progress before a client that does not read is disconnected"
    )
    sse_keep_alive: float = setting(
        15.0, "seconds of silence after which a stream gets a comment; 0: never"
    )
    shutdown_timeout: float = setting(
        30.0, "seconds that open requests have to finish after SIGTERM, SIGHUP or Ctrl-C"
    )
    ready_timeout: float = setting(
        10.0, "seconds without a sign of life from a process until /ready is 503; 0: never"
    )
    watchdog_timeout: float = setting(
        60.0, "seconds without a sign of life from the engine before the server ends; 0: never"
    )

    @property
    def metrics_prefixes(self) -> list[str]:
        """Of --metrics-prefix."""
        names = [name.strip() for name in self.metrics_prefix.split(",")]
        return [name for name in names if name and name != "none"]

    def problems(self) -> list[str]:
        wrong = super().problems()
        wrong += [
            f"--metrics-prefix {name}: must be sglang, vllm or none, with commas between"
            for name in self.metrics_prefixes
            if name not in ("sglang", "vllm")
        ]
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path):
            wrong.append(
                f"--root-path {self.root_path}: must begin with / and not end with it, as in /llm"
            )
        if (address := self.otlp_traces_endpoint) and not re.match("https?://.", address):
            remedy = "must begin with http:// or https://, as http://localhost:4318/v1/traces does"
            wrong.append(f"--otlp-traces-endpoint {address}: {remedy}")
        if not 1 <= self.port <= 65535:
            wrong.append(f"--port {self.port}: must be between 1 and 65535")
        for name in ("header_timeout", "body_timeout", "write_timeout"):
            seconds = getattr(self, name)
            if not 0 < seconds < math.inf:
                wrong.append(f"{flag_of(name)} {seconds:g}: must be more than 0 seconds")
        for name in ("shutdown_timeout", "sse_keep_alive", "request_timeout"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf:
                wrong.append(f"{flag_of(name)} {seconds:g}: must be 0 seconds or more")
        for name in ("ready_timeout", "watchdog_timeout"):
            seconds = getattr(self, name)
            if not (seconds == 0 or 2 <= seconds < math.inf):
                wrong.append(
                    f"{flag_of(name)} {seconds:g}: must be 2 seconds or more, or 0 for never"
                )
        if self.max_body_size > MAX_BODY_SIZE:
            wrong.append(f"--max-body-size {self.max_body_size}: must be {MAX_BODY_SIZE} or less")
        return wrong


@dataclass(frozen=True)
class ServerConfig(HttpSettings, NodeSettings, EngineConfig):
    """The engine's settings, those of the HTTP side, and how nodes find each other."""

    def problems(self) -> list[str]:
        wrong = super().problems()
        if self.simulate_acc_len and self.speculative_adaptive:
            wrong.append(
                f"--simulate-acc-len {self.simulate_acc_len:g}: smaller trees than the one that is "
                "set would not accept that many; add --no-speculative-adaptive"
            )
        return wrong


def own_engine_part(config: ServerConfig) -> EngineConfig:
    """The same for the engine that this server starts: ``tokenizer_path`` is empty if the server
    loads no tokenizer, since no client can ask for a grammar then."""
    engine = engine_part(config)
    return dataclasses.replace(engine, tokenizer_path="") if config.skip_tokenizer_init else engine

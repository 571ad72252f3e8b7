"""Replicas of the server on a Ray cluster:

    python -m mamba_eagle.cluster.ray_serve --num-replicas 4 -- --model-path /models/nemotron

Ray Serve places the replicas and their GPUs, watches and restarts them, and scales them if asked.
Each replica is this project's server as a child process. An ingress takes HTTP, and passes each
request to the replica whose cache has most of its prompt, as KV events say, or to the one that its
beginning went to before, as Ray's own router remembers; bytes go through as they are.

    client ─HTTP─▶ Ray's proxy ─▶ Ingress ─▶ Replica ─HTTP─▶ server process ─▶ scheduler, runner

``build_app`` is for ``serve run`` and for configuration files of Ray Serve.
"""

import argparse
import asyncio
import importlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from mamba_eagle.cluster import replica
from mamba_eagle.cluster.prompts import prompt_of
from mamba_eagle.cluster.scores import IMBALANCE
from mamba_eagle.config import from_arguments

log = logging.getLogger("mamba_eagle.cluster")
READY_SECONDS = 900.0  # loading a large model takes minutes
# Ray's only import of it that needs neither vLLM nor SGLang.
PREFIX_ROUTER = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router"
    ":PrefixCacheAffinityRouter"
)
EVENT_ROUTER = "mamba_eagle.cluster.event_router:EventRouter"
ROUTERS = ("auto", "events", "prefix", "load")
OF_PROXY = ("date", "server", "x-request-id")  # Ray's adds its own; the last is what it passes on
# Nothing here blocks an event loop, so requests need not change threads in each process. Ray's
# processes inherit these where the command starts them; a runtime_env would not reach all of them.
SHORT_HOPS = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
}


@dataclass(frozen=True)
class ClusterConfig:
    """What ``build_app`` makes."""

    server_flags: tuple[str, ...] = ()
    num_replicas: int = 1
    max_replicas: int = 0  # 0: as many as num_replicas, always
    gpus_per_replica: float | None = None  # None: 1 where the cluster has GPUs
    cpus_per_replica: float = 1.0
    max_ongoing_requests: int = 256  # per replica; others wait in the ingress
    router: str = "auto"  # one of ROUTERS, or another of Ray's as module:Class


# ── what runs on the cluster ─────────────────────────────────────────────────────────────────


class Replica:
    """A server. Ray calls ``check_health``, and starts another replica when it fails."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, flags: Sequence[str], with_events: bool
    ) -> None:
        self.published: replica.EventSource | None = None
        if not with_events:
            self.server = replica.ServerChild(flags)
        else:
            node = ray.util.get_node_ip_address()
            endpoint, replay_endpoint = (f"tcp://{node}:{replica.free_port()}" for _ in range(2))
            config = {"endpoint": endpoint, "replay_endpoint": replay_endpoint}
            self.server = replica.ServerChild(
                [*flags, "--kv-events-config", json.dumps(config)], node
            )
            self.published = replica.EventSource(endpoint, replay_endpoint, self.server.url)
        await self.server.wait_until_ready(READY_SECONDS)

    async def check_health(self) -> None:
        await self.server.check_health()

    def record_routing_stats(self) -> dict[str, Any]:
        """Ray hands it to the router."""
        return self.published._asdict() if self.published is not None else {}

    async def forward(self, request: replica.Forwarded) -> AsyncIterator[replica.Head | bytes]:
        async for part in replica.forward(self.server.client, request):
            yield part

    def __del__(self) -> None:  # Ray's way to say that the replica is to end
        if hasattr(self, "server"):
            self.server.stop()


class Ingress:
    """HTTP in, HTTP out."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self.replicas = replicas.options(method_name="forward", stream=True)

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        query = f"?{request.url.query}" if request.url.query else ""
        headers = replica.end_to_end(request.headers.items())
        forwarded = replica.Forwarded(
            prompt_of(body) or request.url.path,  # the router cannot compare nothing
            request.method,
            request.url.path + query,
            headers,
            body,
        )
        parts = self.replicas.remote(forwarded)
        try:
            head = await anext(parts)
        except asyncio.CancelledError:  # the client has left; the replica has not heard of that
            parts.cancel()
            raise
        except Exception:
            log.exception("a request was lost with its replica")
            return _lost()
        reply = StreamingResponse(_body(parts), head.status)
        kept = ((name, value) for name, value in head.headers if name not in OF_PROXY)
        reply.raw_headers = [
            (name.encode(replica.CHARSET), value.encode(replica.CHARSET)) for name, value in kept
        ]
        return reply


async def _body(parts: Any) -> AsyncIterator[bytes]:
    try:
        async for piece in parts:
            yield piece
    finally:
        parts.cancel()  # the client has left, or nothing is left to cancel


def _lost() -> Response:
    message = "the replica that served this request was lost; send it again"
    error = {"message": message, "type": "service_unavailable_error", "param": None, "code": 503}
    return JSONResponse({"error": error}, 503, headers={"Retry-After": "1"})


# ── the application ──────────────────────────────────────────────────────────────────────────


def build_app(config: ClusterConfig | dict[str, Any]) -> serve.Application:
    """config: a ClusterConfig, or its fields (from a configuration file of Ray Serve)."""
    if isinstance(config, dict):
        flags = tuple(config.get("server_flags", ()))
        config = ClusterConfig(**{**config, "server_flags": flags})
    router = _router(config)
    with_events = router is not None and router.request_router_class == EVENT_ROUTER
    options: dict[str, Any] = {
        "max_ongoing_requests": config.max_ongoing_requests,
        "health_check_period_s": 5,
        "graceful_shutdown_timeout_s": 60,
        "ray_actor_options": {"num_cpus": config.cpus_per_replica, "num_gpus": _gpus(config)},
    }
    if config.max_replicas > config.num_replicas:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=config.num_replicas, max_replicas=config.max_replicas
        )
    else:
        options["num_replicas"] = config.num_replicas
    if router is not None:
        options["request_router_config"] = router
    replicas = serve.deployment(**options)(Replica).bind(config.server_flags, with_events)
    quiet = {"env_vars": {"DYN_LOG": "error"}}  # it would warn of a new subscriber's first gap
    ingress = serve.deployment(
        num_replicas=1,
        max_ongoing_requests=4096,
        ray_actor_options={"num_cpus": 0.2, "runtime_env": quiet if with_events else {}},
    )(Ingress)
    return ingress.bind(replicas)


def _gpus(config: ClusterConfig) -> float:
    if config.gpus_per_replica is not None:
        return config.gpus_per_replica
    return 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0


def _router(config: ClusterConfig) -> RequestRouterConfig | None:
    """None: Ray's own, by load.

    Raises: ValueError if it is to be the one by events, and that lacks a package.
    """
    if config.router == "load":
        return None
    if config.router in ("auto", "events") and _can_import(EVENT_ROUTER):
        return RequestRouterConfig(request_router_class=EVENT_ROUTER)
    if config.router == "events":
        raise ValueError("router = events needs a package: pip install 'mamba-eagle[events]'")
    if config.router not in ROUTERS:
        return RequestRouterConfig(request_router_class=config.router)
    if not _can_import(PREFIX_ROUTER):
        log.warning(
            "requests go to the least loaded replica, not to the one that knows their prompt: "
            "Ray's prefix router cannot be imported; pip install 'mamba-eagle[ray]'"
        )
        return None
    return RequestRouterConfig(
        request_router_class=PREFIX_ROUTER,
        request_router_kwargs={"imbalanced_threshold": IMBALANCE, "do_eviction": True},
    )


def _can_import(router: str) -> bool:
    try:
        importlib.import_module(router.partition(":")[0])
    except ImportError:
        return False
    return True


# ── the command ──────────────────────────────────────────────────────────────────────────────


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until it is stopped."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    given = _parser().parse_args(arguments[:split])
    logging.basicConfig(level="INFO")
    for name, value in SHORT_HOPS.items():
        os.environ.setdefault(name, value)
    ray.init(address=given.address or None, include_dashboard=False, log_to_driver=True)
    config: ClusterConfig = from_arguments(ClusterConfig, given)
    config = replace(config, server_flags=tuple(arguments[split + 1 :]))
    serve.start(http_options={"host": given.host, "port": given.port})
    try:
        serve.run(build_app(config), name="mamba-eagle")
        print(f"Cluster is ready at http://{given.host}:{given.port}", flush=True)
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        stop.wait()
    finally:
        serve.shutdown()
        ray.shutdown()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] -- [server flags]",
        description="Replicas on Ray Serve.",
        argument_default=argparse.SUPPRESS,  # ClusterConfig has the defaults
    )
    add = parser.add_argument
    add("--num-replicas", type=int, metavar="N")
    add("--max-replicas", type=int, metavar="N", help="scale up to this many under load")
    add("--gpus-per-replica", type=float, metavar="F", help="default: 1 where there are GPUs")
    add("--cpus-per-replica", type=float, metavar="F")
    add(
        "--router",
        metavar="|".join(ROUTERS),
        help="events: to the replica whose cache has most of the prompt, unless it has much more "
        "to do than others (mamba-eagle[events]); prefix: to the one that has seen the prompt's "
        "beginning; load: to the less loaded of two; auto (default): events where installed, or "
        "prefix; or module:Class, a router for Ray Serve",
    )
    add("--address", default="", help="of a running Ray cluster (default: one on this machine)")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000)
    return parser


if __name__ == "__main__":
    sys.exit(main())

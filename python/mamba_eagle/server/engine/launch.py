"""Starts scheduler and runner, watches them while they serve, and ends them, on this machine and,
through Ray, on other nodes (ray_nodes.py).

The first ``Ending`` to occur, be it a finished drain, a dead or frozen process or a port in use,
determines the exit code and the last line.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import zmq

from mamba_eagle.config import EngineConfig, ServerConfig, engine_part, own_engine_part
from mamba_eagle.core import Failure
from mamba_eagle.message import BEAT_SECONDS, ToWatchdog
from mamba_eagle.message.channel import Receiver
from mamba_eagle.message.lifetime import role_name
from mamba_eagle.metrics import Recorder
from mamba_eagle.metrics.request_log import RequestLog
from mamba_eagle.server.bodies.grammar_trials import Judge, ProcessJudge
from mamba_eagle.server.engine import children
from mamba_eagle.server.engine.nodes import Fault, Nodes, fault
from mamba_eagle.server.lifetime import Lifetime
from mamba_eagle.server.state import ServerState
from mamba_eagle.tokenizer.manager import TokenizerManager
from mamba_eagle.tokenizer.text import TextTokenizer

STACKS_SECONDS = 1.0  # for one process to write its stacks
# A thread that wants the interpreter waits this long before it is handed over. The event loop
# wants it again after each system call, so at Python's 5 ms one step of 16 streams would
# take 100 ms while another thread computes.
SWITCH_SECONDS = 0.0002
SHUTTING_DOWN = "the server is shutting down"

log = logging.getLogger("mamba_eagle.server")
T = TypeVar("T")


class Ending(NamedTuple):
    """Why the server ends; code 0 when it was asked to."""

    code: int
    message: str


def share_interpreter() -> None:
    """Prepares this process for threads beside the event loop; call it when all is loaded."""
    sys.setswitchinterval(SWITCH_SECONDS)
    # One body must not take the model's cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Like asyncio.to_thread, but the end of the loop does not wait for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            settle = partial(future.set_result, function())
        except Exception as error:
            settle = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=work, daemon=True).start()
    return future


class Launch(ABC):
    """Starts the engine, serves with it, and ends it. Subclasses say what serving is."""

    judge_kind: type[Judge] = ProcessJudge
    judge: Judge | None = None  # when it serves

    def __init__(
        self, config: ServerConfig, socket_dir: str, given: EngineConfig | None = None
    ) -> None:
        """given: the settings before they were resolved, for other nodes."""
        self.config, self.given = config, given or config
        self.socket_dir = socket_dir
        self.children: list[children.Child] = []
        self.lifetime = Lifetime()

    async def run(self) -> Ending:
        self.ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        context = zmq.Context(io_threads=1)
        model = self.config.served_model_name or self.config.model_path
        tracer: Any = None
        if endpoint := self.config.otlp_traces_endpoint:
            # Its packages are an extra.
            tracing = importlib.import_module("mamba_eagle.metrics.tracing")
            tracer = tracing.Tracer(endpoint, model)
        requests = RequestLog(self.config.log_prompts) if self.config.log_requests else None
        recorder = Recorder(model, requests, self.config.metrics_prefixes, tracer)
        self.manager = TokenizerManager(self.config, context, self.socket_dir, recorder)
        self.heartbeats: Receiver[ToWatchdog] = Receiver(context, self.socket_dir, "to_watchdog")
        self.nodes = self._make_nodes()
        try:
            await self.nodes.start()
            if not self.ending.done():
                self.start_engine()
            if await self._until_ready():
                share_interpreter()
                own = (self.config, self.manager, recorder, self.socket_dir)
                state = ServerState(*own, lifetime=self.lifetime, judge_kind=self.judge_kind)
                self.judge = state.judge
                if self.manager.tokenizer is not None:  # grammars need one
                    self.judge.start()
                await self.serve(state)
            return await self.ending
        finally:
            if self.judge is not None:
                self.judge.close()
            self.manager.fail(SHUTTING_DOWN, Failure.UNAVAILABLE)
            await asyncio.to_thread(self.end_engine)
            await self.nodes.close()
            self.manager.close()
            self.heartbeats.close()
            context.destroy(linger=0)
            if tracer is not None:
                await asyncio.to_thread(tracer.close)

    @abstractmethod
    async def serve(self, state: ServerState) -> None:
        """Serves until there is an Ending."""

    def say(self, line: str) -> None:
        """Log a line for the operator."""
        log.info(line)

    def end(self, ending: Ending) -> None:
        """The first one counts."""
        if not self.ending.done():
            self.ending.set_result(ending)
            self.nodes.stop()

    def _make_nodes(self) -> Nodes:
        if self.config.nnodes == 1:
            return Nodes(self.fail)
        # Ray is an extra.
        ray_nodes = importlib.import_module("mamba_eagle.server.engine.ray_nodes")
        return ray_nodes.RayNodes(self.config, engine_part(self.given), self.socket_dir, self.fail)

    # ── start ────────────────────────────────────────────────────────────────────────────────

    def start_engine(self) -> None:
        try:
            children.write_settings(self.socket_dir, own_engine_part(self.config))
        except OSError as error:
            where = f"in {self.socket_dir}: {error.strerror}"
            self.end(Ending(1, f"cannot write {where}; make room, or set TMPDIR to another folder"))
            return
        self.say(f"server process: pid {os.getpid()}")
        ranks = range(self.config.ranks_per_node)
        for kind, rank in (("scheduler", 0), *(("runner", rank) for rank in ranks)):
            try:
                child = children.engine_child(kind, rank, self.socket_dir, self._child_ended)
            except OSError as error:
                role = role_name(kind, rank)
                self.end(Ending(1, f"cannot start the {role} process: {error.strerror}"))
                return
            self.children.append(child)
            self.say(f"{child.role} process: pid {child.pid}")

    def end_engine(self) -> None:
        """Returns when it has ended; called in a thread."""
        children.end_children(self.children)

    def _child_ended(self, child: children.Child) -> None:
        """An Ending, unless there was one before: only the launcher ends a child."""
        # If both are dead, the one that was killed has taken the other along: name that one.
        dead = [one for one in self.children if one.process.poll() is not None]
        dead.sort(key=lambda one: (one.process.returncode >= 0, one is not child))
        first = dead[0] if dead else child
        if not self.ending.done():
            self.nodes.judge(fault(self.account_of(first), first.process.returncode))

    def account_of(self, child: children.Child) -> str:
        """How a child ended."""
        return child.how_it_ended()

    def fail(self, reason: Fault) -> None:
        if self.lifetime.failure is not None:
            return  # the watchdog ends it: one that crashes as it writes stacks is not the reason
        if not self.ending.done():
            self.manager.fail(reason.text)
        self.end(Ending(reason.code, reason.text))

    async def _until_ready(self) -> bool:
        """Loads the tokenizer while the engine loads the model. False if there was an Ending."""
        if not self.config.skip_tokenizer_init:
            load = _in_thread(self._load_tokenizer)
            if await self._ended_before(load):
                return False
            if (error := load.exception()) is not None:
                message = (
                    f"--tokenizer-path {self.config.tokenizer_path}: no tokenizer can be loaded "
                    f"({error}); give another folder or add --skip-tokenizer-init"
                )
                self.end(Ending(2, message))
                return False
            self.manager.tokenizer = load.result()
        return not await self._ended_before(self.manager.ready)

    def _load_tokenizer(self) -> TextTokenizer:
        """Raises: OSError, ValueError"""
        tokenizer = TextTokenizer.load(self.config.tokenizer_path)
        tokenizer.json()  # grammars take it from there
        return tokenizer

    async def _ended_before(self, awaited: asyncio.Future[Any]) -> bool:
        futures: set[asyncio.Future[Any]] = {awaited, self.ending}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        return self.ending.done()

    # ── watch ────────────────────────────────────────────────────────────────────────────────

    async def watch(self) -> None:
        """Ends the server when scheduler or runner have stopped working."""
        config = self.config
        watchdog = children.Watchdog(
            config.watchdog_timeout, config.num_ranks, config.ranks_per_node
        )
        last = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            while (beat := self.heartbeats.receive(timeout_ms=0)) is not None:
                watchdog.heard(beat)
            for beat in self.nodes.take_beats():
                watchdog.heard(beat)
            now = time.monotonic()
            # For most of a longer gap this process was suspended, and perhaps the others with it.
            problem = watchdog.tick(min(now - last, 2 * BEAT_SECONDS))
            last = now
            self.lifetime.silent = watchdog.silent(config.ready_timeout)
            if problem is not None:
                await self._give_up(problem)
                return

    async def _give_up(self, problem: str) -> None:
        """Fails probes and requests, writes where the processes hang, and ends the server."""
        self.lifetime.failure = problem
        log.error("%s: the server ends", problem)
        self.manager.fail(problem, Failure.INTERNAL)
        self.nodes.write_stacks()
        for child in self.children:
            log.error("stacks of the %s process (pid %d):", child.role, child.pid)
            child.dump_stacks()
            await asyncio.sleep(STACKS_SECONDS)
        self.end(Ending(1, problem))

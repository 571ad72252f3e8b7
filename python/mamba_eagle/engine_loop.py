"""The thread of an ``Engine``: an event loop that starts scheduler and runner, serves the calls of
other threads and loops, and ends with the engine, with Python or with what fails."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any, TypeVar

from starlette.types import ASGIApp

from mamba_eagle.config import ServerConfig, own_engine_part
from mamba_eagle.in_process import EngineThreads
from mamba_eagle.message import BEAT_SECONDS
from mamba_eagle.message.channel import new_socket_dir, remove_socket_dir
from mamba_eagle.server.app import make_app
from mamba_eagle.server.bodies.grammar_trials import Judge
from mamba_eagle.server.engine.launch import Ending, Launch
from mamba_eagle.server.engine.nodes import fault
from mamba_eagle.server.state import ServerState

T = TypeVar("T")
JOIN_SECONDS = 10.0  # for the processes to end, which takes 3 at most


class EngineError(RuntimeError):
    """A request was refused or failed. ``status``: what HTTP would say; ``param``: the field."""

    def __init__(self, message: str, status: int, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class EngineLoop:
    """An engine on an event loop, in a thread."""

    def __init__(self, config: ServerConfig, kind: type[EngineLaunch]) -> None:
        """Returns when the model is ready. config: resolved."""
        self.config, self._last_words = config, ""
        self._kind = kind
        self._begun: Future[EngineLaunch] = Future()
        self._ready: Future[EngineLaunch] = Future()
        self._under_way: dict[Future[Any], Coroutine[Any, Any, Any]] = {}
        self._lock = threading.Lock()  # no request comes between the loop's end and the last look
        # Not a daemon: the kernel ends the processes with the thread that started them.
        self._thread = threading.Thread(target=self._run, name="mamba-eagle engine")
        # Closes it before Python waits for the thread, which would not end. Weakly: what is
        # registered stays, and would keep the model of a closed engine in memory.
        threading._register_atexit(_close, weakref.ref(self))  # type: ignore[attr-defined]
        self._thread.start()
        try:
            self._launch = self._ready.result()
        except BaseException:  # also Ctrl-C
            self.close()
            raise

    def close(self) -> None:
        """Ends the processes; requests that are under way fail. May be called again."""
        if self._thread.is_alive():
            self._begun.add_done_callback(lambda begun: begun.result().stop())
            self._thread.join(JOIN_SECONDS)

    @property
    def _app(self) -> ASGIApp:
        return self._launch.app

    def _run(self) -> None:
        try:
            self._serve()
        finally:  # what came after the loop's last turn would never be answered
            with self._lock:
                left = list(self._under_way.items())
            for future, work in left:
                work.close()
                with contextlib.suppress(InvalidStateError):
                    future.set_exception(self._closed())

    def _serve(self) -> None:
        try:
            socket_dir = new_socket_dir()
            try:
                launch = self._kind(self.config, socket_dir, self._begun, self._ready)
                ending = asyncio.run(launch.run())
            finally:
                remove_socket_dir(socket_dir)
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)
            return
        self._last_words = ending.message
        if not self._ready.done():
            self._ready.set_exception(EngineError(ending.message, 500))

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if not (self._thread.is_alive() or self._launch.loop.is_closed()):
            work.close()
            raise EngineError("the engine stayed in the process that forked this one", 503)
        try:
            with self._lock:
                future = asyncio.run_coroutine_threadsafe(work, self._launch.loop)
                self._under_way[future] = work
        except RuntimeError:  # the loop is closed
            work.close()
            self._thread.join(JOIN_SECONDS)
            raise self._closed() from None
        future.add_done_callback(lambda future: self._under_way.pop(future, None))
        return future

    def _closed(self) -> EngineError:
        return EngineError(self._last_words or "the engine is closed", 503)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._start(work)
        try:
            return future.result()
        except CancelledError:  # the engine has ended meanwhile, and knows why in a moment
            self._thread.join(JOIN_SECONDS)
            raise self._closed() from None
        except BaseException:  # Ctrl-C
            future.cancel()
            raise

    async def _bridge(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._start(work))


class EngineLaunch(Launch):
    """Serves the holders of the application."""

    def __init__(
        self,
        config: ServerConfig,
        socket_dir: str,
        begun: Future[EngineLaunch],
        ready: Future[EngineLaunch],
    ) -> None:
        """begun: done when ``stop`` may be called."""
        super().__init__(config, socket_dir)
        self.begun, self.ready = begun, ready
        self.app: ASGIApp
        self.loop: asyncio.AbstractEventLoop

    async def run(self) -> Ending:
        self.loop = asyncio.get_running_loop()
        self.loop.call_soon(self.begun.set_result, self)  # when there is an ending to set
        return await super().run()

    def stop(self) -> None:
        """Called in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.end, Ending(0, ""))

    async def serve(self, state: ServerState) -> None:
        self.app = make_app(state)
        watching = self.loop.create_task(self.watch())
        self.ready.set_result(self)
        await self.ending
        watching.cancel()


class ThreadLaunch(EngineLaunch):
    """With scheduler and runner in threads of this process."""

    judge_kind = Judge
    engine: EngineThreads | None = None

    def start_engine(self) -> None:
        loop = asyncio.get_running_loop()

        def failed(error: Exception) -> None:
            reason = fault(str(error) or type(error).__name__, code=1)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self.fail, reason)

        self.engine = EngineThreads(own_engine_part(self.config), self.socket_dir, failed)

    def end_engine(self) -> None:
        if self.engine is not None:
            self.engine.end()

    async def watch(self) -> None:
        """Takes the heartbeats, and no more: a thread cannot be ended."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            while self.heartbeats.receive(timeout_ms=0) is not None:
                pass


def _close(engine: weakref.ref[EngineLoop]) -> None:
    if (alive := engine()) is not None:
        alive.close()

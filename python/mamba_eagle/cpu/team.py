"""A team of threads for the kernels of a step: programs of spans that run without Python between.

A *program* is a list of calls of kernels (span_kernels.py), one after the other; the units of a
call are shared out to the team. The thread that runs the program, the leader, publishes a call by
one word: how many units there are, how many have been taken, how many to take at a time. Everyone
takes units until none is left, and the leader goes on when all have been computed. So no one waits
for a worker that is asleep, or whose core does something else: the others take its share. Which
thread computes a unit changes no bit of it.

Workers look for the next call for a while and then sleep (on Linux, by futex), until the leader
wakes them. Within a program they are awake, and a call costs less than a microsecond, where a
parallel loop of OpenMP whose workers sleep costs 10 to 50 µs. A step is mostly one program; between
steps they sleep and leave their cores to others.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numba.core import types

from mamba_eagle.cpu.abi import CallRow, Job, reader
from mamba_eagle.cpu.memory import (
    add,
    call_function,
    exchange,
    futex,
    load,
    pause,
    pointer_to,
    swap,
)
from mamba_eagle.machine_code import numba

# Places in the block that a team shares, in words of 8 bytes; each has a cache line of its own.
WORD, DONE, SLEEPERS, EPOCH, STOP, FUNCTION, ARGUMENTS, SYSCALL = range(0, 64, 8)
MAX_LOOKS = SYSCALL + 1  # beside what else never changes
CONTROL_WORDS = 64
# The word: units taken so far, units in all, units to take at a time.
_BITS, _MASK = 24, (1 << 24) - 1
MAX_UNITS = _MASK
# How often a worker looks for work before it sleeps: some 50 µs on a Zen 5, whose pause is short,
# and 100 to 200 on an Intel.
LOOKS = 4000
_WAIT, _WAKE = 128, 129  # FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
SHARES = 4  # that a thread takes of a call, if all are equally fast
EVERYBODY = 1 << 30


# Nanoseconds of work below which a call is not shared out.
MIN_SHARED = 4_000

job_at, CALL_ROW = reader(Job), np.dtype(CallRow)


def _inline(function: Any) -> Any:
    return numba.njit(cache=True)(function)


@_inline
def _take(control):  # noqa: ANN001, ANN202
    """Compute some of the units that no one has taken. Returns whether there were any."""
    word = load(control + WORD * 8)
    first, units = word & _MASK, (word >> _BITS) & _MASK
    if first >= units:
        return False
    last = min(first + (word >> (2 * _BITS)), units)
    if swap(control + WORD * 8, word, word + (last - first)) != 0:
        # The leader cannot go on before these units are computed: the call stays what it is.
        function, arguments = load(control + FUNCTION * 8), load(control + ARGUMENTS * 8)
        call_function(function, arguments, first, last)
        add(control + DONE * 8, last - first)
    return True


@_inline
def _share(control, function, arguments, units, chunk):  # noqa: ANN001, ANN202
    """One call by the whole team."""
    exchange(control + FUNCTION * 8, function)
    exchange(control + ARGUMENTS * 8, arguments)
    exchange(control + DONE * 8, 0)
    exchange(control + WORD * 8, (chunk << (2 * _BITS)) | (units << _BITS))
    if load(control + SLEEPERS * 8) != 0 and exchange(control + SLEEPERS * 8, 0) != 0:
        add(control + EPOCH * 8, 1)
        futex(load(control + SYSCALL * 8), _FUTEX, control + EPOCH * 8, _WAKE, EVERYBODY)
    while _take(control):
        pass
    while load(control + DONE * 8) < units:
        pause()


def _work(control, _first, _last):  # noqa: ANN001, ANN202
    """What a worker does until the team is dissolved."""
    looks = 0
    while load(control + STOP * 8) == 0:
        if _take(control):
            looks = 0
            continue
        looks += 1
        pause()
        if looks > load(control + MAX_LOOKS * 8):
            looks = 0
            epoch = load(control + EPOCH * 8)
            add(control + SLEEPERS * 8, 1)
            word = load(control + WORD * 8)  # a call published before found no sleeper
            idle = (word & _MASK) >= ((word >> _BITS) & _MASK)
            if idle and load(control + STOP * 8) == 0:
                futex(
                    load(control + SYSCALL * 8), _FUTEX, control + EPOCH * 8, _WAIT,
                    epoch & 0xFFFFFFFF,
                )  # fmt: skip


@_inline
def _run(address):  # noqa: ANN001, ANN202
    """Run a program: that of the ``Job`` at an address."""
    job = job_at(address)
    calls = numba.carray(pointer_to(job.calls), job.count, CALL_ROW)
    for i in range(job.count):
        call = calls[i]
        if call.rows_at != 0:
            numba.carray(pointer_to(call.rows_at), 1, np.int64)[0] = job.rows
        units = call.units + call.units_per_row * job.rows
        units += call.units_per_request * job.requests + call.units_per_tree * job.trees
        work = call.work + call.work_per_row * job.rows
        if job.control == 0 or units < 2 or work < job.min_shared:
            call_function(call.function, call.arguments, 0, units)
        else:
            chunk = max(units // (job.threads * SHARES), 1)
            _share(job.control, call.function, call.arguments, units, chunk)


def _lead(jobs, count, stop):  # noqa: ANN001, ANN202
    """Run programs, those of ``count`` ``Job``s; none is begun any more once the word at ``stop``
    is not 0. stop 0: there is no such word."""
    addresses = numba.carray(pointer_to(jobs), count, np.int64)
    for i in range(count):
        _run(addresses[i])
        if stop != 0 and load(stop) != 0:
            break


def compiled(function: Any) -> Any:
    """A function of three int64 as a C function, compiled or from Numba's cache."""
    kind = types.void(types.int64, types.int64, types.int64)
    return numba.cfunc(kind, cache=True)(function)


@cache
def leader() -> Any:
    """``_lead``, compiled at the first call."""
    return compiled(_lead)


class Team:
    """``threads - 1`` workers, which start with the team and end with ``dissolve``."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        room = np.zeros(CONTROL_WORDS + 8, np.int64)
        shift = -room.ctypes.data % 64 // 8
        self.control = room[shift : shift + CONTROL_WORDS]
        self.address = int(self.control.ctypes.data)
        self.control[MAX_LOOKS] = LOOKS
        syscall = ctypes.CDLL(None).syscall
        self.control[SYSCALL] = ctypes.cast(syscall, ctypes.c_void_p).value or 0
        self._syscall = syscall
        work = compiled(_work)
        self._work = work
        self.workers = [
            threading.Thread(
                target=work.ctypes, args=(self.address, 0, 0), name=f"kernels-{i}", daemon=True
            )
            for i in range(1, threads)
        ]
        for worker in self.workers:
            worker.start()
        self._one = CallRow()
        self._job = Job(control=self.address, calls=self._one.address, count=1, threads=threads)
        self._jobs = ctypes.c_int64(self._job.address)

    def share(self, function: int, arguments: int, units: int) -> None:
        """One call; the caller is the only leader."""
        one = self._one
        one.function, one.arguments, one.units = function, arguments, units
        leader().ctypes(ctypes.addressof(self._jobs), 1, 0)

    def dissolve(self) -> None:
        """End the workers; nothing may be running."""
        self.control[STOP] = 1
        self.control[EPOCH] += 1
        self._syscall(
            ctypes.c_long(_FUTEX), ctypes.c_void_p(self.address + EPOCH * 8),
            ctypes.c_long(_WAKE), ctypes.c_long(EVERYBODY), None,
        )  # fmt: skip
        for worker in self.workers:
            worker.join()


def can_sleep() -> bool:
    """Whether workers could sleep here; without that there is no team."""
    return sys.platform == "linux" and _FUTEX != 0


_team: Team | None = None
_leading = threading.Lock()


def gather(threads: int) -> None:
    """From now on ``threads`` threads run programs."""
    global _team
    wanted = threads if can_sleep() else 1
    if (1 if _team is None else _team.threads) == wanted:
        return
    with _leading:
        if _team is not None:
            _team.dissolve()
        _team = Team(wanted) if wanted > 1 else None


def _forget() -> None:
    """A child process has no workers."""
    global _team, _leading
    _team, _leading = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def share(function: int, arguments: int, units: int) -> bool:
    """One call by the team; False if there is none, or another thread leads it."""
    team = _team
    if team is None or units > MAX_UNITS or not _leading.acquire(blocking=False):
        return False
    try:
        team.share(function, arguments, units)
    finally:
        _leading.release()
    return True


def _run_first(count: int, jobs: int, programs: tuple[Program, ...], stop: int = 0) -> None:
    """Run the first ``count`` of the jobs whose addresses lie at ``jobs``; they are of these
    programs. This thread leads the team, which has one leader; where another leads, it works alone.
    """
    team = _team
    leads = team is not None and _leading.acquire(blocking=False)
    for program in programs:
        job = program.job
        if team is not None and leads:
            job.control, job.threads, job.min_shared = team.address, team.threads, MIN_SHARED
        else:
            job.control, job.threads = 0, 1
    try:
        leader().ctypes(jobs, count, stop)
    finally:
        if leads:
            _leading.release()


class Program:
    """Calls of span kernels. Not for two threads at the same time."""

    def __init__(self, calls: Sequence[CallRow]) -> None:
        """Blocks that the calls name must stay."""
        self.calls = (CallRow * len(calls))(*calls)
        self.job = Job(calls=ctypes.addressof(self.calls), count=len(calls), threads=1)
        self._jobs = ctypes.c_int64(self.job.address)
        leader()  # is compiled now, and not at the first run

    def run(self, rows: int, requests: int, trees: int = 0) -> None:
        """rows, requests, trees: in this step."""
        self.prepare(rows, requests, trees)
        _run_first(1, ctypes.addressof(self._jobs), (self,))

    def prepare(self, rows: int, requests: int, trees: int) -> None:
        """What ``run`` is given, for a ``Series``."""
        self.job.rows, self.job.requests, self.job.trees = rows, requests, trees


class Series:
    """Programs one after the other, without Python between them. Not for two threads at the same
    time."""

    def __init__(self, programs: Sequence[Program], stop: int) -> None:
        """stop: the address of a word; none is begun any more once it is not 0."""
        self.programs, self.stop = tuple(dict.fromkeys(programs)), stop
        self._jobs = (ctypes.c_int64 * len(programs))(*[p.job.address for p in programs])

    def run(self, count: int) -> None:
        """The first ``count`` programs, which are prepared."""
        _run_first(count, ctypes.addressof(self._jobs), self.programs, self.stop)

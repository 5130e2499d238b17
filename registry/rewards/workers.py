"""Processes that can be killed: one case in flight each, a deadline outside, a memory limit inside.

A pool starts one process, the *zygote*, which imports what the cases need, once, and forks a worker whenever one is
missing: a killed worker is back in milliseconds. Cases and results are JSON over socket pairs; nothing of the parent is
inherited but those, and where the system permits it the workers have a network namespace of their own, without network.
"""

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any, NamedTuple

START_SECONDS = 120.0


class Done(NamedTuple):
    """What became of a case: ``status`` ok, timeout or crash; the value that its function returned; milliseconds."""

    status: str
    value: Any
    ms: float


class _Worker:
    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid, self.channel = pid, channel
        self.case, self.started, self.received = -1, 0.0, b""


class Pool:
    """Runs ``function`` (``package.module:name``, JSON in and out) on cases, ``workers`` at once.

    Args:
        function: what each case is given to.
        workers: cases in flight.
        timeout: seconds of a case; then its worker is killed.
        memory: GiB of address space that a worker may have.
        fresh: a new worker for each case, because the last one may have changed it.
    """

    isolated: bool | None = None
    """Whether the workers are without network; known after the first run."""

    def __init__(
        self, function: str, workers: int = 2, timeout: float = 10.0, memory: float = 2.0, fresh: bool = False
    ) -> None:
        if workers < 1 or timeout <= 0 or memory <= 0:
            raise ValueError(
                f"workers: {workers}, timeout: {timeout}, memory: {memory}; all must be above 0, workers whole"
            )
        self.function, self.workers, self.timeout = function, workers, timeout
        self.memory, self.fresh = memory, fresh
        self._owner, self._idle = 0, list[_Worker]()
        self._zygote: subprocess.Popen[bytes] | None = None
        self._command: socket.socket | None = None

    def run(self, cases: Sequence[Any]) -> list[Done]:
        """One result for each case, in order."""
        results: list[Done | None] = [None] * len(cases)
        if not cases:
            return []
        self._start()
        waiting, busy = list(range(len(cases)))[::-1], list[_Worker]()
        while waiting or busy:
            while waiting and len(busy) < self.workers:
                worker = self._idle.pop() if self._idle else self._fork()
                worker.case, worker.started, worker.received = waiting.pop(), time.monotonic(), b""
                with contextlib.suppress(OSError):  # a dead worker shows when its channel is read
                    worker.channel.sendall(json.dumps(cases[worker.case]).encode() + b"\n")
                busy.append(worker)
            left = min(worker.started for worker in busy) + self.timeout - time.monotonic()
            ready = wait([worker.channel for worker in busy], max(0.0, left))
            for worker in list(busy):
                done = self._progress(worker, worker.channel in ready)
                if done is not None:
                    busy.remove(worker)
                    results[worker.case] = done
                    if done.status == "ok" and not self.fresh:
                        self._idle.append(worker)
                    else:
                        self._kill(worker)
        return [result for result in results if result is not None]

    def _progress(self, worker: _Worker, ready: bool) -> Done | None:
        ms = 1e3 * (time.monotonic() - worker.started)
        late = ms > 1e3 * self.timeout
        if ready or (late and wait([worker.channel], 0)):  # done while this process was busy
            try:
                data = worker.channel.recv(1 << 16)
            except OSError:
                data = b""
            worker.received += data
            if not data or len(worker.received) > 1 << 20:
                return Done("crash", None, ms)
            if worker.received.endswith(b"\n"):
                try:
                    status, value = json.loads(worker.received)
                except ValueError:
                    return Done("crash", None, ms)
                return Done("ok" if status == "ok" else "crash", value, ms)
        return Done("timeout", None, ms) if late else None

    # ---- processes ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._zygote is not None and self._owner == os.getpid() and self._zygote.poll() is None:
            return
        if self._owner == os.getpid():
            self.close()
        self._idle, self._owner = [], os.getpid()  # after a fork the workers belong to the parent
        self._command, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._command.settimeout(START_SECONDS)
        keep = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "HOME")
        environment = {name: os.environ[name] for name in keep if name in os.environ}
        # gmpy2 ignores alarms, and can abort the process.
        environment |= {"SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        with theirs:
            arguments = [str(theirs.fileno()), str(self._owner), self.function, str(self.memory)]
            self._zygote = subprocess.Popen(
                [sys.executable, "-m", "registry.rewards.zygote", *arguments],
                env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )  # fmt: skip
        atexit.register(self.close)
        hello = self._command.recv(1)
        self.isolated = hello == b"!"
        if not hello:
            _, error = self._zygote.communicate(timeout=START_SECONDS)
            reason = (error.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
            raise RuntimeError(f"the workers of {self.function} do not start: {reason}")

    def _fork(self) -> _Worker:
        assert self._command is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            socket.send_fds(self._command, [b"+"], [theirs.fileno()])
        return _Worker(int.from_bytes(self._receive(4), "big"), ours)

    def _kill(self, worker: _Worker) -> None:
        assert self._command is not None
        worker.channel.close()
        self._command.sendall(b"-" + worker.pid.to_bytes(4, "big"))
        self._receive(1)

    def _receive(self, count: int) -> bytes:
        assert self._command is not None
        data = b""
        while len(data) < count:
            if not (part := self._command.recv(count - len(data))):
                raise RuntimeError(f"the process that forks the workers of {self.function} has died")
            data += part
        return data

    def close(self) -> None:
        """Ends all processes. The next ``run`` starts new ones."""
        if self._owner != os.getpid() or self._zygote is None or self._command is None:
            return
        self._command.close()  # the zygote kills its workers and goes
        for worker in self._idle:
            worker.channel.close()
        try:
            self._zygote.wait(5)
        except subprocess.TimeoutExpired:
            self._zygote.kill()
            self._zygote.wait()
        if self._zygote.stderr:
            self._zygote.stderr.close()
        self._zygote, self._command, self._idle = None, None, []
        atexit.unregister(self.close)


_POOLS: dict[tuple[Any, ...], Pool] = {}


def shared_pool(function: str, workers: int, timeout: float, memory: float, fresh: bool = False) -> Pool:
    """The one pool of these settings in this process."""
    key = (function, workers, timeout, memory, fresh)
    if key not in _POOLS:
        _POOLS[key] = Pool(*key)
    return _POOLS[key]

"""The process that forks workers: ``python -m registry.rewards.zygote FD PARENT MODULE:FUNCTION GIB``."""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

_NEWNET, _NEWUSER = 0x40000000, 0x10000000
_PDEATHSIG = 1


def no_network() -> bool:
    """Enter a network namespace without network; False where the system does not permit it."""
    libc = ctypes.CDLL(None, use_errno=True)
    return any(libc.unshare(flags) == 0 for flags in (_NEWNET, _NEWUSER | _NEWNET))


def _end_with(zygote: int) -> None:
    """Have this worker killed when the zygote is: a case that hangs hears of nothing else."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)  # that of the thread that forked: the zygote's main one
    if os.getppid() != zygote:  # it was killed before
        os._exit(0)


def _serve(channel: socket.socket, function: Callable[[Any], Any], memory: int) -> None:
    os.setsid()  # so that what a case starts can be killed with it
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reader = channel.makefile("rb")
    for line in reader:
        try:
            answer = ["ok", function(json.loads(line))]
        except (Exception, MemoryError) as error:
            answer = ["error", type(error).__name__]
        channel.sendall(json.dumps(answer).encode() + b"\n")


def _reap(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def main() -> None:
    command, parent, zygote = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), os.getpid()
    module, _, name = sys.argv[3].partition(":")
    function = getattr(importlib.import_module(module), name)
    getattr(sys.modules[module], "warm_up", lambda: None)()
    memory = int(float(sys.argv[4]) * 2**30)
    command.sendall(b"!" if no_network() else b"~")
    children: set[int] = set()
    # The command also stays open while a process lives that the parent forked. (PDEATHSIG would not do here: it comes
    # with the end of the thread that started this process.)
    while os.getppid() == parent:
        if not select.select([command], [], [], 1.0)[0]:
            continue
        message, fds, _, _ = socket.recv_fds(command, 1, 1)
        if not message:
            break
        if message == b"+":
            pid = os.fork()
            if pid == 0:
                command.close()
                with contextlib.suppress(BaseException):
                    _end_with(zygote)
                    _serve(socket.socket(fileno=fds[0]), function, memory)
                os._exit(0)
            os.close(fds[0])
            children.add(pid)
            command.sendall(pid.to_bytes(4, "big"))
        else:
            pid = int.from_bytes(command.recv(4, socket.MSG_WAITALL), "big")
            if pid in children:
                children.discard(pid)
                _reap(pid)
            command.sendall(b".")
    for pid in children:
        _reap(pid)


if __name__ == "__main__":
    main()

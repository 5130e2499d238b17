"""Running a program against tests in a process that is thrown away: what a worker of the reward ``code`` does.

The limits are those of a fence, not of a wall: see docs/rewards.md.
"""

import contextlib
import io
import os
import resource
import sys
from typing import Any

MAX_FILES = 64
_DENIED = (
    "socket.", "subprocess.", "ctypes.", "shutil.", "ftplib.", "smtplib.", "pty.", "os.fork", "os.forkpty", "os.exec",
    "os.posix_spawn", "os.spawn", "os.system", "os.kill", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod",
    "os.chown", "os.link", "os.symlink", "os.truncate", "os.utime", "os.startfile", "signal.pthread_kill", "mmap.",
    "fcntl.", "sqlite3.", "webbrowser.", "urllib.",
)  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _guard(event: str, arguments: tuple[Any, ...]) -> None:
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES
    if writes or event.startswith(_DENIED):
        raise PermissionError(f"{event} is not permitted in tests of generated code")


def _confine() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # root is not bound by it; the audit hook is for everybody
    os.chdir("/")
    os.environ.clear()
    sys.addaudithook(_guard)  # cannot be taken away again


def _run(program: str, stdin: str = "") -> tuple[dict[str, Any], str]:
    """The names that a program leaves behind, and what it prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    output = io.StringIO()
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()))
    silent = contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO())
    with silent[0], silent[1], contextlib.suppress(SystemExit):
        exec(compile(program, "<program>", "exec"), names)
    return names, output.getvalue()


def _passes(program: str, tests: dict[str, Any]) -> None:
    if "inputs" in tests:
        for stdin, expected in zip(tests["inputs"], tests["outputs"], strict=True):
            _, printed = _run(program, str(stdin))
            wanted = str(expected).strip().split("\n")
            got = printed.strip().split("\n")
            if [line.rstrip() for line in got] != [line.rstrip() for line in wanted]:
                raise AssertionError("another output than expected")
        return
    names, _ = _run(program)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for test in tests["asserts"]:
            exec(compile(test, "<test>", "exec"), names)


def case(arguments: dict[str, Any]) -> str | None:
    """Runs ``program`` on ``tests`` (``asserts``, or ``inputs`` and ``outputs``): None if all pass, else why not."""
    _confine()
    try:
        _passes(arguments["program"], arguments["tests"])
    except BaseException as error:  # a program may raise anything, SystemExit in a test too
        return type(error).__name__
    return None

"""Killable workers: what hangs, crashes or eats memory costs its own case only, and programs stay in their fence."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from registry.rewards import Code, Math, Regex
from registry.rewards.workers import Pool

MISBEHAVE = "tests.test_workers:misbehave"


def misbehave(order: list[Any]) -> Any:
    """What a worker of these tests does."""
    match order:
        case ["hang"]:
            while True:
                pass
        case ["say and hang", fifo]:
            Path(fifo).write_text(str(os.getpid()))
            while True:
                pass
        case ["die"]:
            os._exit(3)
        case ["raise"]:
            raise RuntimeError("no")
        case ["eat"]:
            return len(bytearray(4 << 30))
        case ["garbage"]:
            return object()
        case ["large"]:
            return "x" * (4 << 20)
        case ["fds"]:
            paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
            return [os.readlink(path) for path in paths if os.path.lexists(path)]
        case ["environment"]:
            return dict(os.environ)
        case ["pid"]:
            return os.getpid()
        case ["double", number]:
            return 2 * number
    return None


@pytest.fixture
def pool() -> Any:
    pool = Pool(MISBEHAVE, workers=2, timeout=1.0, memory=1.0)
    yield pool
    pool.close()


def test_results_are_in_order_and_complete(pool: Pool) -> None:
    orders = [
        ["double", 1],
        ["hang"],
        ["double", 2],
        ["die"],
        ["raise"],
        ["eat"],
        ["garbage"],
        ["large"],
        ["double", 3],
    ]
    done = pool.run(orders)
    assert [result.status for result in done] == [
        "ok", "timeout", "ok", "crash", "crash", "crash", "crash", "crash", "ok"
    ]  # fmt: skip
    assert [result.value for result in done if result.status == "ok"] == [2, 4, 6]
    assert done[1].ms >= 1000
    assert [result.value for result in pool.run([["double", i] for i in range(50)])] == list(range(0, 100, 2))
    assert pool.run([]) == []


def test_a_poisoned_batch_loses_only_its_poison(pool: Pool) -> None:
    done = pool.run([["hang"] if i % 10 == 0 else ["double", i] for i in range(40)])
    assert [result.status for result in done] == ["timeout" if i % 10 == 0 else "ok" for i in range(40)]


def test_a_case_that_is_done_in_time_is_no_timeout_for_a_busy_parent(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent finds both workers late; the one that has answered meanwhile counts."""
    from registry.rewards import workers

    pool.run([["double", 1]] * 2)
    start, real = time.monotonic(), workers.wait
    answered: list[bool] = []

    def stalled(channels: Any, timeout: float) -> list[Any]:
        if answered:
            return real(channels, timeout)
        answered.append(bool(real(channels, 5)))  # it is ready, but this process was told nothing
        return []

    monkeypatch.setattr(workers, "wait", stalled)
    monkeypatch.setattr(workers.time, "monotonic", lambda: start + 100 * len(answered))
    [done] = pool.run([["double", 4]])
    assert (answered, done.status, done.value) == ([True], "ok", 8)


def test_a_killed_worker_is_gone(pool: Pool) -> None:
    [before] = pool.run([["pid"]])
    assert Path(f"/proc/{before.value}").exists()
    pool.close()
    assert not Path(f"/proc/{before.value}").exists()
    assert [result.value for result in pool.run([["double", 4]])] == [8]  # and it starts again


HANGS = """
import os, signal, sys
from registry.rewards.workers import Pool
pool = Pool("tests.test_workers:misbehave", workers=1, timeout=1000.0, memory=1.0)
pool.run([["pid"]])
if sys.argv[2] == "forked" and os.fork() == 0:
    signal.pause()  # with a copy of the pool's sockets
pool.run([["say and hang", sys.argv[1]]])
"""


@pytest.mark.parametrize("killed", ["parent", "forked", "zygote", "group"])
def test_what_hangs_ends_when_what_started_it_is_killed(killed: str, tmp_path: Path) -> None:
    """SIGKILL, which leaves no time to tidy up; ``forked``: to the parent of a process that goes on."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    parent = subprocess.Popen([sys.executable, "-c", HANGS, str(fifo), killed], start_new_session=True)
    worker = 0
    try:
        assert select.select([reader], [], [], 120)[0]
        worker = int(os.read(reader, 100))
        [zygote] = [int(n.split()[1]) for n in Path(f"/proc/{worker}/status").read_text().split("\n") if "PPid:" in n]
        ended = os.pidfd_open(worker)
        if killed == "group":
            os.killpg(parent.pid, signal.SIGKILL)
        else:
            os.kill(zygote if killed == "zygote" else parent.pid, signal.SIGKILL)
        assert select.select([ended], [], [], 20)[0]
        os.close(ended)
    finally:
        os.close(reader)
        for kill, pid in ((os.killpg, parent.pid), (os.kill, worker or parent.pid)):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        parent.wait()


def test_workers_are_used_again_unless_fresh(pool: Pool) -> None:
    pids = [result.value for result in pool.run([["pid"]] * 6)]
    assert len(set(pids)) <= 2
    fresh = Pool(MISBEHAVE, workers=2, timeout=5.0, fresh=True)
    pids = [result.value for result in fresh.run([["pid"]] * 6)]
    fresh.close()
    assert len(set(pids)) == 6


def test_workers_inherit_neither_sockets_nor_secrets(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setenv("MY_TOKEN", "secret")
    listener = socket.socket()
    listener.set_inheritable(True)
    try:
        environment, files = pool.run([["environment"], ["fds"]])
    finally:
        listener.close()
    assert "MY_TOKEN" not in environment.value
    assert environment.value["SYMPY_GROUND_TYPES"] == "python"
    assert sum(name.startswith("socket:") for name in files.value) == 1  # its channel


def test_what_does_not_start_is_said() -> None:
    with pytest.raises(RuntimeError, match=r"the workers of no_such_module:f do not start: .*No module named"):
        Pool("no_such_module:f").run([1])
    with pytest.raises(ValueError, match=r"workers: 0, timeout: 1, memory: 1; all must be above 0"):
        Pool("m:f", workers=0, timeout=1, memory=1)


# ---- the rewards on them ---------------------------------------------------------------------------------------------


def test_math_survives_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = Math()
    pool = Pool(MISBEHAVE, workers=2, timeout=1.0, memory=1.0)
    monkeypatch.setattr(pool, "run", lambda cases, run=pool.run: run([["hang"], ["die"]][: len(cases)]))
    reward._pool = pool
    answers = [r"x\cdot x", r"x\cdot x\cdot 1", "x^2", None]
    assert reward(["p"] * 4, ["c"] * 4, answer=["x^2"] * 4, extracted=answers) == [0.0, 0.0, 1.0, 0.0]
    assert [verdict.verdict for verdict in reward.verdicts] == ["timeout", "crash", "correct", "no_answer"]
    pool.close()


def test_math_asks_once_for_what_is_said_many_times() -> None:
    reward, asked = Math(), []
    run = reward._pool.run
    reward._pool = type("Counting", (), {"run": lambda self, cases: asked.extend(cases) or run(cases)})()  # type: ignore[assignment]
    paid = reward(["p"] * 5, ["c"] * 5, answer=["2x"] * 5, extracted=["x+x", "x+x", "x", "x+x", "2x"])
    assert paid == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert asked == [("2x", "x+x", 3.0), ("2x", "x", 3.0)]  # the alarm, at 60 % of 5 s


def test_an_integral_that_never_ends() -> None:
    """The worker hears its alarm, and lives on."""
    reward = Math(workers=1, timeout=1.5)
    paid = reward(["p"] * 2, ["c"] * 2, answer=["1", "2x"], extracted=[r"\int_0^1 \sin(x^x) e^{\cos x} \,dx", "x+x"])
    assert paid == [0.0, 1.0]
    assert [(verdict.verdict, verdict.rule) for verdict in reward.verdicts] == [
        ("timeout", "alarm"),
        ("correct", "value"),
    ]


def test_what_math_verify_adds() -> None:
    golds = ["1", r"\frac{\pi^2}{6}", "1", "2"]
    answers = [
        r"\int_0^1 2x\,dx",
        r"\sum_{k=1}^{\infty} \frac{1}{k^2}",
        r"\lim_{x\to0}\frac{\sin x}{x}",
        r"\int_0^1 2x\,dx",
    ]
    assert Math(timeout=60)(["p"] * 4, ["c"] * 4, answer=golds, extracted=answers) == [1.0, 1.0, 1.0, 0.0]


def test_regex_that_never_ends() -> None:
    reward = Regex("(a+)+b", timeout=0.5)
    assert reward(["p"] * 2, ["a" * 60, "aab"], extracted=[None] * 2) == [0.0, 1.0]
    assert [verdict.verdict for verdict in reward.verdicts] == ["timeout", "correct"]


PROGRAMS = [
    ("def f(x): return x + 1", "correct"),
    ("def f(x): return x", "wrong"),
    ("def f(x): return f(x)", "wrong"),
    ("def f(x:", "wrong"),
    ("raise SystemExit", "wrong"),
    ("def f(x): return x + 1\nimport sys\nsys.exit()", "correct"),
    ("while True: pass", "timeout"),
    ("import time\ntime.sleep(60)", "timeout"),
    ("import os\nos._exit(0)", "crash"),
    ("a = 'a' * 10**10\ndef f(x): return x + 1", "wrong"),
    ("import socket\nsocket.socket()\ndef f(x): return x + 1", "wrong"),
    ("import os\nos.fork()\ndef f(x): return x + 1", "wrong"),
    ("import os\nos.system('true')\ndef f(x): return x + 1", "wrong"),
    ("import subprocess\nsubprocess.run(['true'])\ndef f(x): return x + 1", "wrong"),
    ("import ctypes\nctypes.CDLL(None)\ndef f(x): return x + 1", "wrong"),
    ("import os\nos.kill(1, 0)\ndef f(x): return x + 1", "wrong"),
    ("print('x' * 10**6)\ndef f(x): return x + 1", "correct"),
    ("try:\n    open('PATH', 'w')\nfinally:\n    def f(x): return x + 1", "wrong"),
]


def test_code(tmp_path: Path) -> None:
    reward = Code(timeout=2.0, memory=0.5)
    programs = [program.replace("PATH", str(tmp_path / "file")) for program, _ in PROGRAMS]
    tests = [["assert f(1) == 2", "assert f(2) == 3"]] * len(programs)
    paid = reward(["p"] * len(programs), ["c"] * len(programs), tests=tests, extracted=programs)
    assert [verdict.verdict for verdict in reward.verdicts] == [expected for _, expected in PROGRAMS]
    assert paid == [float(expected == "correct") for _, expected in PROGRAMS]
    assert list(tmp_path.iterdir()) == []


def test_code_with_input_and_output() -> None:
    reward = Code()
    tests = ['{"inputs": ["3\\n", "4\\n"], "outputs": ["6\\n", "8"]}'] * 3
    programs = ["print(2 * int(input()))", "print(6)", "import sys\nprint(int(sys.stdin.read()) * 2, '')"]
    assert reward(["p"] * 3, ["c"] * 3, tests=tests, extracted=programs) == [1.0, 0.0, 1.0]


def test_code_rows_without_tests() -> None:
    rows = [["assert f(1) == 2"], "assert f(1) == 2", None, "", [], {"inputs": ["1"], "outputs": []}]
    assert Code().unverifiable(tests=rows) == [2, 3, 4, 5]
    paid = Code()(["p"] * 6, ["c"] * 6, tests=rows, extracted=["def f(x): return 2", None, "x", "x", "x", "x"])
    assert paid == [1.0, 0.0, None, None, None, None]
    with pytest.raises(ValueError, match=r"code needs the column 'cases', the data has \['answer'\]"):
        Code(tests="cases").unverifiable(answer=["4"])


def test_code_has_no_network() -> None:
    """Whether the system permits a namespace or not, no socket can be made."""
    import socket

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    program = f"import _socket\ns = _socket.socket()\ns.connect(('127.0.0.1', {port}))\ndef f(x): return x + 1"
    reward = Code()
    assert reward(["p"], ["c"], tests=[["assert f(1) == 2"]], extracted=[program]) == [0.0]
    assert reward.verdicts[0].rule == "PermissionError"
    listener.close()

"""``qerl-pl``: LightningCLI over the module, the data module and the registered components."""

import importlib
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence

from registry._meant import meant

HELP = """\
usage: qerl-pl COMMAND [--config FILE] [options]

Teach a 4-bit language model to reason by reinforcement learning (QeRL, arXiv 2510.11696).

commands:
  fit         train; for example: qerl-pl fit --config configs/tiny.yaml
  validate    pass@1 on the validation prompts
  test        pass@1 on the test prompts; --evaluate_base true: beside the base; --adapter FOLDER or none
  compare     two results of test, paired by problem: qerl-pl compare A.json B.json
  bench       speed and memory by model shape, beside other libraries: qerl-pl bench --help
  quantize    a calibrated checkpoint (AWQ, GPTQ) and what it did to the model: qerl-pl quantize --help
  verify      score answers, check the golds of your data: qerl-pl verify --help
  demo        train the embedded model on the CPU, in minutes, and show what it learned

Every setting can be given in YAML or on the command line:
  qerl-pl fit --print_config                     all settings with their defaults, ready to be saved and run
  qerl-pl fit --help                             the same with their meaning
  qerl-pl fit --model.noise.help Cosine          settings of one component, by the name of its class
  qerl-pl fit --config FILE --ckpt_path last     go on where an interrupted run stopped

Set QERL_PL_DEBUG=1 to see tracebacks behind one-line errors."""
LIGHTNING = ("fit", "validate", "test")
COMMANDS = {
    "compare": ("qerl_pl.comparison", "command"),
    "bench": ("qerl_pl.bench.commands", "bench"),
    "quantize": ("qerl_pl.quantize.command", "quantize"),
    "verify": ("qerl_pl.verify", "verify"),
    "demo": ("qerl_pl.demo", "demo"),
}
"""Module and function of each, imported when called."""


def main(args: Sequence[str] | None = None) -> None:
    """Entry point. Help is printed before anything heavy is imported."""
    # OpenMP's threads wait for each other by spinning; beside a busy process that stalls small models for seconds.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    sys.path.insert(0, os.getcwd())  # so that a component in a file beside the config is found by its import path
    if args is not None:
        sys.argv = [sys.argv[0], *args]  # LightningCLI distrusts arguments from anywhere else
    args = sys.argv[1:]
    if not args or args[0] in ("-h", "--help"):
        _run(lambda: print(HELP))
    elif args[0] == "--version":
        from qerl_pl import __version__

        _run(lambda: print(f"qerl-pl {__version__}"))
    else:
        _run(lambda: _command(args[0])(args[1:]))


def _command(name: str) -> Callable[[Sequence[str]], int | None]:
    """The command called ``name``; an option, as ``--config`` before the command, is left to LightningCLI to refuse."""
    if name in COMMANDS:
        module, function = COMMANDS[name]
        return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]
    if name not in LIGHTNING and not name.startswith("-"):
        commands = *LIGHTNING, *COMMANDS
        raise ValueError(f"unknown command {name!r}.{meant(name, commands)} Commands: {', '.join(commands)}")
    return _lightning


def _lightning(args: Sequence[str]) -> None:
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    from qerl_pl.lightning_cli import QeRLCLI

    try:
        QeRLCLI()  # reads sys.argv
    except SIGTERMException:  # a SystemExit, by itself of status 0; but a stopped run is no finished one
        sys.exit(128 + signal.SIGTERM)


def _run(command: Callable[[], int | None]) -> None:
    """Exit with the command's status. Where nobody reads the output any more, as after ``| head``, without a word."""
    status = _status(command)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()  # at the exit it would be too late to answer
    except BrokenPipeError:
        status = status or 128 + signal.SIGPIPE
    if _unread():
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed again at the exit
    if status is not None:
        sys.exit(status)


def _status(command: Callable[[], int | None]) -> int | None:
    """Errors that a user can act on become one line; the rest keep their traceback."""
    try:
        return command()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            raise
        return stop.code
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _unread():  # and not a pipe to a process of ours
            return 128 + signal.SIGPIPE
        ours = isinstance(error, RuntimeError) and "qerl_pl" in _origin(error)
        known = (
            isinstance(error, ValueError | ImportError | OSError) or type(error).__name__ == "MisconfigurationException"
        )
        if os.environ.get("QERL_PL_DEBUG") or not (ours or known):
            raise
        said = str(error)
        if isinstance(error, OSError) and error.strerror and error.filename:
            said = f"{error.strerror}: {error.filename}"  # without its number
        print("qerl-pl: error:", " ".join(said.split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # within fit Lightning takes it: last.ckpt is written, and the exit status is 1
        return 130


def _unread() -> bool:
    """Whether the output goes to a pipe that nobody reads any more."""
    poll = select.poll()
    try:
        poll.register(sys.stdout, 0)  # a pipe without a reader is told unasked
    except (TypeError, OSError, ValueError):  # no file: closed from the beginning, or an object of a caller's
        return False
    return bool(poll.poll(0))


def _origin(error: BaseException) -> str:
    """The file that raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename if trace is not None else ""

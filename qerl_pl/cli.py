"""``qerl-pl``: LightningCLI over the module, the data module and the registered components."""

import os
import sys
from collections.abc import Callable, Sequence

HELP = """\
usage: qerl-pl COMMAND [--config FILE] [options]

Teach a 4-bit language model to reason by reinforcement learning (QeRL, arXiv 2510.11696).

commands:
  fit         train; for example: qerl-pl fit --config configs/tiny.yaml
  validate    pass@1 on the validation prompts
  test        pass@1 on the test prompts; --evaluate_base true: beside the base; --adapter FOLDER or none
  compare     two results of test, paired by problem: qerl-pl compare A.json B.json
  bench       speed and memory by model shape, beside other libraries: qerl-pl bench --help
  verify      score answers, check the golds of your data: qerl-pl verify --help
  demo        train the embedded model on the CPU, in minutes, and show what it learned

Every setting can be given in YAML or on the command line:
  qerl-pl fit --print_config                     all settings with their defaults, ready to be saved and run
  qerl-pl fit --help                             the same with their meaning
  qerl-pl fit --model.noise.help cosine          settings of one component
  qerl-pl fit --config FILE --ckpt_path last     go on where an interrupted run stopped

Set QERL_PL_DEBUG=1 to see tracebacks behind one-line errors."""


def main(args: Sequence[str] | None = None) -> None:
    """Entry point. Help is printed before anything heavy is imported."""
    # OpenMP's threads wait for each other by spinning; beside a busy process that stalls small models for seconds.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    sys.path.insert(0, os.getcwd())  # so that a component in a file beside the config is found by its import path
    if args is not None:
        sys.argv = [sys.argv[0], *args]  # LightningCLI distrusts arguments from anywhere else
    args = sys.argv[1:]
    if not args or args[0] in ("-h", "--help"):
        print(HELP)
    elif args[0] == "--version":
        from qerl_pl import __version__

        print(f"qerl-pl {__version__}")
    elif args[0] == "demo":
        _run(lambda: _demo(args[1:]))
    elif args[0] == "verify":
        _run(lambda: _verify(args[1:]))
    elif args[0] == "bench":
        _run(lambda: _bench(args[1:]))
    elif args[0] == "compare":
        _run(lambda: _compare(args[1:]))
    else:
        _run(_lightning)


def _demo(args: Sequence[str]) -> None:
    from qerl_pl.demo import demo

    demo(args)


def _verify(args: Sequence[str]) -> None:
    from qerl_pl.verify import verify

    sys.exit(verify(args))


def _bench(args: Sequence[str]) -> None:
    from qerl_pl.bench.commands import bench

    bench(args)


def _compare(args: Sequence[str]) -> None:
    from qerl_pl.comparison import command

    command(args)


def _lightning() -> None:
    from qerl_pl.lightning_cli import QeRLCLI

    QeRLCLI()


def _run(command: Callable[[], None]) -> None:
    """Errors that a user can act on become one line; the rest keep their traceback."""
    try:
        command()
    except Exception as error:
        ours = isinstance(error, RuntimeError) and "qerl_pl" in _origin(error)
        known = (
            isinstance(error, ValueError | ImportError | OSError) or type(error).__name__ == "MisconfigurationException"
        )
        if os.environ.get("QERL_PL_DEBUG") or not (ours or known):
            raise
        print("qerl-pl: error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # within fit Lightning takes it: last.ckpt is written, and the exit status is 1
        sys.exit(130)


def _origin(error: BaseException) -> str:
    """The file that raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename if trace is not None else ""

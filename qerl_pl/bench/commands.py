"""The command line of ``qerl-pl bench``; a measurement is imported when it is asked for."""

from collections.abc import Sequence
from importlib import import_module

HELP = """\
usage: qerl-pl bench WHAT [options]

Speed and memory of models by shape: 0.5B, 3B, 7B, 14B, 32B (Qwen2.5) and tiny-test, with random weights.

  rollout     tokens per second of vLLM with an adapter: stock settings, and the project's engine
  train       forward + backward of a micro-batch: the project's policy, and what people use otherwise
  step        whole steps of `fit`, by phase, with peak memory
  sync        adapter and noise into a running engine
  plot        pictures of a folder of results

Several candidates are measured in one call: --model 7B,14B --format nvfp4,bf16. With --output FILE.json rows are
added to a file (a row measured again replaces the old one). Options: qerl-pl bench WHAT --help"""
WHAT = ("rollout", "train", "step", "sync", "plot")


def bench(args: Sequence[str]) -> None:
    """Run one measurement with its options."""
    if not args or args[0] in ("-h", "--help"):
        print(HELP)
        return
    if args[0] not in WHAT:
        raise ValueError(f"bench: there is no {args[0]!r}; choose from {', '.join(WHAT)}")
    from jsonargparse import ArgumentParser

    from qerl_pl.bench.results import check_repeats

    function = getattr(import_module(f"qerl_pl.bench.{args[0]}"), args[0])
    parser = ArgumentParser(prog=f"qerl-pl bench {args[0]}", description=function.__doc__.partition("\n")[0])
    parser.add_function_arguments(function, as_group=False, as_positional=True)
    options = vars(parser.parse_args(list(args[1:])))
    if "repeats" in options:
        check_repeats(options["repeats"])
    function(**options)

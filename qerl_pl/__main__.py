"""``python -m qerl_pl``."""

from qerl_pl.cli import main

main()

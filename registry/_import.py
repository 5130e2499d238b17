"""What an import path in a config or on the command line names."""

import importlib
from typing import Any


def import_path(path: str) -> Any:
    """The function or class ``package.module.name``. ValueError with the bare reason if there is none: who asked knows
    what should be given instead.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:  # the last: a path without a module
        raise ValueError(str(error)) from error

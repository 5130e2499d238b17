"""What an import path in a config or on the command line names."""

import importlib
from typing import Any


class ImportPathError(ValueError):
    """A path that names nothing; the message is the bare reason: who asked knows what should be given instead."""


def import_path(path: str) -> Any:
    """The function or class ``package.module.name``. ImportPathError if there is none; a fault inside the module is
    raised as it is.
    """
    module, _, name = path.rpartition(".")
    if "" in (module, *path.split(".")):
        raise ImportPathError("it must have the form package.module.name, with no dot at its ends")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):  # what the module itself imports
            raise
        raise ImportPathError(str(error)) from error
    try:
        return getattr(found, name)
    except AttributeError as error:
        raise ImportPathError(str(error)) from error

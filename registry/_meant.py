"""What somebody who misspelt a name may have meant."""

import difflib
from collections.abc import Iterable


def meant(name: str, known: Iterable[str]) -> str:
    """``" Did you mean 'math'?"`` if one of the known names is close, else nothing."""
    return "".join(f" Did you mean {close!r}?" for close in difflib.get_close_matches(name, list(known), n=1))

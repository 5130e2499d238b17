"""Seeds that follow from what is drawn, not from what was drawn before: runs resume without any random state."""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from its parts: the same on every machine, unrelated for parts that differ."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1

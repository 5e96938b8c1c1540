"""Seeds derived from what they are for, so that a resumed, replayed or reordered run draws the same numbers.

A keyed hash rather than a generator: no state to save, and the same on every platform and Python version.
"""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """63-bit seed of a purpose and its coordinates, e.g. `derive_seed("order", seed, epoch)`."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def completion_seeds(seed: int, period: int, group: int, num_generations: int) -> tuple[int, ...]:
    """One seed per completion of a group, from (run seed, period, group, sample) alone."""
    return tuple(derive_seed("completion", seed, period, group, sample) for sample in range(num_generations))

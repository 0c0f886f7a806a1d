"""Packed sequences: what values of cu_seqlens mean something. Checked where they are on the host."""

import itertools
from collections.abc import Sequence


def check_starts(name: str, starts: Sequence[int], total: int) -> None:
    """ValueError, naming the value and the rule, unless these cut `total` rows into sequences, and perhaps a rest."""
    if starts[0] != 0:
        raise ValueError(f"{name} must start at 0, got {starts[0]}")
    for index, (start, end) in enumerate(itertools.pairwise(starts), 1):
        if end < start:
            raise ValueError(f"{name} must never fall, got {start} and then {end} at {index}")
    if starts[-1] > total:
        raise ValueError(f"{name} must end within the {total} rows it cuts, got {starts[-1]}")

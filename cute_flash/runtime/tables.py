"""Room for what a kernel works out of packed sequences' lengths before it starts."""

from collections.abc import Callable
from typing import Any

import torch

from ..spec.scratch import ScratchRule, TableRule

Forward = Callable[..., Any]  # launch.Forward


def with_table(forward: Forward, rule: ScratchRule | TableRule | None) -> Forward:
    """The forward, which gives its kernel a table where there is a rule for one: behind the numbers, of which packed
    sequences' lengths are the first two."""
    if not isinstance(rule, TableRule):
        return forward

    def prepared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, numbers: tuple[Any, ...], *sizes: int) -> Any:
        table = q.new_empty(rule.elements(numbers[0].shape[0] - 1), dtype=torch.int32)
        return forward(q, k, v, (*numbers, table), *sizes)

    return prepared

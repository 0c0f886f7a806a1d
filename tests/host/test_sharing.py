"""Where keys are shared among CTAs and how much scratch a kernel is given, to the last tile and sequence."""

from dataclasses import replace

import pytest
import torch

from cute_flash import attention, attention_varlen, explain
from cute_flash.spec import settings
from cute_flash.spec.plan import Tile
from cute_flash.spec.problem import BACKWARD, PACKED
from cute_flash.spec.scratch import ScratchRule, TableRule
from cute_flash.spec.splits import CACHE_SPLIT_KEYS, cache_splits

from ..fakes import FakeBackend

pytestmark = pytest.mark.usefixtures("office")

TABLE = TableRule(words_per_sequence=4, words=3)


class Sharing(FakeBackend):
    """Says how many CTAs share the keys of each launch, and how many elements of scratch one got."""

    def __init__(self, **fields) -> None:
        super().__init__("sm90", **fields)
        self.splits: list[int] = []
        self.scratched: list[int] = []

    def plan(self, problem):
        return replace(super().plan(problem), form=problem.form, tile=Tile(64, 128))

    def split(self, plan):
        return replace(plan, variant="split")

    def scratch(self, plan):
        if plan.direction == BACKWARD:
            return ScratchRule(64, 8, floats_per_tile=2, table=TABLE, table_align=4)
        return TABLE if plan.form == PACKED else None

    def build(self, plan):
        if self.scratch(plan) is not None:
            return lambda *operands: self.scratched.append(operands[-1].numel())
        # a split forward's last two operands are partial results, (splits, ...)
        return lambda *operands: self.splits.append(operands[-1].shape[0] if plan.variant == "split" else 1)


@pytest.mark.parametrize("exports", [False, True])
@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k", "splits"),
    [(4, 64, 2049, 2), (4, 64, 2048, 1), (5, 64, 2049, 1), (2, 128, 2049, 2), (2, 129, 2049, 1), (1, 64, 2100, 10)],
)
def test_keys_are_shared_up_to_the_last_tile_that_leaves_room(
    backends, simulated, exports, batch, seqlen_q, seqlen_k, splits
):
    """10 multiprocessors, four fifths of them for 2 heads: 4 query tiles of a head; beyond 2048 keys, 2 CTAs each."""
    simulated((9, 0), sm_count=10)
    (backend,) = backends(Sharing(exports=exports, row_alignment=16 * exports))
    q, k = (torch.zeros(batch, n, 2, 16, dtype=torch.bfloat16) for n in (seqlen_q, seqlen_k))
    with settings.override(cache_dir=None):
        attention(q, k, k)
    assert backend.splits == [splits]


def test_packed_sequences_have_scratch_for_each_of_them(backends):
    """A table of 3 * 4 + 3 words; in the backward as 16, and 12 rows: one tile, one more for each of 3 sequences and
    one for what follows them."""
    (backend,) = backends(Sharing())
    q, k = (torch.zeros(12, 2, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    starts = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    attention_varlen(q, k, k, cu_seqlens_q=starts, cu_seqlens_k=starts).sum().backward()
    assert backend.scratched == [15, 16 + 2 * 5 * (64 * 8 + 2)]


def test_a_share_of_a_cache_may_be_the_last_and_short():
    assert [cache_splits(1, n * CACHE_SPLIT_KEYS + 1, 264) for n in (0, 3)] == [1, 4]


@pytest.mark.parametrize(("rows", "few"), [(1, 8), (4, 8), (5, 16), (32, 64), (33, 0)])
def test_query_rows_over_a_cache_are_rounded_up(rows, few):
    """Two heads of a group make two rows of a token."""
    q, k = (torch.zeros(1, n, heads, 16) for n, heads in ((rows, 4), (8, 2)))
    found = explain(q, k, k, cache_seqlens=torch.zeros(1, dtype=torch.int32), causal=True)
    assert found.problem.few_rows == few

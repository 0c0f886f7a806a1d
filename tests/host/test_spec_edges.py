"""Rules of the spec to the last row, key and length: against the meaning, all small cases."""

import itertools

import pytest

from cute_flash.spec.lengths import check_starts
from cute_flash.spec.mask import CAUSAL, FULL, Bounds, Mask


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Mask(True, False), Mask(False, True), Mask(True, True)], ids=str)
def test_ranges_are_what_the_dense_mask_shows(mask):
    for rows_all, keys_all, left, right in itertools.product((1, 3, 5), (1, 3, 5), (0, 1, 3), (0, 2)):
        bounds, diagonal = Bounds(left, right), keys_all - rows_all
        seen = mask.dense(rows_all, keys_all, bounds)
        for rows in itertools.combinations(range(rows_all + 1), 2):
            of_rows = seen[slice(*rows)]
            first, last = mask.key_range(rows, rows_all, keys_all, bounds)
            assert of_rows.any(0).nonzero().flatten().tolist() == list(range(first, last))
            for keys in itertools.combinations(range(keys_all + 1), 2):
                assert mask.sees_all(rows, keys, diagonal, bounds) == bool(of_rows[:, slice(*keys)].all())


def test_lengths_may_end_with_the_rows_and_not_one_after():
    check_starts("cu_seqlens_q", [0, 2, 2, 7], 7)
    for starts, sentence in (([0, 8], "end within the 7 rows"), ([1, 7], "start at 0"), ([0, 3, 2], "never fall")):
        with pytest.raises(ValueError, match=f"cu_seqlens_q must {sentence}"):
            check_starts("cu_seqlens_q", starts, 7)

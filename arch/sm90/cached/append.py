"""Before the keys are read: new ones are written behind those that each row has, 16 bytes a thread.

A CTA writes one key, or a part of it where all heads' K and V are more vectors than it has threads: so CTAs are
counted, which memory keeps under 2^31, and not vectors (8 heads of 128 of 2^23 keys are 2^31 of them).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .shares import CacheSizes, lengths_of

THREADS = 128
VECTOR = 8  # 16-bit elements in 16 bytes


@cute.kernel
def append_kernel(new: tuple, caches: tuple, tables: tuple, sizes: CacheSizes, page_size: cutlass.Constexpr[int]):
    """new, caches: (k, v); tables: (cache_seqlens, page_table, cache_batch_idx). What has no room is dropped."""
    cute.arch.griddepcontrol_launch_dependents()
    seqlens, page_table, batch_idx = tables
    vectors = [x.shape[3] // VECTOR for x in new]
    parts, block = parts_of(new, sizes), cute.arch.block_idx()[0]
    place, part = block // parts, block % parts
    batch, key = place // sizes.appended, place % sizes.appended
    index = part * THREADS + cute.arch.thread_idx()[0]
    head, vector = index // (vectors[0] + vectors[1]), index % (vectors[0] + vectors[1])
    if head < sizes.heads_kv:
        before, _ = lengths_of(seqlens[batch], sizes)
        position = before + key
        if position < sizes.capacity:
            page = batch
            if cutlass.const_expr(page_size > 0):
                page, position = page_table[batch, position // page_size], position % page_size
            elif cutlass.const_expr(batch_idx is not None):
                page = batch_idx[batch]
            page = cutlass.min(cutlass.max(page, 0), sizes.cache_rows - 1)
            if vector < vectors[0]:
                _copy(new[0], caches[0], (batch, key), (page, position), (head, vector * VECTOR))
            else:
                _copy(new[1], caches[1], (batch, key), (page, position), (head, (vector - vectors[0]) * VECTOR))


def _copy(new: cute.Tensor, cache: cute.Tensor, source: tuple, target: tuple, place: tuple):
    def vector(tensor: cute.Tensor, row: tuple) -> cute.Tensor:
        start = cute.domain_offset((*row, *place), tensor).iterator
        return cute.make_tensor(start.align(16), cute.make_layout(VECTOR))

    cute.autovec_copy(vector(new, source), vector(cache, target))


def parts_of(new: tuple, sizes: CacheSizes) -> Int32:
    """CTAs of a key."""
    vectors = sizes.heads_kv * Int32((new[0].shape[3] + new[1].shape[3]) // VECTOR)
    return (vectors + THREADS - 1) // THREADS


def launch_append(new: tuple, caches: tuple, tables: tuple, sizes: CacheSizes, page_size: int, stream):
    blocks = sizes.batch * sizes.appended * parts_of(new, sizes)
    append_kernel(new, caches, tables, sizes, page_size).launch(
        grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream
    )

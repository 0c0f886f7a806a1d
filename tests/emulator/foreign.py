"""Kernels that others wrote, compiled unmodified: flash-attn-4's forward and quack's GEMMs."""

from __future__ import annotations

import functools
import warnings


def fake(dtype, rank: int, align: int = 16):
    """A tensor argument with dynamic shape, contiguous last dimension and 16-byte rows."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    unit = align * 8 // dtype.width
    strides = tuple(cute.sym_int64(divisibility=unit) for _ in range(rank - 1))
    return make_fake_tensor(dtype, tuple(cute.sym_int() for _ in range(rank)), (*strides, 1), assumed_align=align)


@functools.lru_cache(None)
def fa4_forward(
    arch: str, head_dim: int, causal: bool, group: int = 1, two_cta: bool = False, head_dim_v: int | None = None
):
    """-> compiled function of (q, k, v, out, lse, scale); emulation for `arch` must be on."""
    import cutlass.cute as cute
    from cutlass import BFloat16, Float32
    from cutlass.cute.runtime import make_fake_stream
    from flash_attn.cute.utils import AuxData

    tensors = [fake(BFloat16, 4) for _ in range(4)]
    head = [*tensors, fake(Float32, 3, align=4), Float32(1.0), *[None] * 8]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    if arch == "sm_90a":
        kernel = _fa4_hopper(head_dim, causal, group)
        args = [*head, None, AuxData(None, None), None, None, stream]
        tail = [None, AuxData(None, None), None, None]
    else:
        kernel = _fa4_blackwell((head_dim, head_dim_v or head_dim), causal, group, two_cta)
        args = [*head, None, None, AuxData(None, None), *[None] * 8, stream]
        tail = [None, None, AuxData(None, None), *[None] * 8]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = cute.compile(kernel, *args, options="--enable-tvm-ffi")
    return lambda q, k, v, out, lse, scale: compiled(q, k, v, out, lse, scale, *[None] * 8, *tail)


def _fa4_hopper(head_dim: int, causal: bool, group: int):
    from cutlass import BFloat16
    from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90

    tile_m, threads = (192, 512) if head_dim <= 64 else (128, 384)
    return FlashAttentionForwardSm90(
        BFloat16, head_dim, head_dim, group, is_causal=causal, is_local=False, pack_gqa=False, tile_m=tile_m,
        tile_n=128, num_stages=2, num_threads=threads, Q_in_regs=False, intra_wg_overlap=True, mma_pv_is_rs=True,
    )  # fmt: skip


def _fa4_blackwell(head_dims: tuple[int, int], causal: bool, group: int, two_cta: bool):
    from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100

    return FlashAttentionForwardSm100(
        *head_dims, qhead_per_kvhead=group, is_causal=causal, is_local=False, is_split_kv=False, pack_gqa=False,
        m_block_size=128, n_block_size=128, q_stage=2, is_static_persistent=not causal, use_2cta_instrs=two_cta,
    )  # fmt: skip


def quack_gemm(monkeypatch, arch: str, a, b, d, tile: tuple, cluster: tuple, **options):
    """D = A B^T by quack's GEMM for `arch`, told which GPU it is on; emulation must be on."""
    monkeypatch.setenv("QUACK_ARCH", arch)
    monkeypatch.setenv("CUTE_DSL_ARCH", arch)
    import quack.cache
    from quack import cute_dsl_utils
    from quack.gemm import _gemm_plan_cache, gemm

    monkeypatch.setattr(quack.cache, "CACHE_ENABLED", False)  # a kernel from its disk cache has no PTX
    cute_dsl_utils._get_device_capacity_cached.cache_clear()
    cute_dsl_utils.get_compile_target_capacity.cache_clear()
    _gemm_plan_cache.clear()
    gemm(a, b, d, None, None, *tile, *cluster, **options)


@functools.lru_cache(None)
def fa4_backward(arch: str, head_dim: int, causal: bool, two_cta: bool = False):
    """-> (rows of a query tile, function of (q, k, v, dout, lse_log2, dpsum, dq_accumulator, dk, dv, scale))."""
    import cutlass.cute as cute
    from cutlass import BFloat16, Float32
    from cutlass.cute.runtime import make_fake_stream
    from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
    from flash_attn.cute.flash_bwd_sm100 import FlashAttentionBackwardSm100
    from flash_attn.cute.utils import AuxData

    if arch == "sm_90a":
        tile_m = 64 if causal else 80
        kernel = FlashAttentionBackwardSm90(
            BFloat16, head_dim, head_dim, 1, causal, is_local=False, deterministic=False, tile_m=tile_m, tile_n=128,
            Q_stage=2, dO_stage=2, PdS_stage=2, SdP_swapAB=True, dKV_swapAB=False, dQ_swapAB=not causal,
            AtomLayoutMSdP=1, AtomLayoutNdKV=2, AtomLayoutMdQ=1, num_threads=384, V_in_regs=False,
        )  # fmt: skip
    else:
        tile_m = 128
        kernel = FlashAttentionBackwardSm100(
            head_dim, head_dim, is_causal=causal, is_local=False, qhead_per_kvhead=1, tile_m=tile_m, tile_n=128,
            cluster_size=2 if two_cta else 1, use_2cta_instrs=two_cta,
        )  # fmt: skip
    q, k, v, dout, dk, dv = (fake(BFloat16, 4) for _ in range(6))
    lse, dpsum, dq = (fake(Float32, 3) for _ in range(3))
    tail = [*[None] * 9, AuxData(None, None), None, None]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = cute.compile(
            kernel, q, k, v, dout, lse, dpsum, dq, dk, dv, Float32(1.0), *tail, stream, options="--enable-tvm-ffi"
        )
    return tile_m, lambda *args: compiled(*args, *tail)

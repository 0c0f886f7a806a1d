"""What attention and explain refuse, each in one sentence that names the value and the rule."""

import inspect
import math
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

import cute_flash
from cute_flash import UnsupportedError, attention, attention_kvcache, attention_varlen, explain
from cute_flash.runtime import foreign

from .. import oracle

pytestmark = pytest.mark.usefixtures("office")


def inputs(q=(2, 5, 4, 16), k=(2, 7, 2, 16), v=(2, 7, 2, 16), dtype=torch.float32):
    return tuple(torch.zeros(shape, dtype=dtype) for shape in (q, k, v))


@pytest.mark.parametrize(
    ("shapes", "error", "words"),
    [
        ({"q": (5, 4, 16)}, ValueError, "q must be 4-D.*(5, 4, 16)"),
        ({"v": (1, 2, 7, 2, 16)}, ValueError, "v must be 4-D"),
        ({"k": (3, 7, 2, 16), "v": (3, 7, 2, 16)}, ValueError, "one batch size, got 2, 3 and 3"),
        ({"v": (1, 7, 2, 16)}, ValueError, "one batch size, got 2, 2 and 1"),
        ({"v": (2, 8, 2, 16)}, ValueError, "k and v must have one seqlen, got 7 and 8"),
        ({"v": (2, 7, 4, 16)}, ValueError, "k and v must have one head count, got 2 and 4"),
        ({"k": (2, 7, 2, 24)}, ValueError, "q and k must have one head_dim, got 16 and 24"),
        ({"q": (2, 5, 3, 16)}, ValueError, "heads_q=3 and heads_kv=2"),
        ({"q": (2, 5, 33, 16)}, ValueError, "heads_q=33 and heads_kv=2: heads are the last dimension but one"),
        ({"k": (2, 7, 0, 16), "v": (2, 7, 0, 16)}, ValueError, "heads_q=4 and heads_kv=0"),
        ({"q": (2, 5, 4, 7), "k": (2, 7, 2, 7)}, UnsupportedError, "head_dim=7 is not supported: head_dim is 8 to 256"),
        ({"q": (2, 5, 4, 257), "k": (2, 7, 2, 257)}, UnsupportedError, "head_dim=257 .* 8 to 256"),
        ({"v": (2, 7, 2, 257)}, UnsupportedError, "head_dim_v=257 .* 8 to 256"),
        ({"v": (2, 7, 2, 4)}, UnsupportedError, "head_dim_v=4 .* 8 to 256"),
    ],
)
def test_shapes_that_do_not_fit_are_named_with_the_rule(shapes, error, words):
    for call in (attention, explain):
        with pytest.raises(error, match=words.replace("(5, 4, 16)", r"\(5, 4, 16\)")):
            call(*inputs(**shapes))


@pytest.mark.parametrize(
    ("dtype", "error", "words"),
    [
        (torch.float8_e4m3fn, UnsupportedError, "dtype float8_e4m3fn is not built yet"),
        (torch.float8_e5m2, UnsupportedError, "dtype float8_e5m2 is not built yet"),
        (torch.int32, TypeError, "must be one of bfloat16, float16, float32, float64, got int32"),
        (torch.complex64, TypeError, "got complex64"),
    ],
)
def test_dtypes_that_are_not_served(dtype, error, words):
    with pytest.raises(error, match=words):
        attention(*inputs(dtype=dtype))


def test_an_architecture_is_text():
    with pytest.raises(TypeError, match=r"arch=9.0 must be text"):
        explain(*inputs(), arch=9.0)


def test_tensors_that_do_not_match_each_other():
    q, k, v = inputs()
    with pytest.raises(TypeError, match=r"one dtype, got q torch\.float32, k torch\.float16, v torch\.float32"):
        attention(q, k.half(), v)
    with pytest.raises(TypeError, match=r"v torch\.bfloat16: cast them, or call under torch\.autocast$"):
        attention(q, k, v.bfloat16())
    with pytest.raises(TypeError, match=r"v torch\.float8_e4m3fn$"):  # autocast does not cast that either
        attention(q, k, v.to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="one device, got q cpu, k meta, v cpu"):
        attention(q, k.to("meta"), v)
    with pytest.raises(TypeError, match=r"k must be a torch\.Tensor, got ndarray"):
        attention(q, k.numpy(), v)
    with pytest.raises(TypeError, match=r"v must be a torch\.Tensor, got NoneType"):
        attention(q, k, None)
    with pytest.raises(TypeError, match="q must be a plain strided tensor"):
        attention(q.to_sparse(), k, v)
    nested = torch.nested.nested_tensor([torch.zeros(3, 2, 16), torch.zeros(4, 2, 16)])  # has no shape
    for wrong in ((nested, k, v), (q, k, nested)):
        with pytest.raises(TypeError, match=r"must be a plain strided tensor, got a nested tensor: .* attention_v"):
            attention(*wrong)


def test_the_way_out_for_nested_tensors_is_one():
    """As the sentence says: values() and offsets().int() of a jagged tensor are packed sequences."""
    rows = [torch.randn(n, 2, 16, dtype=torch.float64) for n in (3, 5)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    packed, starts = jagged.values(), jagged.offsets().int()
    out = attention_varlen(packed, packed, packed, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True)
    for row, mine in zip(rows, out.split([3, 5]), strict=True):
        right = oracle.forward(row[None], row[None], row[None], causal=True)
        assert oracle.relative_error(mine[None], right.out) < 1e-14


def test_a_bad_call_after_a_good_one_is_still_refused():
    """The warm path must not wave through what only the cold path checks."""
    q, k, v = inputs()
    attention(q, k, v)
    for bad in ((q[:1], k, v), (q, k[:, :3], v), (q, k, v[:1])):
        with pytest.raises(ValueError, match="must have one"):
            attention(*bad)
    with pytest.raises(ValueError, match="scale=nan: a scale is finite"):
        attention(q, k, v, scale=math.nan)


# --------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "option",
    [
        {"sink": torch.zeros(4)},
        {"alibi_slopes": torch.zeros(4)},
        {"score_mod": lambda s, *_: s},
        {"mask_mod": lambda *_: True},
        {"block_mask": object()},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_not_built_yet_are_refused_by_name(option):
    (name,) = option
    for call in (attention, explain):
        with pytest.raises(UnsupportedError, match=rf"^{name}= is not built yet"):
            call(*inputs(), **option)


@pytest.mark.parametrize(
    "neutral", [{"softcap": 0}, {"softcap": 0.0}, {"window": (None, None)}, {"window": None}], ids=str
)
def test_options_that_ask_for_nothing_are_taken(neutral):
    q, k, v = (torch.randn_like(t) for t in inputs())
    assert torch.equal(attention(q, k, v, **neutral), attention(q, k, v))


@pytest.mark.parametrize("softcap", [-1.0, math.nan, math.inf, 2.0**-17, 1025], ids=str)
def test_a_softcap_that_cannot_be_computed_right_is_refused(softcap):
    for call in (attention, explain):
        with pytest.raises(ValueError, match=r"softcap=.*a softcap is None, 0 or from 2\*\*-16 to 2\*\*10"):
            call(*inputs(), softcap=softcap)


@pytest.mark.parametrize("softcap", ["15", torch.tensor(15.0), 1j, True, (1.0,)], ids=repr)
def test_a_softcap_is_a_number(softcap):
    with pytest.raises(TypeError, match="softcap must be a Python number"):
        attention(*inputs(), softcap=softcap)


@pytest.mark.parametrize("option", [{"window": (3, 1)}, {"softcap": 15.0}], ids=str)
def test_a_warm_call_refuses_the_windows_and_softcaps_that_a_cold_one_refuses(option):
    """Equal keys, other types: True == 1 == 1.0."""
    attention(*inputs(), **option)
    for window in ((3, True), (3.0, 1), (3, -1), (3, 1, 0)):
        with pytest.raises((TypeError, ValueError), match="window"):
            attention(*inputs(), window=window)
    for softcap in (True, -15.0, torch.tensor(15.0)):
        with pytest.raises((TypeError, ValueError), match="softcap"):
            attention(*inputs(), softcap=softcap)
    with pytest.raises(TypeError, match="causal must be True or False"):
        attention(*inputs(), causal=2, **option)


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (-1, 5), (0, -1)], ids=str)
def test_a_negative_window_bound_is_an_error_that_names_none(window):
    for causal in (False, True):
        with pytest.raises(ValueError, match=r"None \(not -1\) means unbounded"):
            attention(*inputs(), window=window, causal=causal)


@pytest.mark.parametrize("window", [3, (1,), (1, 2, 3), (1.5, 0), "ab", (True, 0)], ids=str)
def test_a_malformed_window_is_a_type_error(window):
    with pytest.raises(TypeError, match="window"):
        attention(*inputs(), window=window)


def test_one_number_for_a_window_is_answered_with_the_pair():
    with pytest.raises(TypeError, match=r"got 16: a causal window of 16 keys is \(15, 0\)$"):
        attention(*inputs(), window=16, causal=True)
    with pytest.raises(TypeError, match=r"got 0$"):  # of no keys at all
        attention(*inputs(), window=0)


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("dropout", UnsupportedError, "dropout= is not supported"),
        ("dropout_p", UnsupportedError, "dropout_p= is not supported"),
        ("attn_mask", UnsupportedError, "attn_mask= is not supported"),
        ("is_causal", TypeError, r"no argument is_causal= \(here: causal=\)"),
        ("softmax_scale", TypeError, r"\(here: scale=\)"),
        ("enable_gqa", TypeError, "grouped heads follow from the head counts"),
        ("frobnicate", TypeError, "no argument frobnicate="),
    ],
)
def test_arguments_of_other_libraries_are_refused_by_name(name, error, words):
    q, k, v = inputs()
    for call in (attention, explain):
        with pytest.raises(error, match=words):
            call(q, k, v, **{name: torch.zeros(5, 7)})


@pytest.mark.parametrize(
    ("scale", "value"),
    [
        *((x, str(x)) for x in (math.nan, math.inf, -math.inf, 2.0**61, -(2.0**61), 2.0**-101, -(2.0**-101))),
        (10**400, "about 2**1328"),
        (-(10**5000), "about -2**16609"),  # more digits than str() takes
        (Fraction(1, 10**400), "about 2**-1328"),  # 0 as a float
        (Fraction(10**5000, 3), "about 2**16608"),
        (Fraction(2**80 + 1, 2**20), str(2.0**60)),
        (np.float32(1e-40), str(float(np.float32(1e-40)))),
        (np.float16(math.inf), "inf"),
        (np.int64(65537), "65537.0"),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_scales_that_cannot_be_computed_right_are_refused(scale, value):
    q, k, v = inputs()
    attention(q, k, v)  # a warm call refuses them too
    words = re.escape(f"scale={value}: a scale is finite, and |scale| 0 or from 2**-100 to 2**16")
    for call in (attention, explain):
        with pytest.raises(ValueError, match=f"^{words}$"):
            call(q, k, v, scale=scale)


@pytest.mark.parametrize(
    "scale", ["0.5", torch.tensor(0.5), np.array(0.5), np.bool_(True), 1j, Decimal(1), True], ids=repr
)
def test_a_scale_is_a_real_number(scale):
    name = type(scale).__name__
    with pytest.raises(TypeError, match=rf"^scale must be a real number \(Python's or NumPy's\) or None, got {name}$"):
        attention(*inputs(), scale=scale)


@pytest.mark.parametrize(
    "scale",
    [np.float64(0.25), np.float32(0.25), np.float16(0.25), Fraction(1, 4), np.int8(1), 1, 0, 2.0**-100, 2.0**16],
)
def test_every_kind_of_real_number_is_a_scale(scale):
    q, k, v = (torch.randn_like(t) for t in inputs())
    assert torch.equal(attention(q, k, v, scale=scale), attention(q, k, v, scale=float(scale)))


@pytest.mark.parametrize("name", ["causal", "return_lse", "deterministic"])
@pytest.mark.parametrize("value", ["yes", 2, None, torch.ones(2)], ids=repr)
def test_flags_are_true_or_false(name, value):
    if isinstance(value, torch.Tensor) and name == "deterministic":
        value = [True]
    with pytest.raises(TypeError, match=f"{name} must be True or False"):
        attention(*inputs(), **{name: value})


# --------------------------------------------------------------------------------------------- words of other libraries

CU = torch.tensor([0, 5], dtype=torch.int32)
FUNCTIONS = {
    "attention": lambda **more: attention(*inputs(), **more),
    "attention_varlen": lambda **more: attention_varlen(
        *(x[0] for x in inputs(q=(1, 5, 4, 16), k=(1, 5, 2, 16), v=(1, 5, 2, 16))),
        **{"cu_seqlens_q": CU, "cu_seqlens_k": CU, **more},
    ),
    "attention_kvcache": lambda **more: attention_kvcache(*inputs(), **{"cache_seqlens": CU, **more}),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_words_of_other_libraries_are_translated(function):
    call = FUNCTIONS[function]
    call()  # and a warm call translates them too
    taken = {"attention": {"k", "v"}, "attention_varlen": {"k", "v"}}.get(function, set())  # positional there
    for name, here in foreign.RENAMED.items():
        if name not in taken:
            with pytest.raises(TypeError, match=re.escape(f"{function}() has no argument {name}= (here: {here})")):
                call(**{name: torch.zeros(3)})
    for name, owner in foreign.OWNERS.items():
        if owner != function:
            with pytest.raises(TypeError, match=re.escape(f"no argument {name}= ({owner} has it)")):
                call(**{name: torch.zeros(3)})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_the_translations_name_is_there(function):
    names = set(inspect.signature(getattr(cute_flash, function)).parameters)
    assert all(name in names for name, owner in foreign.OWNERS.items() if owner == function)
    assert not names & (set(foreign.RENAMED) - {"k", "v"}) and not names & set(foreign.REFUSED)
    for here in foreign.RENAMED.values():
        if here.endswith(f" of {function}"):
            assert set(re.findall(r"(\w+)=", here)) <= names
    assert set(foreign.OWNERS.values()) | {"attention"} == set(FUNCTIONS)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", foreign.REFUSED)
def test_masks_and_dropout_are_refused_unless_they_say_nothing(function, name):
    FUNCTIONS[function](**{name: None})
    with pytest.raises(UnsupportedError, match=rf"^{name}= is not supported: "):
        FUNCTIONS[function](**{name: 0.5 if "dropout" in name else torch.ones(5, 7)})


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "cache_seqlens"])
def test_lengths_of_another_kind_are_refused_with_a_way_out(name):
    function = "attention_kvcache" if name == "cache_seqlens" else "attention_varlen"
    with pytest.raises(TypeError, match=rf"^{name} must be int32, got int64: convert it once, with \.int\(\)$"):
        FUNCTIONS[function](**{name: CU.cumsum(0)})
    shape = r"\(batch,\)" if name == "cache_seqlens" else r"\(sequences \+ 1,\)"
    with pytest.raises(TypeError, match=rf"^{name} must be a torch\.Tensor, got int: {shape} int32 on q's device$"):
        FUNCTIONS[function](**{name: 5})

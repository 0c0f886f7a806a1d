"""attn_implementation="cute_flash": tiny models beside eager attention, and what has no form here is refused."""

import pytest
import torch

from cute_flash import UnsupportedError
from cute_flash.integrations import spans as runs
from cute_flash.integrations import transformers as ours

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
masking = transformers.masking_utils

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
WINDOW = 7  # shorter than the sequences: masks, sliding caches and ends of tiles all matter
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **GROUPED, head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=5.0, query_pre_attn_scalar=16
    ),
    "bert": lambda: transformers.BertConfig(**SIZES, attention_probs_dropout_prob=0.0),
}
# Logits of size 1, float32 throughout: Transformers' eager attention and ours differ by some ulps a layer.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def registered(office):
    ours.register()


def model_of(name):
    torch.manual_seed(0)
    make = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    model = make.from_config(CONFIGS[name]()).eval()
    for parameter in model.parameters():  # the default initialisation leaves attention near uniform, whatever its mask
        parameter.data.mul_(4) if parameter.dim() == 2 else None
    return model


def tokens(batch=3, length=21, padding=None):
    """(input_ids, attention_mask or None): sequences of three lengths, padded on that side."""
    ids = torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))
    if padding is None:
        return ids, None
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    mask[2, -12:] = 0
    return ids, mask if padding == "right" else mask.flip(1)


def words(mask):
    return {} if mask is None else {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def logits_and_gradients(model, implementation, ids, mask):
    """Of the real tokens: what stands at padding means nothing."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model(ids, **words(mask)).logits
    real = logits if mask is None else logits[mask.bool()]
    real.cos().sum().backward()
    return real.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("padding", [None, "right", "left"])
def test_logits_and_gradients_are_eagers(name, padding):
    model, (ids, mask) = model_of(name), tokens(padding=padding)
    expected, gradients = logits_and_gradients(model, "eager", ids, mask)
    logits, mine = logits_and_gradients(model, "cute_flash", ids, mask)
    torch.testing.assert_close(logits, expected, **CLOSE)
    assert mine.keys() == gradients.keys()
    size = max(
        gradient.abs().max().item() for gradient in gradients.values()
    )  # some are 0 but for rounding: key biases
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(mine[parameter], gradient, rtol=1e-4, atol=1e-6 * size, msg=parameter)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_is_eagers_token_by_token(name, padding, cache):
    """12 new tokens: past the window, and through a sliding cache that is full."""
    model, (ids, mask) = model_of(name), tokens(length=15, padding=padding)
    results = []
    for implementation in ("eager", "cute_flash"):
        model.set_attn_implementation(implementation)
        results.append(
            model.generate(
                ids, attention_mask=torch.ones_like(ids) if mask is None else mask, max_new_tokens=12, do_sample=False,
                pad_token_id=0, eos_token_id=None, cache_implementation=cache,
            )
        )  # fmt: skip
    assert torch.equal(*results)
    assert results[0].shape[1] == 27 and len(results[0][:, 15:].unique()) > 3  # no constant answer


CUTS = ((4, 10, 7), (13, 8))  # a batch of two rows, five sequences


def packed():
    ids, _ = tokens(batch=2)
    return ids, torch.stack([torch.cat([torch.arange(n) for n in row]) for row in CUTS])


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_packed_sequences_are_eagers(name):
    """position_ids that start again, as a collator without padding makes them: nobody sees another sequence."""
    model, (ids, positions) = model_of(name), packed()
    results = []
    for implementation in ("eager", "cute_flash"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(ids, position_ids=positions, use_cache=False).logits
        logits.cos().sum().backward()
        results.append((logits.detach(), model.model.embed_tokens.weight.grad.clone()))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    alone = model(ids[1:, :13], use_cache=False).logits
    torch.testing.assert_close(results[1][0][1:, :13], alone, **CLOSE)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_cu_seq_lens_are_position_ids(name):
    """What DataCollatorWithFlattening hands over."""
    model, (ids, _) = model_of(name), packed()
    rows = [{"input_ids": row} for row in ids[0].split(CUTS[0])]
    batch = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows)
    batch.pop("labels")
    model.set_attn_implementation("eager")
    expected = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    model.set_attn_implementation("cute_flash")
    torch.testing.assert_close(model(**batch, use_cache=False).logits, expected, **CLOSE)
    longer = {**batch, "cu_seq_lens_q": batch["cu_seq_lens_q"].long(), "max_length_q": torch.tensor(10)}
    torch.testing.assert_close(model(**longer, use_cache=False).logits, expected, **CLOSE)


def test_a_window_and_a_softcap_matter_here():
    """Or the tests above would pass without them."""
    ids, _ = tokens()
    for name, field in (("mistral", "sliding_window"), ("gemma2", "attn_logit_softcapping")):
        model = model_of(name)
        config = CONFIGS[name]()
        setattr(config, field, None)
        without = type(model)(config).eval()
        without.load_state_dict(model.state_dict())
        a, b = (m(ids).logits for m in (model, without))
        assert (a - b).abs().max() > 0.005, name  # far more than CLOSE allows


def test_no_mask_is_made_where_there_is_no_padding(monkeypatch):
    seen = []
    monkeypatch.setattr(runs, "read", lambda mask: seen.append(mask))
    for name in CONFIGS:
        model, (ids, _) = model_of(name), tokens()
        model.set_attn_implementation("cute_flash")
        model(ids, attention_mask=torch.ones_like(ids))
        model(ids)
    assert seen == []


def test_compiles_whole_and_notices_packed_sequences():
    model, (ids, _) = model_of("mistral"), tokens()
    model.set_attn_implementation("cute_flash")
    torch._dynamo.reset()

    def call(ids, positions):
        return model(ids, position_ids=positions, use_cache=False).logits

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    positions = torch.arange(21)[None].expand(3, -1)
    torch.testing.assert_close(compiled(ids, positions), call(ids, positions), **CLOSE)
    with pytest.raises(RuntimeError, match="neither causal nor a sliding window"):
        compiled(ids, torch.cat((torch.arange(11), torch.arange(10)))[None].expand(3, -1))


@pytest.mark.parametrize(
    "name", ["llama", "bert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "gemma2"))]
)
def test_padding_compiles_whole(name):
    """No graph for each mask and length: the spans are read when it runs, not while it is traced."""
    from torch._dynamo.testing import CompileCounterWithBackend

    model, cached = model_of(name), {} if name == "bert" else {"use_cache": False}
    calls = [tokens(length=n, padding=side) for n, side in ((21, "right"), (21, "left"), (30, "left"), (17, "right"))]
    right = [logits_and_gradients(model, "cute_flash", *call) for call in calls]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def logits_of(ids, mask, positions):
        return model(ids, attention_mask=mask, position_ids=positions, **cached).logits

    compiled = torch.compile(logits_of, fullgraph=True, dynamic=True, backend=counter)
    for (ids, mask), (expected, gradients) in zip(calls, right, strict=True):
        model.zero_grad()
        real = compiled(ids, *words(mask).values())[mask.bool()]
        torch.testing.assert_close(real, expected, **CLOSE)
        real.cos().sum().backward()
        for parameter, value in model.named_parameters():
            if parameter in gradients:
                torch.testing.assert_close(value.grad, gradients[parameter], rtol=1e-4, atol=1e-6, msg=parameter)
    assert counter.frame_count <= 2 < len(calls)
    ids, mask = tokens(length=21, padding="right")
    mask[0, 3] = 0
    with pytest.raises(UnsupportedError, match="row 0 of attention_mask has holes"):
        compiled(ids, *words(mask).values())


def test_a_dense_mask_is_refused_while_a_graph_is_traced():
    q = torch.randn(2, 4, 5, 16)

    def call(q, mask):
        return ours.attention_forward(torch.nn.Module(), q, q, q, mask)[0]

    with pytest.raises(Exception, match=r"got a dense one of shape \(2, 1, 5, 5\)"):
        torch.compile(call, fullgraph=True, backend="eager")(q, torch.zeros(2, 1, 5, 5))


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 5])
@pytest.mark.parametrize(
    "rows",
    [
        [[0, 0, 4, 5, -1, 0], [1, 2, 5, 5, -1, 0]],
        [[0, 0, 5, 5, 2, 0], [1, 0, 5, 5, 2, 0]],
        [[0, 0, 0, 5, -1, -1], [1, 0, 0, 5, -1, -1]],
        [[0, 0, 2, 5, -1, 0], [0, 2, 5, 5, -1, 0], [1, 0, 5, 5, -1, 0]],
    ],
)
def test_opcheck_of_spans(rows, seqlen_q, lse):
    q, k, v = (torch.randn(2, n, heads, 16, requires_grad=True) for n, heads in ((seqlen_q, 4), (5, 2), (5, 2)))
    mask = torch.tensor(rows, dtype=torch.int32)[:, None, None]
    torch.library.opcheck(torch.ops.cute_flash.attention_of_spans, (q, k, v, mask, lse, 0.3, 5.0))
    detached = tuple(x.detach() for x in (q, k, v))
    out, lse_out = torch.ops.cute_flash.attention_of_spans(*detached, mask, True, 0.3, None)
    for dlse in (None, torch.randn_like(lse_out)):
        arguments = (torch.randn_like(out), dlse, *detached, out, lse_out, mask, 0.3, None)
        torch.library.opcheck(torch.ops.cute_flash.attention_of_spans_backward, arguments)
    torch.testing.assert_close(out, runs.attend(*detached, mask, 0.3, None))
    real = torch.ones(2, 5, dtype=torch.bool)
    torch.library.opcheck(torch.ops.cute_flash.spans_of_mask, (real, None, 2, 5, 5, 0, 0, None, 0))
    torch.library.opcheck(torch.ops.cute_flash.spans_of_mask, (None, torch.tensor(3), 2, 1, 8, 0, 0, 7, 0))


@pytest.mark.parametrize("bounds", [(None, 0), (None, None), (3, 0), (4, 4)], ids=str)
@pytest.mark.parametrize("in_graph", [False, True])
def test_packed_or_one_by_one_is_the_same(monkeypatch, bounds, in_graph):
    """A chunk of five rows over a cache of 14 that holds 11, padded on the left, on the right, and whole; one sequence
    of padding alone. NaN stands where nobody may look."""
    real = torch.tensor([[0] * 4 + [1] * 7, [1] * 9 + [0] * 2, [1] * 11, [0] * 11, [0] * 10 + [1]], dtype=torch.bool)
    if bounds == (None, None):
        real = torch.cat([real, torch.zeros(5, 3, dtype=torch.bool)], 1)
    mask = runs.of_mask(real, runs.Places(5, 5, 14, 6, 0), bounds)
    torch.manual_seed(0)
    q, k, v = (torch.randn(5, n, heads, 16, dtype=torch.float64) for n, heads in ((5, 4), (14, 2), (14, 2)))
    seen = torch.zeros(5, 14, dtype=torch.bool)
    seen[:, : real.shape[1]] = real
    for x in (k, v):
        x[~seen] = float("nan")
    dout = torch.randn_like(q)
    attend, results = runs.attend_in_graph if in_graph else runs.attend, []
    for packed in (True, False):
        if not packed:
            monkeypatch.setattr(runs, "_is_packed", lambda parts, q: False)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, mask, 0.3, 5.0)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)
    out, dq, dk, dv = results[0]
    assert out[2].abs().min() > 0 and not out[3].any() and not out.isnan().any()
    assert not any(grad.isnan().any() for grad in (dq, dk, dv)) and not dk[~seen].any() and not dv[~seen].any()


def test_a_second_derivative_of_spans_raises():
    q, k, v = (torch.randn(2, 5, 2, 16, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[0, 0, 5, 5, -1, 0], [1, 1, 5, 5, -1, 0]], dtype=torch.int32)[:, None, None]
    out = torch.ops.cute_flash.attention_of_spans(q, k, v, mask, True, None, None)[0]
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


@pytest.mark.slow
def test_a_compiled_static_cache_does_not_compile_for_every_token():
    from torch._dynamo.testing import CompileCounterWithBackend

    model, (ids, mask) = model_of("llama"), tokens(length=15, padding="left")
    model.set_attn_implementation("cute_flash")
    words = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    expected = model.generate(ids, **words, max_new_tokens=14, min_new_tokens=14)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    model.forward = torch.compile(model.forward, backend=counter)
    counts = []
    for count in (5, 14):
        tokens_made = model.generate(ids, **words, max_new_tokens=count, min_new_tokens=count)
        assert torch.equal(tokens_made, expected[:, : 15 + count])
        counts.append(counter.frame_count)
    assert counts[1] - counts[0] <= 4  # the second cache has another size, and no token a graph of its own


def spans(mask_function=masking.causal_mask_function, q_length=5, kv_length=5, **options):
    return ours.mask_spans(2, q_length, kv_length, mask_function=mask_function, **options)


def test_padding_becomes_runs_of_keys():
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]], dtype=torch.bool)
    assert spans(attention_mask=real)[:, 0, 0].tolist() == [[0, 2, 5, 5, -1, 0], [1, 0, 4, 5, -1, 0]]
    window = masking.sliding_window_causal_mask_function(3)
    assert spans(window, attention_mask=real)[:, 0, 0].tolist() == [[0, 2, 5, 5, 2, 0], [1, 0, 4, 5, 2, 0]]
    both = masking.bidirectional_mask_function
    assert spans(both, 1, 5, attention_mask=real)[:, 0, 0].tolist() == [[0, 2, 5, 5, -1, -1], [1, 0, 4, 5, -1, -1]]
    around = masking.sliding_window_bidirectional_mask_function(2)
    assert spans(around)[:, 0, 0].tolist() == [[n, 0, 5, 5, 2, 2] for n in range(2)]
    assert spans(q_length=1, kv_length=64, q_offset=9)[:, 0, 0].tolist() == [
        [n, 0, 10, 10, -1, 0] for n in range(2)
    ]  # a static cache
    assert spans(q_length=1, kv_length=10, q_offset=torch.tensor(9)) is None
    assert spans(attention_mask=torch.ones(2, 5, dtype=torch.bool)) is None
    numbers = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]])
    assert runs.of_packed(numbers, (None, 0))[:, 0, 0].tolist() == [
        [0, 0, 2, 5, -1, 0], [0, 2, 5, 5, -1, 0], [1, 0, 5, 5, -1, 0],
    ]  # fmt: skip
    nothing = spans(attention_mask=torch.zeros(2, 5, dtype=torch.bool))
    assert nothing[:, 0, 0].tolist() == [[n, 0, 0, 5, -1, 0] for n in range(2)]


@pytest.mark.parametrize(
    ("make", "bounds"),
    [
        (lambda: masking.causal_mask_function, (None, 0)),
        (lambda: masking.bidirectional_mask_function, (None, None)),
        (lambda: masking.sliding_window_causal_mask_function(3), (2, 0)),
        (lambda: masking.sliding_window_bidirectional_mask_function(3), (3, 3)),
    ],
)
def test_bounds_mean_what_transformers_masks_mean(make, bounds):
    """Against the mask that Transformers itself would make."""
    q_length, kv_length = 6, 9
    dense = masking.sdpa_mask(
        1, q_length, kv_length, q_offset=3, mask_function=make(), allow_is_causal_skip=False
    )[0, 0]  # fmt: skip
    from tests.oracle import visible_keys

    assert ours._bounds_of(make()) == bounds
    assert torch.equal(dense, visible_keys(q_length, kv_length, False, dense.device, bounds))


def _around():
    return ours._closed_over(masking.sliding_window_bidirectional_mask_function(3))["mask_functions"]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: spans(masking.chunked_causal_mask_function(4, torch.zeros(2))),
            r"this one is and_masks\(chunked_overlay, causal_mask",
        ),
        (
            lambda: spans(masking.or_masks(masking.causal_mask_function, lambda *a: a)),
            r"or_masks\(causal_mask_function, <lambda>\)",
        ),
        (lambda: spans(masking.or_masks(*_around())), r"or_masks\(sliding_window_bidirectional_overlay"),
        (lambda: spans(lambda *places: True), "this one is <lambda>"),
        (lambda: spans(attention_mask=torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 1]])), "row 1 of attention_mask has"),
        (lambda: spans(attention_mask=torch.ones(2, 3)), "attention_mask is of 3 keys and there are 5"),
        (lambda: spans(q_offset=3), "queries end at key 8 of 5"),
        (lambda: runs.read(torch.zeros(2, 1, 5, 5)), r"got a dense one of shape \(2, 1, 5, 5\)"),
    ],
)
def test_masks_without_such_a_form_are_refused(call, sentence):
    with pytest.raises(UnsupportedError, match=sentence):
        call()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dropout": 0.1}, r"attention dropout is not supported.*dropout=0.1"),
        ({"s_aux": torch.zeros(2)}, "attention sinks are not built yet"),
        ({"position_bias": torch.zeros(2)}, "position biases are not built yet"),
        ({"block_table": torch.zeros(2)}, "paged caches"),
        ({"output_attentions": True}, "never forms the weights"),
        ({"is_causal": False, "sliding_window": 3}, "without the mask that says how wide"),
    ],
)
def test_options_without_a_kernel_are_refused(options, sentence):
    q = torch.zeros(1, 2, 5, 16)
    with pytest.raises(UnsupportedError, match=sentence):
        ours.attention_forward(torch.nn.Module(), q, q, q, None, **options)


def test_models_in_training_with_dropout_are_refused_by_name():
    config = CONFIGS["llama"]()
    config.attention_dropout = 0.25
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="cute_flash").train()
    with pytest.raises(UnsupportedError, match=r"dropout=0\.25"):
        model(tokens()[0])


def test_the_name_survives_another_flash_implementation():
    """Transformers loads a package for every name with "flash" in it, and keeps one at a time."""
    from transformers import modeling_flash_attention_utils as flash

    transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"](), attn_implementation="cute_flash")
    flash._loaded_implementation = "another"
    transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"](), attn_implementation="cute_flash")
    assert flash._flash_fn is ours.flash_attn.flash_attn_func
    with pytest.raises(Exception, match=r"(?i)flash|kernels"):
        flash._lazy_imports("flash_attention_2")


def test_an_old_transformers_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(masking, "sdpa_mask", lambda batch_size, cache_position: None)
    with pytest.raises(ImportError, match=r"needs Transformers 5 .*found " + transformers.__version__):
        ours.register()


def test_a_batch_is_one_call_where_it_can_be(monkeypatch):
    """Packed where spans differ; but a single row is attended sequence by sequence: a cache is not moved together."""
    calls = []
    for name in ("attention", "attention_varlen"):
        monkeypatch.setattr(
            runs,
            name,
            lambda q, k, v, name=name, **options: calls.append((name, len(q), len(k))) or torch.zeros_like(q),
        )
    alike, unlike = ([[n, start * n, 4, 4, -1, 0] for n in range(3)] for start in (0, 1))
    for rows, seqlen_q, expected in (
        (alike, 4, [("attention", 3, 3)]),
        (alike, 1, [("attention", 3, 3)]),
        (unlike, 4, [("attention_varlen", 12, 12)]),
        (unlike, 2, [("attention_varlen", 6, 12)]),
        (unlike, 1, [("attention", 1, 1)] * 3),
    ):
        calls.clear()
        q, k = torch.zeros(3, seqlen_q, 2, 16), torch.zeros(3, 4, 2, 16)
        mask = torch.tensor(rows, dtype=torch.int32)[:, None, None]
        out, weights = ours.attention_forward(torch.nn.Module(), *(x.transpose(1, 2) for x in (q, k, k)), mask)
        assert out.shape == q.shape and weights is None and calls == expected

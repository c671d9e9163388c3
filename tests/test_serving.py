"""The two serving functions of the seed: raw gates in, a pool of states [pool,HV,V,K] updated in place."""

import inspect

import pytest
import torch
from helpers import (
    CountOps,
    PeakMemory,
    assert_close,
    case_id,
    offsets,
    pairwise,
    rand,
    randn,
    rng,
    serve,
    without,
)

from gdn_ref import gdn_decode, gdn_extend_chunkwise, gdn_extend_chunkwise_torch, gdn_rollback

EXTEND = {"loop-name": gdn_extend_chunkwise, "torch-name": gdn_extend_chunkwise_torch}
both = pytest.mark.parametrize("extend", EXTEND.values(), ids=EXTEND)
NAMES = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state_pool", "cache_indices", "cu_seqlens")


def request(
    lengths=(70, 1, 63),
    H=1,
    HV=2,
    K=16,
    V=24,
    *,
    slots=None,
    pool=6,
    keys="random",
    dtype=torch.float32,
    pool_dtype=torch.float32,
    decay=1.0,
    beyond=0,
    label=(),
):
    """Arguments of one call as a dict: un-normalised keys, gates as a trained layer has them."""
    gen = rng("serve", lengths, H, HV, K, V, keys, decay, label)
    T, shift = sum(lengths) + beyond, 1.0 if keys == "correlated" else 0.0
    slots = list(range(len(lengths))) if slots is None else slots
    x = {
        "q": randn(gen, T, H, K) + shift,
        "k": 2.0 * (randn(gen, T, H, K) + shift),
        "v": randn(gen, T, HV, V),
        "a": randn(gen, T, HV) - 2.0,
        "b": randn(gen, T, HV),
    }
    x = {n: t.to(dtype) for n, t in x.items()}
    x |= {
        "A_log": torch.log(decay * (0.1 + rand(gen, HV))).float(),
        "dt_bias": randn(gen, HV).float(),
        "state_pool": randn(gen, pool, HV, V, K).to(pool_dtype),
        "cache_indices": torch.tensor(slots, dtype=torch.int64),
        "cu_seqlens": offsets(lengths),
    }
    return x


def expected(x, fresh=()):
    """Oracle: o and the pool as they must be after the call; rows with slot -1 give 0 and leave the pool alone."""
    pool = x["state_pool"].double()
    slots = x["cache_indices"].tolist()
    states = [torch.zeros_like(pool[0]) if s < 0 or n in fresh else pool[s] for n, s in enumerate(slots)]
    o, new = serve(*(x[n] for n in NAMES[:7]), states, x["cu_seqlens"])
    pool = pool.clone()
    for n, s in enumerate(slots):
        if s < 0:
            o[x["cu_seqlens"][n] : x["cu_seqlens"][n + 1]] = 0
        else:
            pool[s] = new[n]
    return {"o": o[None], "state": pool}


def call(extend, x, **options):
    """Run on a copy of the pool; returns o and the pool after."""
    pool = x["state_pool"].clone()
    o = extend(**{**x, "state_pool": pool}, **options)
    return {"o": o[None], "state": pool}


# ---------------------------------------------------------------- signature


@pytest.mark.parametrize(
    "extend, chunk_size", [(gdn_extend_chunkwise, 64), (gdn_extend_chunkwise_torch, 128)], ids=EXTEND
)
def test_signature_is_the_seeds_plus_keyword_only_options(extend, chunk_size):
    p = inspect.signature(extend).parameters
    seed = [n for n in p if p[n].kind is not p[n].KEYWORD_ONLY]
    assert tuple(seed) == (*NAMES, "chunk_size") and p["chunk_size"].default == chunk_size
    assert "has_initial_state" in p and p["has_initial_state"].default is None
    assert all(p[n].kind is p[n].KEYWORD_ONLY for n in p if n not in seed)
    assert all(p[n].default is p[n].empty for n in NAMES)


@both
def test_the_seeds_positional_call(extend):
    x = request()
    pool = x["state_pool"].clone()
    o = extend(*(pool if n == "state_pool" else x[n] for n in NAMES), 32)
    assert_close({"o": o[None], "state": pool}, expected(x), cu_seqlens=x["cu_seqlens"])


# ---------------------------------------------------------------- values

ROWS = pairwise(
    lengths=((70, 1, 63, 130), (0, 17, 0, 64, 65, 0), (1,) * 9, (200,)),
    C=(16, 64, 128),
    heads=((2, 2), (1, 3), (2, 8)),
    KV=((16, 24), (24, 8)),
    keys=("random", "correlated"),
    decay=(0.01, 1.0, 30.0),
)


@both
@pytest.mark.parametrize("row", ROWS, ids=case_id)
def test_extend_equals_the_recurrence(row, extend):
    (H, HV), (K, V), n = row["heads"], row["KV"], len(row["lengths"])
    slots = [(3 * i + 1) % 11 for i in range(n)]
    x = request(row["lengths"], H, HV, K, V, slots=slots, pool=12, keys=row["keys"], decay=row["decay"])
    results = call(extend, x, chunk_size=row["C"])
    assert_close(results, expected(x), cu_seqlens=x["cu_seqlens"])
    idle = [s for s in range(12) if s not in slots]
    assert torch.equal(results["state"][idle], x["state_pool"][idle])


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_as_the_seed_documents_them(dtype, extend):
    """Only the output is rounded: arithmetic and state stay float32."""
    x = request(dtype=dtype, keys="correlated")
    results = call(extend, x)
    assert results["o"].dtype == dtype
    assert_close(results, expected(x), {"o": 5e-3, "state": 1e-5}, x["cu_seqlens"])


@both
def test_what_is_fixed_scale_norm_gates(extend):
    """Scale K^-0.5 and the l2 norm are inside: scaling q and k changes (next to) nothing."""
    x = request()
    base = call(extend, x)
    scaled = call(extend, x | {"q": 100.0 * x["q"], "k": 0.5 * x["k"]})
    assert_close(scaled, {n: t.double() for n, t in base.items()}, 1e-5, x["cu_seqlens"])


@both
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_index_dtypes(dtype, extend):
    x = request(slots=[4, 0, 2])
    cast = {n: x[n].to(dtype) for n in ("cache_indices", "cu_seqlens")}
    assert_close(call(extend, x | cast), expected(x), cu_seqlens=x["cu_seqlens"])


@both
def test_nothing_but_the_pool_is_written(extend):
    x = request()
    kept = {n: t.clone() for n, t in x.items()}
    call(extend, x)
    assert all(torch.equal(x[n], t) for n, t in kept.items())


@both
def test_strided_inputs(extend):
    x = request(H=2, HV=4)
    fused = torch.cat([x[n].flatten(1) for n in "qkvab"], -1)
    pieces = fused.split([x[n][0].numel() for n in "qkvab"], -1)
    views = {n: t.unflatten(-1, x[n].shape[1:]) for n, t in zip("qkvab", pieces, strict=True)}
    assert not any(t.is_contiguous() for t in views.values())
    assert_close(call(extend, x | views), expected(x), cu_seqlens=x["cu_seqlens"])


# ---------------------------------------------------------------- slots


@both
def test_slot_minus_one_is_skipped(extend):
    """Padding rows give 0 and touch no slot: not the last one (Python's -1), not slot 0."""
    x = request((20, 5, 30, 7), slots=[0, -1, 3, -1])
    x["q"][20:25] = float("nan")  # padding may hold anything
    x["v"][55:] = float("nan")
    results = call(extend, x)
    assert not results["o"][0, 20:25].any() and not results["o"][0, 55:].any()
    clean = dict(x, q=x["q"].nan_to_num(), v=x["v"].nan_to_num())
    assert_close(results, expected(clean), cu_seqlens=x["cu_seqlens"])
    assert torch.equal(results["state"][[1, 2, 4, 5]], x["state_pool"][[1, 2, 4, 5]])


@both
def test_all_rows_skipped(extend):
    x = request((20, 5), slots=[-1, -1])
    results = call(extend, x)
    assert torch.equal(results["state"], x["state_pool"]) and not results["o"].any()


@both
def test_fresh_requests_start_from_zero_whatever_the_slot_holds(extend):
    x = request((20, 30, 40, 10), slots=[2, 0, 5, 3])
    x["state_pool"][2], x["state_pool"][5] = 7.0, float("nan")
    fresh = torch.tensor([False, True, False, True])
    results = call(extend, x, has_initial_state=fresh)
    clean = x | {"state_pool": x["state_pool"].nan_to_num()}
    assert_close(results, expected(clean, fresh=(0, 2)), cu_seqlens=x["cu_seqlens"])


@both
def test_an_empty_fresh_request_leaves_zero_and_an_empty_old_one_its_state(extend):
    x = request((0, 0, 5), slots=[1, 2, 3])
    x["state_pool"][1] = float("nan")
    results = call(extend, x, has_initial_state=torch.tensor([False, True, True]))
    assert not results["state"][1].any()
    assert torch.equal(results["state"][2], x["state_pool"][2])


@both
@pytest.mark.parametrize(
    "flag",
    [
        [True, False, True],
        torch.tensor([True, False]),
        torch.tensor([[True, False, True]]),
        torch.tensor([1.0, 0.0, 1.0]),
    ],
    ids=["list", "short", "rank", "float"],
)
def test_has_initial_state_of_the_wrong_kind(flag, extend):
    x = request()
    if isinstance(flag, list):  # a list of the right length may be taken, but then rightly
        try:
            results = call(extend, x, has_initial_state=flag)
        except (TypeError, ValueError) as error:
            assert "has_initial_state" in str(error)
        else:
            assert_close(results, expected(x, fresh=(1,)), cu_seqlens=x["cu_seqlens"])
        return
    with pytest.raises((TypeError, ValueError), match="has_initial_state"):
        call(extend, x, has_initial_state=flag)


# ---------------------------------------------------------------- the pool


@both
def test_bfloat16_pool_advances_in_its_own_dtype(extend):
    """float32 arithmetic on the stored state, then rounded once: never a silent no-op."""
    x = request(pool_dtype=torch.bfloat16, slots=[4, 0, 2])
    results = call(extend, x)
    assert results["state"].dtype == torch.bfloat16
    right = expected(x)
    assert_close({"o": results["o"]}, {"o": right["o"]}, cu_seqlens=x["cu_seqlens"])
    assert_close({"state": results["state"]}, {"state": right["state"]}, 3e-3)
    assert not any(torch.equal(results["state"][s], x["state_pool"][s]) for s in (0, 2, 4))


@both
def test_strided_pool_is_updated_in_place(extend):
    """Other data between the slots: the update shows in the storage and the gaps keep every byte."""
    x = request(pool=8, slots=[6, 1, 3])
    right = expected(x)
    storage = torch.full((8, 2, 2, 24, 16), 123.0)
    storage[:, 1] = x["state_pool"]
    pool = storage[:, 1]
    pointer = pool.data_ptr()
    o = extend(**(x | {"state_pool": pool}))
    assert pool.data_ptr() == pointer and (storage[:, 0] == 123.0).all()
    assert_close({"o": o[None], "state": storage[:, 1]}, right, cu_seqlens=x["cu_seqlens"])


@both
def test_no_copy_of_the_pool_is_made(extend):
    """Memory of a call does not grow with the pool."""
    peaks = []
    for size in (4, 2000):
        x = request((3, 2), pool=size)
        extend(**x)
        with PeakMemory() as meter:
            extend(**x)
        peaks.append(meter.peak)
    assert peaks[1] <= 1.1 * peaks[0] and peaks[1] < 2000 * 2 * 24 * 16 * 4 / 10


@both
def test_results_do_not_alias_the_pool(extend):
    x = request((1,), slots=[0])
    pool = x["state_pool"].clone()
    o = extend(**(x | {"state_pool": pool}))
    after = pool.clone()
    o.zero_()
    assert torch.equal(pool, after)


@both
def test_no_gradient_is_kept(extend):
    """Serving writes in place: parameters that require grad must neither fail nor tie the pool to a graph."""
    x = request()
    x["A_log"].requires_grad_()
    results = call(extend, x)
    assert not results["state"].requires_grad


# ---------------------------------------------------------------- splits and padding


@both
@pytest.mark.parametrize("split", [(200,), (64, 136), (1, 199), (63, 1, 136), (0, 128, 0, 72)], ids=str)
def test_splits_of_a_prompt(split, extend):
    whole = request((200,), slots=[3], keys="correlated", decay=0.05)
    right = expected(whole)
    pool, pieces, start = whole["state_pool"].clone(), [], 0
    for n in split:
        part = {m: whole[m][start : start + n] for m in "qkvab"}
        pieces.append(extend(**(whole | part | {"state_pool": pool, "cu_seqlens": offsets((n,))})))
        start += n
    assert_close({"o": torch.cat(pieces)[None], "state": pool}, right)


@both
def test_tokens_beyond_the_last_request(extend):
    x = request((20, 30), beyond=14)
    x["k"][50:], x["b"][50:] = float("nan"), float("nan")
    results = call(extend, x)
    assert not results["o"][0, 50:].any()
    clean = {n: t[:50] if n in "qkvab" else t for n, t in x.items()}
    right = expected(clean)
    assert_close({"o": results["o"][:, :50], "state": results["state"]}, right, cu_seqlens=x["cu_seqlens"])


@both
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)], ids=str)
def test_no_tokens(lengths, extend):
    x = request(lengths)
    results = call(extend, x)
    assert results["o"].shape == (1, 0, 2, 24) and torch.equal(results["state"], x["state_pool"])


# ---------------------------------------------------------------- errors

BAD = {
    "q-rank": ("q", lambda x: {"q": x["q"][None]}),
    "k-width": ("k", lambda x: {"k": x["k"][..., 1:]}),
    "v-tokens": ("v", lambda x: {"v": x["v"][1:]}),
    "a-heads": ("a", lambda x: {"a": x["a"][:, :1]}),
    "b-rank": ("b", lambda x: {"b": x["b"][..., None]}),
    "A_log-size": ("A_log", lambda x: {"A_log": x["A_log"][:1]}),
    "dt_bias-size": ("dt_bias", lambda x: {"dt_bias": torch.zeros(3)}),
    "pool-rank": ("state_pool", lambda x: {"state_pool": x["state_pool"][0]}),
    "pool-transposed": ("state_pool", lambda x: {"state_pool": x["state_pool"].mT.contiguous()}),
    "pool-heads": ("state_pool", lambda x: {"state_pool": x["state_pool"][:, :1]}),
    "pool-float16": ("state_pool", lambda x: {"state_pool": x["state_pool"].half()}),
    "pool-float64": ("state_pool", lambda x: {"state_pool": x["state_pool"].double()}),
    "pool-integers": ("state_pool", lambda x: {"state_pool": x["state_pool"].int()}),
    "pool-inner-stride": ("state_pool", lambda x: {"state_pool": x["state_pool"].mT.contiguous().mT}),
    "slot-too-large": ("cache_indices", lambda x: {"cache_indices": torch.tensor([0, 6, 1])}),
    "slot-below-minus-one": ("cache_indices", lambda x: {"cache_indices": torch.tensor([0, -2, 1])}),
    "slot-twice": ("cache_indices", lambda x: {"cache_indices": torch.tensor([3, 1, 3])}),
    "slot-count": ("cache_indices", lambda x: {"cache_indices": torch.tensor([3, 1])}),
    "slot-rank": ("cache_indices", lambda x: {"cache_indices": torch.tensor([[3, 1, 2]])}),
    "slot-float": ("cache_indices", lambda x: {"cache_indices": torch.tensor([3.0, 1.0, 2.0])}),
    "cu-start": ("cu_seqlens", lambda x: {"cu_seqlens": torch.tensor([1, 70, 71, 134])}),
    "cu-decreasing": ("cu_seqlens", lambda x: {"cu_seqlens": torch.tensor([0, 71, 70, 134])}),
    "cu-beyond": ("cu_seqlens", lambda x: {"cu_seqlens": torch.tensor([0, 70, 71, 135])}),
    "cu-float": ("cu_seqlens", lambda x: {"cu_seqlens": torch.tensor([0.0, 70.0, 71.0, 134.0])}),
    "chunk-zero": ("chunk_size", lambda x: {"chunk_size": 0}),
    "heads": ("HV", lambda x: {"q": x["q"].repeat(1, 3, 1), "k": x["k"].repeat(1, 3, 1)}),
}


@both
@pytest.mark.parametrize("case", BAD)
def test_a_bad_call_names_the_argument_and_writes_nothing(case, extend):
    name, change = BAD[case]
    x = request()
    x = x | change(x)
    before = x["state_pool"].clone()
    kind = (TypeError, ValueError) if case.endswith(("float", "integers")) else ValueError
    with pytest.raises(kind, match=rf"\b{name}\b"):
        extend(**x)
    assert torch.equal(x["state_pool"], before)


@both
def test_messages_give_found_and_expected(extend):
    x = request()
    for change, words in (
        ({"cache_indices": torch.tensor([0, 9, 1])}, ["9", "6"]),
        ({"cache_indices": torch.tensor([3, 1, 3])}, ["3"]),
        ({"state_pool": x["state_pool"].half()}, ["float16", "float32", "bfloat16"]),
    ):
        with pytest.raises(ValueError) as error:
            extend(**(x | change))
        assert all(w in str(error.value) for w in words), str(error.value)


@both
def test_unknown_names_are_type_errors(extend):
    with pytest.raises(TypeError, match="scale"):
        extend(**request(), scale=1.0)


def test_both_names_agree():
    """One function under two names of the seed, apart from the default chunk size."""
    x = request(keys="correlated")
    one, other = call(gdn_extend_chunkwise, x), call(gdn_extend_chunkwise_torch, x)
    assert_close(one, {n: t.double() for n, t in other.items()}, 1e-5, x["cu_seqlens"])
    assert torch.equal(call(gdn_extend_chunkwise_torch, x, chunk_size=64)["o"], one["o"])


def test_a_call_costs_no_more_operations_for_more_requests():
    """128 one-token requests in one call: not 128 times the work of one."""
    counts = []
    for n in (1, 128):
        x = request((1,) * n, pool=n)
        gdn_extend_chunkwise(**x)
        with CountOps() as ops:
            gdn_extend_chunkwise(**x)
        counts.append(ops.count)
    assert counts[1] <= counts[0] + 20, counts


@both
def test_requests_of_one_token_pay_for_no_chunks(extend):
    """A batch of single tokens takes the decode step: fewer than half the operations."""
    x = request((1,) * 5, pool=7, slots=[6, -1, 2, 3, 0])
    assert_close(call(extend, x), expected(x), cu_seqlens=x["cu_seqlens"])
    extend(**x)
    with CountOps() as ops:
        extend(**x)
    longer = request((2,) * 5, pool=7, slots=[6, -1, 2, 3, 0])
    extend(**longer)
    with CountOps() as chunked:
        extend(**longer)
    assert 2 * ops.count < chunked.count, (ops.count, chunked.count)


# ---------------------------------------------------------------- decode


def drafts(N=3, T=1, H=1, HV=2, K=16, V=24, **options):
    """Arguments of gdn_decode: the requests of request(), T tokens each, along an axis of their own."""
    x = without(request((T,) * N, H, HV, K, V, **options), "cu_seqlens")
    return {n: t.unflatten(0, (N, T)) if n in "qkvab" else t for n, t in x.items()}


def decoded(x, **options):
    """Run on a copy of the pool; o [1,N*T,HV,V] and the pool after, and whatever else came back."""
    pool = x["state_pool"].clone()
    o = gdn_decode(**{**x, "state_pool": pool}, **options)
    o, *others = o if isinstance(o, tuple) else (o,)
    return {"o": o.flatten(0, 1)[None], "state": pool}, *others


def decode_expected(x, fresh=()):
    N, T = x["q"].shape[:2]
    flat = {n: t.flatten(0, 1) if n in "qkvab" else t for n, t in x.items()}
    return expected(flat | {"cu_seqlens": offsets((T,) * N)}, fresh)


DECODE_ROWS = pairwise(
    N=(1, 4),
    T=(1, 3, 8),
    heads=((1, 1), (1, 3), (2, 8)),
    KV=((16, 24), (24, 8), (1, 1)),
    keys=("random", "correlated"),
    decay=(0.01, 1.0, 30.0),
)


def test_signature_of_decode():
    p = inspect.signature(gdn_decode).parameters
    assert tuple(p) == (*NAMES[:9], "has_initial_state", "state_after_each")
    assert [p[n].default for n in list(p)[9:]] == [None, False]
    assert all(p[n].kind is p[n].KEYWORD_ONLY for n in list(p)[9:])


@pytest.mark.parametrize("row", DECODE_ROWS, ids=case_id)
def test_decode_equals_the_recurrence(row):
    (H, HV), (K, V), N = row["heads"], row["KV"], row["N"]
    slots = [(3 * i + 1) % 7 for i in range(N)]
    x = drafts(N, row["T"], H, HV, K, V, slots=slots, pool=7, keys=row["keys"], decay=row["decay"])
    results, *_ = decoded(x)
    assert_close(results, decode_expected(x), cu_seqlens=offsets((row["T"],) * N))
    idle = [s for s in range(7) if s not in slots]
    assert torch.equal(results["state"][idle], x["state_pool"][idle])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_decode_of_other_dtypes(dtype):
    x = drafts(T=4, dtype=dtype)
    results, *_ = decoded(x)
    assert results["o"].dtype == dtype
    assert_close(results, decode_expected(x), {"o": 5e-3, "state": 1e-5})


def test_decode_advances_a_bfloat16_pool():
    """T03: in place and in its own dtype, never a silent no-op."""
    x = drafts(pool_dtype=torch.bfloat16)
    results, *_ = decoded(x)
    assert_close(results, decode_expected(x), {"o": 1e-5, "state": 3e-3})
    assert not any(torch.equal(results["state"][s], x["state_pool"][s]) for s in (0, 1, 2))


def test_decode_skips_and_starts_afresh():
    """T04, T07: padding may hold NaN and touches nothing; a fresh request does not see what the slot holds."""
    x = drafts(4, 2, slots=[0, -1, 3, 5])
    x["v"][1], x["a"][1] = float("nan"), float("nan")
    x["state_pool"][3] = float("nan")
    results, states = decoded(x, has_initial_state=torch.tensor([True, True, False, True]), state_after_each=True)
    clean = {n: t.nan_to_num() if t.is_floating_point() else t for n, t in x.items()}
    assert_close(results, decode_expected(clean, fresh=(2,)), cu_seqlens=offsets((2,) * 4))
    assert not results["o"][0, 2:4].any() and not states[1].any()


def test_decode_into_a_strided_pool():
    """T09, T10: no copy of the pool, no byte beside the slots."""
    x = drafts(pool=8, slots=[6, 1, 3])
    storage = torch.full((8, 2, 2, 24, 16), 123.0)
    storage[:, 1] = x["state_pool"]
    o = gdn_decode(**(x | {"state_pool": storage[:, 1]}))
    assert (storage[:, 0] == 123.0).all()
    assert_close({"o": o.flatten(0, 1)[None], "state": storage[:, 1]}, decode_expected(x))


def test_prefill_then_decode():
    """T01: 70 tokens at once and 5 one by one leave what 75 at once leave, K = V or not."""
    for K, V in ((16, 16), (16, 24)):
        x = request((75,), K=K, V=V, slots=[3])
        right, pool = expected(x), x["state_pool"].clone()
        first = {n: t[:70] if n in "qkvab" else t for n, t in x.items()} | {"state_pool": pool}
        pieces = [gdn_extend_chunkwise(**(first | {"cu_seqlens": offsets((70,))}))]
        for i in range(70, 75):
            step = {n: t[None, i : i + 1] if n in "qkvab" else t for n, t in x.items()} | {"state_pool": pool}
            pieces.append(gdn_decode(**without(step, "cu_seqlens"))[0])
        assert_close({"o": torch.cat(pieces)[None], "state": pool}, right)


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
def test_states_after_each_token(pool_dtype):
    """T14: states[:, n-1] is bitwise what a call with n tokens leaves in the pool."""
    x = drafts(T=4, pool_dtype=pool_dtype, slots=[4, 0, 2])
    results, states = decoded(x, state_after_each=True)
    assert states.shape == (3, 4, 2, 24, 16) and states.dtype == pool_dtype
    for n in range(1, 5):
        part, *_ = decoded({m: t[:, :n] if m in "qkvab" else t for m, t in x.items()})
        assert torch.equal(part["state"][[4, 0, 2]], states[:, n - 1])
        assert torch.equal(part["o"][0].unflatten(0, (3, n)), results["o"][0].unflatten(0, (3, 4))[:, :n])


def test_rejected_drafts_leave_no_trace():
    x = drafts(T=4, slots=[4, -1, 2])
    pool = x["state_pool"].clone()
    _, states = gdn_decode(**(x | {"state_pool": pool}), state_after_each=True)
    assert gdn_rollback(states, torch.tensor([2, 0, 3]), pool, x["cache_indices"]) is None
    plain = x["state_pool"].clone()
    for n, accepted in ((0, 2), (2, 3)):
        part = {m: t[n : n + 1, :accepted] if m in "qkvab" else t for m, t in x.items()}
        gdn_decode(**(part | {"state_pool": plain, "cache_indices": x["cache_indices"][n : n + 1]}))
    assert torch.equal(pool, plain)


BAD_DECODE = {
    **{n: BAD[n] for n in BAD if not n.startswith(("cu", "chunk", "q-", "k-", "v-", "a-", "b-", "heads"))},
    "q-rank": ("q", lambda x: {"q": x["q"][0]}),
    "q-none": ("q", lambda x: {"q": None}),
    "q-tokens": ("q", lambda x: {n: x[n].repeat(1, 9, *[1] * (x[n].ndim - 2)) for n in "qkvab"}),
    "q-no-token": ("q", lambda x: {n: x[n][:, :0] for n in "qkvab"}),
    "k-width": ("k", lambda x: {"k": x["k"][..., 1:]}),
    "v-requests": ("v", lambda x: {"v": x["v"][1:]}),
    "a-heads": ("a", lambda x: {"a": x["a"][..., :1]}),
    "b-rank": ("b", lambda x: {"b": x["b"][..., None]}),
    "flag-float": ("has_initial_state", lambda x: {"has_initial_state": torch.ones(3)}),
    "flag-count": ("has_initial_state", lambda x: {"has_initial_state": torch.ones(2, dtype=torch.bool)}),
}


@pytest.mark.parametrize("case", BAD_DECODE)
def test_a_bad_decode_names_the_argument_and_writes_nothing(case):
    """Twice, for what is looked at once must not be forgotten by the second call."""
    name, change = BAD_DECODE[case]
    x = drafts()
    gdn_decode(**(x | {"state_pool": x["state_pool"].clone()}))
    x = x | change(x)
    before = x["state_pool"].clone()
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
            gdn_decode(**x)
    assert torch.equal(x["state_pool"], before)


@pytest.mark.parametrize(
    "change, name",
    [
        ({"accepted": torch.tensor([0, 1, 1])}, "accepted"),
        ({"accepted": torch.tensor([1, 5, 1])}, "accepted"),
        ({"accepted": torch.tensor([1, 1])}, "accepted"),
        ({"accepted": [1, 1, 1]}, "accepted"),
        ({"cache_indices": torch.tensor([1, 1, 2])}, "cache_indices"),
        ({"states": torch.zeros(3, 4, 2, 16, 24)}, "state_pool"),
        ({"states": torch.zeros(3, 4, 2, 24, 16, dtype=torch.bfloat16)}, "states"),
    ],
)
def test_a_bad_rollback_names_the_argument_and_writes_nothing(change, name):
    pool = drafts()["state_pool"]
    before = pool.clone()
    x = {
        "states": torch.zeros(3, 4, 2, 24, 16),
        "accepted": torch.tensor([1, 2, 4]),
        "state_pool": pool,
        "cache_indices": torch.tensor([0, 1, 2]),
    }
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
        gdn_rollback(**(x | change))
    assert torch.equal(pool, before)


def test_decode_under_autocast_stays_float32():
    x = drafts(T=2)
    with torch.autocast("cpu", torch.bfloat16):
        results, *_ = decoded(x)
    assert_close(results, decode_expected(x))


def test_a_decode_costs_no_more_operations_for_more_requests():
    counts = []
    for n in (1, 128):
        x = drafts(n, pool=n)
        gdn_decode(**x)
        with CountOps() as ops:
            gdn_decode(**x)
        counts.append(ops.count)
    assert counts[1] <= counts[0] + 2, counts


def test_decode_says_that_float16_overflows():
    """N18: a readout of 1e5 does not fit into float16; the docstring says so."""
    assert "65504" in gdn_decode.__doc__

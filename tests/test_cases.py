"""Field reports: one test (or a few) per case, named after its id, with one line on why.

Where a public fault has a known size, the test also shows that the faulty form would break its bound.
Cases that need a GPU, Triton, torch.compile or the decode kernels wait for the parts that bring those.
"""

import inspect
import itertools
import math
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from helpers import (
    FP32_BOUND,
    CountOps,
    assert_close,
    check,
    fused_projection,
    gates,
    l2norm,
    make,
    offsets,
    peak_memory,
    rand,
    randn,
    recurrence,
    reference,
    relative_l2,
    rng,
    run,
    serve,
    where_triton_runs,
    without,
    worst,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import gdn_ref
from gdn_ref import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    gdn_decode,
    gdn_extend_chunkwise,
    gdn_extend_chunkwise_torch,
    gdn_rollback,
)

ROOT = Path(__file__).resolve().parent.parent
NAN, INF = float("nan"), float("inf")
CHUNKS = (16, 32, 64)


def op(q, k, v, g, beta, **options):
    return chunk_gated_delta_rule(q, k, v, g, beta, **{"output_final_state": True, "backend": "torch", **options})


def step(q, k, v, g, beta, **options):
    return fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, **{"output_final_state": True, **options})


def is_right(x, bound=FP32_BOUND, fn=op, **options):
    check(fn, x, bound, **options)


def error(actual, expected):
    """Worst relative L2 over sequences and heads of one token tensor."""
    return worst({"o": actual}, {"o": expected.double()})["o"]


# ================================================================ 1 numerical


@pytest.mark.parametrize("some", [False, True], ids=["all", "half"])
@pytest.mark.parametrize("C", CHUNKS)
def test_N01_zero_decay_is_not_a_mask(some, C):
    """g = 0 is a legal decay: masks go by index, never by the value of the exponent."""
    x = make(130, 2, K=64, V=64, decays="none")
    x["beta"] = torch.full_like(x["beta"], 0.5)
    if some:
        x["g"] = -(rand(rng("N01"), 1, 130, 2) < 0.5).float()
    is_right(x, chunk_size=C)


@pytest.mark.parametrize("g", [-0.1, -1.0, -2.0, -30.0])
def test_N02_strong_decay_never_divides_by_gamma(g):
    """Only differences of the cumulative decay are used: beta/gamma is inf from -88.7 on."""
    x = make(70, 2, K=16, V=16)
    x["g"] = torch.full_like(x["g"], g)
    is_right(x)
    if g <= -2.0:
        gamma = x["g"][:, :64].cumsum(1).exp()
        assert not (x["beta"][:, :64] / gamma).isfinite().all(), "the divided form would have overflowed here"


@pytest.mark.parametrize("g", [-1.4, -1.5, -20.0])
def test_N05_the_exponent_is_masked_before_exp(g):
    """Above the diagonal the differences are positive: masked after exp they give NaN forward or in g.grad."""
    x = make(64, 1, state=False)
    x["g"] = torch.full_like(x["g"], g)
    is_right(x)
    G = x["g"][0, :, 0].cumsum(0).requires_grad_()
    d = G[:, None] - G[None, :]
    late = torch.where(torch.ones(64, 64).tril().bool(), d.exp(), torch.zeros(()))
    assert late.isfinite().all() and torch.autograd.grad(late.sum(), G)[0].isnan().any() == (-63 * g > 88.8)


@pytest.mark.parametrize("C", [16, 32, 64, 128])
def test_N06_repeated_keys_give_back_the_value(C):
    """Every key equal, beta 1: o_t is v_t. An inverse by powers of L sums terms near 1e18 on the way."""
    v = randn(rng("N06"), 1, 128, 1, 8).float()
    k = torch.zeros(1, 128, 1, 8)
    k[..., 0] = 1.0
    o, S = op(k, k, v, torch.zeros(1, 128, 1), torch.ones(1, 128, 1), scale=1.0, chunk_size=C)
    assert error(o, v) < 1e-6 and torch.equal(S[0, 0, 1:], torch.zeros(7, 8))
    assert error(S[:, :, :1], v[:, -1:, :, None][:, 0]) < 1e-6


def test_N06_the_squaring_inverse_would_be_caught():
    L = torch.ones(64, 64).tril(-1)
    power, inverse = L, torch.eye(64) - L
    for _ in range(5):
        power = power @ power
        inverse = inverse @ (torch.eye(64) + power)
    assert not (inverse - torch.linalg.inv(torch.eye(64) + L)).norm() < 1.0


@pytest.mark.parametrize("T", [8, 16, 24, 64])
def test_N08_unnormalised_keys_diverge_as_the_recurrence_does(T):
    """beta |k|^2 near 32: the recurrence itself grows without bound; never clamped, tracked while finite."""
    gen = rng("N08", T)
    q, k, v = (randn(gen, 1, T, 1, 64).float() for _ in range(3))
    beta = rand(gen, 1, T, 1).sigmoid().float()
    o, _ = op(q, k, v, torch.zeros(1, T, 1), beta)
    expected, _ = recurrence(q, k, v, torch.zeros(1, T, 1), beta)
    assert expected.abs().max() > {8: 1e3, 16: 1e6, 24: 1e10, 64: 1e25}[T]
    assert error(o, expected) < 1e-5


def test_N08_is_documented():
    assert re.search(r"normali[sz]e", inspect.getdoc(chunk_gated_delta_rule))


def test_N10_one_eps_rule_in_every_path():
    """x rsqrt(sum x^2 + 1e-6), eps inside the root: 0.098 for this vector, where eps outside gives 0.497."""
    x = torch.full((1, 1, 1, 4), 1e-4)
    inside = 1e-4 / math.sqrt(4e-8 + 1e-6)
    assert abs(inside - 0.098) < 1e-3
    assert torch.allclose(gdn_ref.l2norm(x), torch.full_like(x, inside))
    v, one, zero = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
    for fn in (op, step):
        for backend in ("torch", "recurrent"):
            o, S = fn(x, x, v, zero, one, scale=1.0, use_qk_l2norm_in_kernel=True, backend=backend)
            assert torch.allclose(S, torch.full_like(S, inside)) and torch.allclose(
                o, 4 * torch.full_like(o, inside**2)
            )
    for extend in (gdn_extend_chunkwise, gdn_extend_chunkwise_torch):
        pool = torch.zeros(1, 1, 1, 4)
        extend(
            x[0],
            x[0],
            v[0],
            zero[0],
            zero[0] + 100.0,
            torch.zeros(1),
            torch.zeros(1),
            pool,
            torch.tensor([0]),
            offsets((1,)),
        )
        assert torch.allclose(pool, torch.full_like(pool, inside))


def test_N11_beta_stays_float32_to_the_update():
    """sigmoid(b) rounded to bfloat16 costs 2e-3 that grows with context; here token by token over 512 tokens."""
    gen, T = rng("N11"), 512
    q, k, v = (randn(gen, T, 1, 64).float() for _ in range(3))
    b = randn(gen, T, 1).bfloat16()
    a, A_log, dt_bias = torch.zeros(T, 1), torch.tensor([math.log(1e-3 / math.log(2.0))]), torch.zeros(1)  # g = -1e-3
    pool, rows = torch.zeros(1, 1, 64, 64), []
    for t in range(T):
        now = (x[t : t + 1] for x in (q, k, v, a, b))
        rows.append(gdn_extend_chunkwise(*now, A_log, dt_bias, pool, torch.tensor([0]), offsets((1,))))
    o, S = serve(q, k, v, a, b, A_log, dt_bias, torch.zeros(1, 1, 64, 64), offsets((T,)))
    assert_close({"o": torch.cat(rows)[None], "state": pool}, {"o": o[None], "state": S})
    g = torch.full((1, T, 1), -1e-3)
    rounded, _ = recurrence(l2norm(q)[None], l2norm(k)[None], v[None], g, b.float().sigmoid().bfloat16()[None])
    assert error(rounded, o[None]) > 50 * FP32_BOUND


@pytest.mark.parametrize("a, alpha", [(-200.0, 1.0), (0.0, 0.0)])
def test_N13_raw_gates_at_extreme_inputs(a, alpha):
    """A_log = 100: inf * 0 would poison the state for good; the true alphas are 1 and 0."""
    x = without(make(5, 1, K=4, V=4), "g")
    x |= {"a": torch.full((1, 5, 1), a), "A_log": torch.tensor([100.0]), "dt_bias": torch.zeros(1)}

    def raw(a, A_log, dt_bias, **rest):
        return op(g=a, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, **rest)

    results = run(raw, x)
    g = torch.full((1, 5, 1), math.log(alpha) if alpha else -INF)
    right = recurrence(g=g, **without(x, "a", "A_log", "dt_bias"))
    assert_close({n: results[n] for n in ("o", "state")}, {"o": right[0], "state": right[1]})
    assert all(t.isfinite().all() for t in results.values())


@pytest.mark.parametrize("A_log", [0.0, 2.8, 4.6])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_N15_gradients_judged_at_the_trainable_inputs(backend, A_log):
    """dg alone misleads where gates saturate; a, b, A_log and dt_bias are what is trained."""
    gen = rng("N15", A_log)
    x = {n: t for n, t in make(130, 1, 2, K=32, V=32).items() if n not in ("g", "beta")}
    x |= {
        "a": 2.0 * randn(gen, 1, 130, 2).float(),
        "b": randn(gen, 1, 130, 2).float(),
        "A_log": torch.full((2,), A_log),
        "dt_bias": torch.zeros(2),
    }
    found = run(raw_op(backend), for_backend(x, backend))
    assert_close({n: t.cpu() for n, t in found.items()}, reference(x, raw_oracle))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_N15_strong_gates_among_weak_ones(backend):
    """What A_log gets from tokens across which nothing passes is next to nothing, and must not be 49 times the rounding
    of all others: sums of rows less sums of columns left that (9.17)."""
    gen, T = rng("N15", "among"), 200
    x = {n: t for n, t in make(T, 1, 1, K=32, V=32, keys="correlated").items() if n not in ("g", "beta")}
    strong = (torch.arange(T) % 8 == 7)[None, :, None]
    x |= {
        "a": (torch.where(strong, 3.0, -12.0) + 0.1 * randn(gen, 1, T, 1)).float(),
        "b": randn(gen, 1, T, 1).float(),
        "A_log": torch.tensor([math.log(16.0)]),
        "dt_bias": torch.zeros(1),
    }
    found = run(raw_op(backend), for_backend(x, backend))
    assert_close({n: t.cpu() for n, t in found.items()}, reference(x, raw_oracle), {"d_A_log": 1e-4, "*": 2e-5})


def for_backend(x, backend):
    """The case where the backend runs, if it does here."""
    if backend != "triton":
        return x
    pytest.importorskip("triton")
    return where_triton_runs(x)


def raw_op(backend):
    def raw(q, k, v, a, b, A_log, dt_bias, initial_state):
        return op(
            q,
            k,
            v,
            a,
            b,
            initial_state=initial_state,
            use_gate_in_kernel=True,
            A_log=A_log,
            dt_bias=dt_bias,
            use_beta_sigmoid_in_kernel=True,
            backend=backend,
        )

    return raw


def raw_oracle(q, k, v, a, b, A_log, dt_bias, initial_state):
    return recurrence(q, k, v, *gates(a, b, A_log, dt_bias), initial_state=initial_state)


@pytest.mark.parametrize("fn", [op, step])
def test_N18_a_readout_beyond_float16_is_not_a_silent_inf(fn):
    """Exact o is 1e5 > 65504: saturated, or inf only with a word; the float32 state stays finite."""
    q = torch.full((1, 1, 1, 16), 0.25).half()
    zero, state = torch.zeros(1, 1, 1), torch.full((1, 1, 16, 16), 1e5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        o, S = fn(q, q, torch.zeros_like(q), zero, zero, initial_state=state)
    assert torch.equal(S, state)
    if not o.isfinite().all():
        text = inspect.getdoc(chunk_gated_delta_rule)
        assert any("float16" in str(w.message) for w in said) or re.search(r"float16[^.]*(overflow|satur|65504)", text)
    for dtype in (torch.float32, torch.bfloat16):
        wide, _ = fn(q, q, torch.zeros_like(q, dtype=dtype), zero, zero, initial_state=state)
        assert error(wide, torch.full_like(wide, 1e5)) < 4e-3


def test_N18_a_state_beyond_float16_in_the_kernels():
    """beta = 0 and g = 0 leave the state as it is, whatever its size."""
    q, zero = torch.full((1, 1, 1, 16), 0.25, dtype=torch.float16), torch.zeros(1, 1, 1)
    x = {"q": q, "k": q, "v": 0 * q, "g": zero, "beta": zero, "initial_state": torch.full((1, 1, 16, 16), 1e5)}
    _, S = op(**for_backend(x, "triton"), backend="triton")
    assert torch.equal(S.cpu(), x["initial_state"])


def test_N18_short_keys_that_the_kernels_normalise():
    """Keys of 4e-4, which eps makes 0.4 long, and values of 200: no state is beyond 100, but what is written is
    multiplied by one over the key's length before it meets the key."""
    gen = rng("N18", "short")
    q, k = (1e-4 * randn(gen, 1, 20, 1, 16).sign() for _ in range(2))
    x = {"q": q, "k": k, "v": 200 * randn(gen, 1, 20, 1, 16).sign()}
    x = {n: t.half() for n, t in x.items()} | {"g": torch.full((1, 20, 1), -0.1), "beta": torch.full((1, 20, 1), 0.9)}
    o, S = op(**for_backend(x, "triton"), use_qk_l2norm_in_kernel=True, backend="triton")
    o_ref, S_ref = recurrence(**(x | {"q": l2norm(x["q"]), "k": l2norm(x["k"])}))
    assert_close({"o": o.cpu(), "state": S.cpu()}, {"o": o_ref, "state": S_ref}, 1e-2)


@pytest.mark.parametrize("split", [(63, 1), (64, 1), (149, 1), (63, 87)], ids=str)
def test_N20_prefill_then_decode_equals_prefill(split):
    """Chunk padding is no cause of a difference: prefill and the token recurrence meet within 1e-5."""
    x = make(sum(split), 2, 4, keys="correlated")
    first = {n: t if n == "initial_state" else t[:, : split[0]] for n, t in x.items()}
    rest = {n: t[:, split[0] :] for n, t in x.items() if n != "initial_state"}
    o_1, S = op(**first)
    o_2, S = step(**rest, initial_state=S, backend="recurrent")
    o, expected = recurrence(**x)
    assert_close({"o": torch.cat([o_1, o_2], 1), "state": S}, {"o": o, "state": expected})


def test_N20_inert_padding_leaves_the_state_bit_identical():
    x = make(63, 2)
    pad = {n: torch.cat([t, torch.zeros_like(t[:, :1])], 1) if n != "initial_state" else t for n, t in x.items()}
    assert torch.equal(op(**x)[1], op(**pad)[1])
    loud = pad | {"q": pad["q"].clone()}
    loud["q"][:, 63:] = 1.0  # the query of a pad is read, never written
    assert torch.equal(op(**x)[1], op(**loud)[1])


# ================================================================ 2 shapes and indexing


@pytest.mark.parametrize("C", CHUNKS)
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130])
def test_S01_the_final_state_of_a_ragged_last_chunk(T, C):
    """The last chunk's decay is read at its last real token; outputs alone would not show it."""
    x = make(T, 1, 2, decays="ordinary")
    is_right(x, chunk_size=C)


@pytest.mark.parametrize("K, V", [(64, 128), (128, 64), (32, 48), (16, 256)])
def test_S03_K_and_V_differ(K, V):
    """State [.,HV,K,V]; no tile of one is taken for the other, forward, backward and state."""
    x = make(100, 1, 2, K, V)
    assert op(**x)[1].shape == (1, 2, K, V)
    is_right(x)


@pytest.mark.parametrize("D", [1, 3, 8, 12, 24, 60, 100, 192, 256])
def test_S04_head_widths_that_are_no_power_of_two(D):
    """Any width from 1 to 256, never a partial sum."""
    is_right(make(70, 1, 2, D, D))


def test_S05_wide_heads_backward():
    """K 256 and V 512, the shape that exhausts shared memory elsewhere: the torch path has no such limit."""
    is_right(make(130, 1, 2, 256, 512))


@pytest.mark.parametrize("HV", [2, 4, 6, 8, 10, 16])
def test_S06_every_integer_head_ratio(HV):
    """Ratios 3, 5 and 8 as well as 1, 2 and 4; value head h uses key head h // ratio."""
    x = make(70, 2, HV, 8, 12)
    is_right(x)
    is_right(x, fn=step, backend="recurrent")
    interleaved = run(op, x | {n: x[n].repeat(1, 1, HV // 2, 1) for n in "qk"}, wrt=[])
    if HV > 2:
        assert error(interleaved["o"], reference(x)["o"]) > 0.1  # heads taken in the other order would be seen


@pytest.mark.parametrize("H, HV", [(4, 2), (2, 3), (0, 2)])
def test_S07_heads_that_do_not_divide_are_refused(H, HV):
    """ValueError naming H and HV before any work."""
    q, v, g = torch.zeros(1, 4, H, 8), torch.zeros(1, 4, HV, 8), torch.zeros(1, 4, HV)
    named = "H = 0" if H == 0 else rf"(?=.*\bH = {H}\b)(?=.*\bHV = {HV}\b)"
    with CountOps() as ops, pytest.raises(ValueError, match=named):
        op(q, q, v, g, g)
    assert ops.count == 0


def test_S09_two_thousand_one_token_documents():
    """cu_seqlens = arange(2049) at HV = 32: no limit on the number of documents, and quick."""
    N, HV = 2048, 32
    x = make(N, 8, HV, 16, 16, state=False)
    state = randn(rng("S09"), N, HV, 16, 16).float()
    with CountOps() as ops:
        o, S = op(**(x | {"cu_seqlens": torch.arange(N + 1), "initial_state": state}))
    batch = {n: t.transpose(0, 1) for n, t in x.items() if t is not None}
    o_ref, S_ref = recurrence(**batch, initial_state=state)
    assert ops.count < 2000, "one document after the other"
    assert_close({"o": o.transpose(0, 1), "state": S}, {"o": o_ref, "state": S_ref})


def test_S13_strided_views_of_one_projection():
    """q, k, v, a, b split from one tensor without .contiguous(): same numbers as copies, gradient into the whole."""
    H, HV, K, V, T = 2, 4, 16, 24, 70
    whole = fused_projection(rng("S13"), 2, T, H, HV, K, V)[0]._base
    A_log, dt_bias = torch.zeros(HV), torch.full((HV,), -2.0)

    def layer(x, form, **options):
        q, k, v, a, b = x.split([H * K, H * K, HV * V, HV, HV], -1)
        return form(q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), a, b, **options)

    def ours(q, k, v, a, b):
        return op(
            q,
            k,
            v,
            a,
            b,
            use_gate_in_kernel=True,
            A_log=A_log,
            dt_bias=dt_bias,
            use_beta_sigmoid_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
        )

    def oracle(q, k, v, a, b):
        return recurrence(l2norm(q), l2norm(k), v, *gates(a, b, A_log, dt_bias))

    def copied(*views):
        return ours(*(t.contiguous() for t in views))

    results = [
        _grads(lambda x, f=f: layer(x, f), t) for f, t in ((ours, whole), (copied, whole), (oracle, whole.double()))
    ]
    assert_close(results[0], results[2])
    assert_close(results[1], results[2])


def _grads(fn, x):
    x = x.detach().requires_grad_()
    o, S = fn(x)
    d = torch.autograd.grad(o.sum() + S.square().sum(), x)[0]
    return {"o": o.detach(), "state": S.detach(), "d_x": d[:, :, None]}


@pytest.mark.parametrize(
    "change, name",
    [
        ({"cu_seqlens": torch.tensor([0, 40, 71])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 50, 40])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, -5, 40])}, "cu_seqlens"),
        ({"scale": torch.tensor(2)}, "scale"),
        ({"beta": torch.zeros(1, 70, 2, 1)}, "beta"),
        ({"beta": torch.zeros(70, 2)}, "beta"),
        ({"g": torch.zeros(1, 70)}, "g"),
    ],
    ids=["beyond-T", "decreasing", "negative", "scale-int-tensor", "beta-rank-4", "beta-rank-2", "g-rank-2"],
)
def test_S16_bad_arguments_do_not_pass(change, name):
    """Each is refused by name."""
    x = make(70, 2)
    x["initial_state"] = x["initial_state"].expand(2, -1, -1, -1) if "cu_seqlens" in change else x["initial_state"]
    with pytest.raises((ValueError, TypeError) if name == "scale" else ValueError, match=rf"\b{name}\b"):
        op(**(x | change))


def test_S16_a_slot_beyond_the_pool():
    x, pool = _request((5, 6)), torch.ones(2, 2, 24, 16)
    for extend in (gdn_extend_chunkwise, gdn_extend_chunkwise_torch):
        with pytest.raises(ValueError, match="cache_indices"):
            extend(**x, state_pool=pool, cache_indices=torch.tensor([0, 2]))
        assert (pool == 1).all()


def _request(lengths, H=1, HV=2, K=16, V=24, label="request"):
    gen, T = rng(label, lengths), sum(lengths)
    x = {
        "q": randn(gen, T, H, K),
        "k": randn(gen, T, H, K) + 1.0,
        "v": randn(gen, T, HV, V),
        "a": randn(gen, T, HV) - 3.0,
        "b": randn(gen, T, HV),
        "A_log": rand(gen, HV),
        "dt_bias": randn(gen, HV),
    }
    return {n: t.float() for n, t in x.items()} | {"cu_seqlens": offsets(lengths)}


# ================================================================ 3 variable length and padding

LENGTHS = (70, 1, 63, 130)


@pytest.mark.parametrize("keys", ["random", "correlated"])
@pytest.mark.parametrize("decays", ["slow", "strong"])
def test_V01_packed_sequences_are_separate_runs(decays, keys):
    """No leak of state or gradient from one sample to another, each with its own initial state."""
    x = make(H=1, HV=2, lengths=LENGTHS, decays=decays, keys=keys)
    packed = run(op, x)
    for n, (a, b) in enumerate(itertools.pairwise(x["cu_seqlens"].tolist())):
        alone = {m: t[n : n + 1] if m == "initial_state" else t[:, a:b] for m, t in x.items() if m != "cu_seqlens"}
        o, S = recurrence(**alone)
        assert_close({"o": packed["o"][:, a:b], "state": packed["state"][n : n + 1]}, {"o": o, "state": S})
    assert_close(packed, reference(x), cu_seqlens=x["cu_seqlens"])
    if decays == "slow":
        leaky, _ = recurrence(**(without(x, "cu_seqlens") | {"initial_state": x["initial_state"][:1]}))
        assert error(leaky[:, 71:134], reference(x)["o"][:, 71:134]) > 0.1


def test_V01_no_gradient_crosses_a_boundary():
    x = make(H=1, HV=2, lengths=LENGTHS, decays="slow")
    leaves = {n: t.detach().requires_grad_() for n, t in x.items() if n != "cu_seqlens"}
    o, _ = op(**leaves, cu_seqlens=x["cu_seqlens"])
    d = dict(zip(leaves, torch.autograd.grad(o[:, 71:134].sum(), list(leaves.values())), strict=True))
    for n, t in d.items():
        inside = t[2] if n == "initial_state" else t[:, 71:134]
        assert inside.any() and t.count_nonzero() == inside.count_nonzero(), n


@pytest.mark.parametrize("fn", [op, step])
@pytest.mark.parametrize("form", ["int32", "int64", "list", "strided"])
def test_V04_cu_seqlens_in_every_integer_form(form, fn):
    """int32 and int64 are accepted; a list is taken or refused by name, never misread."""
    x = make(H=1, HV=2, lengths=(20, 0, 45))
    cu = x["cu_seqlens"]
    wide = torch.stack([cu, cu + 99], 1)[:, 0]
    given = {"int32": cu.int(), "int64": cu, "list": cu.tolist(), "strided": wide}[form]
    try:
        results = run(fn, x | {"cu_seqlens": given})
    except (TypeError, ValueError) as refused:
        assert form == "list" and "cu_seqlens" in str(refused)
    else:
        assert_close(results, reference(x), cu_seqlens=cu)


@pytest.mark.parametrize("bad", ["batch", "states", "first"])
def test_V07_packing_and_counts_are_checked(bad):
    """B other than 1, N other than the number of states, a first offset other than 0: found and expected are named."""
    x = make(64, 1, B=2 if bad == "batch" else 1)
    if bad == "states":
        x["initial_state"] = x["initial_state"].expand(3, -1, -1, -1)
    cu = {"batch": [0, 64], "states": [0, 30, 64], "first": [1, 64]}[bad]
    words = {
        "batch": ("cu_seqlens", "2", "1"),
        "states": ("initial_state", "3", "2"),
        "first": ("cu_seqlens", "1", "0"),
    }[bad]
    with pytest.raises(ValueError) as refused:
        op(**x, cu_seqlens=torch.tensor(cu))
    assert all(w in str(refused.value) for w in words), str(refused.value)


def test_V08_left_padding_by_beta_g_and_k_zero_is_the_identity():
    """The op has no mask: beta = g = 0 on pads gives the unpadded run; g other than 0 there does not."""
    x = make(70, 1, 2, B=2)
    pads = 20
    padded = {n: t.clone() for n, t in x.items()}
    for n in ("g", "beta", "k"):
        padded[n][0, :pads] = 0
    results = run(op, padded)
    alone = {n: t[:1] if n == "initial_state" else t[:1, pads:] for n, t in x.items()}
    o, S = recurrence(**alone)
    assert_close({"o": results["o"][:1, pads:], "state": results["state"][:1]}, {"o": o, "state": S})
    decayed = padded | {"g": padded["g"].clone()}
    decayed["g"][0, 10:pads] = -0.5
    only_pads = {n: t[:1] if n == "initial_state" else t[:1, :pads] for n, t in decayed.items()}
    before, after = x["initial_state"][:1].double(), recurrence(**only_pads)[1]
    assert (before - after).norm() / before.norm() > 0.99  # the report's 99%


def test_V08_is_documented():
    text = inspect.getdoc(chunk_gated_delta_rule)
    assert re.search(r"(?i)\b(pad|padding|mask)", text) and "beta" in text


def test_V09_short_packed_sequences_cost_no_more_than_padded_ones():
    """256 sequences of 32 tokens: not more arithmetic than the same padded to 64 (counted, not timed)."""
    flops = {}
    for length in (32, 63, 64):
        x = make(length * 256, 1, 1, 16, 16, state=False)
        with FlopCounterMode(display=False) as counter:
            op(**x, cu_seqlens=torch.arange(257) * length)
        flops[length] = counter.get_total_flops()
    assert 0 < flops[32] <= flops[64] and flops[63] <= 1.001 * flops[64], flops


def test_V10_no_loop_over_segments():
    """The number of torch operations does not grow with the number of segments."""
    counts, stages = {}, {}
    for n in (1, 2, 256):
        x = make(256 * 16, 1, 1, 8, 8, state=False)
        cu = torch.arange(n + 1) * (256 * 16 // n)
        with CountOps() as ops:
            op(**x, cu_seqlens=cu)
        counts[n] = ops.count
        gdn_ref.prepare_chunk_indices(cu, 64)
        with CountOps() as ops:
            gdn_ref.prepare_chunk_indices(cu, 64)
        stages[n] = ops.count
    assert counts[256] <= counts[1] and counts[2] <= counts[1] + 20, counts
    assert max(stages.values()) - min(stages.values()) <= 2, stages


# ================================================================ 4 state, pool and serving


@pytest.mark.parametrize("V", [64, 40])
def test_T01_the_layout_of_the_state_in_every_entry_point(V):
    """The op's [K,V] and the pool's [V,K] are the same memory transposed; an asymmetric state shows a slip."""
    lengths, K = (75,), 64
    x = _request(lengths, 1, 2, K, V)
    initial = randn(rng("T01"), 1, 2, K, V).float()
    assert (initial - initial.mT if V == K else initial).abs().max() > 1
    pool = initial.mT.contiguous()
    first = {n: t[:70] if n in "qkvab" else t for n, t in x.items()} | {"cu_seqlens": offsets((70,))}
    rows = [gdn_extend_chunkwise(**first, state_pool=pool, cache_indices=torch.tensor([0]))]
    for t in range(70, 75):
        now = {n: s[t : t + 1] if n in "qkvab" else s for n, s in x.items()} | {"cu_seqlens": offsets((1,))}
        rows.append(gdn_extend_chunkwise(**now, state_pool=pool, cache_indices=torch.tensor([0])))
    raw = {
        "use_gate_in_kernel": True,
        "A_log": x["A_log"],
        "dt_bias": x["dt_bias"],
        "use_beta_sigmoid_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
    }
    o, S = op(*(x[n][None] for n in "qkvab"), initial_state=initial, **raw)
    o_v, S_v = op(*(x[n][None] for n in "qkvab"), initial_state=initial.mT, state_v_first=True, **raw)
    o_ref, pool_ref = serve(
        *(x[n] for n in ("q", "k", "v", "a", "b", "A_log", "dt_bias")), initial.mT, offsets(lengths)
    )
    for out, state in ((torch.cat(rows)[None], pool), (o, S.mT), (o_v, S_v)):
        assert_close({"o": out, "state": state}, {"o": o_ref[None], "state": pool_ref})


@pytest.mark.parametrize("extend", [gdn_extend_chunkwise, gdn_extend_chunkwise_torch])
def test_T03_a_bfloat16_pool_is_no_silent_no_op(extend):
    """One decode step moves pool[idx] in the pool's own dtype; float16 is refused by name."""
    x = _request((1,))
    for dtype in (torch.bfloat16, torch.float16):
        pool = randn(rng("T03"), 3, 2, 24, 16).to(dtype)
        before = pool.clone()
        if dtype == torch.float16:
            with pytest.raises(ValueError, match="state_pool"):
                extend(**x, state_pool=pool, cache_indices=torch.tensor([1]))
            assert torch.equal(pool, before)
            continue
        extend(**x, state_pool=pool, cache_indices=torch.tensor([1]))
        assert not torch.equal(pool[1], before[1]) and torch.equal(pool[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("extend", [gdn_extend_chunkwise, gdn_extend_chunkwise_torch])
def test_T04_slot_minus_one_writes_nowhere(extend):
    """cache_indices [0, -1]: only slot 0, a valid slot, changes; neither it twice nor the last slot."""
    x, pool = _request((5, 6)), randn(rng("T04"), 3, 2, 24, 16).float()
    before = pool.clone()
    o = extend(**x, state_pool=pool, cache_indices=torch.tensor([0, -1]))
    assert torch.equal(pool[1:], before[1:]) and not torch.equal(pool[0], before[0])
    assert not o[5:].any() and o[:5].any()
    names = ("q", "k", "v", "a", "b", "A_log", "dt_bias")
    o_ref, S = serve(*(x[n][:5] if n in "qkvab" else x[n] for n in names), before[:1], offsets((5,)))
    assert_close({"o": o[None, :5], "state": pool[:1]}, {"o": o_ref[None], "state": S})


@pytest.mark.parametrize("stale", [7.0, NAN, INF])
@pytest.mark.parametrize("extend", [gdn_extend_chunkwise, gdn_extend_chunkwise_torch])
def test_T07_a_reused_slot_starts_from_zero(extend, stale):
    """By selection, not by multiplying: 0 * NaN is NaN."""
    x, pool = _request((70,)), torch.full((2, 2, 24, 16), stale)
    zero = torch.zeros(2, 2, 24, 16)
    o = extend(**x, state_pool=pool, cache_indices=torch.tensor([1]), has_initial_state=torch.tensor([False]))
    o_0 = extend(**x, state_pool=zero, cache_indices=torch.tensor([1]))
    assert torch.equal(o, o_0) and torch.equal(pool[1], zero[1])
    assert torch.equal(pool[0].nan_to_num(), torch.full((2, 24, 16), stale).nan_to_num())


def test_T09_initial_state_kept_and_pool_updated_in_place():
    """initial_state is never written; the pool is, at the listed slots only, where it lies."""
    x = make(70, 1, 2)
    before = x["initial_state"].clone()
    for backend in ("torch", "recurrent"):
        op(**x, backend=backend)
        run(op, x, backend=backend)
    assert torch.equal(x["initial_state"], before)
    big = randn(rng("T09"), 9, 2, 24, 16).float()
    kept, view = big.clone(), big[2:7]
    address = view.data_ptr()
    gdn_extend_chunkwise(**_request((5, 6)), state_pool=view, cache_indices=torch.tensor([4, 1]))
    assert view.data_ptr() == address
    changed = [s for s in range(9) if not torch.equal(big[s], kept[s])]
    assert changed == [3, 6]


def test_T10_a_pool_that_is_a_strided_view():
    """pool = storage[:, 1]: the update shows in storage, gap bytes stay, inner stride other than 1 is refused."""
    storage = randn(rng("T10"), 8, 2, 2, 24, 16).float()
    kept = storage.clone()
    x = _request((5, 6))
    for extend in (gdn_extend_chunkwise, gdn_extend_chunkwise_torch):
        storage.copy_(kept)
        extend(**x, state_pool=storage[:, 1], cache_indices=torch.tensor([7, 2]))
        assert torch.equal(storage[:, 0], kept[:, 0])
        assert [s for s in range(8) if not torch.equal(storage[s, 1], kept[s, 1])] == [2, 7]
        twisted = torch.zeros(8, 2, 16, 24).mT
        with pytest.raises(ValueError, match="(?s)state_pool.*stride"):
            extend(**x, state_pool=twisted, cache_indices=torch.tensor([7, 2]))
        assert not twisted.any()


@pytest.mark.parametrize("split", [(200,), (64, 136), (1, 199), (63, 1, 136)], ids=str)
@pytest.mark.parametrize("extend", [gdn_extend_chunkwise, gdn_extend_chunkwise_torch])
def test_T12_a_prompt_in_pieces_carries_its_state(extend, split):
    """Every split of 200 tokens gives the same o and state; a restart from zero would be far off."""
    x, pool = _request((200,), label="T12"), randn(rng("T12"), 1, 2, 24, 16).float()
    names = ("q", "k", "v", "a", "b", "A_log", "dt_bias")
    right = serve(*(x[n] for n in names), pool.clone(), offsets((200,)))
    rows, start = [], 0
    for n in split:
        part = {m: t[start : start + n] if m in "qkvab" else t for m, t in x.items()} | {"cu_seqlens": offsets((n,))}
        rows.append(extend(**part, state_pool=pool, cache_indices=torch.tensor([0])))
        start += n
    assert_close({"o": torch.cat(rows)[None], "state": pool}, {"o": right[0][None], "state": right[1]})
    tail = serve(*(x[m][64:] if m in "qkvab" else x[m] for m in names), torch.zeros(1, 2, 24, 16), offsets((136,)))
    assert error(tail[0][None, :30], right[0][None, 64:94]) > 0.05


def test_T14_rejected_drafts_leave_no_trace():
    """Decode 4 drafts, accept 2, decode 2 others: what plain decoding of those 4 tokens gives, bit for bit."""
    x, start = without(_request((6,), label="T14"), "cu_seqlens"), randn(rng("T14"), 2, 2, 24, 16).float()
    slot = torch.tensor([1])
    part = lambda *at: {n: t[None, list(at)] if n in "qkvab" else t for n, t in x.items()}  # noqa: E731
    pool = start.clone()
    _, states = gdn_decode(**part(0, 1, 2, 3), state_pool=pool, cache_indices=slot, state_after_each=True)
    stained = gdn_decode(**part(4, 5), state_pool=pool.clone(), cache_indices=slot)
    gdn_rollback(states, torch.tensor([2]), pool, slot)
    o = gdn_decode(**part(4, 5), state_pool=pool, cache_indices=slot)
    plain = start.clone()
    greedy = [gdn_decode(**part(t), state_pool=plain, cache_indices=slot) for t in (0, 1, 4, 5)]
    assert torch.equal(pool, plain) and torch.equal(o, torch.cat(greedy[2:], 1))
    assert error(stained, o) > 0.05


# ================================================================ 5 dtypes

HALF, GATE = (torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("fn", [op, step])
def test_D01_mixed_dtypes_interleaved(fn):
    """All 8 combinations, twice and interleaved: g and beta go to float32, o comes in v's dtype."""
    for x_dtype, g_dtype, b_dtype in 2 * list(itertools.product(HALF, GATE, GATE)):
        x = make(66, 1, 2, decays="slow")
        x = {
            n: t.to({"g": g_dtype, "beta": b_dtype, "initial_state": torch.float32}.get(n, x_dtype))
            for n, t in x.items()
        }
        o, S = fn(**x)
        o_ref, S_ref = recurrence(**x)
        assert o.dtype == x_dtype and S.dtype == torch.float32
        assert_close({"o": o, "state": S}, {"o": o_ref, "state": S_ref}, {"o": 4e-3, "state": FP32_BOUND})


@pytest.mark.parametrize("fn", [op, step])
@pytest.mark.parametrize("backend", ["torch", "recurrent"])
def test_D03_gradcheck_in_float64(fn, backend):
    """float64 in, float64 out, so gradcheck and gradgradcheck can run: T5 K3 V2 HV2, every differentiable input."""
    x = make(5, 1, 2, 3, 2, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in x.values()]

    def f(q, k, v, g, beta, S):
        return fn(q, k, v, g, beta, initial_state=S, backend=backend)

    assert all(t.dtype == torch.float64 for t in f(*inputs))
    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs)


# ================================================================ 6 autograd, devices


@pytest.mark.parametrize("fn", [op, step])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_C05_one_input_alone_requires_grad(fn, name):
    """The one gradient equals that of the full case; the other inputs get none."""
    x = make(70, 1, 2)
    right = reference(x)
    alone = run(fn, x, wrt=[name])
    assert_close(alone, {n: right[n] for n in ("o", "state", "d_" + name)})


def test_C05_no_gate_at_all():
    x = without(make(70, 1, 2, decays="none"), "g")
    results = run(lambda **t: fused_recurrent_gated_delta_rule(**t, output_final_state=True), x)
    ungated = reference(x, lambda **t: recurrence(g=torch.zeros(1, 70, 2), **t))
    assert_close(results, ungated)


@pytest.mark.parametrize("fn", [op, step])
def test_C06_checkpoint_on_a_cold_call(fn):
    """The recomputation takes the path of the first call: same gradients as without a checkpoint."""
    x = make(130, 1, 2)
    leaves = [t.requires_grad_() for t in x.values()]

    def f(q, k, v, g, beta, S):
        return fn(q, k, v, g, beta, initial_state=S)

    def grads(outputs):
        return torch.autograd.grad(sum(t.square().sum() for t in outputs), leaves)

    for one, two in zip(grads(checkpoint(f, *leaves, use_reentrant=False)), grads(f(*leaves)), strict=True):
        assert torch.equal(one, two)
    with torch.no_grad():
        assert all(
            torch.equal(a, b) for a, b in zip(f(*leaves), checkpoint(f, *leaves, use_reentrant=False), strict=True)
        )


def test_C07_mixed_devices_are_named_and_the_gpu_path_refuses_cpu_tensors_plainly(monkeypatch):
    """ValueError with both devices; backend="triton" on CPU tensors gives one line, not a driver's traceback."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = make(5, 1)
    with pytest.raises(ValueError, match="(?s)(?=.*meta)(?=.*cpu)"):
        op(**(x | {"v": x["v"].to("meta")}))
    with pytest.raises((ValueError, RuntimeError, NotImplementedError), match="triton") as refused:
        op(**x, backend="triton")
    assert "\n" not in str(refused.value).strip()


# ================================================================ 7 cards


@pytest.mark.parametrize("capability, dtype", [((7, 5), torch.bfloat16), ((7, 0), torch.float16), ((6, 1), None)])
def test_H04_cards_too_old_for_the_kernels_are_known_before_anything_is_compiled(capability, dtype, monkeypatch):
    """T4, V100 and older: one line that says which card, what it has and what is needed; "auto" goes to PyTorch."""
    nothing = {"recall": lambda kind: None, "kind_of_call": lambda *call: (), "stand_in": lambda device: ""}
    launcher = types.SimpleNamespace(**nothing)  # that compiles
    monkeypatch.setattr(gdn_ref.ops, "_kernels", lambda: launcher)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    has = "compute capability 8.0, and cuda:0 has " + ".".join(map(str, capability))
    with FakeTensorMode():
        q, g = torch.empty(1, 70, 1, 16, device="cuda", dtype=dtype), torch.empty(1, 70, 1, device="cuda")
        chosen = gdn_ref.which_backend(q), gdn_ref.which_backend(q, decode=True)
        for call in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule):
            with pytest.raises(RuntimeError) as refused:
                call(q, q, q, g=g, beta=g, backend="triton")
            assert has in str(refused.value) and "'torch'" in str(refused.value) and "\n" not in str(refused.value)
            monkeypatch.setenv("GDN_REF_STRICT", "1")
            with pytest.raises(RuntimeError, match=re.escape(has)):
                call(q, q, q, g=g, beta=g)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
        assert gdn_ref.which_backend(q).name == "triton"
    assert [b.name for b in chosen] == ["torch", "recurrent"] and all(has in b.reason for b in chosen)


# ================================================================ 8 memory and notices


def _training_peak(T, backend, K=32):
    x = make(T, 1, 1, K, K, state=False)
    leaves = [x[n].requires_grad_() for n in ("q", "k", "v", "g", "beta")]
    with peak_memory() as meter:
        o, _ = op(*leaves, backend=backend)
        o.sum().backward()
    return meter.peak


def test_P01_training_memory_grows_with_chunks_not_tokens():
    """Peak bytes of forward and backward, counted: the token loop keeps a state a token, the chunk form one a chunk."""
    K, T = 64, 512
    state = K * K * 4
    growth = (_training_peak(2 * T, "torch", K) - _training_peak(T, "torch", K)) / T
    loop = (_training_peak(128, "recurrent", K) - _training_peak(64, "recurrent", K)) / 64
    assert loop > state, "what the loop needs a token, so that the test could fail"
    rows = 4 * (24 * K + 8 * 64)  # q, k, v and what is made of them a token; A, Gamma and their kind: rows of C
    assert growth < state / 64 * 4 + rows, (growth, state / 64, rows)
    assert growth < loop / 4


def test_P01_chunk_form_is_what_auto_trains_with():
    assert _training_peak(256, "auto") == _training_peak(256, "torch") < _training_peak(256, "recurrent") / 2


def test_P02_which_backend_says_who_serves_and_why(monkeypatch):
    """A query function; the wanted backend is served or refused, never another one in silence."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.zeros(1)
    for name in ("torch", "recurrent"):
        assert gdn_ref.which_backend(x, name).name == name
    chosen = gdn_ref.which_backend(x)
    assert chosen.name == "torch" and "CPU" in chosen.reason
    assert gdn_ref.which_backend(x, decode=True).name == "recurrent"
    with pytest.raises(RuntimeError, match="triton"):
        gdn_ref.which_backend(x, "triton")
    elsewhere = gdn_ref.which_backend(x.to("meta"))
    assert "meta" in elsewhere.reason and elsewhere.reason != chosen.reason


def test_P02_a_slow_path_on_another_device_is_announced_once_or_refused():
    """Off the CPU "auto" says once which backend serves and why; GDN_REF_STRICT=1 makes that an error."""
    code = (
        "import torch, warnings, gdn_ref\n"
        "x, g = torch.zeros(1, 3, 1, 2, device='meta'), torch.zeros(1, 3, 1, device='meta')\n"
        "said = []\n"
        "warnings.showwarning = lambda m, kind, *_: said.append(kind.__name__)\n"
        "warnings.simplefilter('always')\n"
        "for _ in range(2):\n"
        "    try: gdn_ref.chunk_gated_delta_rule(x, x, x, g, g)\n"
        "    except Exception as e: said.append(type(e).__name__ if 'STRICT' in str(e) else 'other')\n"
        "print([s for s in said if s != 'other'])\n"
    )
    assert _python(code, GDN_REF_STRICT="0").strip() == "['BackendNotice']"
    assert _python(code, GDN_REF_STRICT="1").strip() == "['RuntimeError', 'RuntimeError']"


# ================================================================ 9 install and API


def _python(code, **env):
    import os

    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, env={**os.environ, **env}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_I01_import_makes_no_driver_call_and_pulls_in_nothing_heavy():
    """Without a GPU or Triton the import works, and the torch paths run; the GPU path says why it can't."""
    out = _python(
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in ('triton', 'sympy', 'matplotlib', 'tqdm'): raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import torch, gdn_ref\n"
        "assert not torch.cuda.is_initialized()\n"
        "x = torch.zeros(1, 3, 1, 2); g = torch.zeros(1, 3, 1)\n"
        "o, s = gdn_ref.chunk_gated_delta_rule(x, x, x, g, g)\n"
        "assert o.shape == x.shape and s is None and not torch.cuda.is_initialized()\n"
        "try: gdn_ref.chunk_gated_delta_rule(x, x, x, g, g, backend='triton')\n"
        "except Exception as e: print(type(e).__name__, str(e))\n",
        CUDA_VISIBLE_DEVICES="",
    )
    assert "triton" in out and out.count("\n") == 1


def test_I01_import_loads_neither_triton_nor_the_book():
    heavy = "{'triton', 'sympy', 'matplotlib', 'tqdm'}"
    out = _python(
        f"import torch, sys; before = set(sys.modules); import gdn_ref; print({heavy} & (set(sys.modules) - before))"
    )
    assert out.strip() == "set()"


def _positional(fn):
    return [n for n, p in inspect.signature(fn).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]


def test_I03_a_flag_cannot_land_in_chunk_size():
    """Options added later are keyword-only, so that a positional False cannot become a chunk size."""
    seed = ["q", "k", "v", "a", "b", "A_log", "dt_bias", "state_pool", "cache_indices", "cu_seqlens", "chunk_size"]
    assert _positional(gdn_extend_chunkwise) == _positional(gdn_extend_chunkwise_torch) == seed
    assert _positional(chunk_gated_delta_rule)[-1] == "cu_seqlens" and len(_positional(chunk_gated_delta_rule)) == 13
    assert _positional(fused_recurrent_gated_delta_rule) == ["q", "k", "v", "g"]
    x = make(4, 1)
    heads = [x[n] for n in ("q", "k", "v", "g", "beta")]
    with pytest.raises(TypeError):
        chunk_gated_delta_rule(*heads, None, None, False, False, False, False, False, None, 64)
    with pytest.raises(TypeError):
        fused_recurrent_gated_delta_rule(*heads)


def test_I04_g_before_beta_everywhere():
    """Both are [B,T,HV]: a swap would run and return nonsense, so names and order are the same everywhere."""
    seen = 0
    for name in gdn_ref.__all__:
        fn = getattr(gdn_ref, name)
        if not inspect.isfunction(fn):
            continue
        names = list(inspect.signature(fn).parameters)
        if {"g", "beta"} <= set(names) and name != "recompute_w_u_fwd":  # whose order the seed fixes
            assert names.index("g") < names.index("beta"), name
            seen += 1
        assert not {"gate", "log_decay", "betas"} & set(names), name
    assert seen >= 2


# ================================================================ 10 formulas and docs


def _pair_decay(g):
    G = g.cumsum(-1)
    lower = torch.ones(len(g), len(g)).tril().bool()
    return (G[:, None] - G[None, :]).masked_fill(~lower, -INF).exp()


def test_O01_the_output_mask_is_Gamma_not_M():
    """Gamma is exact; the plain causal mask printed in the paper is several times the output off."""
    x = make(64, 1, K=16, V=16, dtype=torch.float64, state=False)
    q, k, v = (x[n][0, :, 0] for n in "qkv")
    g, beta = -torch.nn.functional.softplus(randn(rng("O01"), 64)), x["beta"][0, :, 0]
    pair = _pair_decay(g)
    E = torch.linalg.solve(torch.eye(64) + (beta[:, None] * (k @ k.T) * pair).tril(-1), beta[:, None] * v)
    o, _ = recurrence(*(t[None, :, None] for t in (q, k, v, g, beta)))
    by_gamma = ((q @ k.T * pair) @ E / 4)[None, :, None]
    by_mask = ((q @ k.T).tril() @ E / 4)[None, :, None]
    assert error(by_gamma, o) < 1e-14 and error(by_mask, o) > 1.0
    ours, _ = op(*(t[None, :, None] for t in (q, k, v, g, beta)))
    assert error(ours, o) < 1e-12


def test_O02_decay_first_then_the_error():
    """The state is decayed before the error is taken; the other order is several percent off and documented."""
    x = make(64, 2, 4, decays="slow")
    x["g"] = -0.2 * rand(rng("O02"), 1, 64, 4).float()
    results, other = run(op, x), reference(x, forget_last=True)
    assert_close(results, reference(x))
    assert worst(results, other)["o"] > 0.03
    assert re.search(r"(?i)decay", inspect.getdoc(chunk_gated_delta_rule))


def _snippets(text):
    return re.findall(r"```python\n(.*?)```", text, re.S)


def test_O05_the_readme_example_runs():
    """What the README shows is executed; a bare statement of names would not be an example."""
    readme = ROOT / "README.md"
    blocks = _snippets(readme.read_text())
    assert blocks, "the README has a Python example"
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_O05_teaching_sizes_are_unequal():
    """The stages run where no two sizes are equal (tokens, heads, widths, chunk), as teaching code often can't."""
    is_right(make(37, 3, 6, 5, 7, B=2), chunk_size=16)


def test_O06_docs_use_the_layout_they_state():
    """o = q S with S [K,V]: the docstring's own lines run on K != V."""
    x = make(1, 1, K=5, V=3, dtype=torch.float64)
    S = x["initial_state"][0, 0]
    q, k, v, g, beta = (x[n][0, 0, 0] for n in ("q", "k", "v", "g", "beta"))
    decayed = g.exp() * S
    new = decayed + beta * torch.outer(k, v - k @ decayed)
    o, state = op(**x, scale=1.0)
    torch.testing.assert_close(state[0, 0], new)
    torch.testing.assert_close(o[0, 0, 0], q @ new)
    text = inspect.getdoc(chunk_gated_delta_rule)
    assert re.search(r"\[N, ?HV, ?K, ?V\]", text)
    for extend in (gdn_extend_chunkwise, gdn_extend_chunkwise_torch):
        assert re.search(r"\[pool\w*, ?HV, ?V, ?K\]", inspect.getdoc(extend)) or extend is gdn_extend_chunkwise_torch


def test_O06_doctests_of_the_package():
    import doctest
    import importlib

    for name in ("arguments", "gates", "recurrent", "chunkwise", "ops", "serving"):
        result = doctest.testmod(importlib.import_module(f"gdn_ref.{name}"))
        assert result.failed == 0, name


def _swapped_wy(q, k, v, g, beta, S, C, swap):
    """One head by the seed's recursion, in float64, with its two factors in either order; decays by differences."""
    out = []
    for a in range(0, len(q), C):
        qc, kc, vc, gc, bc = (t[a : a + C] for t in (q, k, v, g, beta))
        pair, W, U = _pair_decay(gc), torch.zeros_like(kc), torch.zeros_like(vc)
        for i in range(len(kc)):
            if swap:  # K (W' b k), for W and for U by the same pattern
                W[i] = bc[i] * (kc[i] - (kc[:i].T @ (W[:i] @ kc[i])))
                U[i] = bc[i] * (vc[i] - (pair[i, :i, None] * U[:i]).T @ (kc[:i] @ kc[i]))
            else:
                W[i] = bc[i] * (kc[i] - (W[:i].T @ (kc[:i] @ kc[i])))
                U[i] = bc[i] * (vc[i] - (pair[i, :i, None] * U[:i]).T @ (kc[:i] @ kc[i]))
        gamma = gc.cumsum(0).exp()[:, None]
        E = U - gamma * (W @ S)
        out.append(gamma * (qc @ S) + (qc @ kc.T * pair) @ E)
        S = gamma[-1] * S + (pair[-1, :, None] * kc).T @ E
    return torch.cat(out), S


@pytest.mark.parametrize("keys", ["random", "correlated"])
@pytest.mark.parametrize("C", [2, 3, 8, 64])
def test_O09_the_order_of_the_two_factors(C, keys):
    """w = b k - W (K' b k). The printed order is equal for 1 or 2 tokens and wrong from 3 on."""
    x = make(70, 1, K=16, V=16, keys=keys, beta="unit", dtype=torch.float64)
    x["g"] = torch.full_like(x["g"], -0.1)
    heads = [x[n][0, :, 0] for n in ("q", "k", "v", "g", "beta")] + [x["initial_state"][0, 0]]
    o, S = recurrence(**x, scale=1.0)
    for swap in (False, True):
        o_c, _ = _swapped_wy(*heads, C, swap)
        e = error(o_c[None, :, None], o)
        if swap and C > 2:
            assert e > (2e-2 if C == 64 else 5e-4), e  # far above the bound: a loose tolerance would hide it
        else:
            assert e < 1e-13, e
    x32 = {n: t.float() for n, t in x.items()}
    is_right(x32, chunk_size=C)
    pool = x32["initial_state"].mT.contiguous()
    a, b = torch.zeros(70, 1), torch.logit(x32["beta"][0])
    rate = torch.tensor([math.log(0.1 / math.log(2.0))])
    out = gdn_extend_chunkwise(
        x32["q"][0],
        x32["k"][0],
        x32["v"][0],
        a,
        b,
        rate,
        torch.zeros(1),
        pool,
        torch.tensor([0]),
        offsets((70,)),
        C,
    )
    o_ref, S_ref = serve(
        x32["q"][0], x32["k"][0], x32["v"][0], a, b, rate, torch.zeros(1), x32["initial_state"].mT, offsets((70,))
    )
    assert_close({"o": out[None], "state": pool}, {"o": o_ref[None], "state": S_ref})


def test_the_comparison_rule_itself():
    """Per sequence and head: a fault in one small head of one sequence is not averaged away."""
    right = torch.ones(2, 50, 4, 8, dtype=torch.float64)
    right[:, :, 0] *= 1e3
    wrong = right.clone()
    wrong[1, :, 3] *= 1.001
    assert (wrong - right).norm() / right.norm() < FP32_BOUND  # what one global norm would say
    assert relative_l2(wrong, right).max() > 50 * FP32_BOUND

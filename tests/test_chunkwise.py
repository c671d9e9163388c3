"""The chunk form in torch against the float64 token recurrence: values, state, every gradient; whole and by stage.

The axes of the main test are combined pairwise (every pair of values meets in some row), not as a full product.
"""

import itertools
import math

import pytest
import torch
from helpers import (
    DECAYS,
    KEYS,
    assert_close,
    case_id,
    check,
    gates,
    l2norm,
    make,
    offsets,
    pairwise,
    rand,
    randn,
    recurrence,
    reference,
    relative_l2,
    rng,
    run,
    unit,
)
from torch.utils.checkpoint import checkpoint

import gdn_ref
from gdn_ref import chunk_gated_delta_rule

LOG2E = 1.0 / math.log(2.0)
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def chunked(q, k, v, g, beta, **options):
    return chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, backend="torch", **options)


# ---------------------------------------------------------------- the whole

ROWS = pairwise(
    T=(0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 130, 200),
    C=(16, 32, 64, 128),
    heads=((2, 2), (2, 4), (1, 3), (1, 4), (1, 8)),
    KV=((16, 24), (32, 16), (12, 5)),
    keys=KEYS,
    decays=DECAYS,
    beta=("unit", "wide"),
    state=(True, False),
)


@pytest.mark.parametrize("row", ROWS, ids=case_id)
def test_chunk_equals_recurrence(row):
    (H, HV), (K, V) = row["heads"], row["KV"]
    x = make(row["T"], H, HV, K, V, keys=row["keys"], decays=row["decays"], beta=row["beta"], state=row["state"])
    check(chunked, x, chunk_size=row["C"])


PACKED = pairwise(
    lengths=((70, 1, 63, 130), (0, 17, 0, 64, 65, 0), (1,) * 20, (0,), (0, 200, 0), (16, 48, 64, 2)),
    C=(16, 64, 128),
    keys=KEYS,
    decays=DECAYS,
    heads=((2, 2), (1, 3), (2, 8)),
)


@pytest.mark.parametrize("row", PACKED, ids=case_id)
def test_packed_chunk_equals_recurrence(row):
    H, HV = row["heads"]
    x = make(H=H, HV=HV, lengths=row["lengths"], keys=row["keys"], decays=row["decays"])
    check(chunked, x, chunk_size=row["C"])


@pytest.mark.parametrize("T", [200, 520, 1100])
def test_batch_of_long_sequences(T):
    """Enough chunks to pass any grouping of chunks inside, with a batch."""
    x = make(T, 1, 2, 16, 8, B=3, keys="correlated", decays="ordinary")
    check(chunked, x)


def test_more_rows_than_one_step_holds():
    """Batch times heads times chunk beyond what the scan takes at once, as a batch and packed; HV beyond one group."""
    for x in (make(40, 1, 32, 4, 3, B=140), make(H=1, HV=32, K=4, V=3, lengths=(33, 40) * 70), make(70, 3, 96, 4, 3)):
        o, S = recurrence(**x)
        with torch.no_grad():
            o_c, S_c = chunked(**x)
        assert_close({"o": o_c, "state": S_c}, {"o": o, "state": S}, cu_seqlens=x.get("cu_seqlens"))


@pytest.mark.parametrize("C", [1, 2, 3, 5, 8, 24, 48, 100, 256])
def test_other_chunk_sizes(C):
    check(chunked, make(70, 1, 2, keys="correlated"), chunk_size=C)


@pytest.mark.parametrize("keys", ["random", "correlated", "repeated"])
@pytest.mark.parametrize("decays", ["none", "slow", "strong", "alternating"])
def test_wide_heads(decays, keys):
    x = make(140, 1, 2, 128, 96, keys=keys, decays=decays)
    check(chunked, x)


@pytest.mark.parametrize("decays", ["reset", "strong", "huge_then_small"])
def test_strided_views_of_one_projection_give_what_copies_give(decays):
    H, HV, K, V, T = 2, 6, 8, 12, 75
    x = make(T, H, HV, K, V, B=2, decays=decays)
    whole = torch.cat([x["q"].flatten(2), x["k"].flatten(2), x["v"].flatten(2), x["g"], x["beta"]], -1)
    parts = whole.split([H * K, H * K, HV * V, HV, HV], -1)
    q, k, v = (t.unflatten(-1, shape) for t, shape in zip(parts, ((H, K), (H, K), (HV, V)), strict=False))
    views = {
        "q": q,
        "k": k,
        "v": v,
        "g": parts[3],
        "beta": parts[4],
        "initial_state": x["initial_state"].mT.contiguous().mT,
    }
    assert not any(t.is_contiguous() for t in views.values())
    results = run(chunked, views)
    assert_close(results, reference(views))
    copies = run(chunked, {n: t.contiguous() for n, t in views.items()})
    assert_close(results, {n: t.double() for n, t in copies.items()}, 1e-6)


def test_heads_first_and_expanded_views():
    """Other strides: [B,H,T,K] storage seen as [B,T,H,K]; one key head expanded over batch and heads."""
    x = make(70, 2, 4, 8, 6, B=2)
    views = {n: t if n == "initial_state" else t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in x.items()}
    assert_close(run(chunked, views), reference(x))
    one = {**x, "q": x["q"][:1, :, :1].expand(2, -1, 2, -1), "beta": x["beta"][:, :, :1].expand(-1, -1, 4)}
    assert_close(run(chunked, one), reference(one))


RAW = pairwise(
    T=(1, 63, 130), A_log=(0.0, 1.4, 2.8, 4.6), spread=(1.0, 3.0), keys=("random", "correlated"), neg=(False, True)
)


@pytest.mark.parametrize("row", RAW, ids=case_id)
def test_raw_gates_and_l2norm_inside(row):
    """Gradients judged at the trainable inputs a, b, A_log, dt_bias and at q, k before they are normalised."""
    T, H, HV, K, V = row["T"], 1, 2, 16, 12
    gen = rng("rawop", *row.values())
    shift = 1.0 if row["keys"] == "correlated" else 0.0
    x = {
        "q": randn(gen, 1, T, H, K) + shift,
        "k": 3.0 * (randn(gen, 1, T, H, K) + shift),
        "v": randn(gen, 1, T, HV, V),
        "a": row["spread"] * randn(gen, 1, T, HV),
        "b": randn(gen, 1, T, HV),
        "A_log": row["A_log"] * rand(gen, HV),
        "dt_bias": randn(gen, HV) - 2.0,
        "initial_state": randn(gen, 1, HV, K, V),
    }
    x = {n: t.float() for n, t in x.items()}

    def op(q, k, v, a, b, A_log, dt_bias, initial_state):
        return chunked(
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
            use_qk_l2norm_in_kernel=True,
            allow_neg_eigval=row["neg"],
        )

    def oracle(q, k, v, a, b, A_log, dt_bias, initial_state):
        g, beta = gates(a, b, A_log, dt_bias, 2.0 if row["neg"] else 1.0)
        return recurrence(l2norm(q), l2norm(k), v, g, beta, initial_state=initial_state)

    check(op, x, oracle=oracle)


@pytest.mark.parametrize("C", [16, 32, 64, 128])
def test_float64_is_float64_throughout(C):
    x = make(150, 2, 4, 8, 6, keys="correlated", decays="loguniform", dtype=torch.float64)
    results = run(chunked, x, chunk_size=C)
    assert all(t.dtype == torch.float64 for t in results.values())
    assert_close(results, reference(x), 1e-11)


def test_scale_is_applied_to_the_output_alone():
    x = make(70, 2)
    for scale in (1.0, 0.3, -2.0, 0.0):
        assert_close(run(chunked, x, scale=scale), reference(x, scale=scale))


# ---------------------------------------------------------------- the comparison can fail


@pytest.mark.parametrize("name", ["forget_last", "scale", "beta", "last_token", "one_head"])
def test_the_comparison_sees_a_wrong_result(name):
    """Faults of the size that public code has had must break the bound, or the bounds above mean nothing."""
    x = make(130, 2, 4, decays="slow")
    right = reference(x)
    if name == "forget_last":
        wrong = reference(x, forget_last=True)
    elif name == "scale":
        wrong = reference(x, scale=1.0001 * 16**-0.5)
    elif name == "beta":
        wrong = reference({**x, "beta": x["beta"].bfloat16().float()})
    elif name == "last_token":
        wrong = {**right, "d_g": right["d_g"].clone()}
        wrong["d_g"][:, -1] = 0
    else:
        wrong = {**right, "o": right["o"].clone()}
        wrong["o"][:, :, 3] *= 1.0001
    with pytest.raises(AssertionError, match="relative L2"):
        assert_close(wrong, right)


# ---------------------------------------------------------------- the stages


def stage_inputs(T=70, C=32, lengths=None, H=1, HV=2, K=8, V=6, decays="ordinary"):
    x = make(T, H, HV, K, V, lengths=lengths, decays=decays, dtype=torch.float64)
    T = x["k"].shape[1]
    cu = x.get("cu_seqlens")
    bounds = [0, T] if cu is None else cu.tolist()
    pieces = [(t, min(t + C, b)) for a, b in itertools.pairwise(bounds) for t in range(a, b, C)]
    return x, cu, pieces


STAGE_CASES = [(70, 16, None), (64, 64, None), (1, 16, None), (130, 64, (63, 0, 1, 66)), (40, 16, (16, 17, 7))]
STAGE_IDS = [f"T{T}-C{C}-{'packed' if n else 'plain'}" for T, C, n in STAGE_CASES]
on_stages = pytest.mark.parametrize("T, C, lengths", STAGE_CASES, ids=STAGE_IDS)


def pair_decay(g):
    """Gamma [C,C] of one chunk of one head by products, no division and no difference of sums."""
    C, alpha = len(g), g.exp()
    gamma = torch.zeros(C, C, dtype=g.dtype)
    for i in range(C):
        for j in range(i + 1):
            gamma[i, j] = alpha[j + 1 : i + 1].prod()
    return gamma


@on_stages
def test_chunk_local_cumsum_restarts_and_scales(T, C, lengths):
    x, cu, pieces = stage_inputs(T, C, lengths)
    G2 = gdn_ref.chunk_local_cumsum(x["g"], C, scale=LOG2E, cu_seqlens=cu)
    expected = torch.zeros_like(x["g"])
    for a, b in pieces:
        expected[:, a:b] = x["g"][:, a:b].cumsum(1) / math.log(2.0)
    torch.testing.assert_close(G2, expected, rtol=1e-12, atol=1e-12)


@on_stages
@pytest.mark.parametrize("gated", [True, False])
def test_scaled_dot_kkt_is_strictly_lower_and_decayed(T, C, lengths, gated):
    x, cu, pieces = stage_inputs(T, C, lengths)
    G2 = gdn_ref.chunk_local_cumsum(x["g"], C, scale=LOG2E, cu_seqlens=cu) if gated else None
    A = gdn_ref.chunk_scaled_dot_kkt_fwd(k=x["k"], g=G2, beta=x["beta"], cu_seqlens=cu, chunk_size=C)
    assert A.shape == (1, x["k"].shape[1], 2, C)
    for a, b in pieces:
        for h in range(2):
            k, beta = x["k"][0, a:b, 0], x["beta"][0, a:b, h]
            L = (beta[:, None] * (k @ k.T) * (pair_decay(x["g"][0, a:b, h]) if gated else 1.0)).tril(-1)
            torch.testing.assert_close(A[0, a:b, h, : b - a].double(), L, rtol=1e-5, atol=1e-7)
            assert torch.equal(A[0, a:b, h], A[0, a:b, h].tril(-1))


@on_stages
def test_solve_tril_is_the_inverse(T, C, lengths):
    x, cu, pieces = stage_inputs(T, C, lengths)
    A = torch.zeros(1, x["k"].shape[1], 2, C, dtype=torch.float64)
    for a, b in pieces:
        A[0, a:b, :, : b - a] = 0.3 * randn(rng("tril", a, b), b - a, 2, b - a)
        A[0, a:b] = A[0, a:b].transpose(0, 1).tril(-1).transpose(0, 1)
    before = A.clone()
    inverse = gdn_ref.solve_tril(A, cu_seqlens=cu)
    assert torch.equal(A, before) and inverse.shape == A.shape
    for a, b in pieces:
        for h in range(2):
            n = b - a
            exact = torch.linalg.inv(torch.eye(n, dtype=torch.float64) + A[0, a:b, h, :n])
            error = (inverse[0, a:b, h, :n].double() - exact).norm() / exact.norm()
            assert error < (1e-12 if inverse.dtype == torch.float64 else 1e-5)
            assert torch.equal(inverse[0, a:b, h], inverse[0, a:b, h].tril())


@pytest.mark.parametrize("C", [16, 64, 128])
def test_solve_tril_of_repeated_keys(C):
    """L all ones below the diagonal: its powers pass 1e18 at C = 64, the inverse is bidiagonal with 1 and -1."""
    A = torch.ones(C, C).tril(-1)[None, :, None, :].float()
    inverse = gdn_ref.solve_tril(A)[0, :, 0]
    exact = torch.eye(C) - torch.diag(torch.ones(C - 1), -1)
    torch.testing.assert_close(inverse, exact, rtol=0, atol=1e-6)


@on_stages
@pytest.mark.parametrize("gated", [True, False])
def test_recompute_w_u_is_w_and_u(T, C, lengths, gated):
    """w = A (beta 2^g k), u = A (beta v): the layout and the meaning that the Megatron page documents."""
    x, cu, pieces = stage_inputs(T, C, lengths)
    G2 = gdn_ref.chunk_local_cumsum(x["g"], C, scale=LOG2E, cu_seqlens=cu) if gated else None
    A = gdn_ref.solve_tril(
        gdn_ref.chunk_scaled_dot_kkt_fwd(k=x["k"], g=G2, beta=x["beta"], cu_seqlens=cu, chunk_size=C), cu_seqlens=cu
    )
    w, u = gdn_ref.recompute_w_u_fwd(x["k"], x["v"], x["beta"], A, g=G2, cu_seqlens=cu)
    assert w.shape == (1, x["k"].shape[1], 2, 8) and u.shape == x["v"].shape and u.dtype == x["v"].dtype
    for a, b in pieces:
        for h in range(2):
            A_h, beta = A[0, a:b, h, : b - a].double(), x["beta"][0, a:b, h, None]
            gamma = torch.exp2(G2[0, a:b, h, None].double()) if gated else 1.0
            torch.testing.assert_close(
                w[0, a:b, h].double(), A_h @ (beta * gamma * x["k"][0, a:b, 0]), rtol=1e-5, atol=1e-6
            )
            torch.testing.assert_close(u[0, a:b, h].double(), A_h @ (beta * x["v"][0, a:b, h]), rtol=1e-5, atol=1e-6)


def test_recompute_w_u_takes_any_lower_A_not_only_an_inverse():
    """The stage applies the A it is given: an A of the caller's own, ragged end included."""
    T, C = 23, 16
    x, _, pieces = stage_inputs(T, C)
    A = torch.zeros(1, T, 2, C, dtype=torch.float64)
    for a, b in pieces:
        A[0, a:b, :, : b - a] = randn(rng("anyA", a), b - a, 2, b - a)
    w, u = gdn_ref.recompute_w_u_fwd(x["k"], x["v"], x["beta"], A)
    for a, b in pieces:
        torch.testing.assert_close(
            u[0, a:b, 1], A[0, a:b, 1, : b - a] @ (x["beta"][0, a:b, 1, None] * x["v"][0, a:b, 1])
        )
        torch.testing.assert_close(
            w[0, a:b, 1], A[0, a:b, 1, : b - a] @ (x["beta"][0, a:b, 1, None] * x["k"][0, a:b, 0])
        )


def test_the_public_stages_compose_to_the_whole():
    """U - W S_0 and the two closing lines of chapter 5 in plain torch give the op's o and state."""
    C, T = 16, 16
    x = make(T, 1, 2, 8, 6, decays="strong", dtype=torch.float64)
    G2 = gdn_ref.chunk_local_cumsum(x["g"], C, scale=LOG2E)
    A = gdn_ref.solve_tril(gdn_ref.chunk_scaled_dot_kkt_fwd(k=x["k"], g=G2, beta=x["beta"], chunk_size=C))
    w, u = gdn_ref.recompute_w_u_fwd(x["k"], x["v"], x["beta"], A, g=G2)
    o, state = recurrence(**x)
    for h in range(2):
        S0, q, k = x["initial_state"][0, h], x["q"][0, :, 0], x["k"][0, :, 0]
        gamma, pair = torch.exp2(G2[0, :, h, None]), pair_decay(x["g"][0, :, h])
        E = u[0, :, h] - w[0, :, h] @ S0
        torch.testing.assert_close(8**-0.5 * (gamma * (q @ S0) + (q @ k.T * pair) @ E), o[0, :, h])
        torch.testing.assert_close(gamma[-1] * S0 + (pair[-1, :, None] * k).T @ E, state[0, h])


@pytest.mark.parametrize(
    "lengths, C", [((70, 1, 63, 130), 64), ((0, 16, 0), 16), ((0,), 64), ((1,) * 5, 32), ((129,), 64)], ids=str
)
def test_prepare_chunk_indices_lists_sequence_and_chunk(lengths, C):
    indices = gdn_ref.prepare_chunk_indices(offsets(lengths), C)
    expected = [(n, c) for n, length in enumerate(lengths) for c in range(math.ceil(length / C))]
    assert [tuple(row) for row in indices.tolist()] == expected
    assert indices.shape == (len(expected), 2) and not indices.is_floating_point()


def test_chunk_indices_made_beforehand_change_nothing():
    C = 16
    x, cu, _ = stage_inputs(C=C, lengths=(16, 0, 17, 7))
    A = gdn_ref.solve_tril(
        gdn_ref.chunk_scaled_dot_kkt_fwd(k=x["k"], beta=x["beta"], cu_seqlens=cu, chunk_size=C), cu_seqlens=cu
    )
    indices = gdn_ref.prepare_chunk_indices(cu, C)
    derived = gdn_ref.recompute_w_u_fwd(x["k"], x["v"], x["beta"], A, cu_seqlens=cu)
    given = gdn_ref.recompute_w_u_fwd(x["k"], x["v"], x["beta"], A, cu_seqlens=cu, chunk_indices=indices)
    assert all(torch.equal(a, b) for a, b in zip(derived, given, strict=True))


BAD_STAGE = {
    "k-heads": ("k", {"k": torch.zeros(1, 20, 3, 8)}),
    "k-rank": ("k", {"k": torch.zeros(20, 1, 8)}),
    "k-tokens": ("k", {"k": torch.zeros(1, 19, 1, 8)}),
    "v-tokens": ("v", {"v": torch.zeros(1, 19, 2, 6)}),
    "v-heads": ("v", {"v": torch.zeros(1, 20, 1, 6)}),
    "beta-heads": ("beta", {"beta": torch.zeros(1, 20, 1)}),
    "A-rank": ("A", {"A": torch.zeros(1, 20, 16)}),
    "A-heads": ("A", {"A": torch.zeros(1, 20, 1, 16)}),
    "g-heads": ("g", {"g": torch.zeros(1, 20, 1)}),
    "g-integers": ("g", {"g": torch.zeros(1, 20, 2, dtype=torch.int64)}),
    "cu-beyond": ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 21])}),
    "cu-decreasing": ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 12, 7])}),
    "cu-float": ("cu_seqlens", {"cu_seqlens": torch.tensor([0.0, 20.0])}),
}


@pytest.mark.parametrize("case", BAD_STAGE)
def test_a_stage_refuses_what_does_not_fit_by_name(case):
    """The peers' recompute_w_u_fwd checks nothing and reads wrong rows; the stages here are public and check."""
    name, change = BAD_STAGE[case]
    x = {"k": torch.zeros(1, 20, 1, 8), "v": torch.zeros(1, 20, 2, 6), "beta": torch.zeros(1, 20, 2)}
    x |= {"A": torch.zeros(1, 20, 2, 16), "g": torch.zeros(1, 20, 2)}
    kind = (TypeError, ValueError) if case.endswith(("float", "integers")) else ValueError
    with pytest.raises(kind, match=rf"\b{name}\b"):
        gdn_ref.recompute_w_u_fwd(**(x | change))


def test_the_other_stages_check_too():
    k, g, A = torch.zeros(1, 20, 1, 8), torch.zeros(1, 20, 2), torch.zeros(1, 20, 2, 16)
    for name, call in {
        "g": lambda: gdn_ref.chunk_local_cumsum(g[0], 16),
        "chunk_size": lambda: gdn_ref.chunk_local_cumsum(g, 0),
        "beta": lambda: gdn_ref.chunk_scaled_dot_kkt_fwd(k, g, g[..., :1]),
        "A": lambda: gdn_ref.solve_tril(A[0]),
        "cu_seqlens": lambda: gdn_ref.solve_tril(A, torch.tensor([1, 20])),
    }.items():
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            call()


# ---------------------------------------------------------------- gradients


def small(lengths=None, **options):
    x = make(5, 1, 2, 3, 2, lengths=lengths, dtype=torch.float64, **options)
    return [x[n].requires_grad_() for n in NAMES], x.get("cu_seqlens")


@pytest.mark.parametrize("decays, lengths", [("ordinary", None), ("reset", None), ("slow", (3, 0, 2))], ids=str)
def test_gradcheck_of_the_chunk_form(decays, lengths):
    inputs, cu = small(lengths, decays=decays)
    assert decays != "reset" or inputs[3].isinf().any()

    def f(q, k, v, g, beta, S):
        return chunked(q, k, v, g, beta, initial_state=S, cu_seqlens=cu, chunk_size=16)

    assert torch.autograd.gradcheck(f, inputs)
    if decays != "reset":  # the second derivative of a numerical difference of -inf is not a number
        assert torch.autograd.gradgradcheck(f, inputs)


def test_gradcheck_over_several_chunks():
    x = make(18, 1, 1, 2, 2, dtype=torch.float64)
    inputs = [x[n].requires_grad_() for n in NAMES]
    assert torch.autograd.gradcheck(
        lambda q, k, v, g, beta, S: chunked(q, k, v, g, beta, initial_state=S, chunk_size=16), inputs
    )


def test_gradcheck_with_gates_and_norms_inside():
    gen = rng("gradcheck raw")
    inputs = [
        randn(gen, *shape).requires_grad_()
        for shape in ((1, 4, 1, 3), (1, 4, 1, 3), (1, 4, 2, 2), (1, 4, 2), (1, 4, 2), (2,), (2,))
    ]

    def f(q, k, v, a, b, A_log, dt_bias):
        return chunked(
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
            allow_neg_eigval=True,
            chunk_size=16,
        )

    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs)


@pytest.mark.parametrize("backend", ["torch", "recurrent"])
@pytest.mark.parametrize("which", ["o", "state", "strided", "expanded"])
def test_upstream_gradients_of_every_form(which, backend):
    """do or the state's gradient missing, strided, or expanded from one number as .sum() and .mean() give it."""
    x = make(70, 2, 4, 8, 6, decays="ordinary")

    def grads(fn, x):
        leaves = {n: t.detach().requires_grad_() for n, t in x.items()}
        o, S = fn(**leaves)
        if which == "o":
            outputs, upstream = [o], [randn(rng("do"), *o.shape).to(o.dtype)]
        elif which == "state":
            outputs, upstream = [S], [randn(rng("dS"), *S.shape).to(S.dtype)]
        elif which == "strided":
            outputs = [o, S]
            upstream = [randn(rng("do"), *reversed(t.shape)).to(t.dtype).permute(3, 2, 1, 0) for t in outputs]
        else:
            outputs, upstream = [o, S], [torch.ones((), dtype=t.dtype).expand(t.shape) for t in (o, S)]
        d = torch.autograd.grad(outputs, list(leaves.values()), upstream, allow_unused=True)
        return {"d_" + n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), d, strict=True)}

    def op(q, k, v, g, beta, initial_state):
        return chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=initial_state, output_final_state=True, backend=backend
        )

    assert_close(grads(op, x), grads(recurrence, {n: t.double() for n, t in x.items()}))


@pytest.mark.parametrize("backend", ["torch", "recurrent"])
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_checkpoint_gives_the_same_gradients(backend, chunk_size):
    x = make(130, 1, 2, 8, 6)
    leaves = [x[n].requires_grad_() for n in NAMES]

    def f(q, k, v, g, beta, S):
        return chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=S, output_final_state=True, chunk_size=chunk_size, backend=backend
        )

    def grads(outputs):
        return torch.autograd.grad(sum(t.square().sum() for t in outputs), leaves)

    cold = grads(checkpoint(f, *leaves, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(cold, grads(f(*leaves)), strict=True))


def test_no_grad_gives_the_same_numbers_and_no_graph():
    x = make(130, 1, 2, 8, 6)
    with_grad = run(chunked, x)
    with torch.no_grad():
        o, state = chunked(**x)
    assert not o.requires_grad and torch.equal(o, with_grad["o"]) and torch.equal(state, with_grad["state"])


@pytest.mark.parametrize("backend", ["torch", "recurrent"])
def test_inference_mode_and_packed_without_grad(backend):
    x = make(H=1, HV=2, lengths=(70, 0, 1, 130, 64))
    expected = recurrence(**x)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            first = chunk_gated_delta_rule(**x, output_final_state=True, backend=backend)
            again = chunk_gated_delta_rule(**x, output_final_state=True, backend=backend)
        for o, S in (first, again):  # nothing of the second call was written into the first one's results
            assert_close({"o": o, "state": S}, {"o": expected[0], "state": expected[1]}, cu_seqlens=x["cu_seqlens"])


@pytest.mark.parametrize("backend", ["torch", "recurrent"])
def test_autocast_does_not_reach_inside(backend):
    """Under autocast every matrix product would be rounded to bfloat16; state, decays and inverse are float32."""
    x = make(130, 1, 2)

    def fn(**t):  # the backward pass runs outside, as torch advises
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return chunk_gated_delta_rule(**t, output_final_state=True, backend=backend)

    results = run(fn, x)
    assert results["o"].dtype == results["state"].dtype == torch.float32
    assert_close(results, reference(x))


@pytest.mark.parametrize("backend", ["torch", "recurrent"])
@pytest.mark.parametrize("lengths", [None, (40, 0, 30)], ids=["plain", "packed"])
def test_the_default_dtype_plays_no_part(lengths, backend):
    """A notebook with float64 as default gives float32 inputs the same float32 results, bit for bit."""
    x = make(70, 1, 2, lengths=lengths)

    def fn(**t):
        return chunk_gated_delta_rule(**t, output_final_state=True, backend=backend)

    plain = run(fn, x)
    torch.set_default_dtype(torch.float64)
    try:
        other = run(fn, x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(other[n].dtype == t.dtype and torch.equal(other[n], t) for n, t in plain.items())


def test_independence_of_sequences_heads_and_the_future():
    """d o[b,t,h] reaches only sequence b, head h (and its key head) and tokens up to t."""
    x = make(40, 2, 4, 6, 5, B=2)
    leaves = {n: t.detach().requires_grad_() for n, t in x.items()}
    o, _ = chunked(**leaves, chunk_size=16)
    d = dict(zip(leaves, torch.autograd.grad(o[1, 20, 3].sum(), list(leaves.values())), strict=True))
    for n, t in d.items():
        assert not t[0].any(), n
        if n != "initial_state":
            assert not t[1, 21:].any() and not t[1, :, : (1 if n in "qk" else 3)].any() and t[1, :21].any(), n
    assert d["initial_state"][1, 3].any() and not d["initial_state"][1, :3].any()


def test_relative_l2_is_per_sequence_and_head():
    expected = torch.ones(1, 8, 2, 3)
    actual = expected.clone()
    actual[:, 5:, 1] = 2.0
    errors = relative_l2(actual, expected, offsets((5, 3)))
    assert errors.tolist() == [[0.0, 0.0], [0.0, 1.0], [0.0, 0.0]]


def test_unit_rows_are_what_the_makers_promise():
    for kind in KEYS:
        k = make(12, 2, keys=kind)["k"]
        assert (k.norm(dim=-1) - 1).abs().max() < 1e-6
    assert unit(torch.ones(1, 4)).tolist() == [[0.5] * 4]

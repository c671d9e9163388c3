"""The hand-written backward pass of the chunkwise form: its numbers, its zeros, what it keeps, and its own gradient."""

import numpy as np
import pytest
import torch
from helpers import assert_close, check, make, peak_memory, randn, recurrence, reference, rng, run
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from gdn_ref import chunk_gated_delta_rule, chunkwise, exact

NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def chunked(q, k, v, g, beta, initial_state=None, **options):
    options = {"output_final_state": True, "backend": "torch", **options}
    return chunk_gated_delta_rule(q, k, v, g, beta, initial_state=initial_state, **options)


def leaves_of(x, dtype=torch.float64):
    return {n: x[n].to(dtype).detach().requires_grad_() for n in NAMES if x.get(n) is not None}


# ---------------------------------------------------------------- numbers


CASES = {
    "one-short-chunk": {"T": 3},
    "chunks": {"T": 11, "chunk_size": 4},
    "values-share-keys": {"T": 7, "HV": 3, "chunk_size": 4},
    "batch": {"T": 6, "B": 2, "chunk_size": 4},
    "packed": {"lengths": (5, 0, 2, 4), "chunk_size": 4},
    "packed-of-one": {"lengths": (1, 1, 1), "HV": 2},
    "single-tokens": {"T": 4, "chunk_size": 1},
    "resets": {"T": 9, "decays": "reset", "chunk_size": 4},
}


@pytest.mark.parametrize("case", CASES)
def test_gradcheck_of_every_input(case):
    options = dict(CASES[case])
    size = options.pop("chunk_size", 64)
    x = make(**{"H": 1, "HV": 1, "K": 3, "V": 2, "dtype": torch.float64, **options})

    def f(*inputs):
        return chunked(*inputs, cu_seqlens=x.get("cu_seqlens"), chunk_size=size, scale=0.7)

    assert gradcheck(f, tuple(leaves_of(x).values()))


@pytest.mark.parametrize("wrt", NAMES)
def test_gradcheck_of_each_input_alone(wrt):
    x = make(9, 1, 2, 3, 2, dtype=torch.float64)

    def f(value):
        return chunked(**(x | {wrt: value}), chunk_size=4)

    assert gradcheck(f, x[wrt].clone().requires_grad_())


@pytest.mark.parametrize("wrt", ["a", "b", "A_log", "dt_bias", "q", "k", "all"])
def test_gradcheck_through_the_raw_gates_and_the_norm(wrt):
    gen = rng("raw backward")
    shapes = {"q": (1, 6, 1, 3), "k": (1, 6, 1, 3), "v": (1, 6, 2, 2), "a": (1, 6, 2), "b": (1, 6, 2)}
    x = {n: randn(gen, *shape) for n, shape in (shapes | {"A_log": (2,), "dt_bias": (2,)}).items()}
    names = list(x) if wrt == "all" else [wrt]

    def f(*values):
        given = x | dict(zip(names, values, strict=True))
        flags = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True}
        a, b = given.pop("a"), given.pop("b")
        return chunked(**given, g=a, beta=b, **flags, allow_neg_eigval=True, chunk_size=4)

    assert gradcheck(f, tuple(x[n].clone().requires_grad_() for n in names))


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 64])
def test_the_exact_backward_says_the_same(chunk_size):
    """exact.chunkwise_backward, which is proved over the rationals, on the same float64 numbers."""
    x = make(10, 1, K=4, V=3, decays="slow", dtype=torch.float64)
    found = run(chunked, x, chunk_size=chunk_size, scale=1.0)
    o, state = chunked(**x, scale=1.0)
    do, dstate = (t.numpy() for t in _upstream(o, state))
    q, k, v, g, beta = (x[n][0, :, 0].numpy() for n in NAMES[:5])
    S0 = x["initial_state"][0, 0].numpy()
    wanted = exact.chunkwise_backward(q, k, v, np.exp(g), beta, S0, do[0, :, 0], dstate[0, 0], chunk_size)
    for name, d in zip(NAMES, wanted, strict=True):
        mine = found["d_" + name]
        torch.testing.assert_close(mine[0, 0] if name == "initial_state" else mine[0, :, 0], torch.from_numpy(d))


def _upstream(o, state):
    gen = rng(("upstream",), tuple(o.shape))
    return (randn(gen, *x.shape).bfloat16().double() for x in (o, state))


@pytest.mark.parametrize("form", ["strided", "expanded", "o-only", "state-only"])
@pytest.mark.parametrize("lengths", [None, (40, 0, 1, 29)], ids=["plain", "packed"])
def test_upstream_gradients_in_any_form(form, lengths):
    x = make(70, 2, 4, 8, 6, lengths=lengths)
    cu = x.pop("cu_seqlens", None)

    def gradients(fn, x):
        leaves = {n: t.detach().requires_grad_() for n, t in x.items()}
        results = fn(**leaves, cu_seqlens=cu)
        gen = rng("forms", form)
        up = [randn(gen, *reversed(t.shape)).to(t.dtype).permute(3, 2, 1, 0) for t in results]
        if form == "expanded":
            up = [torch.ones((), dtype=t.dtype).expand(t.shape) for t in results]
        chosen = {"o-only": slice(0, 1), "state-only": slice(1, 2)}.get(form, slice(0, 2))
        d = torch.autograd.grad(results[chosen], list(leaves.values()), up[chosen], allow_unused=True)
        return {"d_" + n: torch.zeros_like(t) if y is None else y for (n, t), y in zip(leaves.items(), d, strict=True)}

    wide = {n: t.double() for n, t in x.items()}
    assert_close(gradients(chunked, x), gradients(recurrence, wide), cu_seqlens=cu)


@pytest.mark.parametrize("rows", [1, 6, 40])
def test_however_many_chunks_are_taken_together(rows, monkeypatch):
    """Groups of one step, of some, of all; packed sequences that end within a group and between two."""
    monkeypatch.setattr(chunkwise, "GROUP_ROWS", rows)
    check(chunked, make(H=1, HV=2, lengths=(150, 17, 33, 0, 64), keys="correlated"), chunk_size=16)
    check(chunked, make(90, 1, 2, B=2), chunk_size=16)


def test_gradients_in_half_precision_are_the_rounded_ones():
    x = make(80, 1, 2)
    x |= {n: x[n].bfloat16() for n in ("q", "k", "v", "g", "beta", "initial_state")}
    found = run(chunked, x)
    assert all(found["d_" + n].dtype == torch.bfloat16 for n in NAMES)
    assert_close(found, reference(x), {"state": 1e-5, "*": 5e-3})


def test_the_same_bits_every_time():
    for x in (make(200, 2, 6, keys="correlated"), make(H=1, HV=3, lengths=(70, 0, 1, 64))):
        first, second = run(chunked, x), run(chunked, x)
        assert all(torch.equal(first[n], second[n]) for n in first)


# ---------------------------------------------------------------- zeros that are exact


def test_an_empty_memory_has_nothing_to_forget():
    """dg of the first token of a sequence that starts from nothing is 0, not nearly 0 (9.14)."""
    x = make(H=2, HV=4, lengths=(70, 1, 65), state=False)
    d = run(chunked, x)["d_g"]
    assert not d[0, [0, 70, 71]].any() and d[0, 1:70].all()


def test_outputs_owe_nothing_to_later_tokens():
    x = make(150, 1, 2, keys="correlated")
    leaves = leaves_of(x, torch.float32)
    for t in (0, 1, 63, 64, 100):
        o, _ = chunked(**leaves)
        d = torch.autograd.grad(o[:, :t].square().sum(), list(leaves.values()))
        assert not any(y[:, t:].any() for n, y in zip(leaves, d, strict=True) if n != "initial_state")


@pytest.mark.parametrize("g", [float("-inf"), -3e38, -200.0])
def test_nothing_crosses_a_reset(g):
    x = make(140, 1, 2, decays="slow")
    x["g"][:, 70] = g
    leaves = leaves_of(x, torch.float32)
    o, state = chunked(**leaves)
    d = dict(zip(leaves, torch.autograd.grad(o[:, 70:].sum() + state.sum(), list(leaves.values())), strict=True))
    assert not d["initial_state"].any() and not d["g"][:, :71].any()
    assert not any(d[n][:, :70].any() for n in ("q", "k", "v", "beta"))
    assert all(y.isfinite().all() for y in d.values())


def test_strong_decays_keep_the_digits_of_a_small_gradient():
    """e^-30 a token: a sum over rows less one over columns would leave nothing but rounding of so small a dg (9.17)."""
    x = make(130, 1, 2, decays="deep")
    found, wanted = run(chunked, x)["d_g"].double(), reference(x)["d_g"]
    assert wanted.abs().max() < 1e-6
    assert ((found - wanted).abs() <= 1e-4 * wanted.abs() + 1e-30).all()  # every one, not their norm


# ---------------------------------------------------------------- what it keeps, and how it is called


def test_one_node_in_the_graph():
    x = leaves_of(make(150, 1, 2), torch.float32)
    o, _ = chunked(**x)
    assert type(o.grad_fn).__name__ == "ChunkwiseDeltaRuleBackward"
    assert {f.name() for f, _ in o.grad_fn.next_functions if f} == {"torch::autograd::AccumulateGrad"}


def kept_bytes(T, K=64, **options):
    x = leaves_of(make(T, 1, 1, K, K, **options), torch.float32)
    inputs, sizes = {t.untyped_storage().data_ptr() for t in x.values()}, {}

    def note(t):
        if t.untyped_storage().data_ptr() not in inputs:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        chunked(**x)
    return sum(sizes.values())


def test_keeps_a_state_a_chunk_and_some_rows_a_token():
    """Of a token the error, V wide, and four rows of matrices, C wide; of a chunk of 64 the state, K by V."""
    K = C = 64
    assert kept_bytes(1024, K) == 4 * (1024 // C * K * K + 1024 * (K + 4 * C))
    assert kept_bytes(1024, K) < 1024 * K * K * 4 / 8  # what the token recurrence keeps of states alone, over eight


def test_nothing_is_kept_where_no_gradient_is_wanted():
    x = make(512, 1, 2, 64, 64)
    with peak_memory() as without:
        chunked(**x)
    with peak_memory() as with_, torch.no_grad():
        chunked(**leaves_of(x, torch.float32))
    assert with_.peak == without.peak


@pytest.mark.parametrize("lengths", [None, (70, 0, 3, 64)], ids=["plain", "packed"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_from_cold(lengths, reentrant):
    x = make(130, 1, 2, 8, 6, lengths=lengths)
    cu, leaves = x.pop("cu_seqlens", None), leaves_of(x, torch.float32)

    def f(*inputs):
        return chunked(*inputs, cu_seqlens=cu)

    def gradients(results):
        return torch.autograd.grad(sum(t.square().sum() for t in results), list(leaves.values()))

    if reentrant:
        sum(t.square().sum() for t in checkpoint(f, *leaves.values(), use_reentrant=True)).backward()
        cold = [t.grad for t in leaves.values()]
    else:
        cold = gradients(checkpoint(f, *leaves.values(), use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(cold, gradients(f(*leaves.values())), strict=True))


def test_autocast_does_not_reach_the_backward_pass():
    x = make(130, 1, 2)
    leaves = leaves_of(x, torch.float32)

    def gradients(context):
        o, state = chunked(**leaves)
        with context:
            return torch.autograd.grad(o.square().sum() + state.sum(), list(leaves.values()))

    plain, cast = gradients(torch.enable_grad()), gradients(torch.autocast("cpu", dtype=torch.bfloat16))
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_inputs_and_upstream_gradients_are_not_written():
    x = make(130, 1, 2)
    leaves = leaves_of(x, torch.float32)
    o, state = chunked(**leaves)
    up = [torch.ones_like(o), torch.ones_like(state)]
    first = torch.autograd.grad((o, state), list(leaves.values()), up, retain_graph=True)
    second = torch.autograd.grad((o, state), list(leaves.values()), up)  # and nothing that was kept is, either
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(x[n], t) for n, t in leaves.items()) and all((t == 1).all() for t in up)


@pytest.mark.parametrize("T", [64, 70, 130])
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_dg_of_a_few_strong_decays_between_weak_ones(T, chunk_size):
    """Next to nothing passes across these tokens, and their dg is a millionth of the others': sums of rows less sums of
    columns (9.17) leave a tenth of it wrong, which no norm over all tokens shows. So these are compared alone."""
    x = make(T, 1, 2)
    x["g"][:] = -0.01
    x["g"][:, 7::8] = -20.0
    found, expected = (d["d_g"].double()[:, 7::8] for d in (run(chunked, x, chunk_size=chunk_size), reference(x)))
    assert_close({"d_g": found}, {"d_g": expected})


# ---------------------------------------------------------------- the second derivative


@pytest.mark.parametrize("lengths", [None, (3, 0, 2)], ids=["plain", "packed"])
def test_gradgradcheck(lengths):
    x = make(5, 1, 2, 3, 2, lengths=lengths, dtype=torch.float64)

    def f(*inputs):
        return chunked(*inputs, cu_seqlens=x.get("cu_seqlens"), chunk_size=2)

    assert gradgradcheck(f, tuple(leaves_of(x).values()))


def test_a_gradient_that_will_be_differentiated_is_the_same_gradient():
    """It comes from the token recurrence, which keeps a state a token; so only create_graph=True pays for it."""
    leaves = leaves_of(make(70, 1, 2, 8, 6, decays="reset"))
    o, state = chunked(**leaves)
    loss = o.square().sum() + state.square().sum()
    plain = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    again = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    assert not any(t.requires_grad for t in plain) and all(t.requires_grad for t in again)
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b)
    penalty = torch.autograd.grad(sum(t.square().sum() for t in again), list(leaves.values()))
    assert all(t.isfinite().all() and t.any() for t in penalty)


def test_some_inputs_alone_can_be_differentiated_twice():
    x = make(12, 1, 2, 4, 3, dtype=torch.float64)
    k = x["k"].clone().requires_grad_()
    o, _ = chunked(**(x | {"k": k}), output_final_state=False)
    (dk,) = torch.autograd.grad(o.square().sum(), k, create_graph=True)
    (again,) = torch.autograd.grad(dk.square().sum(), k)
    assert again.shape == k.shape and again.any()

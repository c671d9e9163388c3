"""The token recurrence of the package: the oracle itself held against the definition, and its float32 form."""

import pytest
import torch
from helpers import (
    DECAYS,
    FP32_BOUND,
    assert_close,
    case_id,
    check,
    make,
    offsets,
    pairwise,
    randn,
    recurrence,
    reference,
    rng,
    run,
)

from gdn_ref import fused_recurrent_gated_delta_rule
from gdn_ref.recurrent import recurrent_gated_delta_rule


def recurrent(q, k, v, g, beta, scale=None, initial_state=None, cu_seqlens=None):
    return fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        backend="recurrent",
    )


def test_the_definition_itself_on_one_head():
    """S_t = alpha (I - beta k'k) S + beta k'v with the identity written out: checks the oracle of the tests too."""
    x = make(T=9, H=1, K=4, V=3, dtype=torch.float64)
    S, eye = x["initial_state"][0, 0], torch.eye(4, dtype=torch.float64)
    rows = []
    for t in range(9):
        q, k, v, g, beta = (x[n][0, t, 0] for n in ("q", "k", "v", "g", "beta"))
        S = g.exp() * (eye - beta * torch.outer(k, k)) @ S + beta * torch.outer(k, v)
        rows.append(4**-0.5 * q @ S)
    for form in (recurrence, recurrent):
        o, state = form(**x)
        torch.testing.assert_close(o[0, :, 0], torch.stack(rows), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(state[0, 0], S, rtol=1e-13, atol=1e-13)


ROWS = pairwise(
    T=(0, 1, 2, 17, 64),
    heads=((1, 1), (2, 4), (1, 3)),
    KV=((8, 8), (12, 5), (1, 9)),
    keys=("random", "repeated"),
    decays=DECAYS,
    state=(True, False),
)


@pytest.mark.parametrize("row", ROWS, ids=case_id)
def test_float32_recurrence_against_float64(row):
    (H, HV), (K, V) = row["heads"], row["KV"]
    x = make(row["T"], H, HV, K, V, B=2, keys=row["keys"], decays=row["decays"], state=row["state"])
    check(recurrent, x)


@pytest.mark.parametrize("lengths", [(3, 0, 5), (0, 0), (1, 1, 1, 1), (0, 7)], ids=str)
def test_float64_recurrence_packed(lengths):
    x = make(H=2, HV=4, K=5, V=3, lengths=lengths, decays="reset", dtype=torch.float64)
    assert_close(run(recurrent, x), reference(x), 1e-12, x["cu_seqlens"])


def test_the_function_below_the_op_in_float64():
    x = make(H=1, HV=2, K=4, V=3, lengths=(2, 4), dtype=torch.float64)
    o, S = recurrent_gated_delta_rule(
        x["q"], x["k"], x["v"], x["g"], x["beta"], 0.5, x["initial_state"], x["cu_seqlens"]
    )
    o_ref, S_ref = recurrence(**x, scale=0.5)
    assert S.shape == (2, 2, 4, 3)
    assert_close({"o": o, "state": S}, {"o": o_ref, "state": S_ref}, 1e-13, x["cu_seqlens"])


def test_defaults_no_decay_and_full_write():
    """g=None is alpha = 1 and beta=None is beta = 1."""
    x = make(T=20, H=2, K=8, V=6)
    ones, zeros = torch.ones_like(x["beta"]), torch.zeros_like(x["g"])
    for backend in ("recurrent", "torch"):
        bare, state = fused_recurrent_gated_delta_rule(x["q"], x["k"], x["v"], output_final_state=True, backend=backend)
        full = recurrence(x["q"], x["k"], x["v"], zeros, ones)
        assert_close({"o": bare, "state": state}, {"o": full[0], "state": full[1]}, FP32_BOUND)


def test_gradients_by_gradcheck_and_their_gradients():
    x = make(T=5, H=1, HV=2, K=3, V=2, dtype=torch.float64)
    inputs = [x[n].requires_grad_() for n in ("q", "k", "v", "g", "beta", "initial_state")]

    def f(q, k, v, g, beta, S):
        return recurrent(q, k, v, g, beta, initial_state=S)

    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs)


def test_packed_gradcheck():
    x = make(H=1, HV=2, K=3, V=2, lengths=(3, 0, 2), dtype=torch.float64)
    inputs = [x[n].requires_grad_() for n in ("q", "k", "v", "g", "beta", "initial_state")]

    def f(q, k, v, g, beta, S):
        return recurrent(q, k, v, g, beta, initial_state=S, cu_seqlens=x["cu_seqlens"])

    assert torch.autograd.gradcheck(f, inputs)


def test_recurrence_leaves_its_inputs_alone():
    x = make(T=10, H=2, lengths=(4, 6))
    before = {n: t.clone() for n, t in x.items()}
    recurrent(**x)
    assert all(torch.equal(before[n], t) for n, t in x.items())


def test_tokens_of_no_sequence_give_zero():
    gen = rng("beyond")
    q = k = randn(gen, 1, 9, 1, 4)
    v, gates = randn(gen, 1, 9, 1, 4), -torch.ones(1, 9, 1)
    o, _ = recurrent(q, k, v, gates, gates.abs(), cu_seqlens=offsets((2, 3)))
    assert o[:, :5].abs().min() > 0 and torch.equal(o[:, 5:], torch.zeros(1, 4, 1, 4))

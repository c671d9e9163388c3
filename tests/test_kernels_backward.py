"""The fused Triton backward against float64 autograd of the token recurrence, interpreted where there is no GPU."""

import gc
import math
import threading

import helpers as h
import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="Triton is not installed, so its kernels are not tested here; see `make kernels`")

from test_kernels_forward import (
    BOUNDS,
    DEVICE,
    GPU,
    HALF,
    Waits,
    among_nan,
    far_apart,
    fits,
    for_this_card,
    on_gpu,
    to_device,
)

import gdn_ref
from gdn_ref.kernels import launch, launch_backward

GRADIENTS = ("d_q", "d_k", "d_v", "d_g", "d_beta", "d_A_log", "d_dt_bias", "d_initial_state")
CHECKED = BOUNDS | {torch.bfloat16: 2e-2, torch.float16: 2e-2}


def backward(x, do, dstate, **options):
    """{name: gradient} of the kernels, on the CPU, for a dict of inputs as helpers.make gives it."""
    x = to_device(x)
    scale = options.pop("scale", x["q"].shape[-1] ** -0.5)
    do, dstate = (t if t is None else t.to(DEVICE) for t in (do, dstate))
    found = launch_backward.chunk_backward(
        x["q"], x["k"], x["v"], x["g"], x["beta"], scale, x.get("initial_state"), x.get("cu_seqlens"), do, dstate,
        **options,
    )  # fmt: skip
    return {n: t.cpu() for n, t in zip(GRADIENTS, found, strict=True) if t is not None}


def upstream(x):
    """Gradients of o and of the final state, as an op hands them over: in v's dtype, and in float32."""
    N = len(x["q"]) if x.get("cu_seqlens") is None else len(x["cu_seqlens"]) - 1
    state = torch.empty(N, x["v"].shape[2], x["q"].shape[3], x["v"].shape[3])
    do, dstate = h.upstream(x["v"], state)
    return do.to(x["v"].dtype), dstate.float()


def check(x, bound=None, **options):
    """Every gradient within the bound of the oracle's, per sequence and head, or as near as float32 comes."""
    expected = h.reference(x)
    found = backward(x, *upstream(x), **options)
    given = {"d_" + n for n in ("q", "k", "v", "g", "beta", "initial_state") if x.get(n) is not None}
    assert set(found) == given
    for name, gradient in found.items():
        assert gradient.dtype == x[name.removeprefix("d_")].dtype, name
    dtype = x["q"].dtype
    if bound:
        h.assert_close(found, {n: expected[n] for n in found}, bound, x.get("cu_seqlens"))
    elif dtype == torch.float32:
        h.assert_close_where_sums_cancel(found, expected, x, CHECKED[dtype])
    else:
        h.assert_close_for_dtype(found, expected, x, CHECKED[dtype])


# ---------------------------------------------------------------- values

SHAPES = h.pairwise(
    T=[1, 2, 16, 33, 64, 70],
    heads=[(1, 1), (1, 3), (2, 2)],
    KV=[(16, 16), (24, 60), (1, 8), (33, 1)],
    keys=h.KEYS,
    dtype=h.DTYPES,
)


@pytest.mark.parametrize("row", SHAPES, ids=h.case_id)
def test_shapes(row):
    (H, HV), (K, V) = row["heads"], row["KV"]
    check(h.make(row["T"], H, HV, K, V, keys=row["keys"], decays="ordinary", dtype=h.DTYPES[row["dtype"]]))


@pytest.mark.parametrize("decays", h.DECAYS)
@h.in_every_dtype
def test_decays(decays, dtype):
    """dg, too, however fast tokens decay."""
    x = h.make(40 if dtype == torch.float32 else 100, 1, 2, 16, 16, keys="correlated", decays=decays, dtype=dtype)
    x |= {n: x[n].float() for n in ("g", "beta")}  # whose gradients float16 may not hold, nor that of a state
    check(h.without(x, "initial_state") | {"initial_state": None} if dtype == torch.float16 else x)


@pytest.mark.parametrize("rate", [1.0, 4.0, 16.0])
def test_dg_under_strong_decay(rate):
    """A up to 16: within 2e-2 of float64 in 16 bits."""
    x = h.make(130, 1, 1, 32, 32, decays="none", dtype=HALF)
    gen = h.rng("rate", rate)
    x["g"] = -rate * torch.nn.functional.softplus(h.randn(gen, 1, 130, 1)).float()
    check(x | {"initial_state": x["initial_state"].float()}, bound=2e-2)


@pytest.mark.parametrize("rate", [8.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "16 bits"])
def test_dg_across_which_next_to_nothing_passes(rate, dtype):
    """At such tokens alone: beside the others' it is so small that the norm of all of dg does not see it. Sums of rows
    less sums of columns in float32 would leave rounding there, 1e-7 e^rate of it (9.17)."""
    x = h.make(70, 1, 2, 32, 32, decays="none", dtype=dtype)
    x["g"] = torch.full((1, 70, 2), -0.01)
    x["g"][:, 3::8] = -rate
    found, expected = (d["d_g"].double()[:, 3::8] for d in (backward(x, *upstream(x)), h.reference(x)))
    h.assert_close({"d_g": found}, {"d_g": expected}, CHECKED[dtype])


@pytest.mark.parametrize("rate", [40.0, 80.0])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "16 bits"])
def test_dg_across_which_less_passes_than_float64_resolves(rate, dtype):
    """There it has no digits: what is left of its neighbours' is rounding of float64, and stays that small."""
    x = h.make(70, 1, 2, 32, 32, decays="none", dtype=dtype)
    x["g"] = torch.full((1, 70, 2), -0.01)
    x["g"][:, 3::8] = -rate
    found = backward(x, *upstream(x))["d_g"].double()
    assert found[:, 3::8].abs().amax() < 1e-13 * found.abs().amax()


@pytest.mark.parametrize("K, V", [(128, 128), (256, 16), (16, 256), (192, 100)])
@h.in_every_dtype
def test_wide_heads(K, V, dtype):
    check(h.make(20, 1, 1, K, V, keys="correlated", dtype=dtype))


@pytest.mark.parametrize("segments", [None, 2])
@pytest.mark.parametrize("size", [1e-7, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "bf16"])
def test_gradients_of_any_size(size, dtype, segments):
    """Losses that are means have gradients that float16 would not hold: their size is taken out on the way."""
    x = h.make(70, 1, 2, 32, 16, dtype=dtype)
    do, dstate = upstream(x)
    one, other = (backward(x, do * s, dstate * s, segments=segments) for s in (1, size))
    h.assert_close({n: t / size for n, t in other.items()}, {n: t.double() for n, t in one.items()}, CHECKED[dtype])


def test_batches():
    check(h.make(33, 1, 2, 16, 20, B=3, decays="slow"))


# ---------------------------------------------------------------- packed sequences


@pytest.mark.parametrize("lengths", [[40, 1, 0, 33], [0, 0, 5], [1] * 5, [32, 64]], ids=str)
@h.in_every_dtype
def test_packed(lengths, dtype):
    check(h.make(H=1, HV=2, K=16, V=24, lengths=lengths, dtype=dtype))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_tokens_of_no_sequence_get_zero(index):
    x = h.make(100, 1, 2, 16, 24, state=False)
    for name in h.TOKEN_INPUTS:
        x[name][:, 60:] = float("nan")
    do, _ = upstream(x)
    do[:, 60:] = float("nan")
    cu = torch.tensor([0, 25, 60], dtype=index)
    found = backward(x | {"cu_seqlens": cu}, do, None)
    assert all((t[:, 60:] == 0).all() for t in found.values())
    within = {n: t[:, :60] for n, t in x.items() if t is not None}
    alone = backward(within | {"cu_seqlens": cu}, do[:, :60].contiguous(), None)
    assert all(torch.equal(found[n][:, :60], alone[n]) for n in alone)


def test_S09_more_than_65535_sequences_lie_on_the_first_axis_of_the_grid(monkeypatch):
    grids = []
    monkeypatch.setattr(launch.Launch, "__call__", lambda self, *_: grids.append(self.grid))
    x, N = h.make(1, 1, 1, 16, 16, state=False), 70_000
    backward(x | {"cu_seqlens": torch.zeros(N + 1, dtype=torch.int32)}, x["v"], None)
    assert len(grids) >= 6 and all(grid[1:] == (1, 1) for grid in grids)
    assert sum(grid[0] >= N for grid in grids) >= 6


@pytest.mark.parametrize("T, lengths", [(0, None), (0, [0, 0])])
def test_nothing_to_do(T, lengths):
    x = h.make(T, 1, 2, 16, 24)
    if lengths:
        x |= {"cu_seqlens": h.offsets(lengths), "initial_state": x["initial_state"].repeat(2, 1, 1, 1)}
    do, dstate = upstream(x)
    found = backward(x, do, dstate)
    assert torch.equal(found["d_initial_state"], dstate)
    assert all(found[n].shape == x[n[2:]].shape for n in found)


# ---------------------------------------------------------------- gates, norm, states, layouts


@pytest.mark.parametrize("allow_neg_eigval, bias, K, dtype, segments", [
    (False, True, 24, torch.float32, None), (True, False, 24, torch.float32, 2), (False, True, 70, HALF, None),
])  # fmt: skip
def test_raw_gates_and_norm(allow_neg_eigval, bias, K, dtype, segments):
    x = h.make(40, 1, 3, K, 16, dtype=dtype)
    gen = h.rng("raw gates", bias)
    raw = {"a": h.randn(gen, 1, 40, 3) * 2, "b": h.randn(gen, 1, 40, 3) * 2, "A_log": h.randn(gen, 3)}
    raw |= {"dt_bias": h.randn(gen, 3)} if bias else {}
    raw = {n: t.float() for n, t in raw.items()}
    x["q"], x["k"] = x["q"] * 3, x["k"] * 0.2

    def oracle(q, k, v, a, b, A_log, initial_state, dt_bias=torch.zeros(3)):  # noqa: B008
        g, beta = h.gates(a, b, A_log, dt_bias, 2.0 if allow_neg_eigval else 1.0)
        return h.recurrence(h.l2norm(q), h.l2norm(k), v, g, beta, scale=K**-0.5, initial_state=initial_state)

    expected = h.reference(h.without(x, "g", "beta") | raw, oracle)
    found = backward(
        x | {"g": raw["a"], "beta": raw["b"]}, *upstream(x), use_qk_l2norm=True, beta_is_raw=True,
        allow_neg_eigval=allow_neg_eigval, A_log=raw["A_log"].to(DEVICE),
        dt_bias=raw["dt_bias"].to(DEVICE) if bias else None, segments=segments,
    )  # fmt: skip
    found = {{"d_g": "d_a", "d_beta": "d_b"}.get(n, n): t for n, t in found.items()}
    h.assert_close(found, {n: expected[n] for n in found}, CHECKED[dtype])


@pytest.mark.parametrize("a, A_log", [(-200.0, 100.0), (0.0, 100.0), (-30.0, 0.0), (200.0, 0.0)])
def test_extreme_raw_gates_stay_finite(a, A_log):
    x = h.make(40, 1, 1, 16, 16)
    x["g"] = torch.full((1, 40, 1), a)
    found = backward(x, *upstream(x), A_log=torch.tensor([A_log]).to(DEVICE))
    assert all(t.isfinite().all() for t in found.values())


def test_gates_left_out():
    x = h.make(40, 1, 2, 16, 24, keys="correlated")
    for name, value in (("g", 0.0), ("beta", 1.0)):
        given, left_out = (backward(x | {name: v}, *upstream(x)) for v in (torch.full_like(x[name], value), None))
        assert set(given) - set(left_out) == {"d_" + name}
        assert all(torch.equal(given[n], t) for n, t in left_out.items())


@pytest.mark.parametrize("lengths", [None, [18, 0, 5]], ids=["plain", "packed"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_states_in_either_layout(state_dtype, lengths):
    x = h.make(23, 1, 2, 24, 40, lengths=lengths, decays="slow")
    x["initial_state"] = x["initial_state"].to(state_dtype)
    do, dstate = upstream(x)
    one = backward(x, do, dstate)
    v_first = x | {"initial_state": x["initial_state"].mT}  # a view: its strides are those of the other layout
    other = backward(v_first, do, dstate.mT, state_v_first=True)
    other["d_initial_state"] = other["d_initial_state"].mT
    assert all(torch.equal(one[n], other[n]) for n in one)
    if state_dtype == torch.float32:
        check(x)


def test_missing_gradients_are_zero():
    x = h.make(40, 1, 2, 16, 24)
    do, dstate = upstream(x)
    whole = {n: t.double() for n, t in backward(x, do, dstate).items()}
    parts = [backward(x, do, None), backward(x, None, dstate)]
    h.assert_close({n: parts[0][n] + parts[1][n] for n in whole}, whole)


@pytest.mark.parametrize("axes", ["heads_first", "transposed", "every_other_token", "expanded"])
def test_any_strides(axes):
    x = h.make(40, 1, 2, 16, 24, B=2, dtype=HALF)
    change = {
        "heads_first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "transposed": lambda t: t.mT.contiguous().mT,
        "every_other_token": lambda t: t.repeat_interleave(2, 1)[:, ::2],
        "expanded": lambda t: t,
    }[axes]
    do, dstate = upstream(x)
    if axes == "expanded":
        do, dstate = do[:1, :1].expand_as(do), dstate[:, :1].expand_as(dstate)
    expected = backward(x, do.contiguous(), dstate.contiguous())
    found = backward(x | {n: change(x[n]) for n in h.TOKEN_INPUTS}, change(do), dstate)
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def test_mixed_dtypes():
    x = h.make(40, 1, 2, 16, 24)
    x |= {n: x[n].to(HALF) for n in ("q", "k", "beta")}
    expected, found = h.reference(x), backward(x, *upstream(x))
    assert all(found[n].dtype == x[n[2:]].dtype for n in found)
    exact = ("d_v", "d_g", "d_initial_state")
    h.assert_close({n: found[n] for n in exact}, {n: expected[n] for n in exact}, 2e-5)
    h.assert_close(found, {n: expected[n] for n in found}, 1e-2)


# ---------------------------------------------------------------- exact zeros, and what must not matter


@h.in_every_dtype
def test_no_gradient_against_time(dtype):
    """Outputs before token t say nothing about what comes at it or after; and a first token decays nothing."""
    x, t = h.make(70, 1, 2, 16, 24, state=False, dtype=dtype), 37
    do, _ = upstream(x)
    do[:, t:] = 0
    found = backward(x, do, None)
    assert all((d[:, t:] == 0).all() for d in found.values())
    assert (found["d_g"][:, 0] == 0).all()
    assert (backward(x, *upstream(x))["d_g"][:, 0] == 0).all()


@h.in_every_dtype
def test_resets_and_no_writes(dtype):
    """g = -inf and beta = 0: the gradient of the reset is 0, that of the strength is not, and nothing is NaN."""
    x = h.make(60, 1, 2, 16, 24, dtype=dtype)
    x["g"][:, 10::20], x["beta"][:, ::7] = float("-inf"), 0
    found = backward(x, *upstream(x))
    assert (found["d_g"][:, 10::20] == 0).all()
    wide = x | {"g": x["g"].clamp_min(-1e4)}  # the oracle's derivative of -inf is NaN
    expected = h.reference(wide)
    h.assert_close(found, {n: expected[n] for n in found}, CHECKED[dtype] * 2)


def test_batch_mates_and_packed_mates_do_not_matter():
    """Bitwise; also where a mate is nothing but NaN, upstream too."""
    x = h.make(50, 1, 2, 16, 24, B=3, dtype=HALF)
    do, dstate = upstream(x)
    mates = {n: t.clone() for n, t in x.items()}
    for t in (*mates.values(), do, dstate):
        t[1] = float("nan")
    found = backward(mates, do, dstate)
    for b in (0, 2):
        alone = backward({n: t[b : b + 1] for n, t in x.items()}, do[b : b + 1], dstate[b : b + 1])
        assert all(torch.equal(found[n][b], alone[n][0]) for n in alone)
    packed = {n: t.flatten(0, 1)[None] if n in h.TOKEN_INPUTS else t for n, t in mates.items()}
    packed["cu_seqlens"] = h.offsets([50, 50, 50])
    again = backward(packed, do.flatten(0, 1)[None], dstate)
    assert all(torch.equal(again[n].view(found[n].shape)[::2], found[n][::2]) for n in found)


@pytest.mark.parametrize("lengths", [None, [17, 0, 23]], ids=["plain", "packed"])
@pytest.mark.parametrize("K, V", [(24, 20), (128, 128)])
def test_nothing_is_read_around_the_inputs(lengths, K, V):
    x = h.make(40, 1, 1, K, V, lengths=lengths, dtype=HALF)
    do, dstate = upstream(x)
    nan = {n: among_nan(t.to(DEVICE)) if n != "cu_seqlens" else t for n, t in x.items()}
    found = backward(nan, among_nan(do.to(DEVICE)), among_nan(dstate.to(DEVICE)))
    assert all(torch.equal(t, found[n]) for n, t in backward(x, do, dstate).items())


def test_repeats_bitwise():
    x = h.make(H=2, HV=4, K=32, V=32, lengths=[60, 30], dtype=HALF)
    first, *others = (backward(x, *upstream(x)) for _ in range(3))
    assert all(torch.equal(first[n], other[n]) for other in others for n in first)


# ---------------------------------------------------------------- every configuration


def every_config():
    """(bytes an element, K, configuration) of all that the tables hold, each once."""
    seen = set()
    for arch in ("sm_80", "sm_90", "sm_100", "gfx942", "some other card"):
        for itemsize in (2, 4):
            for K in (64, 128, 256):
                for c in launch_backward.configs_for(arch, itemsize, K):
                    if (itemsize, K, c) not in seen:
                        seen.add((itemsize, K, c))
                        name = f"{arch}-{itemsize}-K{K}-BV{c.BV}-BK{c.BK}".replace(" ", "_")
                        yield pytest.param(itemsize, K, c, id=name)


@pytest.mark.parametrize("itemsize, K, config", list(every_config()))
@pytest.mark.parametrize("lengths", [None, [45, 0, 1, 34]], ids=["plain", "packed"])
def test_H02_every_configuration_forced(itemsize, K, config, lengths):
    """Miscompiles have come at one tile width only, so the winner alone proves nothing."""
    dtype = HALF if itemsize == 2 else torch.float32
    T = 400 if GPU else 40 if (itemsize, K) == (4, 128) else 80
    lengths = lengths and [n * T // 80 for n in lengths]
    # 88 columns of V: none of the table's blocks has to be narrowed for them
    V = 128 if K == 128 else 88  # and 128 are what models have, with keys of that width
    x = h.make(T, 1, 2 if GPU else 1, K, V, keys="correlated", decays="slow", lengths=lengths, dtype=dtype)
    cut = launch_backward._cut(*(x[n] for n in ("q", "k", "v", "v")), None, config)[0]
    assert cut._replace(gluon=False) == config._replace(gluon=False)  # for which see test_kernels_hopper.py
    with fits(config):
        check(x, config=for_this_card(config))


# ---------------------------------------------------------------- segments


@pytest.fixture
def full_of_nan(monkeypatch):
    """Whoever reads of a call's memory what nobody has written reads NaN."""
    new = lambda self, device: torch.full((self.size,), 255, dtype=torch.uint8, device=device)  # noqa: E731
    monkeypatch.setattr(launch.Work, "allocate", new)


@h.in_every_dtype
@pytest.mark.parametrize("segments", [2, 5])
@pytest.mark.parametrize("decays", ["none", "slow", "reset"])
def test_segments_are_exact(segments, decays, dtype, full_of_nan):
    """Slow gates: whoever drops what comes from far away is caught here. The gradient of the final state goes through
    every segment into that of the initial one."""
    T = 66 if dtype == torch.float32 else 140
    x = h.make(T, 1, 2, 32, 20, B=2 if segments == 2 else 1, keys="correlated", decays=decays, dtype=dtype)
    check(x, segments=segments)


def test_segments_compose_as_finely_as_float32(full_of_nan):
    """Where no key points, the adjoint decays and nothing else: to 3e-5, of which a map or a state in one half of
    bfloat16 would be a hundred times as far off."""
    x = h.make(140, 1, 1, 32, 20, decays="slow", dtype=HALF)
    x |= {n: x[n].float() for n in ("g", "initial_state")}
    x["k"][..., 16:] = 0
    _, dstate = upstream(x)
    found = backward(x, None, dstate * 1.2345, segments=5)["d_initial_state"][:, :, 16:]
    expected = dstate.double()[:, :, 16:] * 1.2345 * x["g"].double().sum().exp()
    h.assert_close({"d_initial_state": found}, {"d_initial_state": expected}, 3e-5)


@pytest.mark.parametrize("decaying", [slice(0, 400), slice(208, 336), slice(336, 400), slice(0)], ids=str)
def test_segments_start_early_where_the_future_is_forgotten(decaying, full_of_nan):
    """The second of two is tokens 208 to 399, longer than one look, which is 128 tokens: if these decay, only they are
    run for its map; if those after them do, all are, for they see each other; and the rest has a say otherwise."""
    x = h.make(400, 1, 1, 16, 16, keys="correlated", decays="slow")
    x["beta"] = x["beta"] * 0.1  # or many writes leave as little as decays do
    x["g"][:, decaying] = -2.0
    check(x, segments=2)


def test_segments_see_keys_that_keep_alive_what_decays(full_of_nan):
    """As in the forward's test: by the decays alone all would be forgotten, and nothing is."""
    x = h.make(300, 1, 1, 16, 16, keys="repeated")
    x["g"], x["beta"] = torch.full_like(x["g"], -2.0), torch.ones_like(x["beta"])
    x["k"] = x["k"] * (1 + math.exp(2)) ** 0.5
    x["v"], x["q"] = x["v"] * 1e-3, x["q"] * 1e-3
    check(x, segments=2)


def cut_into_segments():
    """(configuration, bytes an element) of all that may be, each once, and the one of float32 besides."""
    archs = ("sm_80", "sm_90", "sm_100", "some other card")
    found = {launch_backward.configs_for(a, 2, 64)[0]: a for a in archs}
    found[launch_backward.FP32[4, False][0]] = "fp32"
    return [pytest.param(c, 4 if a == "fp32" else 2, id=a.replace(" ", "_")) for c, a in found.items()]


@pytest.mark.parametrize("config, itemsize", cut_into_segments())
def test_segments_in_every_configuration(config, itemsize, full_of_nan):
    """Maps in several blocks of rows, the last of them partly filled, and last segments that are shorter."""
    dtype = HALF if itemsize == 2 else torch.float32
    x = h.make(4 * config.C + 3, 1, 1, 64, 80, keys="correlated", decays="slow", dtype=dtype)
    with fits(config):
        check(x, config=for_this_card(config), segments=2)


def test_segments_with_states_in_either_layout(full_of_nan):
    x = h.make(80, 1, 2, 24, 40, decays="slow")
    do, dstate = upstream(x)
    one = backward(x, do, dstate, segments=2)
    v_first = x | {"initial_state": x["initial_state"].mT}
    other = backward(v_first, do, dstate.mT, state_v_first=True, segments=2)
    other["d_initial_state"] = other["d_initial_state"].mT
    assert all(torch.equal(one[n], other[n]) for n in one)
    check(h.without(x, "initial_state") | {"initial_state": None}, segments=2)


def test_segments_repeat_bitwise():
    x = h.make(150, 2, 4, 32, 32, B=2, decays="slow", dtype=HALF)
    first, *others = (backward(x, *upstream(x), segments=3) for _ in range(3))
    assert all(torch.equal(first[n], other[n]) for other in others for n in first)


@pytest.mark.parametrize("T, heads, K, dtype, packed, segments", [
    (4096, 32, 128, HALF, False, 2), (4096, 32, 128, torch.float16, False, 2), (4096, 32, 64, HALF, False, 4),
    (4096, 32, 128, torch.float32, False, 1), (4096, 32, 128, HALF, True, 1), (4096, 64, 128, HALF, False, 1),
    (1024, 4, 128, HALF, False, 1), (4096, 2, 256, HALF, False, 1),
])  # fmt: skip
def test_segments_chosen_by_shape(T, heads, K, dtype, packed, segments, monkeypatch):
    """As the forward chooses them: where heads are few, sequences long, and products of 16 bits."""
    monkeypatch.setattr(launch_backward, "device_of", lambda device: launch.Device("sm_90", 132))
    q = k = v = torch.zeros(1, T, heads, K, dtype=dtype)
    gate, cu = torch.zeros(1, T, heads), torch.tensor([0, T]) if packed else None
    plan = launch_backward.make_plan(q, k, v, gate, gate, None, None, cu, None, v, None, 1.0, *[False] * 4)
    assert plan.launches["adjoints"].grid[0] == segments * plan.launches["states"].grid[0]
    assert ("adjoint_segments" in plan.launches) == (segments > 1)


# ---------------------------------------------------------------- what the forward keeps


def keeping(x, cut, config=None, segments=None):
    """What the forward kernels keep of x, where the backward pass would have it cut so."""
    x, options = to_device(x), (x["q"].shape[-1] ** -0.5, True, False, False, False, False)
    given = (*(x[n] for n in ("q", "k", "v", "g", "beta")), None, None, x.get("cu_seqlens"), x.get("initial_state"))
    plan = launch.plan_of(given, options, lambda *_: cut, config, segments)
    o, _, memory = plan.run_and_keep(*given)
    return o, plan.kept and launch_backward.Kept(plan.kept, memory)


def alike():
    """(bytes an element, forward's configuration, backward's) of those that cut alike."""
    assert launch.configs_for("sm_90", 2, 64)[0].C == launch_backward.configs_for("sm_90", 2, 64)[0].C
    for arch in ("sm_90", "some other card"):
        for itemsize in (2, 4):
            both = (module.configs_for(arch, itemsize, 64) for module in (launch, launch_backward))
            for one, other in zip(*both, strict=True):
                if one.C == other.C:
                    yield pytest.param(itemsize, one, other, id=f"{arch}-{itemsize}-BV{one.BV}".replace(" ", "_"))


@pytest.mark.parametrize("lengths", [None, [45, 0, 1, 34]], ids=["plain", "packed"])
@pytest.mark.parametrize("itemsize, config, backwards", list(alike()))
def test_gradients_from_what_the_forward_keeps(itemsize, config, backwards, lengths, monkeypatch):
    x = h.make(80, 1, 2, 64, 120, keys="correlated", lengths=lengths, dtype=HALF if itemsize == 2 else torch.float32)
    config, backwards = for_this_card(config), for_this_card(backwards)
    monkeypatch.setattr(launch_backward, "states_kernel", None)  # nobody may make them again
    with fits(backwards):
        o, kept = keeping(x, (config.C, 128), config)
        assert kept.cut() == (config.C, 128)
        check(x, config=backwards, saved=kept)
    assert torch.equal(o, launch.chunk_forward(**for_the_launcher(x), config=config)[0])


def for_the_launcher(x):
    return to_device(x) | {"scale": x["q"].shape[-1] ** -0.5, "output_final_state": True}


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "bf16"])
def test_segments_and_second_passes_keep_too(dtype, monkeypatch):
    """Huge values make the second pass do all of it again, with sizes taken out."""
    monkeypatch.setattr(launch_backward, "states_kernel", None)
    config = for_this_card((launch.configs_for("sm_90", 2, 64) if dtype == HALF else launch.FP32[4, False])[0])
    backwards = (launch_backward.configs_for("sm_90", 2, 64) if dtype == HALF else launch_backward.FP32[4, False])[0]
    x = h.make(300 if dtype == HALF else 70, 1, 1, 64, 128, decays="slow", dtype=dtype)
    x["v"], x["initial_state"] = x["v"] * 2**20, x["initial_state"] * 2**20
    with fits(backwards):
        _, kept = keeping(x, (config.C, 128), config, segments=1 if dtype != HALF else 2)
        check(x, config=for_this_card(backwards), saved=kept)


@pytest.mark.parametrize("segments", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "bf16"])
def test_segments_from_what_the_forward_keeps(dtype, segments, full_of_nan, monkeypatch):
    """The forward, which runs in one piece here, has left the bounds that say what is forgotten. (In float32 the second
    of two segments is longer than one look, after which a bound that is no number would end the search.)"""
    monkeypatch.setattr(launch_backward, "states_kernel", None)
    both = (module.configs_for("sm_90", dtype.itemsize, 64)[0] for module in (launch, launch_backward))
    config, backwards = map(for_this_card, both)
    x = h.make(300, 1, 1, 16, config.BV, keys="correlated", decays="slow", dtype=dtype)
    with fits(backwards):
        _, kept = keeping(x, (config.C, config.BV), config)
        check(x, config=backwards, saved=kept, segments=segments)


def test_what_is_kept_in_another_cut_is_made_again():
    x = h.make(40, 1, 1, 32, 16)
    config = launch.FP32[4, False][0]
    assert keeping(x, (32, 16), config)[1] is None
    _, kept = keeping(x, (16, 16), config)
    for tensor in kept.work.tensors(kept.memory).values():
        tensor.fill_(float("nan"))
    other = launch_backward.FP32[4, False][0]._replace(C=32)
    check(x, config=for_this_card(other), saved=kept)


RAW = {n: True for n in ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")}


def small_leaves(raw=False, lengths=None):
    x = h.make(50, 1, 2, 16, 16, dtype=torch.float32, lengths=lengths)
    x |= {"A_log": torch.tensor([0.5, 1.0]), "dt_bias": torch.tensor([0.1, -0.2])} if raw else {}
    names = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
    return {n: t.requires_grad_() for n, t in to_device(x).items() if n in names}


def results_of(leaves, **options):
    return gdn_ref.chunk_gated_delta_rule(**leaves, output_final_state=True, backend="triton", **options)


def loss(leaves, **options):
    o, state = results_of(leaves, **options)
    return o.square().sum() + state.square().sum()


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that are launched."""
    names, original = [], launch.Launch.__call__

    def listening(self, *tensors, **options):
        names.append(self.kernel.__name__)
        return original(self, *tensors, **options)

    monkeypatch.setattr(launch.Launch, "__call__", listening)
    return names


@pytest.mark.parametrize("raw", [False, True])
def test_recompute_states_is_a_switch(raw, launched):
    found = {}
    for again in (True, False, True, False):
        leaves = small_leaves(raw)
        launched.clear()
        with gdn_ref.recompute_states(again):
            loss(leaves, **(RAW if raw else {})).backward()
        assert ("states_kernel" in launched) == again
        found[again] = {n: t.grad for n, t in leaves.items()}
    h.assert_close(found[False], {n: t.double() for n, t in found[True].items()}, 1e-6)


@pytest.mark.parametrize("lengths", [None, [30, 0, 20]], ids=["plain", "packed"])
@pytest.mark.parametrize("raw", [False, True], ids=["gates", "raw"])
def test_recompute_states_holds_nothing_but_inputs(raw, lengths):
    """In bytes between forward and backward, of what autograd saves and of all that is alive: without it, tiles,
    factors, states and errors."""
    held, leaves = {}, small_leaves(raw, lengths)
    cu = None if lengths is None else h.offsets(lengths).to(DEVICE)
    given = {t.untyped_storage().data_ptr() for t in (*leaves.values(), cu) if t is not None}
    for again in (True, False):
        saved = {}

        def note(t):
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()  # noqa: B023
            return t

        with (
            gdn_ref.recompute_states(again),
            torch.autograd.graph.saved_tensors_hooks(note, lambda t: t),
            h.peak_memory() as meter,
        ):
            o, state = results_of(leaves, cu_seqlens=cu, **(RAW if raw else {}))
        held[again] = sum(size for place, size in saved.items() if place not in given)
        gc.collect()
        assert meter.live == held[again] + o.nbytes + state.nbytes
        del o, state
    slots = 50 // 16 + 4 if lengths else 4  # in chunks of 16 tokens: 50 in either case
    a_slot = 2 * 16 * 16 + 8 * 16 + 16 * 16 + 16 * 16  # A and P, factors, S, E
    assert held == {True: 0, False: 4 * 2 * slots * a_slot}


@pytest.mark.parametrize("again", [False, True])
def test_steps_with_checkpoints_keep_the_switch(again, launched):
    """The backward pass runs in a thread of its own, as autograd's does for a GPU."""
    leaves, other = small_leaves(), small_leaves()
    loss(other).backward()
    with gdn_ref.recompute_states(again):
        whole = checkpoint(loss, leaves, use_reentrant=False)
        launched.clear()
        thread = threading.Thread(target=whole.backward)
        thread.start()
        thread.join()
    assert ("states_kernel" in launched) == again
    h.assert_close({n: t.grad for n, t in leaves.items()}, {n: t.grad.double() for n, t in other.items()}, 1e-6)


def test_what_is_kept_may_be_used_twice_and_goes_through_hooks():
    leaves, other = small_leaves(), small_leaves()
    loss(other).backward()
    with torch.autograd.graph.save_on_cpu():
        whole = loss(leaves)
    twice = [torch.autograd.grad(whole, list(leaves.values()), retain_graph=again) for again in (True, False)]
    for found in twice:
        assert all(torch.equal(a, b.grad) for a, b in zip(found, other.values(), strict=True))


def test_an_interrupted_first_call_begins_anew(monkeypatch):
    """Kernels are given tensors until the last of them has been compiled: an address says nothing of its dtype."""
    x = h.make(16, 1, 1, 16, 16)
    inputs = [x[n] for n in ("q", "k", "v", "g", "beta")]
    plan = launch_backward.make_plan(*inputs, *[None] * 6, 1.0, False, False, False, False)
    given = []
    for name, one in plan.launches.items():
        one.run = None if name == "finish" else given.append
    monkeypatch.setattr(launch.Launch, "__call__", lambda self, arguments, stream: given.extend(arguments))
    plan.run(*inputs, None, None, None, None, x["v"], None, None)
    assert given and all(t is None or isinstance(t, torch.Tensor) for t in given)


def test_H04_unknown_cards_get_safe_configurations():
    for name in ("sm_75", "sm_89", "sm_120", "gfx90a", "gfx1100"):
        for itemsize in (2, 4):
            for K in (1, 128, 256):
                found = launch_backward.configs_for(name, itemsize, K)
                assert found and not any(c.tma for c in found)


# ---------------------------------------------------------------- what a call costs


@pytest.mark.parametrize("lengths", [None, [70, 1, 63]], ids=["plain", "packed"])
def test_C03_a_call_waits_for_nothing(lengths, monkeypatch):
    x = to_device(h.make(134, 1, 2, 16, 16, lengths=lengths))
    do, dstate = (t.to(DEVICE) for t in upstream(x))
    launched = []
    if GPU:
        backward(x, do, dstate)
        torch.cuda.set_sync_debug_mode("error")
        try:
            launch_backward.chunk_backward(
                *(x[n] for n in h.TOKEN_INPUTS), 0.25, x["initial_state"], x.get("cu_seqlens"), do, dstate
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    monkeypatch.setattr(launch.Launch, "__call__", lambda self, *_: launched.append(self))
    with Waits() as seen:
        backward(x, do, dstate)
    assert not seen.found and len(launched) == 7  # decays, A and P; states; adjoints; pairs; gradients; gates


def test_plans_are_kept():
    x = to_device(h.make(40, 1, 2, 16, 16))
    backward(x, *upstream(x))
    before = len(launch_backward._plans)
    backward({n: t.clone() for n, t in x.items()}, *upstream(x))
    assert len(launch_backward._plans) == before


@on_gpu
@pytest.mark.parametrize("packed", [False, True])
def test_captured_in_a_graph(packed):
    x = to_device(h.make(300, 1, 2, 64, 64, lengths=[100, 200] if packed else None, dtype=HALF))
    do, dstate = (t.to(DEVICE) for t in upstream(x))
    call = lambda: launch_backward.chunk_backward(  # noqa: E731
        *(x[n] for n in h.TOKEN_INPUTS), 0.125, x["initial_state"], x.get("cu_seqlens"), do, dstate
    )
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    other = h.make(300, 1, 2, 64, 64, lengths=[299, 1] if packed else None, dtype=HALF, label=("replay",))
    for name, t in other.items():
        if torch.is_tensor(t):
            x[name].copy_(t)
    graph.replay()
    expected = h.reference(other)
    found = {n: t.cpu() for n, t in zip(GRADIENTS, found, strict=True) if t is not None}
    h.assert_close_for_dtype(found, {n: expected[n] for n in found}, other, 2e-2)


# ---------------------------------------------------------------- S11: beyond 2^31


@pytest.mark.skipif(GPU, reason="where there is a GPU, real tensors of that size do this")
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_S11_tokens_beyond_two_to_the_31(name):
    x = h.make(150, 1, 1, 16, 16, dtype=torch.float16, decays="slow", state=False)
    x["g"], x["beta"] = x["g"].half(), x["beta"].half()
    expected, found = (backward(given, *upstream(x)) for given in (x, far_apart(x, name)))
    assert all(torch.equal(found[n], expected[n]) for n in expected)


@on_gpu
def test_S11_tensors_beyond_two_to_the_31():
    """Inputs, gradients, and S and dS, which have twice as many elements. Spot rows, bitwise."""
    B, T, K = 131_200, 128, 128
    if torch.cuda.mem_get_info()[0] < 90 * 2**30:
        pytest.skip("needs 90 GB of the GPU's memory")
    q, k, v, do = (torch.randn(B, T, 1, K, device=DEVICE, dtype=HALF).mul_(K**-0.5) for _ in range(4))
    g, beta = -torch.rand(B, T, 1, device=DEVICE), torch.rand(B, T, 1, device=DEVICE)
    x = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    found = launch_backward.chunk_backward(*x.values(), K**-0.5, None, None, do, None)[:5]
    for b in (0, 1, B // 2, 131_071, 131_072, B - 1):
        row = [t[b : b + 1] for t in (*x.values(), do)]
        alone = launch_backward.chunk_backward(*row[:5], K**-0.5, None, None, row[5], None)[:5]
        assert all(torch.equal(one[b], other[0]) for one, other in zip(found, alone, strict=True)), b


@pytest.mark.parametrize("V", [136, 192])
def test_widths_between_the_blocks(V):
    """Every program has columns of V: the copy engine takes no matrix of width 0, and makes 2^32 of it or less."""
    check(h.make(20, 1, 2, 16, V, dtype=HALF), config=for_this_card(launch_backward.configs_for("sm_90", 2, 64)[0]))

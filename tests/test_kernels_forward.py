"""The fused Triton forward against the float64 recurrence: interpreted where there is no GPU, run where there is one.

With interpreting.py both round alike. Without it bfloat16 inputs are widened where kernels are interpreted; that is
tested too.
"""

import contextlib
import math

import helpers as h
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is not installed, so its kernels are not tested here; see `make test`")

import triton

from gdn_ref.kernels import calls, launch, launch_backward, tiles

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HALF = torch.bfloat16  # where one dtype of 16 bits is enough: the one that keeps fewer digits, and most models have
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
on_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU: the interpreter would take hours, or has nothing to show")


def to_device(x):
    return {n: t.to(DEVICE) if torch.is_tensor(t) else t for n, t in x.items()}


def forward(x, **options):
    """o and the final state [N,HV,K,V] of the kernels, for a dict of inputs as helpers.make gives it."""
    x, K = to_device(x), x["q"].shape[-1]
    state, cu = x.get("initial_state"), x.get("cu_seqlens")
    options = {"scale": K**-0.5, "output_final_state": True} | options
    return launch.chunk_forward(
        x["q"], x["k"], x["v"], x["g"], x["beta"], initial_state=state, cu_seqlens=cu, **options
    )


def check(x, bound=None, **options):
    """The kernels on x against the oracle on the very same numbers, per sequence and head."""
    o, state = forward(x, **options)
    assert o.dtype == x["v"].dtype and state.dtype == torch.float32
    scale = {"scale": options["scale"]} if "scale" in options else {}
    expected = dict(zip(("o", "state"), h.recurrence(**x, **scale), strict=True))
    actual = {"o": o.cpu(), "state": (state.mT if options.get("state_v_first") else state).cpu()}
    if bound or options:
        h.assert_close(actual, expected, bound or BOUNDS[x["q"].dtype], x.get("cu_seqlens"))
    else:
        h.assert_close_for_dtype(actual, expected, x, BOUNDS[x["q"].dtype])


# ---------------------------------------------------------------- values

SHAPES = h.pairwise(
    T=[1, 2, 15, 16, 17, 33, 63, 64, 65, 130],
    heads=[(1, 1), (2, 2), (1, 3)],
    KV=[(16, 16), (24, 60), (1, 8), (33, 1)],
    keys=h.KEYS,
    dtype=h.DTYPES,
)


@pytest.mark.parametrize("row", SHAPES, ids=h.case_id)
def test_shapes(row):
    (H, HV), (K, V) = row["heads"], row["KV"]
    check(h.make(row["T"], H, HV, K, V, keys=row["keys"], decays="ordinary", dtype=h.DTYPES[row["dtype"]]))


@pytest.mark.parametrize("keys", ["correlated", "repeated"])
@pytest.mark.parametrize("decays", h.DECAYS)
@h.in_every_dtype
def test_decays(decays, keys, dtype):
    check(h.make(40 if dtype == torch.float32 else 130, 1, 1, 32, 16, keys=keys, decays=decays, dtype=dtype))


@pytest.mark.parametrize("K, V", [(128, 128), (256, 16), (16, 256), (192, 100), (100, 192), (256, 256)])
@h.in_every_dtype
def test_wide_heads(K, V, dtype):
    check(h.make(20, 1, 1, K, V, keys="correlated", dtype=dtype))


@pytest.mark.parametrize("B, T", [(3, 16), (2, 33), (3, 65), (5, 1)])
def test_batches(B, T):
    check(h.make(T, 1, 2, 16, 20, B=B, decays="slow", dtype=HALF if T > 33 else torch.float32))


@pytest.mark.skipif(GPU, reason="bfloat16 is multiplied as it is on a GPU")
def test_bfloat16_is_widened_where_kernels_are_interpreted(monkeypatch):
    monkeypatch.setitem(tiles.WIDENED, torch.bfloat16, torch.float32)  # as without interpreting.py
    monkeypatch.setattr(launch, "_plans", {})
    x = h.make(40, 1, 2, 32, 32, keys="correlated", dtype=torch.bfloat16)
    o, state = forward(x)
    expected_o, expected_state = h.recurrence(**x)
    assert o.dtype == torch.bfloat16
    h.assert_close({"state": state}, {"state": expected_state}, 1e-5)  # the products were float32
    h.assert_close({"o": o}, {"o": expected_o}, 3e-3)  # and o was rounded once


# ---------------------------------------------------------------- packed sequences

PACKED = {
    "V01": [70, 1, 63, 130],
    "empty": [0, 3, 0, 0, 65, 0],
    "tiny": [1] * 9,
    "aligned": [64, 128, 64],
    "one": [100],
    "all_empty": [0, 0],
}


@pytest.mark.parametrize("lengths", PACKED.values(), ids=PACKED)
@h.in_every_dtype
def test_packed(lengths, dtype):
    if dtype == torch.float32:  # whose chunks are a quarter as long
        lengths = [-(-n // 4) for n in lengths]
    check(h.make(H=1, HV=1, K=16, V=24, lengths=lengths, dtype=dtype))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_tokens_of_no_sequence_give_zero(index):
    x = h.make(200, 1, 2, 16, 24, state=False, dtype=HALF)
    x = {n: t if t is None else t.clone() for n, t in x.items()}
    for name in h.TOKEN_INPUTS:
        x[name][:, 100:] = float("nan")
    o, _ = forward(x | {"cu_seqlens": torch.tensor([0, 30, 100], dtype=index)})
    assert (o[:, 100:] == 0).all()
    within = {n: t[:, :100] for n, t in x.items() if t is not None}
    expected, _ = h.recurrence(**within, cu_seqlens=torch.tensor([0, 30, 100]))
    h.assert_close({"o": o[:, :100].cpu()}, {"o": expected}, BOUNDS[HALF], cu_seqlens=[0, 30, 100])


def test_cu_seqlens_may_stay_on_the_cpu():
    x = h.make(H=1, HV=2, K=16, V=16, lengths=[70, 1, 63], dtype=HALF)
    both = [forward(to_device(x) | {"cu_seqlens": cu}) for cu in (x["cu_seqlens"], x["cu_seqlens"].to(DEVICE))]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def test_S09_more_than_65535_sequences_lie_on_the_first_axis_of_the_grid(monkeypatch):
    grids = []
    monkeypatch.setattr(launch.Launch, "__call__", lambda self, *_: grids.append(self.grid))  # and no launch
    x, N = h.make(1, 1, 1, 16, 16, state=False), 70_000
    forward(x | {"cu_seqlens": torch.zeros(N + 1, dtype=torch.int32)})
    assert len(grids) == 3 and all(grid[0] >= N and grid[1:] == (1, 1) for grid in grids)


@on_gpu
def test_S09_more_than_65535_sequences():
    check(h.make(H=1, HV=2, K=16, V=16, lengths=[1, 0, 2] * 30_000, decays="slow"))


# ---------------------------------------------------------------- gates, norm, states, layouts


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_raw_gates_and_norm(allow_neg_eigval, bias):
    x = h.make(20, 1, 3, 24, 16)
    gen = h.rng("raw gates", bias)
    a, b, A_log = h.randn(gen, 1, 20, 3) * 2, h.randn(gen, 1, 20, 3) * 2, h.randn(gen, 3)
    dt_bias = h.randn(gen, 3) if bias else torch.zeros(3, dtype=torch.float64)
    g, beta = h.gates(a.float(), b.float(), A_log.float(), dt_bias.float(), 2.0 if allow_neg_eigval else 1.0)
    x["q"], x["k"] = x["q"] * 3, x["k"] * 0.2
    normed = x | {"q": h.l2norm(x["q"]), "k": h.l2norm(x["k"]), "g": g, "beta": beta}
    raw = x | {"g": a.float(), "beta": b.float()}
    o, state = forward(
        raw, use_qk_l2norm=True, beta_is_raw=True, allow_neg_eigval=allow_neg_eigval, A_log=A_log.float().to(DEVICE),
        dt_bias=dt_bias.float().to(DEVICE) if bias else None,
    )  # fmt: skip
    h.assert_close({"o": o.cpu(), "state": state.cpu()}, dict(zip(("o", "state"), h.recurrence(**normed), strict=True)))


@pytest.mark.parametrize("name, a", [("N13", -200.0), ("N13_zero", 0.0), ("open", -30.0)])
def test_extreme_raw_gates_stay_finite(name, a):
    x = h.make(40, 1, 1, 16, 16)
    A_log = torch.tensor([100.0 if name != "open" else 0.0])
    raw = torch.full((1, 40, 1), a)
    g, _ = h.gates(raw, raw, A_log, torch.zeros(1))
    o, state = forward(x | {"g": raw}, A_log=A_log.to(DEVICE), dt_bias=None)
    expected = h.recurrence(**(x | {"g": g}))
    h.assert_close({"o": o.cpu(), "state": state.cpu()}, dict(zip(("o", "state"), expected, strict=True)))


def test_N10_norm_of_small_vectors_has_its_epsilon_inside_the_root():
    x = h.make(66, 1, 1, 4, 8)
    x["q"] = x["k"] = torch.full_like(x["q"], 1e-4)
    o, state = forward(x, use_qk_l2norm=True)
    expected = h.recurrence(**(x | {"q": h.l2norm(x["q"]), "k": h.l2norm(x["k"])}))
    h.assert_close({"o": o.cpu(), "state": state.cpu()}, dict(zip(("o", "state"), expected, strict=True)))


def test_gates_left_out():
    x = h.make(70, 1, 1, 16, 24, keys="correlated", dtype=HALF)
    for name, value in (("g", 0.0), ("beta", 1.0)):
        given, left_out = (forward(x | {name: v}) for v in (torch.full_like(x[name], value), None))
        assert all(torch.equal(a, b) for a, b in zip(given, left_out, strict=True))


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [None, [18, 0, 5]], ids=["plain", "packed"])
def test_states_in_either_layout(state_v_first, state_dtype, lengths):
    x = h.make(20, 1, 2, 24, 40, lengths=lengths, decays="slow", dtype=HALF)
    x["initial_state"] = x["initial_state"].to(state_dtype)
    given = x["initial_state"].mT.contiguous() if state_v_first else x["initial_state"]
    before = given.clone()
    o, state = forward(x | {"initial_state": given}, state_v_first=state_v_first)
    assert torch.equal(given, before)
    assert state.is_contiguous()
    actual = {"o": o.cpu(), "state": (state.mT if state_v_first else state).cpu()}
    expected = dict(zip(("o", "state"), h.recurrence(**x), strict=True))
    h.assert_close(actual, expected, BOUNDS[HALF], cu_seqlens=x.get("cu_seqlens"))


def test_no_final_state_unless_asked_for():
    x = h.make(70, 1, 1, 16, 16, dtype=HALF)
    o, none = forward(x, output_final_state=False)
    assert none is None and torch.equal(o, forward(x)[0])


@pytest.mark.parametrize("T, lengths", [(0, None), (0, [0, 0]), (5, [])])
def test_nothing_to_do(T, lengths):
    x = h.make(T, 1, 2, 16, 24, state=lengths != [])
    if lengths is not None:
        x["cu_seqlens"] = h.offsets(lengths)
        x["initial_state"] = None if not lengths else x["initial_state"].repeat(2, 1, 1, 1)
    o, state = forward(x)
    assert o.shape == x["v"].shape and (o == 0).all()
    assert state.shape[0] == (1 if lengths is None else len(lengths))
    if x["initial_state"] is not None:
        assert torch.equal(state.cpu(), x["initial_state"])


def test_mixed_dtypes():
    x = h.make(40, 1, 2, 16, 24)
    x |= {n: x[n].to(HALF) for n in ("q", "k", "beta")}
    check(x, bound={"o": 1e-5, "state": 1e-5})


# ---------------------------------------------------------------- what must not matter


def test_S13_views_of_one_projection():
    gen = h.rng("projection")
    q, k, v, a, b = h.fused_projection(gen, 2, 40, 1, 2, 16, 24, HALF)
    x = {"q": h.unit(q), "k": h.unit(k), "v": v, "g": -a.abs(), "beta": b.sigmoid()}
    whole = torch.cat([t.flatten(2) for t in x.values()], -1).to(DEVICE)  # one tensor again, split again
    parts = whole.split([t.flatten(2).shape[-1] for t in x.values()], -1)
    views = {n: p.unflatten(-1, t.shape[2:]) if t.dim() == 4 else p for (n, t), p in zip(x.items(), parts, strict=True)}
    assert not any(t.is_contiguous() for t in views.values())
    strided, copied = forward(views), forward({n: t.contiguous() for n, t in views.items()})
    assert all(torch.equal(a, b) for a, b in zip(strided, copied, strict=True))


@pytest.mark.parametrize("axes", ["heads_first", "transposed", "every_other_token", "last_axis_apart"])
def test_any_strides(axes):
    x = h.make(40, 1, 1, 16, 24, B=2, dtype=HALF)
    change = {
        "heads_first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "transposed": lambda t: t.mT.contiguous().mT,
        "every_other_token": lambda t: t.repeat_interleave(2, 1)[:, ::2],
        "last_axis_apart": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    }[axes]
    expected = forward(x)
    found = forward(x | {n: change(x[n]) for n in h.TOKEN_INPUTS})
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_batch_mates_do_not_matter():
    """Bitwise; also where a mate is nothing but NaN."""
    x = h.make(100, 1, 2, 16, 24, B=3, dtype=HALF)
    mates = {n: t.clone() for n, t in x.items()}
    for t in mates.values():
        t[1] = float("nan")
    o, state = forward(mates)
    for b in (0, 2):
        alone_o, alone_state = forward({n: t[b : b + 1] for n, t in x.items()})
        assert torch.equal(o[b], alone_o[0]) and torch.equal(state[b], alone_state[0])
    assert o[1].isnan().any()  # it did take part


def test_packed_mates_and_other_heads_do_not_matter():
    lengths = [70, 1, 63, 64]
    x = h.make(H=2, HV=4, K=16, V=24, lengths=lengths, dtype=HALF)
    bounds, spoilt = h.offsets(lengths), {n: t.clone() for n, t in x.items()}
    for name in h.TOKEN_INPUTS:
        t = spoilt[name]
        t[:, bounds[2] : bounds[3]] = float("nan")  # a sequence
        t[:, :, t.shape[2] // 2 :] = float("nan")  # and the upper half of the heads
    spoilt["initial_state"][2] = float("nan")
    o, state = forward(spoilt)
    for n in (0, 1, 3):
        a, b = bounds[n], bounds[n + 1]
        alone = {m: t[:, a:b] for m, t in x.items() if m in h.TOKEN_INPUTS}
        alone_o, alone_state = forward(alone | {"initial_state": x["initial_state"][n : n + 1]})
        assert torch.equal(o[:, a:b, :2], alone_o[:, :, :2])
        assert torch.equal(state[n, :2], alone_state[0, :2])


@pytest.mark.parametrize("lengths", [None, [17, 0, 23]], ids=["plain", "packed"])
@pytest.mark.parametrize("K, V", [(24, 20), (128, 128)])
@h.in_every_dtype
def test_nothing_is_read_around_the_inputs(lengths, K, V, dtype):
    """Inputs lie among NaN; whoever reads past an end, even to multiply it by zero, returns NaN."""
    x = h.make(40, 1, 1, K, V, lengths=lengths, dtype=dtype)
    nan = {n: among_nan(t.to(DEVICE)) if n != "cu_seqlens" else t for n, t in x.items()}
    found, expected = forward(nan), forward(x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def among_nan(x):
    whole = x.new_full((x.numel() + 2 * 4096,), float("nan"))
    inside = whole[4096 : 4096 + x.numel()].view(x.shape)
    inside.copy_(x)
    return inside


def test_repeats_bitwise():
    x = h.make(H=1, HV=2, K=32, V=32, lengths=[100, 30], dtype=HALF)
    first, *others = (forward(x) for _ in range(3 if GPU else 2))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_padding_by_zero_gates_changes_nothing():
    """V08: beta = 0 and g = 0 is the identity, whatever q, k and v hold there; beta = 0 is no logarithm's business."""
    x = h.make(40, 1, 1, 16, 24)
    padded = {n: torch.cat([h.make(30, 1, 1, 16, 24)[n], x[n]], 1) for n in h.TOKEN_INPUTS}
    padded["g"][:, :30] = padded["beta"][:, :30] = 0
    o, state = forward(padded | {"initial_state": x["initial_state"]})
    expected_o, expected_state = h.recurrence(**x)
    h.assert_close({"o": o[:, 30:].cpu(), "state": state.cpu()}, {"o": expected_o, "state": expected_state})


@pytest.mark.parametrize("T", [50])
def test_T12_split_anywhere(T):
    x = h.make(T, 1, 1, 16, 24, decays="slow")
    o, state = forward(x)
    for cut in (1, 40, T - 1):
        first = {n: t[:, :cut] for n, t in x.items() if n != "initial_state"}
        rest = {n: t[:, cut:] for n, t in x.items() if n != "initial_state"}
        o_1, middle = forward(first | {"initial_state": x["initial_state"]})
        o_2, end = forward(rest | {"initial_state": middle})
        h.assert_close({"o": torch.cat([o_1, o_2], 1), "state": end}, {"o": o.double(), "state": state.double()})


# ---------------------------------------------------------------- every configuration, and segments


def every_config():
    """(bytes an element, K, configuration) of all that the tables hold, safe ones included, each once."""
    seen = set()
    for arch in ("sm_80", "sm_90", "sm_100", "gfx942", "some other card"):
        for itemsize in (2, 4):
            for K in (64, 128, 256):
                for c in launch.configs_for(arch, itemsize, K):
                    if (itemsize, K, c) not in seen:
                        seen.add((itemsize, K, c))
                        yield pytest.param(itemsize, K, c, id=f"{arch}-{itemsize}-K{K}-BV{c.BV}".replace(" ", "_"))


def for_this_card(config):
    """The configuration as this card can run it: only Hopper and later have the copy engine."""
    if not GPU:
        return config
    major = torch.cuda.get_device_capability()[0]
    return config._replace(tma=config.tma and major >= 9)


@pytest.mark.parametrize("itemsize, K, config", list(every_config()))
@pytest.mark.parametrize("lengths", [None, [100, 0, 1, 99]], ids=["plain", "packed"])
def test_H02_every_configuration_forced(itemsize, K, config, lengths):
    """Miscompiles have come at one tile width only, so the winner alone proves nothing. 80 columns of V leave a block
    partly filled; 128 are what models have, with keys of that width."""
    T = 80 if not GPU else 1000
    lengths = lengths and [n * T // 200 for n in lengths]
    dtype = HALF if itemsize == 2 else torch.float32
    V = 128 if K == 128 else 80
    x = h.make(T, 1, 1, K, V, keys="correlated", decays="slow", lengths=lengths, dtype=dtype)
    with fits(config):
        check(x, config=for_this_card(config))


@pytest.mark.parametrize("decays", ["none", "slow", "strong", "reset"])
@pytest.mark.parametrize("keys", ["random", "correlated"])
def test_H02_hoppers_narrow_configuration_at_all_speeds(keys, decays):
    """What serves most calls on Hopper, by the copy engine, several value heads a key."""
    config = launch.configs_for("sm_90", 2, 128)[0]
    x = h.make(100 if not GPU else 1000, 1, 2, 128, 128, keys=keys, decays=decays, dtype=HALF)
    with fits(config):
        check(x, bound=1e-2, config=for_this_card(config))


@contextlib.contextmanager
def fits(config):
    """A configuration of another card may need more shared memory than this one has: that is a skip, no failure. Those
    that can be selected on this one must fit."""
    try:
        yield
    except Exception as e:  # the class has moved between Triton's versions
        if "OutOfResources" not in type(e).__name__ or is_of_this_card(config):
            raise
        pytest.skip(f"{config} is for other cards: {e}")


def is_of_this_card(config):
    """Whether the card's own tables have the configuration, of the forward pass or of the backward."""
    architecture = launch.device_of(torch.device(DEVICE, 0)).architecture
    tables = (m.CONFIGS[launch.in_table(architecture)] for m in (launch, launch_backward))
    return any(config in configs for table in tables for configs in table.values())


def test_only_what_is_for_other_cards_may_not_fit(monkeypatch):
    """Or a configuration that asks for too much would be skipped where it is chosen."""

    class OutOfResources(Exception):
        pass

    monkeypatch.setattr(launch, "device_of", lambda _: launch.Device("sm_90", 132))
    for module in (launch, launch_backward):
        own, other = (module.configs_for(a, 2, 128)[0] for a in ("sm_90", "sm_100"))
        if module is launch:
            other = other._replace(stages=9)
        assert raised_by(own, OutOfResources) is OutOfResources
        assert raised_by(other, OutOfResources) is pytest.skip.Exception
        assert raised_by(other, ValueError) is ValueError


def raised_by(config, error):
    """What fits makes of an error: not by pytest.raises, for a skip that it does not expect would skip the test."""
    try:
        with fits(config):
            raise error
    except BaseException as e:
        return type(e)


@h.in_every_dtype
@pytest.mark.parametrize("segments", [2, 5])
@pytest.mark.parametrize("decays", ["none", "slow", "reset"])
def test_segments_are_exact(segments, decays, dtype):
    """Slow gates: whoever drops what comes from far away is caught here."""
    T = 66 if dtype == torch.float32 else 300
    x = h.make(T, 1, 1, 32, 20, B=2 if segments == 2 else 1, keys="correlated", decays=decays, dtype=dtype)
    x["initial_state"] = x["initial_state"] * 10  # all that the last token sees of it came through every segment
    check(x, segments=segments)


@pytest.mark.parametrize("decays", ["strong", "ordinary"])
def test_segments_start_late_where_the_past_is_forgotten(decays):
    """Longer than one look back, so that only the end of a segment is run for its map."""
    x = h.make(400, 1, 1, 16, 16, keys="correlated", decays=decays)
    check(x, segments=2)


def test_segments_see_keys_that_keep_alive_what_decays():
    """beta |k|^2 = 1 + e^2 turns the state over at every token as g = -2 shrinks it: by the decays alone all would be
    forgotten, and nothing is. (Of 400 tokens float32 keeps less than the bound asks: rounding adds up.)"""
    x = h.make(200, 1, 1, 16, 16, keys="repeated")
    x["g"], x["beta"] = torch.full_like(x["g"], -2.0), torch.ones_like(x["beta"])
    x["k"] = x["k"] * (1 + math.exp(2)) ** 0.5
    x["v"] = x["v"] * 1e-3
    check(x, segments=2)


@pytest.mark.parametrize("segments", [None, 2])
@pytest.mark.parametrize(
    "size, dtype",
    [(1e6, torch.bfloat16), (6e4, torch.float16), (1.0, torch.bfloat16), (1e-6, torch.bfloat16)],
    ids=["huge", "huge_fp16", "usual", "tiny"],
)
def test_values_of_any_size(size, dtype, segments):
    """Products take float16, which holds neither errors of 1e5 nor the digits of 1e-6: one value turns round from chunk
    to chunk, by repeated keys, so that the first errors are twice as large as it is, and no writes cancel besides; and
    the tiny ones decay. (float16 values as tiny as that have lost their digits before any kernel sees them.)"""
    x = h.make(300, 1, 1, 16, 16, keys="repeated", decays="none", dtype=dtype, state=False)
    x["beta"] = torch.full_like(x["beta"], 0.5)
    x["v"] = (x["v"][:, :1].sign() * (1 - 2 * (torch.arange(300) // 64 % 2))[None, :, None, None] * size).to(dtype)
    if size < 1:
        x["g"] = torch.where(torch.arange(300)[None, :, None] < 200, -0.3, -1e-3) + torch.zeros_like(x["g"])
    check(x, segments=segments)


@pytest.mark.parametrize("tma", [False, True], ids=["loads", "copies"])
@pytest.mark.parametrize("has_initial", [False, True], ids=["from nothing", "from a state"])
@pytest.mark.parametrize("layout", ["values first", "keys first"])
def test_starts_of_segments_are_the_composed_maps(layout, has_initial, tma):
    """What the scan in Gluon starts from, before every segment (10.1). Maps that nobody writes are NaN: those of last
    segments, and of R where the segment forgets. The state is split in halves too: with one alone it
    would be 2e-3 off."""
    if tma and GPU and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("only Hopper and later have the copy engine")
    N, segments, HV, K, V, BV, gen = 2, 4, 3, 32, 128, launch.ROWS_A_START, h.rng("starts")
    of = launch.maps_of_segments(N * segments * HV, K, V, HALF)
    R = h.randn(gen, N, segments, HV, K, K) * K**-0.5
    high = R.to(HALF)
    R = torch.stack([high, (R - high.double()).to(HALF)], 3)
    B = h.randn(gen, N, segments, HV, V, K).float()
    forgets = torch.zeros(N, segments, HV, dtype=torch.int32)
    forgets[0, 1, 0] = forgets[1, 0, 2] = forgets[1, 2, 1] = 1
    R[:, -1], B[:, -1], R[forgets == 1], forgets[:, -1] = float("nan"), float("nan"), float("nan"), 77
    initial = h.randn(gen, N, HV, V, K).float()

    expected, S = [], initial.double() * has_initial
    for r in range(segments):
        expected.append(S)
        kept = torch.where(forgets[:, r, :, None, None] == 1, 0.0, S @ R[:, r].double().sum(2).nan_to_num())
        S = kept + B[:, r].double()
    given = initial.to(DEVICE) if layout == "values first" else initial.mT.contiguous().mT.to(DEVICE)
    parts = {"R": R.flatten(0, 2), "B": B.flatten(0, 2), "forgets": forgets.flatten()}
    assert {n: (t.shape, t.dtype) for n, t in parts.items()} == of
    starts = torch.full((N, segments, HV, V, K), float("nan"), device=DEVICE)
    numbers = (segments, *given.stride(), HV, K, V, K, BV, has_initial, tma)
    one = launch.Launch(launch.starts_kernel, N * HV * segments * (V // BV), numbers, num_warps=4)
    if tma:
        triton.set_allocator(calls.no_scratch)
    one((*(t.to(DEVICE) for t in parts.values()), given if has_initial else None, starts))
    found = {"state": starts.flatten(0, 1).cpu()}
    h.assert_close(found, {"state": torch.stack(expected, 1).flatten(0, 1)}, 3e-5)


def test_segments_chosen_by_shape():
    device = launch.Device("sm_90", 132)
    (config, *_) = launch.configs_for("sm_90", 2, 128)
    assert launch.choose_segments(device, config, programs=16, chunks=512, K=128, itemsize=2) > 1
    assert launch.choose_segments(device, config, programs=256, chunks=512, K=128, itemsize=2) == 1
    assert launch.choose_segments(device, config, programs=16, chunks=4, K=128, itemsize=2) == 1


def test_H04_unknown_cards_get_safe_configurations():
    for name in ("sm_75", "sm_89", "sm_120", "gfx90a", "gfx1100"):
        for itemsize in (2, 4):
            for K in (1, 128, 256):
                found = launch.configs_for(name, itemsize, K)
                assert found and not any(c.tma for c in found)


@pytest.mark.parametrize("name, like", [("sm_89", "sm_80"), ("sm_120", "sm_80"), ("gfx90a", "gfx942")])
def test_H04_whose_configurations_an_unknown_card_gets_is_said(name, like, monkeypatch):
    monkeypatch.setattr(launch, "device_of", lambda device: launch.Device(name, 100))
    note = launch.stand_in(torch.device("cuda", 0))
    assert name in note and like in note
    monkeypatch.setattr(launch, "device_of", lambda device: launch.Device(like, 100))
    assert launch.stand_in(torch.device("cuda", 0)) == ""


def test_the_compiler_of_gfx942_is_given_no_segments_of_narrow_keys():
    """Up to Triton 3.6 it fails on them, up to 3.4 it takes Python along."""
    config = launch.configs_for("gfx942", 2, 64)[0]
    for K, cut in ((64, False), (128, True)):
        counts = {"programs": 16, "chunks": 512, "K": K, "itemsize": 2}
        assert (launch.choose_segments(launch.Device("gfx942", 304), config, **counts) > 1) == cut



# ---------------------------------------------------------------- what a call costs


class Waits(TorchDispatchMode):
    """Operations that read a tensor's value into Python, which makes the processor wait for the device."""

    NAMES = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")

    def __init__(self):
        super().__init__()
        self.found, self.count = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if any(name in func.name() for name in self.NAMES):
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lengths", [None, [70, 1, 63]], ids=["plain", "packed"])
def test_C03_P05_a_call_waits_for_nothing_and_launches_four_kernels(lengths, monkeypatch):
    x = to_device(h.make(134, 1, 1, 16, 16, lengths=lengths, dtype=HALF))
    forward(x)  # the plan is made by the first call
    launched, run = [], launch.Launch.__call__
    spy = lambda self, *given, **how: launched.append(self) or run(self, *given, **how)  # noqa: E731
    monkeypatch.setattr(launch.Launch, "__call__", spy)
    if GPU:
        torch.cuda.set_sync_debug_mode("error")
        try:
            forward(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        # ours, not theirs
        monkeypatch.setattr(launch.Launch, "__call__", lambda self, *_: launched.append(self))
        with Waits() as seen:
            forward(x)
        assert not seen.found and seen.count <= 16
    assert len(launched) == 4


def test_plans_are_kept():
    x = to_device(h.make(80, 1, 1, 16, 16, dtype=HALF))
    forward(x)
    before = len(launch._plans)
    forward({n: t.clone() for n, t in x.items()})
    assert len(launch._plans) == before


@on_gpu
@pytest.mark.parametrize("packed", [False, True])
def test_captured_in_a_graph(packed):
    """Boundaries and numbers may change between replays; the shapes may not."""
    x = to_device(h.make(300, 1, 2, 64, 64, lengths=[100, 200] if packed else None, dtype=HALF))
    forward(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = forward(x)
    other = h.make(300, 1, 2, 64, 64, lengths=[299, 1] if packed else None, dtype=HALF, label=("replay",))
    for name, t in other.items():
        if torch.is_tensor(t):
            x[name].copy_(t)
    graph.replay()
    expected = dict(zip(("o", "state"), h.recurrence(**other), strict=True))
    h.assert_close({"o": o.cpu(), "state": state.cpu()}, expected, 1e-2, other.get("cu_seqlens"))


# ---------------------------------------------------------------- S11: beyond 2^31


def far_apart(x, name, stride=2**24 + 16):
    """x with the tokens of one of its float16 tensors `stride` elements from each other, in memory that nobody touches
    in between: after 128 of them they lie beyond 2^31 elements."""
    whole = h.untouched_memory(stride * x[name].shape[1], torch.float16)
    apart = whole.as_strided(x[name].shape, (len(whole), stride, *x[name].stride()[2:]))
    return x | {name: apart.copy_(x[name])}


@pytest.mark.skipif(GPU, reason="where there is a GPU, real tensors of that size do this")
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_S11_tokens_beyond_two_to_the_31(name):
    x = h.make(150, 1, 1, 16, 16, dtype=torch.float16, decays="slow")
    x["g"], x["beta"] = x["g"].half(), x["beta"].half()
    expected, found = forward(x), forward(far_apart(x, name))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["q", "v", "g"])
def test_S11_a_chunk_beyond_two_to_the_31(name):
    """Offsets within a chunk have 32 bits: what is further apart is copied."""
    x = h.make(33, 1, 1, 16, 16, dtype=torch.float16)
    x["g"], x["beta"] = x["g"].half(), x["beta"].half()
    expected, found = forward(x), forward(far_apart(x, name, stride=2**26))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_rows_unevenly_apart_are_copied():
    """A head's numbers that begin at multiples of 16 bytes but not of 16 elements cost a kernel an address each."""
    whole = h.make(20, 1, 1, 16, 24, dtype=HALF)["v"]
    assert calls.by_token(whole) is whole  # no copy would be better
    fused = torch.zeros(1, 20, 2 * 16 + 8, dtype=HALF)
    q = fused[..., :16].unflatten(-1, (1, 16))
    assert calls.by_token(q).is_contiguous() and not q.is_contiguous()
    assert calls.by_token(torch.zeros(1, 20, 48, dtype=HALF)[..., 16:32].unflatten(-1, (1, 16))).stride(1) == 48


@pytest.mark.parametrize("K, limit", [(128, {"maxnreg": 168}), (104, {})])
def test_registers_are_not_limited_for_rows_unevenly_apart(K, limit, monkeypatch):
    """An address for each element takes them all: 168 would leave 2.5 KB a thread in memory."""
    monkeypatch.setattr(launch, "device_of", lambda _: launch.Device("sm_90", 132))
    q, k, v, g, beta = (h.make(20, 1, 2, K, K, dtype=torch.float16)[n] for n in h.TOKEN_INPUTS)
    plan = launch.make_plan(q, k, v, g, beta, None, None, None, None, 1.0, True, True, False, False, True)
    options = plan.launches["prepare"].options
    assert {n: x for n, x in options.items() if n == "maxnreg"} == limit


@on_gpu
@pytest.mark.parametrize("packed", [False, True])
def test_S11_tensors_beyond_two_to_the_31(packed):
    """q, k, v, o, A and P together, and the states: all of more than 2^31 elements. Spot rows, bitwise."""
    B, T, K = 131_200, 128, 128
    if torch.cuda.mem_get_info()[0] < 70 * 2**30:
        pytest.skip("needs 70 GB of the GPU's memory")
    q, k, v = (torch.randn(B, T, 1, K, device=DEVICE, dtype=HALF).mul_(K**-0.5) for _ in range(3))
    g, beta = -torch.rand(B, T, 1, device=DEVICE), torch.rand(B, T, 1, device=DEVICE)
    x = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    row = {n: t.flatten(0, 1)[None] for n, t in x.items()} if packed else x
    if packed:
        row["cu_seqlens"] = torch.arange(0, B * T + 1, T, device=DEVICE)
    o, state = forward(row)
    o = o.view(B, T, 1, K)
    for b in (0, 1, B // 2, 131_071, 131_072, B - 1):
        alone_o, alone_state = forward({n: t[b : b + 1] for n, t in x.items()})
        assert torch.equal(o[b], alone_o[0]) and torch.equal(state[b], alone_state[0]), b

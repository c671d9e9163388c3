"""The Triton stages, one by one and in a row, against the torch stages in float64 and against the recurrence.

Interpreted where there is no GPU, run where there is one: the same tests.
"""

import itertools
import math
import os
import re
from pathlib import Path

import helpers as h
import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is loaded
pytest.importorskip("triton", reason="Triton is not installed, so its kernels are not tested here")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from gdn_ref import chunkwise, identities  # noqa: E402
from gdn_ref.kernels import stages, tiles  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
LOG2E = math.log2(math.e)


def make(dtype=torch.float32, **options):
    """helpers.make with tokens in dtype and gates in float32, on the device."""
    x = h.make(**{"T": 70, "H": 1, "HV": 2, "K": 16, "V": 24} | options)
    x = {n: t.to(dtype) if n in ("q", "k", "v") else t for n, t in x.items()}
    return {n: t.to(DEVICE) if torch.is_tensor(t) else t for n, t in x.items()}


def double(x):
    return {n: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for n, t in x.items()}


def run(module, x, C=64, gated=True, sums=torch.float64, **packing):
    """All six stages of a module in a row; every result by name. sums: the dtype that cumulative decays are kept in."""
    packing = {"cu_seqlens": x.get("cu_seqlens")} | packing
    G = module.chunk_local_cumsum(x["g"], C, scale=LOG2E, output_dtype=sums, **packing) if gated else None
    A = module.chunk_scaled_dot_kkt_fwd(x["k"], G, x["beta"], chunk_size=C, **packing)
    X = module.solve_tril(A, **packing)
    w, u = module.recompute_w_u_fwd(x["k"], x["v"], x["beta"], X, G, **packing)
    S = module.chunk_states(x["k"], w, u, G, x["initial_state"], chunk_size=C, **packing)
    o = module.chunk_output(x["q"], x["k"], S.delta, S.h, G, chunk_size=C, **packing)
    results = {"A": A, "X": X, "w": w, "u": u, "h": S.h, "delta": S.delta, "state": S.final_state, "o": o}
    return {"G": G, **results} if gated else results


def check(x, **options):
    """The stages in a row against the float64 recurrence, per sequence and head."""
    results = run(stages, x, **options)
    gates = {} if options.get("gated", True) else {"g": torch.zeros_like(x["g"])}
    expected = dict(zip(("o", "state"), h.recurrence(**x | gates), strict=True))
    h.assert_close({n: results[n] for n in expected}, expected, BOUNDS[x["k"].dtype], x.get("cu_seqlens"))


# ---------------------------------------------------------------- values

SHAPES = h.pairwise(
    T=[1, 16, 17, 31, 64, 65],
    heads=[(1, 1), (2, 2), (1, 3)],
    KV=[(64, 32), (100, 65), (1, 1), (5, 70)],
    C=[16, 32, 64],
    dtype=h.DTYPES,
)


@pytest.mark.parametrize("row", SHAPES, ids=h.case_id)
def test_stages_in_a_row(row):
    (H, HV), (K, V) = row["heads"], row["KV"]
    check(make(h.DTYPES[row["dtype"]], T=row["T"], H=H, HV=HV, K=K, V=V, keys="correlated"), C=row["C"])


@pytest.mark.parametrize("K, V", [(128, 128), (256, 20), (20, 256), (256, 256)])
@h.in_every_dtype
def test_wide_heads(K, V, dtype):
    check(make(dtype, HV=1, T=66, K=K, V=V))


@pytest.mark.parametrize("decays, keys", list(zip(h.DECAYS, itertools.cycle(h.KEYS[:0:-1]), strict=False)))
def test_decays_of_every_kind(decays, keys):
    check(make(HV=1, T=66, V=16, decays=decays, keys=keys))


@h.in_every_dtype
def test_batches_without_gate_and_initial_state(dtype):
    x = make(dtype, B=2, T=20, H=1, HV=2, state=False)
    check(x, C=16)
    check(x, C=32, gated=False)


@pytest.mark.parametrize("C", [16, 64])
@pytest.mark.parametrize("options", [{}, {"lengths": (0, 5, 32, 0, 34, 1)}, {"B": 2}], ids=["one", "packed", "batch"])
def test_each_stage_is_the_torch_stage(options, C):
    """Every intermediate result, not only the last ones."""
    x = make(**{"T": C + 6} | options)
    results, expected = run(stages, x, C), run(chunkwise, double(x), C)
    for name, value in expected.items():
        assert results[name].shape == value.shape
        assert h.relative_l2(results[name], value, kind="parameter") < 1e-6, name
    assert results["w"].dtype == x["k"].dtype and results["u"].dtype == x["v"].dtype


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("scale", [None, 0.5, LOG2E])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_cumulative_sum(reverse, scale, dtype):
    g = make(T=70, HV=3, decays="huge_then_small")["g"]
    arguments = {"chunk_size": 32, "reverse": reverse, "scale": scale, "output_dtype": dtype}
    found, expected = (m.chunk_local_cumsum(g, **arguments) for m in (stages, chunkwise))
    assert found.dtype == expected.dtype == (dtype or torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-12 if dtype else 1e-6, atol=0)


@h.in_every_dtype
def test_results_come_in_the_dtype_that_is_asked_for(dtype):
    x = make()
    A = stages.chunk_scaled_dot_kkt_fwd(x["k"], None, x["beta"], output_dtype=dtype)
    X = stages.solve_tril(A, output_dtype=dtype)
    assert A.dtype == X.dtype == dtype
    assert h.relative_l2(X, chunkwise.solve_tril(A.double()), kind="parameter") < {torch.float32: 1e-6}.get(dtype, 1e-2)


@pytest.mark.skipif(GPU, reason="bfloat16 is multiplied as it is on a GPU")
def test_bfloat16_is_widened_where_kernels_are_interpreted(monkeypatch):
    x = make(torch.bfloat16)
    r = run(stages, x)
    given = x["q"], x["k"], r["delta"], r["h"], r["G"]
    expected, rounded = chunkwise.chunk_output(*(t.double() for t in given)), stages.chunk_output(*given)
    monkeypatch.setitem(tiles.WIDENED, torch.bfloat16, torch.float32)  # as without interpreting.py
    errors = [h.relative_l2(o, expected, kind="parameter") for o in (stages.chunk_output(*given), rounded)]
    assert errors[0] < 1e-6 and errors[1] > 1e-4
    check(x)
    assert run(stages, x)["w"].dtype == torch.bfloat16


def test_float32_sums_of_ordinary_decays_are_good_enough():
    check(make(T=130, decays="ordinary"), sums=None)


# ---------------------------------------------------------------- packed sequences, memory around the tensors


@h.in_every_dtype
def test_packed_sequences(dtype):
    check(make(dtype, lengths=(0, 5, 32, 0, 34, 1, 0), H=1, HV=2), C=32)


def test_chunk_indices_may_be_passed_in():
    x = make(HV=1, lengths=(3, 0, 20))
    indices = chunkwise.prepare_chunk_indices(x["cu_seqlens"], 16)
    results = run(stages, x, 16)
    for integers in (torch.int32, torch.int64):
        given = run(stages, x, 16, cu_seqlens=x["cu_seqlens"].to(integers), chunk_indices=indices.to(integers))
        assert all(torch.equal(given[n], results[n]) for n in results)


def test_tokens_of_no_sequence_give_zero_and_reach_nobody():
    x = make(HV=1, lengths=(20, 17))
    results = run(stages, x, 16)
    longer = {
        n: torch.cat([t, torch.full_like(t[:, :9], math.nan)], 1) if n in h.TOKEN_INPUTS else t for n, t in x.items()
    }
    found = run(stages, longer, 16)
    for name, value in found.items():
        if name in ("h", "state"):
            assert torch.equal(value, results[name])
        else:
            assert torch.equal(value[:, :37], results[name]) and not value[:, 37:].any(), name


def test_nothing_around_the_tensors_is_read():
    """Inputs that lie between NaNs: one of them read and used would show."""
    x = make(T=37, K=20, V=18, H=1, HV=2)
    walled = {n: torch.full((t.numel() + 8192,), math.nan, dtype=t.dtype, device=DEVICE) for n, t in x.items()}
    walled = {n: w[4096:-4096].view(x[n].shape).copy_(x[n]) for n, w in walled.items()}
    results, found = run(stages, x, 32), run(stages, walled, 32)
    assert all(torch.equal(found[n], results[n]) for n in results)


def test_strided_inputs():
    gen = h.rng("stages", "strided")
    q, k, v, a, b = h.fused_projection(gen, 1, 40, 1, 2, 16, 24)
    x = {"q": h.unit(q), "k": h.unit(k), "v": v, "g": -a.abs(), "beta": b.sigmoid(), "initial_state": None}
    x = {n: t if t is None else t.to(DEVICE).transpose(1, 2).contiguous().transpose(1, 2) for n, t in x.items()}
    x["v"] = torch.cat([v, v], 2).to(DEVICE)[:, :, : v.shape[2]]  # a view of the device's own: a copy would be dense
    assert not any(t.is_contiguous() for t in x.values() if t is not None and t.shape[2] > 1)
    check(x, C=16)


def test_results_do_not_depend_on_batch_mates_and_repeat():
    x = make(HV=1, B=2, T=20)
    results, again = run(stages, x, 16), run(stages, x, 16)
    alone = run(stages, {n: t[1:2] for n, t in x.items()}, 16)
    for name in results:
        assert torch.equal(results[name], again[name]) and torch.equal(results[name][1:2], alone[name]), name


@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_no_tokens(lengths):
    x = make(T=0) if not lengths else make(lengths=lengths)
    results = run(stages, x)
    assert torch.equal(results["state"], x["initial_state"]) and not results["o"].numel()


@pytest.mark.skipif(GPU, reason="pages that nobody has reserved: on the CPU alone")
def test_offsets_beyond_two_to_the_31(monkeypatch):
    """One chunk at token 2^27, where every [T, 16] tensor has passed 2^31 elements. Its pages alone exist."""
    x, C, start = make(T=20, HV=1, K=16, V=16, state=False), 16, 2**27 + 5
    G = stages.chunk_local_cumsum(x["g"], C, scale=LOG2E)
    near, h_, x["G"] = run(stages, x, C, sums=None), torch.randn(1, 2, 1, 16, 16), G
    near["o"] = stages.chunk_output(x["q"], x["k"], near["delta"], h_, G, chunk_size=C)

    def far(shape, dtype):
        return h.untouched_memory(math.prod(shape), dtype).view(shape)

    def moved(t):
        whole = far((1, start + 20, *t.shape[2:]), t.dtype)
        whole[:, start:] = t
        return whole

    monkeypatch.setattr(stages, "_output", lambda chunks, shape, dtype, device: far(shape, dtype))
    where = {"cu_seqlens": torch.tensor([0, start, start + 20]), "chunk_indices": torch.tensor([[1, 0], [1, 1]])}
    q, k, v, g, beta, G, A, X, E = (
        moved({**x, **near}[n]) for n in ("q", "k", "v", "g", "beta", "G", "A", "X", "delta")
    )
    found = {
        "G": stages.chunk_local_cumsum(g, C, scale=LOG2E, **where),
        "A": stages.chunk_scaled_dot_kkt_fwd(k, G, beta, chunk_size=C, **where),
        "X": stages.solve_tril(A, **where),
        **stages.recompute_w_u_fwd(k, v, beta, X, G, **where)._asdict(),
        "o": stages.chunk_output(q, k, E, h_, G, chunk_size=C, **where),
    }
    for name, value in found.items():
        assert torch.equal(value[:, start:], near[name]), name


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"C": 48}, ValueError, "chunk_size: found 48, expected one of 16, 32, 64"),
        ({"k": torch.zeros(1, 70, 1, 257)}, ValueError, "k: found a last axis of 257"),
        ({"beta": None}, TypeError, "beta: found None"),
        ({"k": torch.zeros(1, 70, 1, 16, dtype=torch.float64)}, TypeError, "k: found dtype torch.float64"),
        ({"beta": torch.zeros(1, 69, 2)}, ValueError, "beta: found shape"),
        ({"cu_seqlens": torch.tensor([0, 50, 40])}, ValueError, "cu_seqlens: found 50 then 40"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    x = make() | {n: t.to(DEVICE) if torch.is_tensor(t) and n != "cu_seqlens" else t for n, t in change.items()}
    with pytest.raises(error, match=re.escape(message)):
        stages.chunk_scaled_dot_kkt_fwd(x["k"], x["g"], x["beta"], x.get("cu_seqlens"), x.get("C", 64))


def test_states_and_the_starts_of_chunks_must_fit():
    x = make()
    r = run(stages, x)
    with pytest.raises(ValueError, match="initial_state: found shape"):
        stages.chunk_states(x["k"], r["w"], r["u"], None, x["initial_state"].mT.contiguous())
    with pytest.raises(ValueError, match="h: found shape"):
        stages.chunk_output(x["q"], x["k"], r["delta"], r["h"][:, :1])


# ---------------------------------------------------------------- tiles


@triton.jit
def inverse_kernel(N, X, C: tl.constexpr, DT: tl.constexpr):
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    tl.store(X + i * C + j, tiles.invert_unit_lower(tl.load(N + i * C + j), C, DT))


@pytest.mark.parametrize("C", [16, 32, 64])
@pytest.mark.parametrize("keys, beta", [("random", 1.0), ("correlated", 1.0), ("correlated", 2.0), ("repeated", 1.0)])
def test_inverse(keys, beta, C):
    k = h.make_keys(keys, h.rng("inverse", keys), 1, C, 1, 32)[0, :, 0]
    N = (beta * k @ k.T).float().to(DEVICE)  # what lies on and above the diagonal must not be read
    expected = torch.linalg.inv(torch.eye(C) + N.double().cpu().tril(-1))
    for DT, bound in ((tl.float32, 2e-6), (tl.float16, 1e-2)):
        X = torch.empty_like(N)
        inverse_kernel[(1,)](N, X, C, DT)
        assert not X.triu(1).any()
        assert h.relative_l2(X.cpu(), expected, kind="parameter") < bound, DT


@triton.jit
def locate_kernel(cu_seqlens, found, slots, N, C: tl.constexpr):
    slot = tl.program_id(0)
    sequence, chunk, start, end = tiles.locate(cu_seqlens, tl.load(slots + slot), N, C)
    tl.store(found + 4 * slot, sequence)
    tl.store(found + 4 * slot + 1, chunk)
    tl.store(found + 4 * slot + 2, start)
    tl.store(found + 4 * slot + 3, end)


def located(lengths, slots, C=16, integers=torch.int64):
    cu_seqlens = h.offsets(lengths, integers).to(DEVICE)
    slots = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    found = torch.empty(len(slots), 4, dtype=torch.int64, device=DEVICE)
    locate_kernel[(len(slots),)](cu_seqlens, found, slots, len(lengths), C)
    return found.tolist()


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "lengths", [(0,), (1,), (33,), (0, 0, 5, 0), (16, 16, 16), (5, 64, 0, 0, 70, 1, 15, 17, 0), (1,) * 40]
)
def test_every_chunk_has_one_slot_and_no_slot_two(lengths, integers):
    slots = range(sum(lengths) // 16 + len(lengths))
    chunks = [(n, c) for n, c, start, end in located(lengths, slots, integers=integers) if start + 16 * c < end]
    assert chunks == [(n, c) for n, length in enumerate(lengths) for c in range(-(-length // 16))]


def test_more_sequences_than_a_grid_has_rows():
    lengths = [(7 * n) % 40 for n in range(70_000)]
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    wanted = [(n, c) for n in (0, 1, 65_534, 65_536, 69_999) for c in range(-(-lengths[n] // 16))]
    found = located(lengths, [bounds[n] // 16 + n + c for n, c in wanted])
    assert found == [[n, c, bounds[n], bounds[n + 1]] for n, c in wanted]


@triton.jit
def decay_kernel(g, Gamma, gamma, C: tl.constexpr):
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    whole, rest = tiles.cumulative_decay(tl.load(g + tl.arange(0, C)))
    tl.store(Gamma + i * C + j, tiles.decay_matrix(whole, rest, C))
    tl.store(gamma + tl.arange(0, C), tiles.power(whole, rest))


@pytest.mark.parametrize("decays", h.DECAYS)
def test_decays_between_tokens(decays, C=64):
    g = h.make_decays(decays, h.rng("tiles", decays), 1, C, 1)[0, :, 0].float().to(DEVICE)
    Gamma, gamma = torch.empty(C, C, device=DEVICE), torch.empty(C, device=DEVICE)
    decay_kernel[(1,)](g, Gamma, gamma, C)
    wide, between = g.double().cpu(), torch.zeros(C, C, dtype=torch.float64)
    for i in range(C):
        between[i, : i + 1] = torch.stack([wide[j + 1 : i + 1].sum() for j in range(i + 1)]).exp()
    torch.testing.assert_close(Gamma.cpu().double(), between, rtol=1e-6, atol=1e-37)
    torch.testing.assert_close(gamma.cpu().double(), wide.cumsum(0).exp(), rtol=1e-6, atol=1e-37)


def test_every_tag_stands_in_the_book():
    known = {identity.tag for identity in identities.IDENTITIES}
    for module in (stages, tiles):
        tags = set(re.findall(r"\((\d{1,2}\.\d{1,2})\)", Path(module.__file__).read_text()))
        assert tags and tags <= known, sorted(tags - known)

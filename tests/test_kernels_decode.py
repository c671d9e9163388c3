"""The decode kernel against float64: in Triton's interpreter on a CPU, the same tests as they are on a GPU.

On a GPU everything goes through gdn_decode and gdn_rollback; in the interpreter, which they never choose, through the
plans that they would run.
"""

import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
triton = pytest.importorskip("triton")

from helpers import assert_close, case_id, offsets, pairwise, rand, randn, rng, serve  # noqa: E402

from gdn_ref import gdn_extend_chunkwise  # noqa: E402
from gdn_ref.kernels import decode as kernels  # noqa: E402
from gdn_ref.serving import gdn_decode, gdn_rollback  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
NAMES = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state_pool", "cache_indices")
on_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


def make(
    N=3, T=1, H=1, HV=2, K=16, V=24, *, slots=None, pool=6, dtype=torch.float32, pool_dtype=torch.float32, shift=0.0
):
    """Arguments of one call: un-normalised keys, gates as a trained layer has them."""
    gen = rng("decode", N, T, H, HV, K, V, shift)
    x = {
        "q": randn(gen, N, T, H, K) + shift,
        "k": 2.0 * (randn(gen, N, T, H, K) + shift),
        "v": randn(gen, N, T, HV, V),
        "a": randn(gen, N, T, HV) - 2.0,
        "b": randn(gen, N, T, HV),
    }
    x = {n: t.to(dtype) for n, t in x.items()}
    slots = [(2 * n + 1) % pool for n in range(N)] if slots is None else slots
    x |= {
        "A_log": torch.log(0.1 + rand(gen, HV)).float(),
        "dt_bias": randn(gen, HV).float(),
        "state_pool": randn(gen, pool, HV, V, K).to(pool_dtype),
        "cache_indices": torch.tensor(slots, dtype=torch.int64),
    }
    return {n: t.to(DEVICE) for n, t in x.items()}


def decode(x, known=None, keep=False):
    """Through the public function on a GPU; in the interpreter through the plan behind it. The pool is advanced."""
    known = None if known is None else torch.tensor(known, device=DEVICE)
    if GPU:
        return gdn_decode(**x, has_initial_state=known, state_after_each=keep)
    call = (*(x[n] for n in NAMES), known)
    o, states = kernels.DecodePlan(*call, keep=keep)(*call)
    return (o, states) if keep else o


def rollback(states, accepted, x):
    """The same for gdn_rollback."""
    call = (states, torch.tensor(accepted, device=DEVICE), x["state_pool"], x["cache_indices"])
    if GPU:
        return gdn_rollback(*call)
    return kernels.RollbackPlan(*call)(*call)


def expected(x, known=None):
    """Oracle: o [N,T,HV,V] and the pool as it must be after the call, both float64 on the CPU."""
    x = {n: t.cpu() for n, t in x.items()}
    N, T = x["q"].shape[:2]
    pool, slots = x["state_pool"].double(), x["cache_indices"].tolist()
    fresh = [s < 0 or (known is not None and not known[n]) for n, s in enumerate(slots)]
    states = [torch.zeros_like(pool[0]) if fresh[n] else pool[s] for n, s in enumerate(slots)]
    o, new = serve(*(x[n].flatten(0, 1) for n in NAMES[:5]), x["A_log"], x["dt_bias"], states, offsets((T,) * N))
    o, pool = o.unflatten(0, (N, T)).clone(), pool.clone()
    for n, s in enumerate(slots):
        if s < 0:
            o[n] = 0
        else:
            pool[s] = new[n]
    return {"o": o, "state": pool}


def check(x, bound=1e-5, known=None):
    """One call against the oracle; returns o."""
    right, idle = expected(x, known), x["state_pool"].clone()
    o = decode(x, known)
    assert_close({"o": o.cpu(), "state": x["state_pool"].cpu()}, right, bound)
    for s in set(range(len(idle))) - set(x["cache_indices"].tolist()):
        assert torch.equal(x["state_pool"][s], idle[s])
    return o


# ---------------------------------------------------------------- values

ROWS = pairwise(
    N=(1, 3),
    T=(1, 2, 5, 8),
    heads=((1, 1), (1, 3), (2, 8)),
    KV=((16, 24), (20, 7), (128, 32), (256, 8), (1, 1)),
    shift=(0.0, 1.0),
)


@pytest.mark.parametrize("row", ROWS, ids=case_id)
def test_decode_equals_the_recurrence(row):
    (H, HV), (K, V) = row["heads"], row["KV"]
    check(make(row["N"], row["T"], H, HV, K, V, shift=row["shift"]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_input_dtypes(dtype):
    """Only the output is rounded: the products are float32 sums."""
    x = make(T=4, dtype=dtype)
    o = check(x, {"o": 5e-3, "state": 1e-5})
    assert o.dtype == dtype


@pytest.mark.parametrize("T", [1, 4])
def test_bfloat16_pool_is_rounded_once_a_call(T):
    x = make(T=T, pool_dtype=torch.bfloat16)
    before = x["state_pool"].clone()
    check(x, {"o": 1e-5, "state": 3e-3})
    assert all(not torch.equal(x["state_pool"][s], before[s]) for s in x["cache_indices"].tolist())


@pytest.mark.parametrize("size", [64, 256, 4096])
def test_other_tiles(size, monkeypatch):
    """Any number of rows a warp may hold is right, for a V that they divide and one that they do not."""
    monkeypatch.setattr(kernels, "ENTRIES_PER_WARP", size)
    for V in (32, 50):
        check(make(N=1, T=2, HV=1, K=32, V=V))
    if GPU:
        from gdn_ref import serving

        serving._plans.clear()


def test_extreme_gates():
    """No NaN where exp and softplus overflow one another; a decay of e^-60 and of 1; beta of 0 and 1."""
    x = make(N=1, T=8, HV=2, pool=2)
    x["A_log"][:] = torch.tensor([100.0, -3.0])
    x["dt_bias"][:] = 0
    x["a"][0, :, 0] = torch.tensor([-200.0, -200, -104, -200, -200, -200, -200, -200])
    x["a"][0, :, 1] = torch.tensor([-40.0, -19.9, -20.1, 0, 5, 19.9, 30, 100])
    x["b"][0, :, 1] = torch.tensor([-200.0, -30, -5, 0, 5, 30, 200, 1])
    check(x)


def test_decay_of_zero_resets():
    x = make(N=1, T=3)
    x["A_log"][:], x["a"][0, 1] = 5.0, 100.0
    y = {n: (t[:, 1:] if n in "qkvab" else t.clone()) for n, t in x.items()}
    decode(x)
    decode(y, known=[False])
    assert torch.equal(x["state_pool"], y["state_pool"])


def test_zero_queries_and_keys():
    x = make(T=2)
    x["q"][0], x["k"][1] = 0, 0
    assert not check(x)[0].any()


def test_beta_stays_float32():
    """N11: a sigmoid rounded to bfloat16 and back costs 2e-3, and drifts with the context."""
    T, K = 64, 16
    x = make(N=1, T=T, H=1, HV=1, K=K, V=K, dtype=torch.bfloat16)
    x["A_log"][:] = -7.0
    right = expected(x)
    steps = [{n: (t[:, i : i + 1] if n in "qkvab" else t) for n, t in x.items()} for i in range(T)]
    o = torch.cat([decode(step) for step in steps], 1)
    assert_close({"o": o.cpu(), "state": x["state_pool"].cpu()}, right, {"o": 5e-3, "state": 1e-5})


def test_no_requests():
    x = make(N=1)
    x = {n: (t[:0] if n in (*"qkvab", "cache_indices") else t) for n, t in x.items()}
    assert decode(x).shape == (0, 1, 2, 24)


# ---------------------------------------------------------------- slots, layouts


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_skipped_requests_touch_nothing(dtype):
    """T04: -1 is neither slot 0 nor the last one; padding may hold NaN, which reaches nobody."""
    x = make(N=4, T=2, slots=[0, -1, 3, -1])
    x["cache_indices"] = x["cache_indices"].to(dtype)
    right = expected(x)
    for name in "qkvab":
        x[name][1] = float("nan")
    o, states = decode(x, keep=True)
    assert not o[1].any() and not o[3].any() and not states[1].any() and not states[3].any()
    assert_close({"o": o.cpu(), "state": x["state_pool"].cpu()}, right)


def test_fresh_requests_start_from_zero_whatever_the_slot_holds():
    """T07: by selection, not by a product with zero."""
    x = make(slots=[2, 0, 5])
    x["state_pool"][2], x["state_pool"][5] = 7.0, float("nan")
    check(x, known=[False, True, False])


def test_strided_pool_is_updated_in_place():
    """T10: other data between the slots, between heads and between rows keep every byte."""
    x = make(T=2, pool=8)
    storage = torch.full((8, 2, 2, 30, 20), float("nan"), device=DEVICE)
    storage[:, 1, :, 3:27, 4:20] = x["state_pool"]
    x["state_pool"] = storage[:, 1, :, 3:27, 4:20]
    check(x)
    storage[:, 1, :, 3:27, 4:20] = float("nan")
    assert storage.isnan().all()


def test_strided_inputs_amid_nan():
    """Views of one fused projection, their last axis dense; nothing outside of them is read."""
    x = make(N=2, T=3, H=2, HV=4)
    fused = torch.cat([x[n].flatten(2) for n in "qkvab"], -1)
    around = torch.full((4, 5, fused.shape[-1] + 2), float("nan"), device=DEVICE)
    around[1:3, 1:4, 1:-1] = fused
    pieces = around[1:3, 1:4, 1:-1].split([x[n][0, 0].numel() for n in "qkvab"], -1)
    views = {n: t.unflatten(-1, x[n].shape[2:]) for n, t in zip("qkvab", pieces, strict=True)}
    assert not any(t.is_contiguous() for t in views.values())
    check(x | views)


def test_inner_strides_are_copied():
    x = make(N=2, T=2, H=2, HV=4)
    views = {n: torch.stack([x[n], x[n] * 0], -1)[..., 0] for n in ("q", "k", "v", "a", "b", "A_log", "dt_bias")}
    views["cache_indices"] = torch.stack([x["cache_indices"], x["cache_indices"]], -1)[..., 0]
    check(x | views)


def test_batch_mates_change_nothing():
    x = make(N=3, T=2, slots=[4, 1, 2])
    alone = {n: (t[1:2] if n in (*"qkvab", "cache_indices") else t.clone()) for n, t in x.items()}
    o, single = decode(x), decode(alone)
    assert torch.equal(o[1:2], single) and torch.equal(x["state_pool"][1], alone["state_pool"][1])


@on_gpu
def test_pool_beyond_two_to_the_31():
    """Slot offsets are 64-bit: 5 GB of a bfloat16 pool, the last slot used."""
    x = make(N=2, K=128, V=128, HV=8, slots=[16500, 3], pool=4, pool_dtype=torch.bfloat16)
    small = x["state_pool"]
    x["state_pool"] = torch.empty(16501, 8, 128, 128, device=DEVICE, dtype=torch.bfloat16)
    x["state_pool"][16500], x["state_pool"][3] = small[0], small[1]
    y = x | {"state_pool": small.clone(), "cache_indices": torch.tensor([0, 1], device=DEVICE)}
    assert torch.equal(decode(x), decode(y)) and torch.equal(x["state_pool"][16500], y["state_pool"][0])


# ---------------------------------------------------------------- drafts


def assert_same(a, b):
    """Bitwise in the interpreter. On a GPU to rounding: a kernel that keeps the states is compiled apart, and either
    product of the first pair in a sum along a row may become part of its multiply-add."""
    if GPU:
        a, b, bound = a.double(), b.double(), 1e-6 if a.dtype == torch.float32 else 1e-3
        assert (a - b).norm() <= bound * b.norm()
    else:
        assert torch.equal(a, b)


@pytest.mark.parametrize("T, pool_dtype", [(8, torch.float32), (4, torch.bfloat16)])
def test_states_after_each_token(T, pool_dtype):
    """T14: states[:, n-1] is what a call with n tokens leaves in the pool; the answers are the same too."""
    x = make(T=T, pool_dtype=pool_dtype)
    start = x["state_pool"].clone()
    o, states = decode(x, keep=True)
    assert states.dtype == pool_dtype and states.shape == (3, T, 2, 24, 16)
    for n in range(1, T + 1):
        y = {m: (t[:, :n] if m in "qkvab" else t) for m, t in x.items()} | {"state_pool": start.clone()}
        assert_same(decode(y), o[:, :n])
        assert_same(y["state_pool"][y["cache_indices"]], states[:, n - 1])


def test_rejected_drafts_leave_no_trace():
    """Decode 4, accept 2, go on: as if only the 2 had ever been decoded. Slot -1 and idle slots stay out of it."""
    x = make(N=3, T=4, slots=[4, -1, 2])
    plain = {n: t.clone() for n, t in x.items()}
    _, states = decode(x, keep=True)
    rollback(states, [2, 0, 3], x)
    for n, accepted in ((0, 2), (2, 3)):
        part = {m: (t[n : n + 1, :accepted] if m in "qkvab" else t) for m, t in plain.items()}
        decode(part | {"cache_indices": plain["cache_indices"][n : n + 1]})
    idle = [s for s in range(6) if s not in (4, 2)]
    assert_same(x["state_pool"], plain["state_pool"])
    assert torch.equal(x["state_pool"][idle], plain["state_pool"][idle])


def test_rollback_into_a_strided_pool():
    x = make(N=2, T=3)
    storage = torch.full((6, 3, 24, 20), float("nan"), device=DEVICE)
    storage[:, :2, :, :16] = x["state_pool"]
    x["state_pool"] = storage[:, :2, :, :16]
    _, states = decode(x, keep=True)
    rollback(states, [1, 2], x)
    for n, (slot, last) in enumerate(zip(x["cache_indices"].tolist(), (0, 1), strict=True)):
        assert torch.equal(x["state_pool"][slot], states[n, last])
    storage[:, :2, :, :16] = float("nan")
    assert storage.isnan().all()


@pytest.mark.parametrize("KV", [(16, 16), (16, 24)], ids=str)
def test_prefill_then_decode(KV):
    """T01: the state goes from one to the other untransposed; K = V would hide that from shapes, not from values."""
    K, V = KV
    x = make(N=1, T=75, K=K, V=V, slots=[2])
    right = expected(x)
    first = {n: (t[0, :70] if n in "qkvab" else t) for n, t in x.items()}
    pieces = [gdn_extend_chunkwise(**first, cu_seqlens=torch.tensor([0, 70], device=DEVICE))[None]]
    pieces += [decode({n: (t[:, i : i + 1] if n in "qkvab" else t) for n, t in x.items()}) for i in range(70, 75)]
    assert_close({"o": torch.cat(pieces, 1).cpu(), "state": x["state_pool"].cpu()}, right)


# ---------------------------------------------------------------- on a GPU: graphs and time


def big(N, HV=32, T=1, pool_dtype=torch.float32):
    """K = V = 128, bfloat16 inputs; made on the GPU."""
    gen = torch.Generator(DEVICE).manual_seed(1)
    r = lambda *s: torch.randn(*s, device=DEVICE, generator=gen).bfloat16()  # noqa: E731
    return {
        "q": r(N, T, HV // 2, 128), "k": r(N, T, HV // 2, 128), "v": r(N, T, HV, 128),
        "a": r(N, T, HV), "b": r(N, T, HV),
        "A_log": r(HV).float(), "dt_bias": r(HV).float(),
        "state_pool": torch.randn(N, HV, 128, 128, device=DEVICE, generator=gen).to(pool_dtype),
        "cache_indices": torch.arange(N, device=DEVICE),
    }  # fmt: skip


@on_gpu
@pytest.mark.parametrize("T", [1, 4])
def test_captured_in_a_graph_whose_indices_change(T):
    x = make(N=3, T=T, slots=[0, -1, 2])
    known, accepted = torch.tensor([True, True, False], device=DEVICE), torch.ones(3, device=DEVICE, dtype=torch.int64)

    def step():
        o, states = gdn_decode(**x, has_initial_state=known, state_after_each=True)
        gdn_rollback(states, accepted, x["state_pool"], x["cache_indices"])
        return o

    start, stream = x["state_pool"].clone(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for slots, flags in (([0, -1, 2], [True, True, False]), ([5, 3, -1], [False, True, True]), ([-1] * 3, [True] * 3)):
        x["state_pool"].copy_(start)
        x["cache_indices"].copy_(torch.tensor(slots))
        known.copy_(torch.tensor(flags))
        x["v"].normal_()
        first = x | {n: x[n][:, :1] for n in "qkvab"}
        right = expected(first, flags)
        graph.replay()
        torch.cuda.synchronize()
        assert_close({"o": captured[:, :1].cpu(), "state": x["state_pool"].cpu()}, right)


@on_gpu
def test_prefill_captured_in_a_graph_whose_indices_change():
    """gdn_extend_chunkwise waits for nothing either: slots, flags and boundaries may change between replays."""
    x = make(N=1, T=200, H=2, HV=4, K=32, V=32, pool=6, slots=[0])
    x = {n: t[0] if n in "qkvab" else t for n, t in x.items()}
    x["cache_indices"] = torch.tensor([0, -1, 2], device=DEVICE)
    known, cu = torch.ones(3, device=DEVICE, dtype=torch.bool), torch.tensor([0, 70, 90, 200], device=DEVICE)
    start, stream = x["state_pool"].clone(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        gdn_extend_chunkwise(**x, cu_seqlens=cu, has_initial_state=known)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gdn_extend_chunkwise(**x, cu_seqlens=cu, has_initial_state=known)
    for slots, flags, bounds in (
        ([0, -1, 2], [True, True, True], [0, 70, 90, 200]),
        ([5, 3, -1], [False, True, True], [0, 1, 150, 180]),
    ):
        x["state_pool"].copy_(start)
        for tensor, values in ((x["cache_indices"], slots), (known, flags), (cu, bounds)):
            tensor.copy_(torch.tensor(values))
        graph.replay()
        eager = x | {"state_pool": start.clone()}
        o = gdn_extend_chunkwise(**eager, cu_seqlens=cu, has_initial_state=known)
        assert torch.equal(captured, o) and torch.equal(x["state_pool"], eager["state_pool"])
        states = [torch.zeros_like(start[0]) if s < 0 or not f else start[s] for s, f in zip(slots, flags, strict=True)]
        cpu = {n: t.cpu() for n, t in x.items()}
        right, _ = serve(*(cpu[n] for n in NAMES[:7]), [s.cpu() for s in states], torch.tensor(bounds))
        for n in range(3):
            if slots[n] < 0:
                right[bounds[n] : bounds[n + 1]] = 0
        assert_close({"o": captured[None].cpu()}, {"o": right[None]}, cu_seqlens=torch.tensor(bounds))


@on_gpu
def test_one_kernel_a_call():
    """P05: gates, norm, state and output in one launch."""
    x = big(2)
    gdn_decode(**x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        gdn_decode(**x)
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert names == ["decode_kernel"], names


@on_gpu
def test_time_against_the_copy_bandwidth(capsys, monkeypatch):
    """Prints, asserts nothing: microseconds by graph, TB/s (state read and written once), share of a copy's."""
    from gdn_ref import serving

    source, target = torch.randn(2, 2**28, device=DEVICE)
    copy = 2 * source.nbytes / timed(lambda: target.copy_(source)) / 1e12
    lines = [f"copy {copy:.2f} TB/s; rows: batch, tokens, pool; by entries a warp: us, share of the copy bandwidth"]
    for N, T, pool in ((1, 1, "fp32"), (8, 1, "fp32"), (64, 1, "fp32"), (256, 1, "fp32"), (64, 1, "bf16"),
                       (256, 1, "bf16"), (64, 4, "fp32")):  # fmt: skip
        x = big(N, T=T, pool_dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[pool])
        cells = []
        for size in (256, 512, 1024, 2048):
            monkeypatch.setattr(kernels, "ENTRIES_PER_WARP", size)
            serving._plans.clear()
            seconds = timed(lambda x=x: gdn_decode(**x))
            share = 2 * x["state_pool"].nbytes / seconds / 1e12 / copy
            cells.append(f"{size}: {seconds * 1e6:.1f} {share:.0%}")
        lines.append(f"{N:4} {T} {pool}  " + "   ".join(cells))
    monkeypatch.undo()
    serving._plans.clear()
    lines.append(f"CPU time a call: {host_time(big(1)):.1f} us")
    with capsys.disabled():
        print("\n" + "\n".join(lines))


def timed(f):
    """Median seconds of f, by replays of a graph of it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        f()
        f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    return triton.testing.do_bench(graph.replay, warmup=5, rep=30, return_mode="median") / 1e3


def host_time(x):
    """Median microseconds that a call keeps the CPU busy, in bursts short enough for the queue."""
    import time

    bursts = []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            gdn_decode(**x)
        bursts.append((time.perf_counter() - start) / 20 * 1e6)
    return sorted(bursts)[len(bursts) // 2]

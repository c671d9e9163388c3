"""What the tests share: makers of inputs, an oracle of their own, and the one way in which results are compared.

The oracle is a float64 token recurrence written plainly from the definition, apart from the package's own:
S_t = alpha_t (I - beta_t k_t' k_t) S_{t-1} + beta_t k_t' v_t,  o_t = scale q_t S_t.
"""

import contextlib
import functools
import gc
import itertools
import mmap
import weakref
import zlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

FP32_BOUND = 1e-5
# A float32 result cannot keep five digits below its smallest normal number (1.2e-38): references smaller than
# this are compared with it instead of with themselves, so that an all-zero reference asks for (next to) zero.
FLOOR = 1e-30

KEYS = ("random", "correlated", "repeated")
DECAYS = (
    "none",
    "slow",
    "ordinary",
    "strong",
    "deep",
    "reset",
    "all_reset",
    "huge_then_small",
    "alternating",
    "overflow",
    "edge",
    "loguniform",
)
TOKEN_INPUTS = ("q", "k", "v", "g", "beta")
# What the kernels take, by the names that cases bear.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
in_every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


# ---------------------------------------------------------------- inputs


def rng(*label):
    """A generator seeded by its label, so that a case keeps its numbers when others are added."""
    return torch.Generator().manual_seed(zlib.crc32(repr(label).encode()))


def randn(gen, *shape):
    return torch.randn(*shape, generator=gen, dtype=torch.float64)


def rand(gen, *shape):
    return torch.rand(*shape, generator=gen, dtype=torch.float64)


def unit(x):
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-30)


def make_keys(kind, gen, B, T, H, K):
    """Unit keys. Correlated ones (randn + 1) and equal ones are where a poor inverse of I + L shows."""
    if kind == "repeated":
        return unit(randn(gen, B, 1, H, K)).repeat(1, T, 1, 1)
    return unit(randn(gen, B, T, H, K) + (1.0 if kind == "correlated" else 0.0))


def make_decays(kind, gen, B, T, HV):
    """Log decays g <= 0 [B, T, HV]. Never constant where a constant would sum without rounding (as -5 does)."""
    jitter = 0.5 + rand(gen, B, T, HV)
    some = rand(gen, B, T, HV) < 0.2
    odd = (torch.arange(T) % 2 == 1)[None, :, None]
    inf = torch.tensor(float("-inf"), dtype=torch.float64)
    if kind == "none":
        return torch.zeros(B, T, HV, dtype=torch.float64)
    if kind == "ordinary":  # what a freshly initialised layer has: A in [1, e], softplus(randn)
        return -torch.exp(rand(gen, 1, 1, HV)) * torch.nn.functional.softplus(randn(gen, B, T, HV))
    if kind == "reset":
        return torch.where(some, inf, -1e-3 * jitter)
    if kind == "all_reset":
        return inf.expand(B, T, HV).clone()
    if kind == "huge_then_small":
        return torch.where(some, -1000.0 * jitter, -0.01 * jitter)
    if kind == "alternating":
        return torch.where(odd, -0.01 * jitter, -100.0 * jitter)
    if kind == "overflow":  # two of these sum to -inf in float32
        return torch.where(some, torch.tensor(-3e38, dtype=torch.float64), -0.01 * jitter)
    if kind == "edge":  # e^g passes float32's smallest normal (-87.3) and smallest (-103.9) number
        return torch.where(odd, -1e-3 * jitter, -80.0 - 30.0 * rand(gen, B, T, HV))
    if kind == "loguniform":
        return -torch.exp(-14.0 + 23.0 * rand(gen, B, T, HV))  # 1e-6 .. 8e3
    return {"slow": -1e-3, "strong": -5.0, "deep": -30.0}[kind] * jitter


def make(
    T=130,
    H=2,
    HV=None,
    K=16,
    V=24,
    *,
    B=1,
    keys="random",
    decays="ordinary",
    beta="wide",
    lengths=None,
    state=True,
    dtype=torch.float32,
    label=(),
):
    """Inputs of one case as a dict of q, k, v, g, beta, initial_state (or None) and, when packed, cu_seqlens."""
    HV = HV or H
    if lengths is not None:
        T = sum(lengths)
    gen = rng(T, H, HV, K, V, B, keys, decays, beta, lengths, label)
    N = B if lengths is None else len(lengths)
    x = {
        "q": unit(randn(gen, B, T, H, K) + (1.0 if keys == "correlated" else 0.0)),
        "k": make_keys(keys, gen, B, T, H, K),
        "v": randn(gen, B, T, HV, V),
        "g": make_decays(decays, gen, B, T, HV),
        "beta": rand(gen, B, T, HV) * (2.0 if beta == "wide" else 1.0),
        "initial_state": randn(gen, N, HV, K, V) if state else None,
    }
    x = {name: None if t is None else t.to(dtype) for name, t in x.items()}
    if lengths is not None:
        x["cu_seqlens"] = offsets(lengths)
    return x


def offsets(lengths, dtype=torch.int64):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def without(x, *names):
    return {name: t for name, t in x.items() if name not in names}


def fused_projection(gen, B, T, H, HV, K, V, dtype=torch.float32):
    """q, k, v, a, b as views that split the last axis of one projection (none is contiguous)."""
    whole = randn(gen, B, T, 2 * H * K + HV * V + 2 * HV).to(dtype)
    q, k, v, a, b = whole.split([H * K, H * K, HV * V, HV, HV], dim=-1)
    return q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), a, b


def pairwise(**axes):
    """Rows such that every pair of values of two axes occurs in at least one row (greedy, deterministic)."""
    names, values = list(axes), [list(a) for a in axes.values()]
    pairs = list(itertools.combinations(range(len(names)), 2))
    missing = {(i, j, x, y) for i, j in pairs for x in values[i] for y in values[j]}
    rows = []
    while missing:
        i, j, x, y = min(missing, key=repr)
        row = {i: x, j: y}
        for n in range(len(names)):
            if n not in row:
                start = len(rows) % len(values[n])  # among equals, not always the first value
                row[n] = max(values[n][start:] + values[n][:start], key=lambda c: _gain(missing, row, n, c))  # noqa: B023
        missing -= {(i, j, row[i], row[j]) for i, j in pairs}
        rows.append({name: row[n] for n, name in enumerate(names)})
    return rows


def _gain(missing, row, n, value):
    """How many missing pairs the value on axis n makes with what the row has already."""
    return sum(((m, n, w, value) if m < n else (n, m, value, w)) in missing for m, w in row.items())


def case_id(row):
    """Readable ids such as B1-T63-H2: the number follows its name, a word stands for itself."""
    return "-".join(
        f"{n}{v}" if isinstance(v, int) else "x".join(map(str, v)) if isinstance(v, tuple) else str(v)
        for n, v in row.items()
    )


# ---------------------------------------------------------------- the oracle


def recurrence_one(q, k, v, g, beta, scale, S, *, forget_last=False):
    """o [B,T,HV,V] and S [B,HV,K,V] of unpacked float64 inputs, one token at a time."""
    ratio = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(ratio, dim=2) for x in (q, k))
    out = []
    for t in range(q.shape[1]):
        k_t, alpha = k[:, t, :, None, :], g[:, t, :, None, None].exp()  # [B,HV,1,K], [B,HV,1,1]
        decayed = S * alpha
        error = v[:, t, :, None, :] - k_t @ (S if forget_last else decayed)
        S = decayed + (beta[:, t, :, None, None] * k_t).mT @ error
        out.append(scale * (q[:, t, :, None, :] @ S).squeeze(2))
    return (torch.stack(out, 1) if out else v * 0), S


def recurrence(q, k, v, g, beta, scale=None, initial_state=None, cu_seqlens=None, **options):
    """The oracle: float64, differentiable, GVA, packed or not. Returns (o, final_state [N,HV,K,V])."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    (B, _, _, K), (HV, V) = q.shape, v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    S = q.new_zeros(N, HV, K, V) if initial_state is None else initial_state.double()
    if cu_seqlens is None:
        return recurrence_one(q, k, v, g, beta, scale, S, **options)
    bounds, o, states = [int(c) for c in cu_seqlens], [], []
    for n, (a, b) in enumerate(itertools.pairwise(bounds)):
        o_n, S_n = recurrence_one(*(x[:, a:b] for x in (q, k, v, g, beta)), scale, S[n : n + 1], **options)
        o, states = o + [o_n], states + [S_n]
    o.append(v[:, bounds[-1] :] * 0)  # tokens that belong to no sequence
    return torch.cat(o, 1), torch.cat(states, 0) if states else S


def gates(a, b, A_log, dt_bias, factor=1.0):
    """(g, beta) of raw gates in float64."""
    a, b, A_log, dt_bias = (x.double() for x in (a, b, A_log, dt_bias))
    return -A_log.exp() * torch.nn.functional.softplus(a + dt_bias, threshold=1e9), factor * b.sigmoid()


def l2norm(x):
    """The one rule: eps inside the root."""
    x = x.double()
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def serve(q, k, v, a, b, A_log, dt_bias, states, cu_seqlens):
    """Oracle of the serving functions: [total,...] raw inputs, one [HV,V,K] state a request -> o, states, float64."""
    g, beta = gates(a, b, A_log, dt_bias)
    initial = torch.stack([s.double().mT for s in states]) if len(states) else None
    o, S = recurrence(
        l2norm(q)[None], l2norm(k)[None], v[None], g[None], beta[None], initial_state=initial, cu_seqlens=cu_seqlens
    )
    return o[0], S.mT


# ---------------------------------------------------------------- comparison


def relative_l2(actual, expected, cu_seqlens=None, *, kind="token"):
    """Relative L2 error of each sequence and head, [N, heads]; never one norm over all of them.

    kind: "token" for [B,T,heads,...], "state" for [N,heads,K,V], "parameter" for one norm over the tensor.
    """
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    difference, expected = actual.double() - expected.double(), expected.double()
    return _norms(difference, cu_seqlens, kind) / _norms(expected, cu_seqlens, kind).clamp_min(FLOOR)


def _norms(x, cu_seqlens, kind):
    if kind == "parameter":
        return x.norm().reshape(1, 1)
    if kind == "state":
        return x.flatten(2).norm(dim=2)
    x = x.flatten(3) if x.ndim > 3 else x[..., None]
    if cu_seqlens is None:
        return x.square().sum((1, 3)).sqrt()
    bounds = [int(c) for c in cu_seqlens]
    pieces = list(itertools.pairwise([*bounds, x.shape[1]]))  # the last piece: tokens of no sequence
    return torch.stack([x[0, a:b].square().sum((0, 2)).sqrt() for a, b in pieces])


def kind_of(name):
    name = name.removeprefix("d_")
    if name in ("state", "initial_state"):
        return "state"
    return "parameter" if name in ("A_log", "dt_bias") else "token"


def worst(actual, expected, cu_seqlens=None):
    """{name: worst relative L2 over sequences and heads} of two dicts of results."""
    assert set(actual) == set(expected), (sorted(actual), sorted(expected))
    errors = {}
    for name, reference in expected.items():
        e = relative_l2(actual[name], reference, cu_seqlens, kind=kind_of(name))
        errors[name] = e.nan_to_num(nan=float("inf")).max().item() if e.numel() else 0.0
    return errors


def assert_close(actual, expected, bound=FP32_BOUND, cu_seqlens=None):
    """Every tensor of the dict within its bound (a number, or {name: number} with a "*" entry for the rest)."""
    errors = worst(actual, expected, cu_seqlens)
    bounds = bound if isinstance(bound, dict) else {"*": bound}
    bounds = {n: bounds[n] if n in bounds else bounds["*"] for n in errors}
    bad = {n: f"{e:.2e} > {bounds[n]:.0e}" for n, e in errors.items() if not e <= bounds[n]}
    rounded = {n: f"{e:.1e}" for n, e in errors.items()}
    assert not bad, f"relative L2 against float64, worst sequence and head: {bad}; all: {rounded}"


# ---------------------------------------------------------------- runs with gradients


def upstream(o, state, label=("upstream",)):
    """Fixed random gradients of o and of the state, the same for every implementation of a case.

    Their values are bfloat16 numbers, so that they reach an op with half-precision outputs unrounded.
    """
    gen = rng(label, tuple(o.shape))
    return (randn(gen, *x.shape).bfloat16().double().to(x.device) for x in (o, state))


def where_triton_runs(x):
    """The tensors of a case on the GPU, if there is one; else as they are, for kernels are interpreted there."""
    return {n: t.cuda() if torch.is_tensor(t) and torch.cuda.is_available() else t for n, t in x.items()}


def run(fn, x, wrt=None, label=("upstream",), **options):
    """Results and gradients of fn(**x, **options) -> (o, state), as one dict: o, state, d_q, d_k, ...

    Leaves are detached copies that keep the strides of the tensors in x; wrt: the names that require grad (all
    floating tensors by default).
    """
    wrt = [n for n, t in x.items() if torch.is_tensor(t) and t.is_floating_point()] if wrt is None else list(wrt)
    leaves = {
        n: t.detach().requires_grad_(n in wrt) if torch.is_tensor(t) and t.is_floating_point() else t
        for n, t in x.items()
    }
    o, state = fn(**leaves, **options)
    results = {"o": o.detach(), "state": state.detach()}
    if wrt:
        do, dstate = upstream(o, state, label)
        loss = (o.double() * do).sum() + (state.double() * dstate).sum()
        loss = loss + 0 * sum(leaves[n].sum() for n in wrt) if not loss.requires_grad else loss
        grads = torch.autograd.grad(loss, [leaves[n] for n in wrt], allow_unused=True)
        for n, d in zip(wrt, grads, strict=True):
            results["d_" + n] = torch.zeros_like(leaves[n]) if d is None else d
    return results


def reference(x, fn=recurrence, **options):
    """What run() gives for the oracle, with the very numbers of x in float64 (gradients in float64 too)."""
    wide = {n: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for n, t in x.items()}
    return run(fn, wide, **options)


def check(fn, x, bound=FP32_BOUND, oracle=recurrence, oracle_options=None, **options):
    """run(fn, x) against the oracle: every result and gradient within the bound, per sequence and head.

    One exception, with a measure of its own. The gradient of a gate is a sum of inner products that may cancel to next
    to nothing (one or two tokens; equal keys without decay and from a zero state, where the float32 recurrence itself
    is up to 6e-5 off). Where moving the inputs by half a float32 unit moves the oracle's gradient by a quarter of the
    bound or more, no float32 code can be held to the bound, and six times that movement is allowed instead.
    """
    oracle_options = oracle_options or {}
    actual, expected = run(fn, x, **options), reference(x, oracle, **oracle_options)
    assert set(actual) == set(expected)
    assert_close_where_sums_cancel(actual, expected, x, bound, oracle, oracle_options)


def assert_close_where_sums_cancel(actual, expected, x, bound=FP32_BOUND, oracle=recurrence, oracle_options=None):
    """assert_close for float32, with the one exception that check describes."""

    def excused(name, error, moves):
        if not name.startswith("d_"):
            return torch.zeros_like(error, dtype=torch.bool)
        moved = moves()[name]
        return (moved >= bound / 4) & (error <= 6 * moved)

    _assert_close_or_excused(excused, actual, expected, x, bound, oracle, oracle_options or {}, lambda dtype: 2.0**-24)


def assert_close_for_dtype(actual, expected, x, bound):
    """assert_close, but no stricter than the inputs' own dtype allows: an error above the bound passes where moving
    the inputs, each by half a unit of its dtype, moves the exact result by as much, of that sequence and head.

    So it is where large writes cancel, as those to equal keys with beta near 2 do; and in gradients that are sums of a
    few products, as those of one token or of heads 1 wide are. Any fault worth the name is larger.
    """
    options = {} if any(name.startswith("d_") for name in expected) else {"wrt": []}
    excused = lambda name, error, moves: error <= moves()[name]  # noqa: E731
    half_a_unit = lambda dtype: torch.finfo(dtype).eps / 2  # noqa: E731
    _assert_close_or_excused(excused, actual, expected, x, bound, recurrence, options, half_a_unit)


def _assert_close_or_excused(excused, actual, expected, x, bound, oracle, options, half_a_unit):
    """assert_close, but for sequences and heads that excused(name, error [N, heads], moves) exempts.

    moves() is what _rounding gives, which takes a while: measured once, and only if something is over the bound.
    """
    cu, expected = x.get("cu_seqlens"), {name: expected[name] for name in actual}
    moves = functools.cache(lambda: _rounding(x, expected, oracle, options, half_a_unit))
    for name in actual:
        error = relative_l2(actual[name], expected[name], cu, kind=kind_of(name)).nan_to_num(nan=float("inf"))
        over = ~(error <= bound)
        if not over.any():
            continue
        over &= ~excused(name, error, moves)
        found = f"{name}: relative L2 against float64 {error.tolist()} > {bound:.0e}; all {worst(actual, expected, cu)}"
        assert not over.any(), f"{found}; rounding the inputs alone moves it by {moves()[name].tolist()}"


def _rounding(x, expected, oracle, options, half_a_unit):
    """{name: change [N, heads] of the oracle's results, relative L2, when its inputs move by half_a_unit(dtype)}.

    Root mean square of eight tries.
    """
    changes = []
    for n in range(8):
        gen = rng("rounding", n)
        moved = {
            m: t.double() * (1 + half_a_unit(t.dtype) * torch.sign(randn(gen, *t.shape)))
            if torch.is_tensor(t) and t.is_floating_point()
            else t
            for m, t in x.items()
        }
        results = run(oracle, moved, **options)
        changes.append(
            {m: relative_l2(results[m], expected[m], x.get("cu_seqlens"), kind=kind_of(m)) for m in expected}
        )
    return {m: torch.stack([c[m] for c in changes]).square().mean(0).sqrt() for m in expected}


# ---------------------------------------------------------------- what a call costs


class CountOps(TorchDispatchMode):
    """Number of torch operations that run inside the block."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class PeakMemory(TorchDispatchMode):
    """Peak bytes of the tensor storages made inside the block and still alive, forward and backward alike."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)
        }
        for t in torch.utils._pytree.tree_leaves(out):
            if torch.is_tensor(t) and (key := t.untyped_storage()._cdata) not in given and key not in self.known:
                self._add(t.untyped_storage())
        return out

    def _add(self, storage):
        size, key = storage.nbytes(), storage._cdata
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key, size):
        self.known.discard(key)
        self.live -= size


def untouched_memory(count, dtype):
    """So many numbers as a tensor, whose pages do not exist before somebody touches them: for offsets beyond 2^31."""
    size = count * torch.empty(0, dtype=dtype).element_size()
    never_counted = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has the name since 3.12 alone
    return torch.frombuffer(
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | never_counted), dtype=dtype
    )


@contextlib.contextmanager
def peak_memory():
    gc.collect()
    with PeakMemory() as meter:
        yield meter

"""Fused backward on the host: configurations, memory, launches. The forward's twin is launch.py.

What of the forward it needs, the chunks' tiles, states and errors, it has from there, where both are cut alike (on
Hopper and in float32, for keys up to 128 wide), or makes again, which takes time and saves their memory between the two
passes. In bytes, for a token and a value head at K = V = 128 and 16-bit inputs, in chunks of 64:

    of the forward, kept or made again      A and P 256, factors 32, S 512, E 256          1.0 KB
    needed on the way                       dS 512, pairs 256, sums 32                     0.8 KB
    inputs and gradients                    q and k of a fourth of the heads 128, v, o and do 768, dv, dq, dk 384

Where heads are few the adjoints are cut into segments, by the forward's rule; their maps are 128 KB a segment and head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import launch
from .adjoints import adjoint_segment_kernel, adjoints_kernel
from .backward import (
    finish_kernel,
    gradients_kernel,
    lengths_kernel,
    pairs_kernel,
    states_kernel,
)
from .calls import Arguments, Launch, Work, arrange, can_copy, kind_of_call, launch_all, new_tensors, recalled_or_made
from .launch import HAS_GLUON, Device, device_of, power_of_two, state_strides

hopper = None
if HAS_GLUON:
    from . import hopper


class Config(NamedTuple):
    """How the backward is cut for a device and an input."""

    C: int  # tokens a chunk
    BV: int  # columns of V a program carries through the states and the adjoints
    warps: int
    stages: int  # chunks whose loads are in flight, states
    stages_back: int  # the same, adjoints
    tma: bool  # whether the copy engine loads the tiles (Hopper and later)
    prepare_warps: int
    BK: int  # columns of K that a program of the gradients has
    block: int  # columns of V that it takes at once, and columns of K or V that a program of the pairs does
    gradient_warps: int
    gradient_stages: int  # value heads whose loads are in flight, of the pairs too
    gluon: bool = False  # whether the gradients are those of hopper.py, where they fit


FP32 = {
    (4, False): (Config(16, 16, 8, 1, 1, False, 4, 32, 16, 8, 1),),
    (4, True): (Config(16, 16, 8, 1, 1, False, 4, 32, 16, 8, 1),),
}
# (bytes an element, K > 128): one configuration, or one of narrow and one of wide programs, as in the forward. Where
# chunks have 32 tokens the gradients have as many columns as few warps hold in registers.
CONFIGS: dict[str, dict[tuple[int, bool], tuple[Config, ...]]] = {
    # Hopper: of the gradients one program of two warpgroups has a processor with the tiles of two heads, 209 KB.
    "sm_90": {
        (2, False): (
            Config(64, 64, 4, 3, 3, True, 4, 64, 128, 8, 2, True),
            Config(64, 128, 8, 3, 2, True, 4, 64, 128, 8, 2, True),
        ),
        # Wide keys without the copy engine: with it, blocks of 32 rows met an illegal instruction on an H200, and those
        # of 64 spill.
        (2, True): (Config(32, 16, 8, 2, 2, False, 8, 16, 16, 2, 1),),
        **FP32,
    },
    "sm_100": {
        (2, False): (Config(32, 64, 8, 3, 2, True, 4, 16, 32, 4, 1),),
        (2, True): (Config(32, 64, 8, 2, 1, True, 8, 16, 32, 4, 1),),
        **FP32,
    },
    # Without a copy engine and with products that start from registers, chunks of 32 are what spills nothing.
    "sm_80": {
        (2, False): (Config(32, 32, 8, 2, 2, False, 8, 16, 32, 4, 1),),
        (2, True): (Config(32, 16, 8, 2, 2, False, 8, 16, 32, 4, 1),),
        **FP32,
    },
    "gfx942": {
        (2, False): (Config(32, 32, 4, 1, 1, False, 4, 32, 32, 2, 1),),
        (2, True): (Config(32, 32, 4, 1, 1, False, 4, 32, 32, 2, 1),),
        **FP32,
    },
}
WIDEST_KEPT = 128  # keys


def configs_for(architecture: str, itemsize: int, K: int) -> tuple[Config, ...]:
    """The configurations that can be selected for inputs of `itemsize` bytes and keys K wide."""
    return CONFIGS[launch.in_table(architecture)][itemsize, K > 128]


def choose_config(device: Device, itemsize: int, K: int, V: int, head_sequences: int, packed: bool) -> Config:
    """One of configs_for, by the forward's rule: the wide one where its waves are so much fewer that it pays."""
    narrow, *wide = configs_for(device.architecture, itemsize, K)
    if wide and V > narrow.BV and not (packed and 2 * head_sequences < 3 * device.processors):
        waves = [-(-head_sequences * -(-V // c.BV) // device.processors) for c in (narrow, wide[0])]
        narrow = wide[0] if 1.64 * waves[1] < waves[0] else narrow
    return narrow


# ---------------------------------------------------------------------------------------------------- plans


class Plan:
    """Everything about a call that its data does not change; run() allocates and launches."""

    def __init__(self, launches, work: Work, results: dict, device, tma: bool, to_arrange: bool, dtypes: tuple):
        self.launches, self.work = launches, work
        self.results = results  # shape and dtype of what the caller gets, by name
        self.device, self.tma, self.to_arrange = device, tma, to_arrange
        self.dtypes = dtypes  # of the gradients

    def run(self, q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial, do, dfinal, saved):
        """The gradients of chunk_backward, from its inputs as they came."""
        if self.to_arrange:
            q, k, v, g, beta, cu_seqlens = arrange(q, k, v, g, beta, cu_seqlens)
        do = torch.zeros_like(v) if do is None else do.to(v.dtype).contiguous()
        given = {
            "q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias, "cu_seqlens": cu_seqlens,
            "initial": initial, "do": do, "dfinal": dfinal,
        }  # fmt: skip
        if self.device.type == "cpu" or self.device.index == torch.cuda.current_device():
            return self._launch(given, saved)
        with torch.cuda.device(self.device):
            return self._launch(given, saved)

    def _launch(self, given: dict, saved: Kept | None):
        memory = self.work.allocate(self.device)
        made = new_tensors(self.results, self.device)
        parts = [(self.work, memory)] + ([] if "states" in self.launches else [(saved.work, saved.memory)])
        launch_all(self.launches, ARGUMENTS, given | made, parts, self.device, self.tma)
        dA_log = made["share"].sum((0, 1)) if "share" in made else None
        ddt_bias = None if given["dt_bias"] is None else made["dg"].sum((0, 1))
        dq, dk, dv, dg, dbeta, dinitial = map(made.get, ("dq", "dk", "dv", "dg", "dbeta", "dinitial"))
        found = (dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dinitial)
        return tuple(
            x if x is None or x.dtype == dtype else x.to(dtype) for x, dtype in zip(found, self.dtypes, strict=True)
        )


class Kept(NamedTuple):
    """What a forward call kept for its backward."""

    work: Work  # where its parts lie: tiles, factors, S, E
    memory: Tensor

    def cut(self) -> tuple[int, int]:
        """Tokens a chunk, and rows of a state filled up: see wanted."""
        return self.work.parts["E"][1][2:]


ARGUMENTS = Arguments({
    "decay": ("g", "beta", "A_log", "dt_bias", "cu_seqlens", "factors"),
    "prepare": ("q", "k", "cu_seqlens", "tiles", "factors", "dv"),  # dv gets 0 where tokens belong to no sequence
    "states": ("k", "v", "tiles", "factors", "initial", "S", "E", "cu_seqlens"),
    "adjoint_segments": ("q", "k", "do", "tiles", "factors", "R", "B", "forgets"),
    "adjoints": (
        "q", "k", "do", "tiles", "factors", "dfinal", "R", "B", "forgets", "dS", "dv", "dinitial", "cu_seqlens",
    ),
    "lengths": ("q", "k", "lengths", "dq", "dk", "cu_seqlens"),
    "pairs": (
        "q", "k", "do", "dv", "factors", "lengths", "E", "pairs", "tops", "within", "dq", "dk", "cu_seqlens",
    ),
    "gradients": (
        "q", "k", "do", "dv", "factors", "lengths", "E", "S", "dS", "pairs", "tops", "dq", "dk", "sums", "cu_seqlens",
    ),
    "hopper_gradients": (
        "q", "k", "do", "dv", "factors", "lengths", "E", "S", "dS", "pairs", "dq", "dk", "sums", "cu_seqlens",
    ),
    "lengths_last": ("q", "k", "lengths", "dq", "dk", "cu_seqlens"),
    "finish": (
        "g", "beta", "A_log", "dt_bias", "cu_seqlens", "factors", "lengths", "within", "sums", "dg", "dbeta", "share",
    ),
})  # fmt: skip


def wanted(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int] | None:
    """How chunk_backward would have what a forward call keeps: tokens a chunk, and rows of a state filled up. The
    inputs are those of the kernels. None for wide keys: the scan that keeps their states spills (Hopper, Triton 3.6).
    """
    config, _, VP = _cut(q, k, v, v, cu_seqlens)
    return (config.C, VP) if q.shape[3] <= WIDEST_KEPT else None


def _cut(q, k, v, do, cu_seqlens, config: Config | None = None) -> tuple[Config, bool, int]:
    """Configuration of a call, whether the copy engine can take its rows, and V filled up to whole blocks."""
    V, copied = v.shape[3], can_copy(q, k, v, do)
    if config is None:
        device = device_of(q.device)
        heads = launch.heads_to_cut_for(len(q) if cu_seqlens is None else len(cu_seqlens) - 1, v.shape[2])
        config = choose_config(
            device if copied else device.without_copies(), q.element_size(), q.shape[3], V, heads,
            cu_seqlens is not None,
        )  # fmt: skip
    least_K, least_V = power_of_two(q.shape[3]), power_of_two(V)  # no tile is wider than what it is of
    config = config._replace(
        BV=min(config.BV, least_V), BK=min(config.BK, least_K), block=min(config.block, least_V)
    )  # fmt: skip
    VP = -(-V // config.BV) * config.BV
    if VP % config.block:  # whoever rounded up to whole blocks would have programs without a column of V, and the copy
        config = config._replace(block=config.BV)  # engine takes no matrix of width 0
    return config._replace(gluon=config.gluon and copied and _fits_hopper(config, q, v)), copied, VP


def _fits_hopper(config: Config, q: Tensor, v: Tensor) -> bool:
    """Whether hopper.py's kernel is there, and made for these heads, several of which share a key; its sums are those
    of two blocks of K."""
    fits = q.dtype == torch.bfloat16 and q.shape[3] == v.shape[3] == 128 and v.shape[2] > q.shape[2]
    return hopper is not None and fits and (config.C, config.BK) == (64, 64)


def _gradient_stages(config: Config, VP: int) -> int:
    """Heads whose loads are in flight: shared memory does not hold those of two where they come in several blocks."""
    return config.gradient_stages if VP <= config.block else 1


_plans: dict[tuple, Plan] = {}


def chunk_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    do: Tensor | None,
    dht: Tensor | None,
    *,
    state_v_first: bool = False,
    use_qk_l2norm: bool = False,
    beta_is_raw: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    saved: Kept | None = None,
    config: Config | None = None,
    segments: int | None = None,
) -> tuple[Tensor | None, ...]:
    """The fused backward pass. Arguments are those of launch.chunk_forward, and are not checked here either.

    do: [B,T,HV,V], dht: as the final state, float32; either may be None (0). Any strides, but do is copied where it is
    not contiguous. saved: what the forward pass kept, or None, which makes it again. config and segments stand in for
    those chosen by shape and device.

    Returns (dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dinitial), each in the dtype of what it is the gradient of and
    None where that is. dg and dbeta belong to what was passed as g and beta: the raw gates, if they are raw. Sums are
    in float32 and in a fixed order, so that results repeat bitwise.
    """
    given = (q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state)
    if not launch.has_tokens(q, cu_seqlens):
        return _nothing(given, dht)
    options = (scale, use_qk_l2norm, beta_is_raw, allow_neg_eigval, state_v_first, saved and saved.cut())
    options += (config, segments)
    kind = kind_of_call((*given, do, dht), options)
    plan = recalled_or_made(_plans, kind, lambda: make_plan(*given, do, dht, *options))
    return plan.run(*given, do, dht, saved)


def _nothing(given, dht):
    """No token at all, or no sequence: what comes in at the end goes out at the beginning."""
    grads = [None if x is None else torch.zeros_like(x) for x in given[:7]]
    initial = given[8]
    if initial is None or dht is None:
        return *grads, None if initial is None else torch.zeros_like(initial)
    return *grads, dht.to(initial.dtype, copy=True)


def make_plan(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial, do, dfinal, scale, use_qk_l2norm, beta_is_raw,
    allow_neg_eigval, state_v_first, kept=None, config=None, segments=None,
) -> Plan:  # fmt: skip
    """The plan of a call: configuration, grids and every number that kernels are given. See chunk_backward. What was
    kept is of use if it is cut as is wanted here, which an upstream gradient at an odd address may change."""
    dtypes = tuple(None if x is None else x.dtype for x in (q, k, v, g, beta, A_log, dt_bias, initial))
    given = (q, k, v, g, beta, cu_seqlens)
    q, k, v, g, beta, cu_seqlens = arranged = arrange(*given)
    to_arrange = any(x is not y for x, y in zip(given, arranged, strict=True))
    shape, packed = (*q.shape[2:3], *v.shape[2:3], q.shape[3], v.shape[3]), cu_seqlens is not None
    (B, T), (H, HV, K, _) = q.shape[:2], shape
    N = len(cu_seqlens) - 1 if packed else B
    do = v if do is None else do.to(v.dtype).contiguous()
    config, copied, VP = _cut(q, k, v, do, cu_seqlens, config)
    C, BV, KP, tma, NK = config.C, config.BV, power_of_two(K), config.tma and copied, -(-K // config.BK)
    kept = kept == (C, VP)
    NT, NV = -(-T // C), VP // BV
    slots = T // C + N + 1 if packed else B * NT
    if segments is None:
        counts = launch.heads_to_cut_for(N, HV) * NV, NT, K, q.element_size()
        segments = 1 if packed else launch.choose_segments(device_of(q.device), config, *counts)
    length, segments = launch.cut(NT, segments)
    q_, k_, v_, g_, b_ = (0 if x is None else x.stride(1) for x in (q, k, v, g, beta))
    gates = launch.gates(g, beta, A_log, dt_bias, beta_is_raw, allow_neg_eigval)
    sizes, scan, launches = (T, N, slots), (*shape, C, KP, BV, VP, packed), {}
    if not kept:
        launches["decay"], launches["prepare"] = launch.preparing(
            device_of(q.device), q.element_size(), sizes, shape, (q_, k_, g_, b_), scale, packed, use_qk_l2norm,
            segments > 1, gates, config,
        )
        launches["states"] = Launch(
            states_kernel, N * HV * NV,
            (T, slots, k_, v_, *state_strides(initial, state_v_first), *scan, initial is not None, tma, config.stages),
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
    numbers, how = (T, slots, segments, length, q_, k_), {"num_warps": config.warps, "num_stages": config.stages_back}
    if segments > 1:
        blocks = NV + -(-KP // BV)
        launches["adjoint_segments"] = Launch(
            adjoint_segment_kernel, N * HV * (segments - 1) * blocks,
            (*numbers, *scan[:-1], tma, config.stages_back), **how,
        )  # fmt: skip
    launches["adjoints"] = Launch(
        adjoints_kernel, N * HV * segments * NV,
        (*numbers, *state_strides(dfinal, state_v_first), *scan, dfinal is not None, initial is not None,
         state_v_first, segments > 1, tma, config.stages_back),
        **how,
    )  # fmt: skip
    exact = q.dtype == torch.float32
    launches |= _gradients_of_keys(config, sizes, (q_, k_), shape, KP, VP, scale, packed, use_qk_l2norm, exact)
    numbers = (*sizes, g_, b_, H, HV, C, NK, config.BK, packed, use_qk_l2norm, *gates[:-1])
    launches["finish"] = Launch(finish_kernel, slots * HV, numbers, num_warps=2)
    work, results = _shapes(q, k, v, g, beta, A_log, initial, slots, KP, VP, NK, config, kept)
    if segments > 1:
        work |= launch.maps_of_segments(N * HV * segments, KP, VP, q.dtype)
    if tma:
        programs = max(x.grid[0] for n, x in launches.items() if n in ("adjoints", "adjoint_segments"))
        work["scratch"] = (programs * launch.SCRATCH_A_PROGRAM,), torch.uint8
    return Plan(launches, Work(work), results, q.device, tma, to_arrange, dtypes)


def _gradients_of_keys(
    config: Config, sizes, strides, shape, KP: int, VP: int, scale: float, packed: bool, norm: bool, exact: bool
) -> dict[str, Launch]:
    """What makes dq and dk, and the sums that dg and dbeta are made of."""
    (H, _, K, _), C, slots = shape, config.C, sizes[-1]
    NK, stages = -(-K // config.BK), _gradient_stages(config, VP)
    inputs, found = (*sizes, *strides), {}
    lengths = (*inputs, H, K, C, KP, packed)
    if norm:
        found["lengths"] = Launch(lengths_kernel, slots * H, (*lengths, False), num_warps=8)
    found["pairs"] = Launch(
        pairs_kernel, slots * H,
        (*sizes, scale, *strides, *shape, C, min(config.block, KP), config.block, KP, VP, packed, norm, exact, stages),
        num_warps=config.prepare_warps, num_stages=stages,
    )  # fmt: skip
    if config.gluon:
        eighths = (x // 8 for x in strides)
        found["hopper_gradients"] = Launch(
            hopper.hopper_gradients_kernel, slots * H, (*sizes, *eighths, *shape, C, packed, norm),
            num_warps=hopper.WARPS,
        )  # fmt: skip
        return found
    found["gradients"] = Launch(
        gradients_kernel, slots * H * NK, (*inputs, *shape, C, config.BK, config.block, KP, VP, packed, norm, stages),
        num_warps=config.gradient_warps, num_stages=stages,
    )  # fmt: skip
    if norm and NK > 1:
        found["lengths_last"] = Launch(lengths_kernel, slots * H, (*lengths, True), num_warps=8)
    return found


def _shapes(q, k, v, g, beta, A_log, initial, slots, KP, VP, NK, config: Config, kept: bool) -> tuple[dict, dict]:
    """Shape and dtype by name of what a call needs on the way, and of what it returns. A and P are in the dtype of the
    products here: gradients need not be as fine as the forward, which has float16 for bfloat16."""
    (H, HV), C, single = (q.shape[2], v.shape[2]), config.C, torch.float32
    states = launch.states(HV, slots, C, KP, VP, q.dtype)
    work = {} if kept else launch.prepared(HV, slots, C, q.dtype) | states
    work |= {
        "dS": states["S"],
        "lengths": ((H, slots, 2, C), single),
        "pairs": ((HV, slots, 2, C, C), q.dtype),
        "tops": ((HV, slots, 2), single),
        "within": ((HV, slots, 3, C), torch.float64),
        "sums": ((NK, HV, slots, 2 * C + config.BK), single),
    }
    results = {
        "dq": (q.shape, q.dtype),
        "dk": (k.shape, q.dtype),
        "dv": (v.shape, v.dtype),
        **({} if initial is None else {"dinitial": (initial.shape, initial.dtype)}),
        **({} if g is None else {"dg": (g.shape, g.dtype if A_log is None else single)}),
        **({} if beta is None else {"dbeta": (beta.shape, beta.dtype)}),
        **({} if A_log is None else {"share": (g.shape, single)}),
    }
    return work, results

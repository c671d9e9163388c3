"""Fused forward on the host: which configuration, how many programs, where the results go. All that knows of devices.

A call costs the processor little: the first call of its kind (shapes, strides, dtypes, flags) makes a plan, with the
compiled kernels in it, and later ones only allocate and launch. Nothing here waits for the device, so that a call can
be captured in a CUDA graph once it has run.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .calls import Arguments, Launch, Work, arrange, can_copy, kind_of_call, launch_all, new_tensors, recalled_or_made
from .prep import FACTORS, decay_kernel, prepare_kernel
from .scan import scan_kernel, segment_kernel, starts_kernel
from .tiles import INTERPRETED, RELEASE

# What Gluon is written in is there from Triton 3.6 on, and is not interpreted.
HAS_GLUON = RELEASE >= (3, 6) and not INTERPRETED
hopper_scan = None
if HAS_GLUON:
    from . import hopper_scan

# Chunks whose tiles are here where those of hopper_scan.py keep what they pass through: its way out takes room too.
STAGES_OF_KEEPERS = 2
# Rows of V of a program that composes maps for them: one warpgroup's product.
ROWS_A_START = 64
# Heads whose gates one program adds up: neighbours in memory, so that a token's are read together.
HEADS_A_PROGRAM = 16
# Whether each row, or packed sequence, is cut as if it were alone, so that its bits do not depend on its mates' number.
BATCH_INVARIANT = os.environ.get("GDN_REF_BATCH_INVARIANT") == "1"
# Nine descriptors of 128 bytes, which a scan in segments that keeps what it passes through has.
SCRATCH_A_PROGRAM = 1152


class Config(NamedTuple):
    """How the kernels are cut for a device and an input."""

    C: int  # tokens a chunk
    BV: int  # columns of V a program of the scan carries
    warps: int  # of a program of the scan
    stages: int  # chunks whose loads are in flight
    tma: bool  # whether the copy engine loads the tiles (Hopper and later)
    prepare_warps: int = 4
    gluon: bool = False  # whether the scan is that of hopper_scan.py, where it fits


# float32 inputs are not chosen for speed: their products are exact multiply-adds, which hold whole rows in registers,
# so that chunks, blocks and what a warp does must be small.
FP32 = {(4, False): (Config(16, 16, 8, 1, False),), (4, True): (Config(16, 16, 8, 1, False),)}
# (bytes an element, K > 128): one configuration, or a narrow and a wide one between which the waves decide.
CONFIGS: dict[str, dict[tuple[int, bool], tuple[Config, ...]]] = {
    # Hopper: 64 rows of V are one warpgroup's product. Three chunks in flight hide the copies (with two a chunk takes
    # half as long again). K = 256 fills the registers, unless chunks are shorter. In Gluon a wide program takes five
    # sixths of the time; narrow ones, of which two load the same, wait for the L2 cache either way.
    "sm_90": {
        (2, False): (Config(64, 64, 4, 3, True), Config(64, 128, 8, 3, True, gluon=True)),
        (2, True): (Config(32, 64, 8, 2, True, 8),),
        **FP32,
    },
    "sm_100": {(2, False): (Config(64, 64, 8, 3, True),), (2, True): (Config(32, 64, 8, 2, True, 8),), **FP32},
    # Ampere has no copy engine: narrow blocks of eight warps keep state and operands in registers. It also stands in
    # for Hopper and Blackwell where rows are no multiple of 16 bytes, as their copy engine wants them.
    "sm_80": {(2, False): (Config(64, 32, 8, 2, False, 8),), (2, True): (Config(32, 16, 8, 2, False, 8),), **FP32},
    # CDNA3 has 64 KB of shared memory and twice the registers.
    "gfx942": {(2, False): (Config(64, 32, 4, 1, False),), (2, True): (Config(32, 32, 4, 1, False),), **FP32},
}


def in_table(architecture: str) -> str:
    """Itself if the tables of configurations have it; else the one of its maker that asks a card for the least."""
    return architecture if architecture in CONFIGS else "sm_80" if architecture.startswith("sm_") else "gfx942"


def configs_for(architecture: str, itemsize: int, K: int) -> tuple[Config, ...]:
    """The configurations that can be selected for inputs of `itemsize` bytes and keys K wide."""
    return CONFIGS[in_table(architecture)][itemsize, K > 128]


def configurations(architecture: str) -> list[Config]:
    """All configurations that can be selected on an architecture, each once."""
    return list(dict.fromkeys(c for configs in CONFIGS[in_table(architecture)].values() for c in configs))


class Device(NamedTuple):
    architecture: str
    processors: int

    def without_copies(self) -> Device:
        """The same with the configurations of an architecture that has no copy engine."""
        return self._replace(architecture="sm_80") if self.architecture in ("sm_90", "sm_100") else self


@functools.cache
def device_of(device: torch.device) -> Device:
    """Architecture ("sm_90", "gfx942", "cpu" where kernels are interpreted) and processors of a torch device."""
    if device.type == "cpu":
        return Device("cpu", 1)
    properties = torch.cuda.get_device_properties(device)
    name = getattr(properties, "gcnArchName", "").partition(":")[0] if torch.version.hip else ""
    return Device(name or f"sm_{properties.major}{properties.minor}", properties.multi_processor_count)


def stand_in(device: torch.device) -> str:
    """What is to be said of a card that is not in the tables; nothing of one that is."""
    name = device_of(device).architecture
    return "" if name in CONFIGS else f", cut as for {in_table(name)}: nobody has chosen for {name} yet"


def heads_to_cut_for(sequences: int, heads: int) -> int:
    """By how many sequences times heads it is chosen how each is cut."""
    return heads if BATCH_INVARIANT else sequences * heads


def power_of_two(n: int) -> int:
    """The smallest power of two from 16 that is at least n: the least that a product takes."""
    return max(16, triton.next_power_of_2(n))


def choose_config(
    device: Device, itemsize: int, K: int, V: int, head_sequences: int, packed: bool, gluon: bool = False
) -> Config:
    """One of configs_for: where there are a narrow and a wide one, the wide one if its waves are so much fewer that a
    chunk of it, which costs 1.64 narrow ones and 1.37 in Gluon, pays. Packed sequences may be of any lengths, and among
    few of them the longest decides: for those the narrow one."""
    narrow, *wide = configs_for(device.architecture, itemsize, K)
    narrow = narrow._replace(BV=min(narrow.BV, power_of_two(V)))
    if not wide or V <= narrow.BV or (packed and 2 * head_sequences < 3 * device.processors):
        return narrow
    waves = [-(-head_sequences * -(-V // c.BV) // device.processors) for c in (narrow, wide[0])]
    return wide[0] if (1.37 if gluon else 1.64) * waves[1] < waves[0] else narrow


def fits_hopper(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether hopper_scan.py's kernel is there, and made for these heads. It counts 16 bytes with 32 bits."""
    fits = q.dtype == torch.bfloat16 and q.shape[3] == v.shape[3] == 128
    return hopper_scan is not None and fits and all(x.shape[1] * x.stride(1) < 2**34 for x in (q, k, v))


def registers(device: Device, itemsize: int, K: int, norm: bool, even: bool) -> dict[str, int]:
    """What limits the registers of prepare_kernel, if anything: rows that are squared take four more than let three
    programs run side by side on a Hopper processor, and two take a third longer. Rows that are not even, 16 elements
    and so many times 16 apart, have an address for each element, which take all there are."""
    limited = norm and even and itemsize == 2 and K <= 128 and device.architecture == "sm_90"
    return {"maxnreg": 168} if limited else {}


def choose_segments(device: Device, config: Config, programs: int, chunks: int, K: int, itemsize: int) -> int:
    """Into how many segments a sequence is cut. It pays where the heads leave most of the processors idle, for the map
    of a segment of a head that remembers costs as much again as the scan of it, and every segment composes those before
    it."""
    fits = itemsize == 2 and config.BV <= power_of_two(K) <= 128
    fits &= K > 64 or not device.architecture.startswith("gfx")  # whose compiler fails, up to Triton 3.6
    if programs * 2 > device.processors or chunks < 64 or not fits:
        return 1
    return max(1, min(device.processors // programs, chunks // 16))


def choose_cut(
    device: Device, itemsize: int, K: int, V: int, head_sequences: int, tokens: int, gluon: bool
) -> tuple[Config, int]:
    """Configuration and segments for sequences of so many tokens, 0 if they are packed, which are not cut. Where narrow
    programs would fill half of the processors, four or five segments of wide ones in Gluon instead of two of narrow
    ones, for they load less: at 32 heads and 32768 tokens a sixth less time if all heads forget, a few per cent more if
    not."""

    def segments_of(config: Config) -> int:
        programs = head_sequences * -(-V // config.BV)
        return choose_segments(device, config, programs, -(-tokens // config.C), K, itemsize)

    config = choose_config(device, itemsize, K, V, head_sequences, not tokens, gluon)
    if gluon and segments_of(config) == 2:
        config = configs_for(device.architecture, itemsize, K)[-1]
    return config, segments_of(config)


def cut(chunks: int, segments: int) -> tuple[int, int]:
    """Chunks a segment, and how many segments that makes: no more than were asked for, and none empty."""
    length = -(-chunks // segments)
    return length, -(-chunks // length)


# ---------------------------------------------------------------------------------------------------- plans


ARGUMENTS = Arguments({
    "decay": ("g", "beta", "A_log", "dt_bias", "cu_seqlens", "factors"),
    "prepare": ("q", "k", "cu_seqlens", "tiles", "factors", "o"),  # o gets 0 where tokens belong to no sequence
    "segment": ("k", "v", "tiles", "factors", "R", "B", "forgets"),
    "starts": ("R", "B", "forgets", "initial", "starts"),
    "hopper_scan": (
        "q", "k", "v", "o", "tiles", "factors", "initial", "final", "cu_seqlens", "done", "S", "E",
    ),
    "hopper_scan_segments": (
        "q", "k", "v", "o", "tiles", "factors", "starts", "final", "cu_seqlens", "done", "S", "E",
    ),
    **dict.fromkeys(("scan", "scan_again"), (
        "q", "k", "v", "o", "tiles", "factors", "initial", "final", "cu_seqlens", "R", "B", "forgets", "done", "S", "E",
    )),
})  # fmt: skip


class Plan:
    """Everything about a call that its data does not change; run() allocates and launches."""

    def __init__(self, launches, work: Work, kept: Work | None, results: dict, device, tma: bool, to_arrange, out):
        self.launches = launches
        self.work, self.kept = work, kept  # kept is not part of work, but the caller's, if there is any
        self.results = results  # shape and dtype by name of what the caller gets: "o" and perhaps "final"
        self.device, self.tma, self.to_arrange = device, tma, to_arrange
        self.out = out  # the dtype of o that the caller gets

    def run(self, *inputs) -> tuple[Tensor, Tensor | None]:
        """Outputs [B,T,HV,V] and the final states or None, from the inputs of chunk_forward as they came."""
        return self.run_and_keep(*inputs)[:2]

    def run_and_keep(self, q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial):
        """The same, and the memory that the parts of self.kept lie in, or None."""
        if self.to_arrange:
            q, k, v, g, beta, cu_seqlens = arrange(q, k, v, g, beta, cu_seqlens)
        given = {
            "q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias, "cu_seqlens": cu_seqlens,
            "initial": initial,
        }  # fmt: skip
        if self.device.type == "cpu" or self.device.index == torch.cuda.current_device():
            return self._launch(given)
        with torch.cuda.device(self.device):
            return self._launch(given)

    def _launch(self, given: dict):
        work, kept = self.work.allocate(self.device), self.kept and self.kept.allocate(self.device)
        made = new_tensors(self.results, self.device)
        parts = [(self.work, work)] + ([(self.kept, kept)] if self.kept else [])
        launch_all(self.launches, ARGUMENTS, given | made, parts, self.device, self.tma)
        o = made["o"]
        return (o if o.dtype == self.out else o.to(self.out)), made.get("final"), kept


_plans: dict[tuple, Plan] = {}


def recall(kind: tuple) -> Plan | None:
    """The plan of an earlier call of the same kind, whose arguments have been checked then."""
    return _plans.get(kind)


def chunk_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    state_v_first: bool = False,
    output_final_state: bool = False,
    use_qk_l2norm: bool = False,
    beta_is_raw: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    config: Config | None = None,
    segments: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The fused forward pass: prep, then scan. Arguments are not checked here: see ops.py.

    q, k: [B,T,H,K]; v: [B,T,HV,V], bfloat16, float16 or float32, widths up to 256, best views whose tokens lie evenly
    (others are copied); g [B,T,HV] (natural log; the raw gate a where A_log is given) and beta (the raw gate b where
    beta_is_raw), any of these dtypes, or None; initial_state: [N,HV,K,V], or [N,HV,V,K] where state_v_first, any
    strides and dtype; cu_seqlens: [N+1] on any device. config and segments stand in for those chosen by shape and
    device.

    Returns o [B,T,HV,V] in v's dtype and the final state in float32, or None. Where kernels are interpreted, bfloat16
    is widened to float32, since the interpreter multiplies it wrongly.
    """
    if not has_tokens(q, cu_seqlens):
        N = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
        return _nothing(q, v, initial_state, N, output_final_state, state_v_first)
    tensors = (q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state)
    options = (scale, output_final_state, use_qk_l2norm, beta_is_raw, allow_neg_eigval, state_v_first)
    return plan_of(tensors, options, None, config, segments).run(*tensors)


def has_tokens(q: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether there is anything to launch: a token, and a sequence for it to belong to."""
    return q.shape[1] > 0 and (len(q) if cu_seqlens is None else len(cu_seqlens) - 1) > 0


def plan_of(tensors: tuple, options: tuple, keep: Callable | None = None, config=None, segments=None) -> Plan:
    """The plan of a call with tokens: the tensors and options of chunk_forward, in the order that it has them.

    keep: launch_backward.wanted, where what the backward pass can use is to be kept, or None.
    """
    how = tuple(x for x in (keep, config, segments) if x is not None)
    kind = kind_of_call(tensors, (*options, *how))
    return recalled_or_made(_plans, kind, lambda: make_plan(*tensors, *options, keep, config, segments))


def _nothing(q, v, initial_state, N, output_final_state, state_v_first):
    """What no token at all, or no sequence, gives: zeros, and the states as they were."""
    if not output_final_state:
        return torch.zeros_like(v), None
    (HV, V), K = v.shape[2:], q.shape[3]
    if initial_state is None:
        return torch.zeros_like(v), q.new_zeros((N, HV, *((V, K) if state_v_first else (K, V))), dtype=torch.float32)
    return torch.zeros_like(v), initial_state.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def gates(g, beta, A_log, dt_bias, beta_is_raw: bool, allow_neg_eigval: bool) -> tuple:
    """What decay_kernel is told of the gates: which there are, which are raw, and the largest beta."""
    there = g is not None, A_log is not None, dt_bias is not None, beta is not None
    return *there, beta_is_raw, 2.0 if allow_neg_eigval else 1.0


def preparing(
    device: Device, itemsize: int, sizes, shape, strides, scale, packed, norm, bound, gates, config
) -> tuple[Launch, Launch]:
    """decay_kernel and prepare_kernel, with which forward and backward begin. sizes: tokens, sequences, slots; shape:
    H, HV, K, V; strides: of q, k, g and beta from token to token; config: C and prepare_warps of it count."""
    (T, N, slots), (_, HV, K, V), C, (q_, k_, g_, b_) = sizes, shape, config.C, strides
    heads = min(HEADS_A_PROGRAM, triton.next_power_of_2(HV))
    BK = max(C, power_of_two(K))  # as wide as the inverse's tiles: ptxas 12.8 may lose the address of two kinds
    even = q_ % 16 == k_ % 16 == 0
    decay = Launch(decay_kernel, slots * -(-HV // heads), (T, N, slots, g_, b_, HV, C, heads, packed, *gates))
    prepare = Launch(
        prepare_kernel, slots * HV,
        (T, N, slots, scale, q_, k_, *shape, C, BK, power_of_two(V), packed, norm, bound),
        num_warps=config.prepare_warps, num_stages=1, **registers(device, itemsize, K, norm, even),
    )  # fmt: skip
    return decay, prepare


def prepared(HV: int, slots: int, C: int, dtype: torch.dtype) -> dict:
    """Shape and dtype of what the two kernels of preparing leave."""
    return {"tiles": ((2, HV, slots, C, C), dtype), "factors": ((HV, slots, FACTORS.value, C), torch.float32)}


def states(HV: int, slots: int, C: int, BK: int, VP: int, dtype: torch.dtype) -> dict:
    """Shape and dtype of the states before every chunk, and of its errors: see states_kernel."""
    return {"S": ((HV, slots, VP, BK), dtype), "E": ((HV, slots, C, VP), dtype)}


def maps_of_segments(maps: int, BK: int, VP: int, dtype: torch.dtype) -> dict:
    """Shape and dtype of the affine maps of segments: see segment_kernel. maps: sequences x heads x segments."""
    return {
        "R": ((maps, 2, BK, BK), dtype), "B": ((maps, VP, BK), torch.float32), "forgets": ((maps,), torch.int32),
    }  # fmt: skip


def state_strides(state: Tensor | None, v_first: bool) -> tuple[int, ...]:
    """Strides of a state's sequences, heads, V and K."""
    if state is None:
        return 0, 0, 0, 0
    n, h, row, column = state.stride()
    return (n, h, row, column) if v_first else (n, h, column, row)


def make_plan(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial, scale, output_final_state, use_qk_l2norm, beta_is_raw,
    allow_neg_eigval, state_v_first, keep=None, config=None, segments=None,
) -> Plan:  # fmt: skip
    """The plan of a call: configuration, grids and every number that kernels are given. See plan_of."""
    out, given = v.dtype, (q, k, v, g, beta, cu_seqlens)
    q, k, v, g, beta, cu_seqlens = arranged = arrange(*given)
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    packed = cu_seqlens is not None
    N = len(cu_seqlens) - 1 if packed else B
    device, copied, heads = device_of(q.device), can_copy(q, k, v), heads_to_cut_for(N, HV)
    gluon = copied and fits_hopper(q, k, v)
    if config is None:
        where = device if copied else device.without_copies()
        config, chosen = choose_cut(where, q.element_size(), K, V, heads, 0 if packed else T, gluon)
        segments = chosen if segments is None else segments
    C, BK, tma, gluon = config.C, power_of_two(K), config.tma and copied, config.gluon and gluon
    NT, NV = -(-T // C), -(-V // config.BV)
    slots = T // C + N + 1 if packed else B * NT
    if segments is None:
        segments = 1 if packed else choose_segments(device, config, heads * NV, NT, K, q.element_size())
    length, segments = cut(NT, segments)
    kept = keep is not None and keep(q, k, v, cu_seqlens) == (C, NV * config.BV)  # never None: that compiles anew
    strides = q_, k_, v_, g_, b_ = [0 if x is None else x.stride(1) for x in (q, k, v, g, beta)]
    decay, prepare = preparing(
        device, q.element_size(), (T, N, slots), (H, HV, K, V), (q_, k_, g_, b_), scale, packed, use_qk_l2norm,
        segments > 1 or (kept and not packed),  # the backward pass may cut segments where this one does not
        gates(g, beta, A_log, dt_bias, beta_is_raw, allow_neg_eigval), config,
    )  # fmt: skip
    flags = packed, initial is not None, output_final_state, state_v_first
    sizes, shape = (T, slots, segments, length), (H, HV, K, V, C, BK, config.BV)
    launches = {"decay": decay, "prepare": prepare}
    launches |= _scans(
        config, N, sizes, strides[:3], state_strides(initial, state_v_first), shape, flags, tma, kept,
        q.element_size() == 2, gluon,
    )  # fmt: skip
    work, for_backward = _shapes(
        q.dtype, N * HV * segments, HV, slots, C, BK, NV, config.BV, segments > 1, kept, tma, gluon
    )  # fmt: skip
    results = {"o": (v.shape, q.dtype)}
    if output_final_state:
        results["final"] = (N, HV, V, K) if state_v_first else (N, HV, K, V), torch.float32
    to_arrange = any(x is not y for x, y in zip(given, arranged, strict=True))
    return Plan(launches, work, for_backward, results, q.device, tma, to_arrange, out)


def _scans(
    config: Config, N: int, sizes, strides, initial, shape, flags, tma: bool, kept: bool, half: bool, gluon: bool
) -> dict[str, Launch]:
    """What carries the state through the chunks, after its segments' maps if there are several. sizes: tokens, slots,
    segments, chunks of a segment; strides: of q, k and v, and of the initial state; flags: packed, initial and final
    state, its layout."""
    segments, (H, HV, K, V, C, BK, BV), found = sizes[2], shape, {}
    packed, has_initial, has_final, v_first = flags
    NV, options = -(-V // BV), {"num_warps": config.warps, "num_stages": config.stages}
    programs = N * HV * segments * NV
    if segments > 1:
        numbers = (*sizes, *strides[1:], *shape, tma, config.stages)
        found["segment"] = Launch(segment_kernel, N * HV * (segments - 1) * (NV + -(-BK // BV)), numbers, **options)
    if gluon:
        name, starts = "hopper_scan", initial
        if segments > 1:
            name, starts = "hopper_scan_segments", (HV * V * K, V * K, K, 1)
            numbers = (segments, *initial, HV, K, V, BK, ROWS_A_START, has_initial, tma)
            found["starts"] = Launch(starts_kernel, N * HV * segments * (V // ROWS_A_START), numbers, num_warps=4)
        numbers = (*sizes, *(x // 8 for x in strides), *starts, H, HV, K, V, C, BV)
        numbers += (packed, has_initial or segments > 1, has_final, v_first, kept)
        numbers += (STAGES_OF_KEEPERS if kept else config.stages,)
        found[name] = Launch(hopper_scan.hopper_scan_kernel, programs, numbers, num_warps=config.warps)
    passes = {"scan": 1, "scan_again": 2} if half else {"scan": 0}
    if gluon:
        del passes["scan"]
    for name, one in passes.items():
        numbers = (*sizes, *strides, *initial, *shape, *flags, segments > 1, tma, config.stages, one, kept)
        found[name] = Launch(scan_kernel, programs, numbers, **options)
    return found


def _shapes(dtype, maps, HV, slots, C, BK, NV, BV, segmented, kept, tma, gluon) -> tuple[Work, Work | None]:
    """What a call needs on the way, and what is kept for the backward pass. maps: sequences x heads x segments."""
    # float16 holds A and P, whose entries are near 1, eight times as finely as bfloat16.
    half, single = dtype.itemsize == 2, torch.float32
    work, for_backward = prepared(HV, slots, C, torch.float16 if half else single), None
    if kept:
        for_backward, work = Work(work | states(HV, slots, C, BK, NV * BV, dtype)), {}
    if half:
        work["done"] = (maps * NV,), torch.int32
    if segmented:
        work |= maps_of_segments(maps, BK, NV * BV, dtype)
        if gluon:
            work["starts"] = (maps, NV * BV, BK), single
    if tma:
        work["scratch"] = (maps * NV * SCRATCH_A_PROGRAM,), torch.uint8
    return Work(work), for_backward

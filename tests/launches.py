"""What calls of every kernel's host functions launch on cards that are not here, for the compile test.

Nothing is listed by hand but the calls: they are made as the public functions make them, of tensors that have shapes
and, but for the stages', no memory, and what is launched is listened to. What Triton makes a constant of, such as a
stride of 1, is one here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from gdn_ref.kernels import decode, launch, launch_backward, stages
from gdn_ref.kernels.calls import Launch

PROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.int32: "i32",
    torch.int64: "i64", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def widths(dtype: str, K: int, V: int) -> str:
    """As names have them: K alone where V is as wide."""
    return f"{dtype}/K{K}" + f"-{V}" * (V != K)


# ---------------------------------------------------------------- the calls


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of chunk_gated_delta_rule, and of its backward pass if it trains."""

    name: str
    sizes: tuple[int, int, int, int]  # rows, or sequences if packed; tokens of one; H; HV
    dtype: str = "bf16"
    K: int = 128
    V: int = 128
    hot: bool = False
    trains: bool = False
    packed: bool = False
    initial: bool = False
    final: bool = False
    v_first: bool = False
    raw: bool = True  # gates, and with them the norm
    apart: int = 0  # elements by which token rows lie further apart than they are wide

    def tensors(self) -> dict[str, Tensor | None]:
        """The inputs, in the order in which launch.py has them."""
        (N, T, H, HV), dtype = self.sizes, DTYPES[self.dtype]
        rows, tokens = (1, N * T) if self.packed else (N, T)

        def vectors(heads: int, width: int) -> Tensor:
            flat = empty(rows, tokens, heads * width + self.apart, dtype=dtype)
            return flat[..., : heads * width].unflatten(2, (heads, width))

        return {
            "q": vectors(H, self.K), "k": vectors(H, self.K), "v": vectors(HV, self.V),
            "g": empty(rows, tokens, HV, dtype=dtype if self.raw else torch.float32),
            "beta": empty(rows, tokens, HV, dtype=dtype),
            "A_log": empty(HV) if self.raw else None,
            "dt_bias": empty(HV) if self.raw else None,
            "cu_seqlens": empty(N + 1, dtype=torch.int64) if self.packed else None,
            "initial": self.state() if self.initial else None,
        }  # fmt: skip

    def state(self) -> Tensor:
        return empty(self.sizes[0], self.sizes[3], *((self.V, self.K) if self.v_first else (self.K, self.V)))

    def make(self) -> Iterator[str]:
        """Make it. Says after each pass which it was."""
        given, scale = (*self.tensors().values(),), self.K**-0.5
        options = (scale, self.final, self.raw, self.raw, False, self.v_first)
        plan = launch.plan_of(given, options, launch_backward.wanted if self.trains else None)
        o, final, memory = plan.run_and_keep(*given)
        yield ""
        if not self.trains:
            return
        *inputs, A_log, dt_bias, cu_seqlens, initial = given
        how = dict(state_v_first=self.v_first, use_qk_l2norm=self.raw, beta_is_raw=self.raw)
        how |= dict(A_log=A_log, dt_bias=dt_bias)
        kept = [launch_backward.Kept(plan.kept, memory)] if plan.kept else []
        for saved in (*kept, None):  # without, all is made again, as in a model that torch.compile has compiled
            launch_backward.chunk_backward(*inputs, scale, initial, cu_seqlens, o, final, saved=saved, **how)
            yield "/kept" if saved else "/remade"


# What a call asks for. Serving is packed, with states in the pool's layout; a prompt and a text to score are not.
WAYS: dict[str, dict[str, Any]] = {
    "train": dict(trains=True),
    "train/packed": dict(trains=True, packed=True, raw=False),
    "train/state": dict(trains=True, initial=True, final=True, raw=False),
    "serve": dict(packed=True, initial=True, final=True, v_first=True),
    "prompt": dict(final=True, v_first=True),
    "score": dict(raw=False),
    "continue": dict(initial=True, final=True),
}
# The heads are always as many, as what is divided by them is a constant. Few and some programs on long sequences, which
# are cut into segments; many; and few on what is too short for segments.
SIZES = {"few": (1, 32768, 4, 16), "some": (2, 32768, 4, 16), "many": (16, 8192, 4, 16), "short": (1, 2048, 4, 16)}
WIDTHS = ((64, 64), (32, 32), (16, 16), (64, 128), (128, 64), (128, 256), (256, 128), (96, 80), (40, 24))


def calls() -> Iterator[Call]:
    """Hot are those of models: bfloat16, K = V, in rows of whole 16 bytes. They come first and name what is shared."""

    def named(way: str, many: str, more: str = "", **options) -> Call:
        return Call(f"{way}/{many}{more}", SIZES[many], **WAYS[way], **options)

    for many in SIZES:
        yield from (named(way, many, hot=True) for way in WAYS)
    for way in ("train", "train/packed"):
        yield Call(f"{way}/own", (16, 8192, 16, 16), hot=True, **WAYS[way])  # a key head each
    wide = dict(K=256, V=256)
    yield from (named(way, "many", hot=True, **wide) for way in ("train", "train/state", "serve"))
    for K, V in WIDTHS:
        for way, many in (("train", "many"), ("serve", "few")) + ((("train", "few"),) if K <= 64 or V > 128 else ()):
            yield named(way, many, K=K, V=V)
    for dtype, other in (("fp16", dict(K=64, V=64)), ("fp32", wide)):
        for width in ({}, other):
            for way in ("train", "serve", "train/state"):
                yield from (named(way, many, dtype=dtype, **width) for many in ("few", "many"))
    for apart in (8, 1):  # rows that are whole for a copy engine but not 16 numbers, and rows that are not
        for way in ("train", "serve", "train/state"):
            yield from (named(way, many, f"/apart{apart}", apart=apart) for many in ("few", "many"))


def decode_calls() -> Iterator[tuple[str, str, decode.DecodePlan | decode.RollbackPlan, list]]:
    """(dtype of the pool and widths, what else, plan, tensors): a plain and a padded K, wide and narrow, with the state
    after each token and without."""
    N, T, H, HV, half = 64, 4, 4, 8, torch.bfloat16
    slots = empty(N, dtype=torch.int64)
    for stored, K, V, keep in (
        ("fp32", 128, 128, False), ("fp32", 128, 128, True), ("fp32", 96, 100, True), ("fp32", 16, 16, False),
        ("bf16", 128, 128, False), ("bf16", 96, 100, True), ("bf16", 256, 256, True),
    ):  # fmt: skip
        pool = empty(N, HV, V, K, dtype=DTYPES[stored])
        inputs = [empty(N, T, heads, width, dtype=half) for heads, width in ((H, K), (H, K), (HV, V))]
        inputs += [empty(N, T, HV, dtype=half), empty(N, T, HV, dtype=half), empty(HV), empty(HV), pool, slots]
        inputs.append(empty(N, dtype=torch.bool) if keep else None)
        yield widths(stored, K, V), "every_state" * keep, decode.DecodePlan(*inputs, keep=keep), inputs
    states, pool = empty(N, T, HV, 128, 128), empty(N, HV, 128, 128)
    inputs = [states, empty(N, dtype=torch.int64), pool, slots]
    yield widths("fp32", 128, 128), "", decode.RollbackPlan(*inputs), inputs


def stage_calls() -> Iterator[str]:
    """Make calls of every stage; yields after each which dtype and widths it had. Tiles along K and V are at most 64
    wide, so that one width does for most; chunk_states holds the whole of K, and operands may differ in width."""
    for dtype, K, V, packed in (
        ("bf16", 256, 256, False), ("fp32", 256, 256, True), ("bf16", 128, 128, True), ("bf16", 256, 20, False),
        ("bf16", 20, 256, False),
    ):  # fmt: skip
        kind, (B, T, H, HV) = DTYPES[dtype], (1, 128, 2, 4)
        where = dict(cu_seqlens=torch.tensor([0, T])) if packed else {}
        q, k, v = (torch.empty(B, T, heads, width, dtype=kind) for heads, width in ((H, K), (H, K), (HV, V)))
        beta = torch.empty(B, T, HV)
        g = stages.chunk_local_cumsum(beta, **where)
        A = stages.chunk_scaled_dot_kkt_fwd(k, g, beta, **where)
        A = stages.solve_tril(A.to(kind), **where)
        w, u = stages.recompute_w_u_fwd(k, v, beta, A, g, **where)
        found = stages.chunk_states(k, w, u, g, torch.empty(1, HV, K, V), **where)
        stages.chunk_output(q, k, found.delta, found.h, g, **where)
        yield widths(dtype, K, V) + "/packed" * packed


# ---------------------------------------------------------------- as Triton sees them


class Target(NamedTuple):
    """A kernel as it is compiled."""

    name: str  # unique: kernel, dtype, widths, how it is cut, the first call that launches it
    kernel: Any  # the jitted function
    signature: dict[str, str]  # Triton's type of every argument that is no constant: {"q": "*bf16", "T": "i32"}
    constexprs: dict[str, Any]
    divisible: tuple[str, ...]  # names of whole numbers that are multiples of 16; addresses are taken to be
    num_warps: int
    num_stages: int
    maxnreg: int | None
    hot: bool  # spills are faults


def type_of(x) -> str:
    if isinstance(x, Tensor):
        return "*" + TYPES[x.dtype]
    return "fp32" if isinstance(x, float) else "i32" if -(2**31) <= x < 2**31 else "i64"


def target(kernel, arguments, options: dict, which: tuple[str, str], hot: bool) -> Target:
    """A launch as Triton compiles it. which: dtype and widths, and what stands at the end of the name."""
    signature, constants, divisible = {}, {}, []
    for p, x in zip(kernel.params, arguments, strict=True):
        specialised = type(x) is int and not p.do_not_specialize
        if p.is_constexpr or x is None or (specialised and x == 1):
            constants[p.name] = x
            continue
        signature[p.name] = type_of(x)
        if specialised and x % 16 == 0:
            divisible.append(p.name)
    tile = [f"{x}{constants[x]}" for x in ("C", "BK", "BV", "BT") if x in constants]
    tile += ["again"] if constants.get("PASS") == 2 else ["last"] if constants.get("LAST") else []
    name = "/".join(filter(None, [kernel.__name__.removesuffix("_kernel"), which[0], *tile, which[1]]))
    return Target(name, kernel, signature, constants, tuple(divisible), **{"maxnreg": None, "hot": hot} | options)


def is_seldom(kernel, arguments) -> bool:
    """Hardly ever has a second pass anything left to do, and starts go round once a segment, not once a chunk."""
    names = kernel.arg_names
    again = "PASS" in names and arguments[names.index("PASS")] == 2 and arguments[names.index("SEGMENTED")]
    return again or kernel is launch.starts_kernel


@contextlib.contextmanager
def listening(architecture: str) -> Iterator[list]:
    """[(kernel, arguments, options)] of what is launched meanwhile, as on a card of that architecture."""
    device, heard = launch.Device(architecture, PROCESSORS[architecture]), []
    standard = {"num_warps": 4, "num_stages": 2 if architecture.startswith("gfx") else 3}  # Triton's own

    def launched(self, arguments, stream=None):
        heard.append((self.kernel, (*arguments, *self.constants), standard | self.options))

    def launched_stage(kernel, grid, *arguments, warps=None):
        options = {"num_warps": warps or stages._warps(arguments[0].dtype), "num_stages": 1}
        heard.append((kernel, arguments, options))

    with contextlib.ExitStack() as patches:

        def patch(*what):
            patches.enter_context(mock.patch.object(*what))

        for module in (launch, launch_backward):
            patch(module, "device_of", lambda _: device)
            patch(module, "_plans", {})
        patch(Launch, "__call__", launched)
        patch(stages, "_launch", launched_stage)
        patch(torch.cuda, "current_device", lambda: None)  # the index of tensors without memory
        yield heard


def compile_targets(architecture: str) -> list[Target]:
    """What all calls launch on an architecture, each once, under the name of the first that launches it."""
    found: dict[tuple, Target] = {}

    def add(heard: list, where: str, name: str, hot: bool = False) -> None:
        for kernel, arguments, options in heard:
            made = target(kernel, arguments, options, (where, name), hot and not is_seldom(kernel, arguments))
            found.setdefault((kernel, *map(repr, made[2:8])), made)
        heard.clear()

    with listening(architecture) as heard:
        for call in calls():
            for which in call.make():
                add(heard, widths(call.dtype, call.K, call.V), call.name + which, call.hot)
        for where, which, plan, tensors in decode_calls():
            plan(*tensors)
            add(heard, where, which, hot=True)
        for where in stage_calls():
            add(heard, where, "")
    return list(found.values())

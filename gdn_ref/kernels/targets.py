"""The record by which a module of kernels says what it can launch, so that a test can compile all of it anywhere."""

from __future__ import annotations

from typing import Any, NamedTuple


class CompileTarget(NamedTuple):
    """One kernel in one configuration that can be selected: what triton.compile needs to know of it."""

    name: str  # unique, readable: "decode K128 V128 fp32 pool"
    kernel: Any  # the jitted function
    signature: dict[str, str]  # Triton's type of every argument that is no constexpr: {"q": "*bf16", "T": "i32"}
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int = 1
    hot: bool = True  # spills are faults
    divisible: tuple[str, ...] = ()  # whole-number arguments that are multiples of 16; pointers are taken to be
    maxnreg: int | None = None

"""What a call costs the processor, kept low: kernels that are looked at once, memory in one piece, inputs as they come.

launch.py and launch_backward.py say which kernels, how many programs and where the results go.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from operator import itemgetter

import torch
import triton
from torch import Tensor
from triton.runtime import interpreter

from .tiles import INTERPRETED, WIDENED

FARTHEST = 2**25  # elements from token to token: 64 of them, a chunk, are 2^31
# Plans are small, but a server sees a new number of tokens in every call.
MOST_PLANS = 4096


def _let_data_bound_loops() -> None:
    """Teach the interpreter that a loop may end where data says. Since NumPy 2.4 an array of one number is no longer an
    int by itself, and that is what Triton's interpreter makes of every scalar."""
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, *scope):
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor


if INTERPRETED and hasattr(interpreter, "_patch_lang_tensor"):
    _let_data_bound_loops()


class Launch:
    """One kernel with all but its tensors fixed.

    The first call goes through Triton, which looks at every argument and compiles. Later ones hand addresses, and a
    stream that is asked for once a call, straight to what was compiled, as Triton itself does in the end: then nobody
    looks at the tensors again, nor are there hooks to call before and after.
    """

    def __init__(self, kernel, programs: int, constants: tuple, **options):
        self.kernel, self.grid, self.constants, self.options = kernel, (programs, 1, 1), constants, options
        self.run, self.how = None, ()

    def __call__(self, arguments: tuple, stream: int | None = None) -> None:
        """Tensors or None the first time, and where kernels are interpreted; addresses from then on."""
        if self.run is None:
            compiled = self.kernel[self.grid](*arguments, *self.constants, **self.options)
            if hasattr(compiled, "asm"):  # not where kernels are interpreted
                self.run, self.how = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
        else:
            self.run(*self.grid, stream, *self.how, *arguments, *self.constants)


class Arguments:
    """What each launch takes before its numbers, in order, by name."""

    def __init__(self, names: dict[str, tuple[str, ...]]):
        self.of = {launch: itemgetter(*its) for launch, its in names.items()}  # from a dict of all to a tuple
        self.absent = dict.fromkeys(chain.from_iterable(names.values()))


def current_stream(device: torch.device) -> int:
    """Its handle, by the way that Triton asks for it: torch's own makes an object of it first."""
    return triton.runtime.driver.active.get_current_stream(device.index)


class Scratch:
    """Where Triton keeps the descriptors of the copy engine while kernels run: a place in the memory of the call."""

    def __init__(self, address: int, size: int):
        self.address, self.size = address, size

    def __call__(self, size: int, alignment: int, stream):
        return self if size <= self.size else no_scratch(size, alignment, stream)

    def data_ptr(self) -> int:
        return self.address


def no_scratch(size: int, alignment: int, stream) -> Tensor:
    """The same where no call has set one aside."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


class Work:
    """What a call needs on the way, in one allocation: parts by name, each from a multiple of 128 bytes on."""

    def __init__(self, parts: dict):
        """parts: {name: (shape, dtype)}."""
        self.parts, self.places, self.size = {}, {}, 0  # {name: (bytes, shape, dtype)}, {name: first byte}
        for name, (shape, dtype) in parts.items():
            size = math.prod(shape) * dtype.itemsize
            self.parts[name], self.places[name] = (slice(self.size, self.size + size), shape, dtype), self.size
            self.size += -(-size // 128) * 128

    def allocate(self, device: torch.device) -> Tensor:
        return torch.empty(self.size, dtype=torch.uint8, device=device)

    def tensors(self, memory: Tensor) -> dict[str, Tensor]:
        return {name: memory[there].view(dtype).view(shape) for name, (there, shape, dtype) in self.parts.items()}

    def addresses(self, memory: Tensor) -> dict[str, int]:
        first = memory.data_ptr()
        return {name: first + place for name, place in self.places.items()}

    def scratch(self, memory: Tensor) -> Scratch:
        """The part of that name, for set_allocator."""
        there = self.parts["scratch"][0]
        return Scratch(memory.data_ptr() + there.start, there.stop - there.start)


def new_tensors(shapes: dict, device: torch.device) -> dict[str, Tensor]:
    """Tensors by name, of {name: (shape, dtype)}. A shape in one piece would take torch twice as long to read."""
    return {name: torch.empty(*shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}


def launch_all(
    launches: dict[str, Launch], arguments: Arguments, known: dict, parts: list[tuple[Work, Tensor]], device, tma: bool
) -> None:
    """Launch one after the other, each with its arguments: of the tensors known by name, and of the parts of memory.
    With tma the first memory has a part for descriptors."""
    ready, stream = [*launches.values()][-1].run is not None, None  # the last: whoever was interrupted begins anew
    if ready:
        stream = current_stream(device)
        known = {name: x.data_ptr() for name, x in known.items() if x is not None}
    known = arguments.absent | known
    for work, memory in parts:
        known |= work.addresses(memory) if ready else work.tensors(memory)
    if tma:
        work, memory = parts[0]
        triton.set_allocator(work.scratch(memory) if ready else no_scratch)
    try:
        for name, one in launches.items():
            one(arguments.of[name](known), stream)
    finally:
        if tma:
            triton.set_allocator(no_scratch)  # for whoever launches next


# ---------------------------------------------------------------------------------------------------- plans


def kind_of_call(tensors: tuple, options: tuple) -> tuple:
    """What a plan depends on: sizes, strides, dtypes and options; alignment too, since Triton compiles for it."""
    kinds = [
        None if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15) for x in tensors
    ]
    return tuple(kinds), options


def recalled_or_made(plans: dict, kind: tuple, make: Callable):
    """The plan of that kind; plans forgets all when there are too many."""
    plan = plans.get(kind)
    if plan is None:
        if len(plans) >= MOST_PLANS:
            plans.clear()
        plan = plans[kind] = make()
    return plan


# ---------------------------------------------------------------------------------------------------- inputs


def by_token(x: Tensor) -> Tensor:
    """x [B, T, ...] such that tokens, of all rows of the batch, lie at equal distances and each one's numbers lie
    together: itself wherever that is so (a view of one fused projection too), else a copy. A copy also where rows of
    multiples of 16 elements are no such multiple apart, which costs kernels more, and where 32 bits would not count a
    chunk's elements."""
    (rows, tokens), inner, apart = x.shape[:2], x.shape[2:], x.stride(1)
    wanted = (x.shape[3], 1) if x.dim() == 4 else (1,)
    together = all(n == 1 or s == w for n, s, w in zip(inner, x.stride()[2:], wanted, strict=True))
    as_well = x.dim() == 3 or apart % 16 == 0 or math.prod(inner) % 16
    equal = rows == 1 or x.stride(0) == tokens * apart
    return x if together and equal and as_well and apart < FARTHEST else x.contiguous()


def arrange(q: Tensor, k: Tensor, v: Tensor, g, beta, cu_seqlens) -> tuple:
    """The inputs as the kernels take them: q, k, v of one dtype, tokens at even distances, boundaries on the device."""
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    dtype = WIDENED.get(dtype, dtype)
    q, k, v = (by_token(x.to(dtype)) for x in (q, k, v))
    g, beta = (x if x is None else by_token(x) for x in (g, beta))
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(q.device, non_blocking=True).contiguous()
    return q, k, v, g, beta, cu_seqlens


def can_copy(*tensors: Tensor) -> bool:
    """Whether the copy engine takes these token rows: it wants 16-byte multiples everywhere."""
    return all(
        x.data_ptr() % 16 == 0 and x.stride(1) * x.element_size() % 16 == 0 and x.shape[3] * x.element_size() % 16 == 0
        for x in tensors
    )

"""What the tests change in Triton's interpreter, so that kernels do in it what they do on a GPU, or fail.

Addresses. Every address that a kernel reads or writes must lie inside one of the tensors it was given. A read beyond
an end finds some number there and does no harm until it does, and on a GPU mostly lands in memory that the allocator
holds for others. The interpreter has every address at hand: watch_addresses() has each one looked at. What is masked is
not touched, and not looked at either. On a GPU, tests/sanitizing.py looks for the same with CUDA's own tool.

bfloat16. The interpreter keeps it as 16-bit integers. It cuts off what does not fit where a GPU rounds, and multiplies
and adds the integers, which gives numbers that mean nothing, without a word. The library therefore widens bfloat16 to
float32 where it is interpreted, and the arithmetic that most users run would be tested on GPUs alone. mend_bfloat16()
makes casts and products those of a GPU, refuses what else would be computed on the bits, and has nothing widened.
"""

import bisect
import functools

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from gdn_ref.kernels import tiles

# ---------------------------------------------------------------- addresses

_given = []  # of the kernel that runs: (first address, address behind the last) of each tensor, in order


def extent(x):
    """First address of a tensor's elements, and the one behind the last, whatever its strides."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def tensors(arguments):
    """All tensors among arguments, those in tuples and under descriptors too."""
    for x in arguments:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, tuple):
            yield from tensors(x)
        elif hasattr(x, "base"):
            yield x.base


def apart(extents):
    """The same memory in order, what overlaps as one: views of one projection lie between each other."""
    found = []
    for first, end in sorted(extents):
        if found and first < found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return found


def look_at(addresses, mask, size, what):
    """Raise IndexError if an address under the mask, with the size bytes there, is in no tensor as a whole."""
    addresses = addresses[mask]
    if not addresses.size:
        return
    low, high = int(addresses.min()), int(addresses.max()) + size
    place = bisect.bisect_right(_given, (low, float("inf"))) - 1
    if place >= 0 and high <= _given[place][1]:
        return
    for address in map(int, addresses):
        place = bisect.bisect_right(_given, (address, float("inf"))) - 1
        if place < 0 or address + size > _given[place][1]:
            raise IndexError(f"{what} {size} bytes at {address:#x}, {_beside(address)}")


def _beside(address):
    """Where the nearest tensor lies, for whoever must find the fault."""
    if not _given:
        return "and the kernel was given no tensor"
    first, end = min(_given, key=lambda t: max(t[0] - address, address - t[1]))
    distance = first - address if address < first else address - end
    return f"{distance} bytes {'before' if address < first else 'behind'} a tensor of {end - first} bytes"


def watch_addresses():
    """Have the interpreter look at every address from now on, and at what the copy engine is told of matrices: it wants
    16-byte steps and at least one row and column, which the interpreter alone would not mind."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, run = builder.create_masked_load, builder.create_masked_store, executor.__call__

    def create_masked_load(self, ptrs, mask, *rest, **named):
        look_at(ptrs.data, mask.data, interpreter._get_np_dtype(ptrs.get_element_ty()).itemsize, "reads")
        return load(self, ptrs, mask, *rest, **named)

    def create_masked_store(self, ptrs, value, mask, *rest, **named):
        look_at(ptrs.data, mask.data, value.data.itemsize, "writes")
        return store(self, ptrs, value, mask, *rest, **named)

    def __call__(self, *arguments, **named):
        _given[:] = apart(extent(x) for x in tensors((*arguments, *named.values())) if x.numel())
        return run(self, *arguments, **named)

    def create_make_tensor_descriptor(self, base, shape, strides, tile, *rest, **named):
        size = interpreter._get_np_dtype(base.get_element_ty()).itemsize
        sides, steps = ([int(x.data.item()) for x in sizes] for sizes in (shape, strides))
        odd = base.data.item() % 16 or any(step * size % 16 for step in steps[:-1])
        if odd or min(sides) < 1 or max(tile) > 256 or tile[-1] * size < 16:
            raise IndexError(f"the copy engine takes no matrix {sides} with steps {steps}, by tiles {tile}")
        return describe(self, base, shape, strides, tile, *rest, **named)

    describe = builder.create_make_tensor_descriptor
    builder.create_make_tensor_descriptor = create_make_tensor_descriptor
    builder.create_masked_load, builder.create_masked_store = create_masked_load, create_masked_store
    executor.__call__ = __call__


# ---------------------------------------------------------------- bfloat16

UNSIGNED = np.dtype(np.uint16)  # what the interpreter keeps bfloat16 in
# What passes bits on, or takes a sign from them, and is right as it is.
MOVES = {
    *("load", "store", "masked_load", "masked_store", "tensor_pointer_load", "tensor_pointer_store"),
    *("descriptor_load", "descriptor_store", "descriptor_gather", "descriptor_scatter", "make_tensor_descriptor"),
    *("splat", "unsplat", "broadcast", "expand_dims", "reshape", "trans", "cat", "join", "split", "gather"),
    *("select", "bitcast", "fabs", "print"),
}
MENDED = {"dot", "fp_ext", "fp_trunc", "fp_to_fp"}


def widened(bits):
    """The float32 numbers that bfloat16 bits stand for."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(x):
    """The bits of the bfloat16 numbers nearest to float32 ones, ties to even, as GPUs and torch round."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, nearest).astype(UNSIGNED)


def is_bfloat16(x):
    return isinstance(x, interpreter.TensorHandle) and x.data.dtype == UNSIGNED and x.dtype.scalar == tl.bfloat16


def _refuse(what):
    raise TypeError(f"{what}: the interpreter would take the bits of bfloat16 for integers; convert to float32 before")


def _refusing(name, operation):
    @functools.wraps(operation)
    def checked(self, *operands, **named):
        if any(map(is_bfloat16, operands)):
            _refuse(name)
        return operation(self, *operands, **named)

    return checked


def _mend_casts(builder):
    cast, convert = builder.cast_impl, builder.create_fp_to_fp

    def cast_impl(self, x, wanted):
        here, there = x.dtype.scalar, wanted.scalar
        if (here, there) == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(widened(x.data), there)
        if (here, there) == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(rounded(x.data), there)
        if tl.bfloat16 in (here, there):  # Triton goes through float32, but not from wider numbers
            _refuse(f"a cast from {here} to {there}")
        return cast(self, x, wanted)

    def create_fp_to_fp(self, x, wanted, mode):
        both = {x.dtype.scalar.name, wanted.scalar.name}
        if "bf16" not in both:
            return convert(self, x, wanted, mode)
        if mode != interpreter._ir.ROUNDING_MODE.RTNE or not both <= {"bf16", "fp16"}:
            _refuse(f"a cast by {mode} between {' and '.join(sorted(both))}")
        return self.cast_impl(self.cast_impl(x, tl.float32), wanted)

    builder.cast_impl, builder.create_fp_to_fp = cast_impl, create_fp_to_fp


def _mend_products(builder):
    product = builder.create_dot

    def create_dot(self, a, b, *rest):
        a, b = (interpreter.TensorHandle(widened(x.data), tl.float32) if is_bfloat16(x) else x for x in (a, b))
        return product(self, a, b, *rest)

    builder.create_dot = create_dot


def mend_bfloat16():
    """From now on casts of bfloat16 round, its products are exact and added up in float32, as on a GPU; anything else
    that would be computed on its bits is a TypeError; and the library widens nothing."""
    builder, reduction = interpreter.InterpreterBuilder, interpreter.ReduceScanOpInterface
    for name in dir(builder):
        operation = name.removeprefix("create_")
        if operation != name and operation not in MOVES | MENDED:
            setattr(builder, name, _refusing(operation, getattr(builder, name)))
    _mend_casts(builder)
    _mend_products(builder)
    check_tensor = reduction.check_tensor

    def check_numbers(self, tensors):
        check_tensor(self, tensors)
        if any(is_bfloat16(x.handle) for x in tensors):
            _refuse("a sum, maximum or scan")

    reduction.check_tensor = check_numbers
    tiles.WIDENED.clear()

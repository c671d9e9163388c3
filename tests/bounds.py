"""In the interpreter, every address that a kernel reads or writes must lie inside one of the tensors it was given.

A read beyond an end finds some number there and does no harm until it does, and on a GPU mostly lands in memory that
the allocator holds for others. The interpreter has every address at hand: watch() has each one looked at. What is
masked is not touched, and not looked at either. On a GPU, tests/sanitizing.py looks for the same with CUDA's own tool.
"""

import bisect

import torch
from triton.runtime import interpreter

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


def watch():
    """Have the interpreter look at every address from now on."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, run = builder.create_masked_load, builder.create_masked_store, executor.__call__

    def create_masked_load(self, ptrs, mask, *rest):
        look_at(ptrs.data, mask.data, interpreter._get_np_dtype(ptrs.get_element_ty()).itemsize, "reads")
        return load(self, ptrs, mask, *rest)

    def create_masked_store(self, ptrs, value, mask, *rest):
        look_at(ptrs.data, mask.data, value.data.itemsize, "writes")
        return store(self, ptrs, value, mask, *rest)

    def __call__(self, *arguments, **named):
        _given[:] = apart(extent(x) for x in tensors((*arguments, *named.values())) if x.numel())
        return run(self, *arguments, **named)

    builder.create_masked_load, builder.create_masked_store = create_masked_load, create_masked_store
    executor.__call__ = __call__

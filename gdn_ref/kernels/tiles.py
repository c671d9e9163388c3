"""What the kernels share: where a chunk lies, tiles of tokens, decays inside a chunk, and the inverse of I + N.

A tile is what one program holds: C rows, one a token, C a power of two from 16. Every mask goes by index, so that a
zero, an infinity or a NaN in the data never decides what belongs to a chunk. Offsets inside a tile are 32-bit; what
leads to a tile (token number times row length) is 64-bit.
"""

import torch
import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret  # as it is now: Triton asks when a kernel is defined, and not again
# What is multiplied in another dtype: Triton's interpreter takes the bits of bfloat16 for integers. The tests, which
# teach it better, empty this.
WIDENED = {torch.bfloat16: torch.float32} if INTERPRETED else {}
LOG2E = tl.constexpr(1.4426950408889634)
# e^-104 is 0 in float32: a decay below it is the same reset however deep, and stays finite here for the sums (7.5).
SMALLEST_LOG_DECAY = tl.constexpr(-128.0)
RELEASE = tuple(map(int, triton.__version__.split(".")[:2]))  # of Triton


# ------------------------------------------------------------------------------------------ where a chunk lies


@triton.jit
def first_slot(cu_seqlens, n, C: tl.constexpr):
    """The slot of the first chunk of sequence n, and one past the slots of the sequence before it.

    Sequence n, which starts at token s, is given the slots from s // C + n on. It never needs more of them than lie
    before those of sequence n + 1, so that nobody adds up the lengths of others: no host preparation, no prefix sum.
    T tokens in N sequences fit into T // C + N slots; some stay empty.
    """
    return (tl.load(cu_seqlens + n) // C).to(tl.int32) + n


@triton.jit
def locate(cu_seqlens, slot, N, C: tl.constexpr):
    """The chunk in a slot of packed sequences: (sequence, chunk within it, first token of the sequence, its end).

    A slot is empty where chunk * C reaches the sequence's end. N >= 1 sequences are searched by halves: 17 loads for
    100000 of them, one for two.
    """
    low, high = 0, N - 1
    while low < high:  # the last sequence whose first slot is not past this one
        middle = (low + high + 1) // 2
        after = first_slot(cu_seqlens, middle, C) > slot
        high = tl.where(after, middle - 1, high)
        low = tl.where(after, low, middle)
    start = tl.load(cu_seqlens + low).to(tl.int64)
    return low, slot - first_slot(cu_seqlens, low, C), start, tl.load(cu_seqlens + low + 1).to(tl.int64)


@triton.jit
def sequence(cu_seqlens, n, T, C: tl.constexpr, PACKED: tl.constexpr):
    """(first token, number of tokens, first slot) of sequence n."""
    if PACKED:
        start = tl.load(cu_seqlens + n).to(tl.int64)
        L = (tl.load(cu_seqlens + n + 1) - start).to(tl.int32)
        slot = first_slot(cu_seqlens, n, C)
    else:
        start = n.to(tl.int64) * T
        L = T
        slot = n * tl.cdiv(T, C)
    return start, L, slot


# ------------------------------------------------------------------------------------------ tiles of tokens


@triton.jit
def load_rows(x, stride, rows, columns, n_rows, n_columns):
    """Tile [rows, columns] of x, which points at its corner; 0 from row n_rows and column n_columns on."""
    inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    return tl.load(x + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def load_tokens(x, stride, rows, n_rows):
    """One number a token, [rows]; 0 from row n_rows on."""
    return tl.load(x + rows * stride, mask=rows < n_rows, other=0.0)


@triton.jit
def store_rows(x, stride, rows, columns, n_rows, n_columns, tile):
    """Store what of the tile lies before row n_rows and column n_columns, in the dtype of x."""
    inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    tl.store(x + rows[:, None] * stride + columns[None, :], tile.to(x.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------ decays inside a chunk


@triton.jit
def split_decay(G):
    """Log2 decays in float64 as whole + rest, both float32: whole is exact, rest in (-1, 0].

    Differences of two wholes are exact too, so that a decay between two tokens stays right to 1e-7 however much has
    decayed before them; float32 alone would lose the small decays that follow a large one (7.5).
    """
    whole = G.to(tl.int32).to(tl.float64)
    return whole.to(tl.float32), (G - whole).to(tl.float32)


@triton.jit
def log2_decay(g):
    """g log2(e) in float64, from natural-log decays of any float dtype (7.2).

    An underflowing decay, -inf too, counts as the reset that it is and leaves sums finite (7.5).
    """
    g = tl.where(g < SMALLEST_LOG_DECAY, SMALLEST_LOG_DECAY, g)  # a NaN stays one
    return g.to(tl.float64) * LOG2E


@triton.jit
def cumulative_decay(g):
    """G_i = log2(e) (g_1 + ... + g_i) of a chunk's natural-log decays [C], split in two. Give 0 past the end."""
    return split_decay(tl.cumsum(log2_decay(g), 0))


@triton.jit
def power(whole, rest):
    """2^(whole + rest): gamma of every token, from its cumulative decay."""
    return tl.exp2(whole) * tl.exp2(rest)


@triton.jit
def decay_matrix(whole, rest, C: tl.constexpr):
    """Gamma_ij = 2^(G_i - G_j) at and below the diagonal, 0 above it: [C, C]   (7.1)

    The exponent is masked before exp2, by index: above the diagonal it may overflow.
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    exponent = tl.where(i >= j, whole[:, None] - whole[None, :], float("-inf"))
    return tl.exp2(exponent) * tl.exp2(rest)[:, None] * tl.exp2(-rest)[None, :]  # (7.1)


# ------------------------------------------------------------------------------------------ the inverse


@triton.jit
def invert_unit_lower(N, C: tl.constexpr, DT: tl.constexpr):
    """(I + N)^-1 in float32, N [C, C] read below the diagonal only, C a power of two from 16.

    Block doubling X <- X - X N_level X (6.8): blocks of 2 are inverted by sight; each level joins two neighbours, and
    N_level is what of N lies between them. To 16 on the batch of diagonal blocks, from there on the whole tile. No
    power of N is formed, so correlated keys do no harm (6.6). DT is the dtype of the products' operands, which are
    added up in float32: float16 for 16-bit inputs (|beta k.k| must stay below 65504; bfloat16 is eight times
    coarser), float32 for float32 inputs, in full precision.
    """
    NB: tl.constexpr = C // 16
    b = tl.arange(0, NB)
    same = b[:, None, None, None] == b[None, None, :, None]
    D = tl.sum(tl.where(same, tl.reshape(N, [NB, 16, NB, 16]).to(tl.float32), 0.0), axis=2)  # [NB, 16, 16]
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    X = tl.where(i == j, 1.0, tl.where((i // 2 == j // 2) & (i > j), -D, 0.0))
    for level in tl.static_range(1, 4):  # blocks of 2, 4, 8 are joined
        between = (i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level)
        half = X.to(DT)
        joined = tl.dot(tl.where(between, D, 0.0).to(DT), half, input_precision="ieee")
        X -= tl.dot(half, joined.to(DT), input_precision="ieee")  # (6.8)

    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    X = tl.reshape(tl.where(same, X[:, :, None, :], 0.0), [C, C])
    for level in tl.static_range(4, 8):  # blocks of 16, 32, 64, 128 are joined
        if (1 << level) < C:
            between = (i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level)
            half = X.to(DT)
            joined = tl.dot(tl.where(between, N, 0.0).to(DT), half, input_precision="ieee")
            X -= tl.dot(half, joined.to(DT), input_precision="ieee")  # (6.8)
    return X

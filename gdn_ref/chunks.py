"""Which tokens each chunk holds: the bookkeeping of chunks, and nothing of the algebra.

A chunk never crosses the end of a sequence. Its missing tokens are filled with inert ones (beta = 0, g = 0), which
leave outputs and states as they are (chapter 11).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import INTEGERS, check_chunk_size, check_tensor


def prepare_chunk_indices(cu_seqlens: Tensor, chunk_size: int = 64) -> Tensor:
    """The chunks of packed sequences, in order: [NC, 2] of (sequence, chunk within the sequence).

    cu_seqlens: [N+1], int32 or int64. A sequence of length 0 has no chunk. A fixed number of tensor operations
    whatever N is; on a GPU it waits for the device once (the number of chunks is data), so that callers keep the
    result.
    """
    check_chunk_size(chunk_size)
    check_tensor("cu_seqlens", cu_seqlens, INTEGERS, {"N + 1": None})
    chunks = (cu_seqlens.diff().long() + chunk_size - 1) // chunk_size  # [N]
    sequence = torch.repeat_interleave(torch.arange(len(chunks), device=chunks.device), chunks)  # [NC]
    first = chunks.cumsum(0) - chunks
    return torch.stack([sequence, torch.arange(len(sequence), device=chunks.device) - first[sequence]], 1)


class Slots(NamedTuple):
    """The token in every place of every chunk."""

    token: Tensor  # [NC, C] index into T; a place past the end of its sequence repeats the sequence's last token
    inside: Tensor  # [NC, C] whether the place holds a token of its own


def chunk_slots(chunk_indices: Tensor, cu_seqlens: Tensor, chunk_size: int) -> Slots:
    """Slots of the chunks listed in chunk_indices [NC, 2], in that order."""
    sequence, chunk = chunk_indices.long().unbind(1)
    start, end = cu_seqlens.long()[sequence, None], cu_seqlens.long()[sequence + 1, None]  # [NC, 1]
    token = start + chunk[:, None] * chunk_size + torch.arange(chunk_size, device=start.device)  # [NC, C]
    return Slots(torch.minimum(token, end - 1), token < end)


def even_slots(T: int, chunk_size: int, device: torch.device) -> Slots:
    """Slots of one sequence of T tokens."""
    places = torch.arange(-(-T // chunk_size) * chunk_size, device=device).view(-1, chunk_size)  # [NT, C]
    return Slots(places.clamp(max=max(T - 1, 0)), places < T)


def slots_of(T: int, chunk_size: int, cu_seqlens: Tensor | None, chunk_indices: Tensor | None, device) -> Slots:
    """Slots of [B, T] tokens, packed or not; chunk_indices is made where it is missing."""
    if cu_seqlens is None:
        return even_slots(T, chunk_size, device)
    if chunk_indices is None:
        chunk_indices = prepare_chunk_indices(cu_seqlens, chunk_size)
    return chunk_slots(chunk_indices.to(device), cu_seqlens.to(device), chunk_size)


def to_chunks(x: Tensor, slots: Slots) -> Tensor:
    """[B, T, ...] -> [B, NC, C, ...], zeros where a chunk has no token."""
    inside = slots.inside.view(*slots.inside.shape, *[1] * (x.dim() - 2))
    return torch.where(inside, x[:, slots.token], 0)


def to_tokens(x: Tensor, slots: Slots, T: int) -> Tensor:
    """[B, NC, C, ...] -> [B, T, ...], zeros where a token lies in no chunk."""
    flat = x.new_zeros(x.shape[0], T, *x.shape[3:])
    return flat.index_copy(1, slots.token[slots.inside], x[:, slots.inside])


class Batch(NamedTuple):
    """Sequences that go through the scan side by side, longest first."""

    sequences: Tensor  # [n] their numbers
    chunk_size: int
    counts: list[int]  # step by step, how many of them still have a chunk
    slots: Slots | None  # chunks in the order of the scan: all first chunks, all second chunks, ...; None: not packed

    def states(self, x: Tensor) -> Tensor:
        """The states of these sequences, [N, ...] -> [n, ...]; a view of an unpacked batch."""
        if self.slots is None:
            return x[int(self.sequences[0]) : int(self.sequences[-1]) + 1]
        return x.index_select(0, self.sequences.to(x.device))

    def chunks(self, x: Tensor, masked: bool = False) -> Tensor:
        """[B, T, ...] -> [NC, C, ...] in the order of the scan; a view for one sequence of whole chunks.

        A place without a token of its own holds zeros where masked, else zeros or the sequence's last token.
        """
        if self.slots is None:
            return _steps_first(self.states(x), len(self.counts), self.chunk_size)
        token, inside = (t.to(x.device) for t in self.slots)
        x = x[0].index_select(0, token.flatten()).unflatten(0, token.shape)
        return torch.where(inside.view(*inside.shape, *[1] * (x.dim() - 2)), x, 0) if masked else x


def scan_batches(B: int, T: int, cu_seqlens: Tensor | None, chunk_size: int, most_places: int) -> list[Batch]:
    """Cut the sequences of [B, T] tokens, packed by cu_seqlens [N+1] or not, into batches of like lengths, of at most
    `most_places` places a step (one sequence at least).

    Sequences of length 0 are left out. Short batches get short chunks, so that a thousand one-token sequences cost a
    thousand places and not 64 thousand.
    """
    if cu_seqlens is None:
        size = fitting_chunk(chunk_size, T)
        rows = torch.arange(B if T else 0).split(max(1, most_places // size))
        return [Batch(n, size, [len(n)] * -(-T // size), None) for n in rows if len(n)]
    bounds = cu_seqlens.cpu().long()
    lengths, starts = bounds.diff(), bounds[:-1]
    order = torch.argsort(lengths, descending=True, stable=True)
    order = order[lengths[order] > 0]
    batches = []
    while len(order):
        size = fitting_chunk(chunk_size, int(lengths[order[0]]))
        taken, order = order.split([n := min(len(order), max(1, most_places // size)), len(order) - n])
        batches.append(_packed_batch(taken, lengths[taken], starts[taken], size))
    return batches


def _packed_batch(sequences: Tensor, lengths: Tensor, starts: Tensor, chunk_size: int) -> Batch:
    chunks = (lengths + chunk_size - 1) // chunk_size  # [n], falling
    step, row = (torch.arange(int(chunks[0]))[:, None] < chunks).nonzero(as_tuple=True)  # [NC] each
    token = starts[row, None] + step[:, None] * chunk_size + torch.arange(chunk_size)  # [NC, C]
    end = (starts + lengths)[row, None]
    counts = torch.bincount(step).tolist()
    return Batch(sequences, chunk_size, counts, Slots(torch.minimum(token, end - 1), token < end))


def _steps_first(x: Tensor, NT: int, C: int) -> Tensor:
    """[b, T, ...] -> [NT*b, C, ...]: all first chunks, then all second ones; a view for b = 1, whole chunks."""
    missing = NT * C - x.shape[1]
    x = F.pad(x, [0, 0] * (x.dim() - 2) + [0, missing]) if missing else x
    return x.unflatten(1, (NT, C)).transpose(0, 1).flatten(0, 1)


def join_tokens(parts: list[Tensor], batches: list[Batch], B: int, T: int) -> Tensor:
    """The way back: results [NC, C, ...] of every batch -> [B, T, ...], zeros where a token lies in no sequence."""
    if batches[0].slots is None:
        rows = [
            x.unflatten(0, (len(batch.counts), -1)).transpose(0, 1).flatten(1, 2)[:, :T]  # [b, T, ...]
            for x, batch in zip(parts, batches, strict=True)
        ]
        return torch.cat(rows) if len(rows) > 1 else rows[0].contiguous()
    token, inside = (torch.cat([batch.slots[n].flatten() for batch in batches]).to(parts[0].device) for n in (0, 1))
    found = torch.cat([x.flatten(0, 1) for x in parts])[inside]
    return found.new_zeros(B * T, *found.shape[1:]).index_copy_(0, token[inside], found)[None]


def join_states(parts: list[Tensor], batches: list[Batch], others: Tensor) -> Tensor:
    """States [n, ...] of every batch -> [N, ...], a copy; sequences without a token keep those in `others`."""
    moved = torch.cat([batch.sequences for batch in batches]).to(others.device)
    return others.index_copy(0, moved, torch.cat(parts))


def fitting_chunk(chunk_size: int, longest: int) -> int:
    """The chunk size asked for, or the power of two that holds the longest sequence if that is smaller."""
    return min(chunk_size, power_of_two(longest))


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()

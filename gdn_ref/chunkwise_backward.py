"""Backward pass of the chunkwise form in torch, by hand, behind one torch.autograd.Function.

The forward pass leaves a state a chunk, the errors and the [C, C] matrices; what is one product with a decay away is
computed again. The backward pass takes groups of chunks, the last one first: a scan carries the gradient of the state
from chunk to chunk and finds that of the values on its way, then everything else follows for the whole group at once.

Book: chapter 9.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .chunks import Batch, join_states, join_tokens
from .chunkwise import Buffers, Kept, chunkwise_forward, cumulative_decay, groups_of
from .recurrent import recurrent_gated_delta_rule


class Rows(NamedTuple):
    """Inputs of a group of m chunks, by head; M = m * HV, and value heads are [H, R] where they share their keys."""

    q: Tensor  # [m*H, C, K]
    k: Tensor  # [m*H, C, K]
    beta: Tensor  # [m, H, R, C]
    gamma: Tensor  # [m, H, R, C] decay since the chunk's start
    tail: Tensor  # [m, H, R, C] decay up to the chunk's end
    do: Tensor  # [M, C, V] times scale
    queries: Tensor  # [M, C, K] diag(gamma) Q
    reading: Tensor  # [M, C, K] diag(gamma) K
    writing: Tensor  # [M, C, K] diag(beta gamma_C / gamma) K


def prepare_rows(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, do: Tensor, scale: float, buffer: Buffers) -> Rows:
    """The factors of the products to come. q, k: [m,C,H,K]; g (natural log), beta: [m,C,HV]; do: [m,C,HV,V]."""
    (m, C, H, K), (HV, V) = k.shape, do.shape[2:]
    heads = m, H, HV // H, C
    g, beta = (x.transpose(1, 2).reshape(heads) for x in (g, beta))
    G = cumulative_decay(g)
    gamma, tail = G.exp2().to(g.dtype), (G[..., -1:] - G).exp2().to(g.dtype)
    q, k = buffer.copy("q", q.transpose(1, 2)), buffer.copy("k", k.transpose(1, 2))  # [m, H, C, K]
    do = torch.mul(do.transpose(1, 2), scale, out=buffer("do", m, HV, C, V)).flatten(0, 1)
    scaled = (
        torch.mul(x[:, :, None], factor[..., None], out=buffer(name, *heads, K)).flatten(0, 2)
        for name, x, factor in (("queries", q, gamma), ("reading", k, gamma), ("writing", k, tail * beta))
    )
    return Rows(q.flatten(0, 1), k.flatten(0, 1), beta, gamma, tail, do, *scaled)


class Scanned(NamedTuple):
    dv: Tensor  # [M, C, V]
    dS: Tensor  # [M, K, V] gradient of the state after each chunk
    state: Tensor  # [n*HV, K, V] gradient of the states before the group


def scan_back(rows: Rows, kept: Kept, state: Tensor, buffer: Buffers) -> Scanned:
    """Carry the gradient of the state [n*HV,K,V] from the end of a group of chunks to its start, chunk by chunk."""
    steps = len(kept.S) // len(state), len(state)
    dS = buffer("dS", steps[0] + 1, *state.shape)  # before the first chunk, between, after the last
    dS[-1] = state
    torch.bmm(rows.queries.mT, rows.do, out=dS[:-1].flatten(0, 1))  # (9.6), the outputs' part
    P = _weighted(kept.QK, rows, kept, buffer)
    beta_dE = torch.bmm(P.mT, rows.do, out=buffer("dE", *rows.do.shape))  # (9.4), the outputs' part
    dv, gamma_C = buffer("dv", *rows.do.shape), rows.gamma[..., -1].reshape(-1, 1, 1)
    inputs = beta_dE, dv, kept.A.mT, rows.writing, rows.reading.mT, gamma_C
    parts = zip(dS[:-1], dS[1:], *(x.unflatten(0, steps) for x in inputs), strict=True)
    for before, after, beta_dE_n, dv_n, AT, writing, readingT, decay in reversed(list(parts)):
        torch.bmm(AT, beta_dE_n.baddbmm_(writing, after), out=dv_n)  # (9.4), (9.5)
        before.addcmul_(decay, after).baddbmm_(readingT, dv_n, alpha=-1)  # (9.6)
    return Scanned(dv, dS[1:].flatten(0, 1), dS[0])


def _weighted(products: Tensor, rows: Rows, kept: Kept, buffer: Buffers) -> Tensor:
    """(Gamma * products) diag(beta), [M, C, C], of products [m*H, C, C]."""
    m, H, R, C = rows.beta.shape
    weights = torch.mul(kept.Gamma.view(m, H, R, C, C), rows.beta[..., None, :], out=buffer("P", m, H, R, C, C))
    return weights.mul_(products.view(m, H, 1, C, C)).view(-1, C, C)


class Pairs(NamedTuple):
    """What pairs of tokens of a chunk contribute. beta is multiplied in on the right, and value heads are summed."""

    F: Tensor  # [m*H, C, C] Gamma * (dO R^T)
    J: Tensor  # [m*H, C, C] the like of dV, strictly lower, plus its transpose
    dg: Tensor  # [m, H, R, C]
    dbeta: Tensor  # [m, H, R, C]


def pair_gradients(rows: Rows, kept: Kept, dv: Tensor, buffer: Buffers) -> Pairs:
    """What outputs, and errors, owe to the errors of earlier tokens."""
    m, H, R, C = rows.beta.shape
    F, J = (
        torch.bmm(x, kept.R.mT, out=buffer(n, m * H * R, C, C)).mul_(kept.Gamma).view(m, H, R, C, C)
        for n, x in (("F", rows.do), ("J", dv))
    )  # (9.7), (9.8)
    J.diagonal(dim1=-2, dim2=-1).zero_()
    X = torch.mul(F, kept.QK.view(m, H, 1, C, C), out=buffer("P", *F.shape))
    X.addcmul_(J, kept.KK.view(m, H, 1, C, C), value=-1)
    dbeta, beta = X.sum(-2), rows.beta[..., None, :]  # the pairs of k . c   (9.10)
    starts = torch.ones(C, C, dtype=X.dtype, device=X.device).triu(1)  # [j, t]: j < t
    across = torch.mm(X.mul_(beta).view(-1, C), starts, out=buffer("across", m * H * R * C, C))
    dg = across.view(X.shape).tril_().sum(-2)  # j < t <= i   (9.13)
    F, J = ((x.mul_(beta).sum(2) if R > 1 else x.mul_(beta)).view(-1, C, C) for x in (F, J))
    return Pairs(F, torch.add(J, J.mT, out=buffer("across", m * H, C, C)), dg, dbeta)


class KeyGradients(NamedTuple):
    dq: Tensor  # [m*H, C, K]
    dk: Tensor  # [m*H, C, K]
    read: Tensor  # [m, H, R, C] gamma (do . qS - dv . kS), what hangs on the state before the chunk
    written: Tensor  # [m, H, R, C] R . k dS, what hangs on the state after it, but for decay and beta


def key_gradients(rows: Rows, kept: Kept, scanned: Scanned, pairs: Pairs, buffer: Buffers) -> KeyGradients:
    """Queries and keys, where they meet the states and where they meet one another."""
    (*heads, C), K = rows.beta.shape, rows.k.shape[-1]
    shape, k = (*heads, C, K), rows.k.view(*heads[:2], 1, C, K)

    def outer(x: Tensor, S: Tensor, name: str) -> Tensor:
        return torch.bmm(x, S.mT, out=buffer(name, len(x), C, K)).view(shape)

    # Memory of what has served is taken over.
    dq = outer(rows.do, kept.S, "dq")
    products = torch.mul(dq, rows.queries.view(shape), out=buffer("dE", *shape))
    dk = outer(scanned.dv, kept.S, "queries")
    read = products.addcmul_(dk, rows.reading.view(shape), value=-1).sum(-1)
    c = outer(kept.R, scanned.dS, "writing")
    written = torch.mul(c, k, out=products).sum(-1)
    dq.mul_(rows.gamma[..., None])
    dk.mul_(-rows.gamma[..., None]).addcmul_(c, (rows.tail * rows.beta)[..., None])
    dq, dk = ((x.sum(2) if heads[2] > 1 else x).view(-1, C, K) for x in (dq, dk))
    dq.baddbmm_(pairs.F, rows.k)  # (9.7)
    dk.baddbmm_(pairs.F.mT, rows.q).baddbmm_(pairs.J, rows.k, alpha=-1)  # (9.8), (9.9), (9.10)
    return KeyGradients(dq, dk, read, written)


def gate_gradients(rows: Rows, kept: Kept, dS: Tensor, pairs: Pairs, keys: KeyGradients) -> tuple[Tensor, Tensor]:
    """dg and dbeta, [m, H, R, C]; dS is used up.

    A token's decay has the shares of all decays that lie across it, and no others: the sum over rows less the sum over
    columns says the same, but there large shares cancel, and a small gradient drowns.
    """
    to_end = rows.tail * keys.written
    whole = rows.gamma[..., -1] * dS.mul_(kept.S).sum((-2, -1)).view(rows.gamma.shape[:-1])
    since_start = keys.read.flip(-1).cumsum(-1).flip(-1)
    until_end = pad((rows.beta * to_end).cumsum(-1)[..., :-1], (1, 0))
    return pairs.dg + since_start + until_end + whole[..., None], pairs.dbeta + to_end  # (9.13), (9.10)


class Gradients(NamedTuple):
    """Of the inputs, in their shapes."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor


def _run_batch(q, k, g, beta, do, dstate: Tensor, kept: Kept, counts: list[int], scale: float) -> Gradients:
    """Chunks [NC,C,...] in the order of the scan and gradients of final states [n,HV,K,V] -> all gradients."""
    H, HV = k.shape[2], do.shape[2]
    buffer, final = Buffers(g), dstate.flatten(0, 1)
    found, state = Gradients(*(g.new_empty(x.shape) for x in (q, k, do, g, beta, final))), final[:0]
    for here, n in reversed(groups_of(counts, HV)):
        rows = prepare_rows(*(x[here] for x in (q, k, g, beta, do)), scale, buffer)
        own = kept.of(here, H, HV)
        state = torch.cat([state, final[len(state) : n * HV]])  # with the sequences that end here
        scanned = scan_back(rows, own, state, buffer)
        pairs = pair_gradients(rows, own, scanned.dv, buffer)
        keys = key_gradients(rows, own, scanned, pairs, buffer)
        gates = gate_gradients(rows, own, scanned.dS, pairs, keys)
        for whole, x in zip(found, (keys.dq, keys.dk, scanned.dv, *gates), strict=False):
            part = whole[here].transpose(1, 2)  # [m, heads, C, ...]
            part.copy_(x.view(part.shape))
        state = scanned.state
    found.state.copy_(state)
    return found._replace(state=found.state.view(dstate.shape))


def chunkwise_backward(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    do: Tensor,
    dstate: Tensor,
    batches: list[Batch],
    kept: list[Kept],
) -> Gradients:
    """Gradients of every input of chunkwise_forward, in the dtype of the arithmetic.

    q, k, g, beta, scale: what it was given; batches and kept: what it left. do: [B,T,HV,V] and dstate: [N,HV,K,V], the
    gradients of its results, any strides. Tokens of no sequence get zeros. Source: book (9.3) to (9.14).
    """
    (B, T), do, dstate = do.shape[:2], do.to(g.dtype), dstate.to(g.dtype)
    if not batches:
        return Gradients(*(g.new_zeros(x.shape) for x in (q, k, do, g, beta)), dstate.clone())
    runs = []
    for batch, left in zip(batches, kept, strict=True):
        chunks = (batch.chunks(x, masked=x is not q and x is not k) for x in (q, k, g, beta, do))
        runs.append(_run_batch(*chunks, batch.states(dstate), left, batch.counts, scale))
    *tokens, states = zip(*runs, strict=True)
    return Gradients(*(join_tokens(x, batches, B, T) for x in tokens), join_states(states, batches, dstate))


class ChunkwiseDeltaRule(torch.autograd.Function):
    """chunkwise_forward with chunkwise_backward for its gradient.

    A second derivative (create_graph=True) is taken through the token recurrence, the definition, at the price of a
    state a token.
    """

    @staticmethod
    def forward(ctx, q, k, v, g, beta, scale, initial_state, cu_seqlens, chunk_size):
        found = chunkwise_forward(q, k, v, g, beta, scale, initial_state, cu_seqlens, chunk_size, keep=True)
        ctx.save_for_backward(q, k, v, g, beta, initial_state, *(x for kept in found.kept for x in kept))
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.cu_seqlens, ctx.batches = scale, cu_seqlens, found.batches
        return found.o, found.state

    @staticmethod
    def backward(ctx, do, dstate):
        q, k, v, g, beta, initial_state, *kept = ctx.saved_tensors
        do = v.new_zeros(()).expand(v.shape) if do is None else do
        dstate = initial_state.new_zeros(()).expand(initial_state.shape) if dstate is None else dstate
        inputs, size = (q, k, v, g, beta, initial_state), len(Kept._fields)
        with torch.autocast(q.device.type, enabled=False):
            if torch.is_grad_enabled():
                found = differentiable_gradients(*inputs, ctx.scale, ctx.cu_seqlens, do, dstate)
            else:
                kept = [Kept(*kept[n : n + size]) for n in range(0, len(kept), size)]
                found = chunkwise_backward(q, k, g, beta, ctx.scale, do, dstate, ctx.batches, kept)
        dq, dk, dv, dg, dbeta, dinitial = (x.to(y.dtype) for x, y in zip(found, inputs, strict=True))
        return dq, dk, dv, dg, dbeta, None, dinitial, None, None


def differentiable_gradients(q, k, v, g, beta, initial_state, scale, cu_seqlens, do, dstate) -> list[Tensor]:
    """The same gradients as functions that can be differentiated again, by autograd of the token recurrence."""
    inputs = [x if x.requires_grad else x.detach().requires_grad_() for x in (q, k, v, g, beta, initial_state)]
    *tokens, state = inputs
    bounds = None if cu_seqlens is None else cu_seqlens.cpu()
    q, k, v, g, beta = (x.to(g.dtype) for x in tokens)
    results = recurrent_gated_delta_rule(q, k, v, g, beta, scale, state, bounds)
    found = torch.autograd.grad(
        results, inputs, (do.to(g.dtype), dstate), create_graph=True, allow_unused=True, materialize_grads=True
    )
    return list(found)


def chunkwise_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """chunkwise_forward, differentiable where that is wanted: o [B,T,HV,V] and the states [N,HV,K,V].

    Kept for the gradient: of every chunk the state before it and four [C, C] matrices, of every token its error.
    """
    if not v.shape[1]:
        q, k, v = (x.to(initial_state.dtype) for x in (q, k, v))
        return recurrent_gated_delta_rule(q, k, v, g, beta, scale, initial_state)
    tensors = q, k, v, g, beta, initial_state
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return ChunkwiseDeltaRule.apply(q, k, v, g, beta, scale, initial_state, cu_seqlens, chunk_size)
    found = chunkwise_forward(q, k, v, g, beta, scale, initial_state, cu_seqlens, chunk_size)
    return found.o, found.state

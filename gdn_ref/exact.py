"""The algorithm as the book derives it: one head, NumPy arrays of any scalar type.

Nothing here divides, compares or takes an exponential, and no float literal appears.  So the same lines run on float64,
on ``fractions.Fraction`` and on SymPy expressions (both in arrays of dtype object), and over the last two every result
is exact.  The decay is taken as alpha = e^g; alpha = 0 is a reset and needs no special case.

Shapes, with a token as a row:  q, k [T, K];  v [T, V];  alpha, beta [T];  S [K, V].  q is taken as already scaled.
Inside one chunk T is called C.  Tags such as (5.4) are those of the book and of ``gdn_ref.identities``.
"""

from typing import NamedTuple

import numpy as np


class Output(NamedTuple):
    """Outputs O [T, V] and the state S [K, V] after the last token."""

    O: np.ndarray
    S: np.ndarray


class Decay(NamedTuple):
    """gamma [C], the decay from the chunk's start to each token; Gamma [C, C], the decay from token j to i >= j."""

    gamma: np.ndarray
    Gamma: np.ndarray


class WY(NamedTuple):
    """Effective keys W [C, K], carrying the decay from the chunk's start, and effective values U [C, V]."""

    W: np.ndarray
    U: np.ndarray


class Affine(NamedTuple):
    """The map S ↦ A S + B that a run of tokens is to the memory:  A [K, K], B [K, V].  (10.1)"""

    A: np.ndarray
    B: np.ndarray


# ---- token by token: the definition ----------------------------------------------------------------------------------


def step(q, k, v, alpha, beta, S):
    """One token.  q, k [K]; v [V]; alpha, beta scalars; S [K, V].  Returns (o [V], S [K, V]).  Chapter 1."""
    forgotten = alpha * S                                      # [K, V]
    error = v - k @ forgotten                                  # [V]      read, after forgetting
    S = forgotten + beta * np.outer(k, error)                  # [K, V]   (1.1)
    return q @ S, S


def recurrence(q, k, v, alpha, beta, S0=None):
    """The gated delta rule token by token; what every other form is held against.

    Shapes as in the module's docstring; S0 None means a zero state.  Returns Output(O [T, V], S [K, V]); S0 is left
    as it was.  Raises ValueError when the shapes disagree.  Source: chapter 1, (1.1).
    """
    q, k, v, alpha, beta, S = _arrays(q, k, v, alpha, beta, S0)
    O = np.zeros_like(v, dtype=S.dtype)                        # [T, V]
    for t in range(len(k)):
        O[t], S = step(q[t], k[t], v[t], alpha[t], beta[t], S)
    return Output(O, S)


# ---- one chunk: the stages, under the names that the torch and the Triton code use -----------------------------------


def decay(alpha):
    """Decays inside a chunk, as products of alpha [C] and never as quotients: right also at alpha = 0.  (7.1)"""
    alpha = np.asarray(alpha)
    C = len(alpha)
    Gamma = np.zeros((C, C), dtype=alpha.dtype)                # [C, C]
    for i in range(C):
        Gamma[i, :i] = alpha[i] * Gamma[i - 1, :i]
        Gamma[i, i] = 1
    return Decay(np.cumprod(alpha), Gamma)


def chunk_scaled_dot_kkt_fwd(k, beta, Gamma):
    """Gamma⊙L [C, C] with L = tril(diag(beta) K Kᵀ, −1).  k [C, K]; beta [C]; Gamma [C, C].  Chapter 5."""
    return Gamma * np.tril(beta[:, None] * (k @ k.T), -1)      # [C, C]


def forward_substitution(N, R):
    """X [C, n] with (I + N) X = R, for N [C, C] strictly lower.  The unit diagonal is why it never divides.  (6.3)"""
    X = np.array(R, dtype=np.result_type(N, R))                # [C, n]
    for i in range(1, len(X)):
        X[i] = X[i] - N[i, :i] @ X[:i]
    return X


def solve_tril(N):
    """A = (I + N)⁻¹ [C, C] for N [C, C] strictly lower.  (5.2), by (6.3)"""
    return forward_substitution(N, np.eye(len(N), dtype=N.dtype))


def recompute_w_u_fwd(k, v, beta, A, gamma):
    """W = A diag(beta) diag(gamma) K and U = A diag(beta) V.  (5.3)"""
    return WY(A @ ((beta * gamma)[:, None] * k), A @ (beta[:, None] * v))


def wy_solve(k, v, alpha, beta):
    """WY factors by the triangular solve: all of a chunk's tokens through one matrix A.  (5.2), (5.3)"""
    k, v, alpha, beta = _cast(k, v, alpha, beta)
    gamma, Gamma = decay(alpha)
    A = solve_tril(chunk_scaled_dot_kkt_fwd(k, beta, Gamma))   # [C, C]
    return recompute_w_u_fwd(k, v, beta, A, gamma)


def wy_recursion(k, v, alpha, beta):
    """WY factors row by row, as the induction gives them; equal to ``wy_solve``.  (3.4), (4.1), and with decay (5.3)

    k [C, K]; v [C, V]; alpha, beta [C].  The order of the factors matters: first the new key against the old keys, then
    the old rows.  The swapped order is refuted in (3.6).
    """
    k, v, alpha, beta = _cast(k, v, alpha, beta)
    gamma, Gamma = decay(alpha)
    W, U = np.zeros_like(k), np.zeros_like(v)
    for i in range(len(k)):
        met = Gamma[i, :i] * (k[i] @ k[:i].T)                  # [i]      how much of each older write this key meets
        W[i] = beta[i] * (gamma[i] * k[i] - met @ W[:i])       # [K]      (3.4)
        U[i] = beta[i] * (v[i] - met @ U[:i])                  # [V]      (4.1)
    return WY(W, U)


def chunk_delta(wy, S0):
    """E = U − W S0 [C, V]: row t is what token t writes, beta_t (v_t − alpha_t k_t S_{t−1}).  (5.4)"""
    return wy.U - wy.W @ S0


def chunk_output(q, k, gamma, Gamma, E, S0):
    """O = diag(gamma) Q S0 + (Q Kᵀ ⊙ Gamma) E [C, V]; the mask is Gamma, not M.  (5.5)"""
    return gamma[:, None] * (q @ S0) + (Gamma * (q @ k.T)) @ E


def chunk_state(k, gamma, Gamma, E, S0):
    """The state [K, V] after the chunk, gamma_C S0 + (diag(gamma_C / gamma) K)ᵀ E.  (5.6)

    The quotient is read off as Gamma's last row, so nothing is divided.
    """
    return gamma[-1] * S0 + (Gamma[-1][:, None] * k).T @ E


def chunk(q, k, v, alpha, beta, S0=None):
    """One chunk of C tokens at once; the values of ``recurrence``.  Returns Output(O [C, V], S [K, V]).  Chapter 5."""
    q, k, v, alpha, beta, S = _arrays(q, k, v, alpha, beta, S0)
    if len(k) == 0:
        return Output(v, S)
    gamma, Gamma = decay(alpha)                                # [C], [C, C]
    E = chunk_delta(wy_solve(k, v, alpha, beta), S)            # [C, V]
    return Output(chunk_output(q, k, gamma, Gamma, E, S), chunk_state(k, gamma, Gamma, E, S))


# ---- from chunk to chunk ---------------------------------------------------------------------------------------------


def chunkwise(q, k, v, alpha, beta, S0=None, chunk_size=64):
    """All T tokens in chunks of ``chunk_size`` (the last may be shorter), the state carried from one to the next.

    Shapes as in the module's docstring.  Returns Output(O [T, V], S [K, V]), the values of ``recurrence``.  Raises
    ValueError when the shapes disagree or chunk_size < 1.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size: found {chunk_size}, expected an integer >= 1")
    q, k, v, alpha, beta, S = _arrays(q, k, v, alpha, beta, S0)
    O = np.zeros_like(v)                                       # [T, V]
    for start in range(0, len(k), chunk_size):
        c = slice(start, start + chunk_size)
        O[c], S = chunk(q[c], k[c], v[c], alpha[c], beta[c], S)
    return Output(O, S)


# ---- chunks as maps of the memory: one sequence on many processors ---------------------------------------------------


def chunk_map(k, v, alpha, beta):
    """What one chunk does to any memory: Affine(A, B) with S_C = A S_0 + B.  k [C, K]; v [C, V]; alpha, beta [C].

    Needs neither q nor S_0, so every chunk's map can be made at once.  No tokens: the identity.  Source: (10.1).
    """
    k, v, alpha, beta = _cast(k, v, alpha, beta)
    if len(k) == 0:
        return identity_map(k.shape[1], v.shape[1], k.dtype)
    gamma, Gamma = decay(alpha)
    W, U = wy_solve(k, v, alpha, beta)
    K_C = Gamma[-1][:, None] * k                               # [C, K]   keys, decayed to the chunk's end
    return Affine(gamma[-1] * np.eye(k.shape[1], dtype=k.dtype) - K_C.T @ W, K_C.T @ U)


def identity_map(K, V, dtype=object):
    """(I, 0), the map of no tokens at all.  (10.3)"""
    return Affine(np.eye(K, dtype=dtype), np.zeros((K, V), dtype=dtype))


def compose(later, earlier):
    """The map of two runs, one after the other; the later one stands on the left.  (10.2)"""
    return Affine(later.A @ earlier.A, later.A @ earlier.B + later.B)


def apply(m, S):
    """A S + B [K, V], the memory after the run whose map is ``m``.  (10.1)"""
    return m.A @ S + m.B


def scan(maps, combine=compose):
    """Every prefix m_1, m_2∘m_1, m_3∘m_2∘m_1, …, by pairs: fewer than 2 n compositions, in about 2 log2(n) rounds.

    maps: a list, the earliest first; combine(later, earlier): any associative operation.  Returns a list as long as
    maps.  Source: (10.4).
    """
    if len(maps) < 2:
        return list(maps)
    paired = scan([combine(b, a) for a, b in zip(maps[::2], maps[1::2], strict=False)], combine)
    prefixes = list(maps[:1])
    for j, pair in enumerate(paired):                          # pair: all up to the odd place 2j + 1
        prefixes.append(pair)
        prefixes += [combine(m, pair) for m in maps[2 * j + 2:2 * j + 3]]
    return prefixes


def segment_map(k, v, alpha, beta, chunk_size=64):
    """The map of a segment of any length, by the same code as the forward pass: columns do not mix.  (10.5)

    Run on the values [V | 0] from the state [0 | I], the rule ends in [B | A].  Shapes as in ``chunk_map``.
    """
    k, v, alpha, beta = _cast(k, v, alpha, beta)
    A, B = identity_map(k.shape[1], v.shape[1], k.dtype)
    values = np.concatenate([v, np.zeros_like(k)], axis=1)     # [T, V + K]
    end = chunkwise(k, k, values, alpha, beta, np.concatenate([B, A], axis=1), chunk_size).S
    return Affine(end[:, v.shape[1]:], end[:, :v.shape[1]])


def parallel(q, k, v, alpha, beta, S0=None, segment_size=256, chunk_size=64):
    """One sequence cut into segments, one a processor; the values of ``recurrence``, nothing dropped.  (10.6)

    Each processor makes its segment's map, a scan of the maps gives every processor the state that reaches it, and
    each runs its own segment from there.  Only the scan looks across segments.  Shapes as in the module's docstring.
    Returns Output(O [T, V], S [K, V]).  Raises ValueError when the shapes disagree or a size is below 1.
    """
    if segment_size < 1:
        raise ValueError(f"segment_size: found {segment_size}, expected an integer >= 1")
    q, k, v, alpha, beta, S = _arrays(q, k, v, alpha, beta, S0)
    cuts = [slice(start, start + segment_size) for start in range(0, len(k), segment_size)]
    maps = [segment_map(k[c], v[c], alpha[c], beta[c], chunk_size) for c in cuts]
    states = [S] + [apply(m, S) for m in scan(maps)]           # [K, V] each: before every segment, and at the end
    runs = [chunkwise(q[c], k[c], v[c], alpha[c], beta[c], before, chunk_size)
            for c, before in zip(cuts, states, strict=False)]
    return Output(np.concatenate([v[:0]] + [run.O for run in runs]), states[-1])


# ---- backward, token by token ----------------------------------------------------------------------------------------


class Gradients(NamedTuple):
    """Gradients of a loss with respect to the inputs, each in its input's shape.

    dq, dk [T, K];  dv [T, V];  dg, dbeta [T];  dS0 [K, V].  dg is taken with respect to the log decay g = log(alpha),
    that is alpha times the gradient with respect to alpha: the number that needs no logarithm and is 0 at a reset.
    """

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dg: np.ndarray
    dbeta: np.ndarray
    dS0: np.ndarray


def states(k, v, alpha, beta, S0):
    """S_0, S_1, … S_T, [T + 1, K, V]: all that the forward pass has to leave for the backward one.  (1.1)"""
    S = np.zeros((len(k) + 1, *S0.shape), dtype=S0.dtype)      # [T + 1, K, V]
    S[0] = S0
    for t in range(len(k)):
        _, S[t + 1] = step(k[t], k[t], v[t], alpha[t], beta[t], S[t])
    return S


def adjoint_before(k, alpha, beta, Lambda):
    """alpha H Lambda [K, V]: the gradient of the state before a token from that of the state after it.  (8.1)"""
    return alpha * (Lambda - beta * np.outer(k, k @ Lambda))


def adjoints(q, k, alpha, beta, dO, dS):
    """Lambda_1, … Lambda_T [T, K, V], the gradients of the states, from the last token to the first.  (8.1)"""
    Lambda = np.zeros((len(k), *dS.shape), dtype=dS.dtype)     # [T, K, V]
    for t in reversed(range(len(k))):
        Lambda[t] = dS + np.outer(q[t], dO[t])
        dS = adjoint_before(k[t], alpha[t], beta[t], Lambda[t])
    return Lambda


def token_backward(k, v, alpha, beta, do, S, S_after, Lambda):
    """One token's own gradients (dq [K], dk [K], dv [V], dg, dbeta), from the states around it and Lambda [K, V]."""
    forgotten = alpha * S                                      # [K, V]
    e, y = v - k @ forgotten, k @ Lambda                       # [V]      the error, and what k reads of the adjoint
    dq = S_after @ do                                          # (8.2)
    dv = beta * y                                              # (8.3)
    dbeta = y @ e                                              # (8.4)
    dk = beta * (Lambda @ e - forgotten @ y)                   # (8.5)
    dg = np.sum((Lambda - beta * np.outer(k, y)) * forgotten)  # (8.6)
    return dq, dk, dv, dg, dbeta


def recurrence_backward(q, k, v, alpha, beta, S0=None, dO=None, dS=None):
    """Gradients of a loss through ``recurrence``, given those of its outputs; what every other form is held against.

    dO [T, V] and dS [K, V] are the loss's gradients with respect to O and the last state; None stands for zeros.  Other
    shapes as in the module's docstring.  Returns Gradients.  Keeps all T + 1 states.  Raises ValueError when the shapes
    disagree.  Source: chapter 8, (8.1) to (8.6).
    """
    q, k, v, alpha, beta, S0, dO, dS = _upstream(q, k, v, alpha, beta, S0, dO, dS)
    S, Lambda = states(k, v, alpha, beta, S0), adjoints(q, k, alpha, beta, dO, dS)
    found = [np.zeros_like(x) for x in (q, k, v, alpha, beta)]
    for t in range(len(k)):
        own = token_backward(k[t], v[t], alpha[t], beta[t], dO[t], S[t], S[t + 1], Lambda[t])
        for gradient, row in zip(found, own, strict=True):
            gradient[t] = row
    dS0 = adjoint_before(k[0], alpha[0], beta[0], Lambda[0]) if len(k) else dS.copy()   # (8.8)
    return Gradients(*found, dS0)


# ---- backward, by chunk ----------------------------------------------------------------------------------------------


def tril_inverse_backward(T, dT):
    """dL = −tril(Tᵀ dT Tᵀ, −1) [C, C], for T = (I + L)⁻¹.  (9.1)"""
    return -np.tril(T.T @ dT @ T.T, -1)


def right_inverse(k, beta, Gamma):
    """A_r = (I + Gamma⊙tril(K Kᵀ, −1) diag(beta))⁻¹ [C, C]: A with beta on its right, so that diag(beta) A_r =
    A diag(beta) and the errors come out without a division by beta.  (9.3)"""
    return solve_tril(Gamma * np.tril((k @ k.T) * beta[None, :], -1))


def chunk_errors(k, v, A_r, gamma, S):
    """R = A_r (V − diag(gamma) K S) [C, V]: row t is e_t = v_t − alpha_t k_t S_{t−1}, and E = diag(beta) R.  (9.3)"""
    return A_r @ (v - gamma[:, None] * (k @ S))


def values_backward(q, k, beta, A_r, Gamma, dO, dS):
    """dV = A_rᵀ diag(beta) dE [C, V], dE [C, V] the gradient of the deltas: from the outputs, and from the state."""
    dE = (Gamma * (q @ k.T)).T @ dO + Gamma[-1][:, None] * (k @ dS)                     # (9.4)
    return A_r.T @ (beta[:, None] * dE)                        # (9.5)


def state_backward(q, k, gamma, dO, dV, dS):
    """The gradient [K, V] of the state before a chunk, from that of the state after it.  (9.6)"""
    return gamma[-1] * dS + (gamma[:, None] * q).T @ dO - (gamma[:, None] * k).T @ dV


def rows_backward(q, k, beta, gamma, Gamma, R, dO, dV, S, dS):
    """dq, a and c, [C, K] each: row t is do_t S_tᵀ, −dv_t (alpha_t S_{t−1})ᵀ and e_t Lambda_tᵀ.  (9.7), (9.8), (9.9)"""
    F, J = Gamma * (dO @ R.T), np.tril(Gamma * (dV @ R.T), -1)                          # [C, C]
    written = beta[:, None] * k                                # [C, K]
    dq = gamma[:, None] * (dO @ S.T) + F @ written             # (9.7)
    a = -gamma[:, None] * (dV @ S.T) - J @ written             # (9.8)
    c = Gamma[-1][:, None] * (R @ dS.T) + F.T @ q - J.T @ k    # (9.9)
    return dq, a, c


def decay_shares(q, k, beta, gamma, Gamma, R, dO, dV, S, dS):
    """X [C + 1, C + 1]: what every decay of the chunk, from j to i, adds to the loss's slope in its logarithm.  (9.11)

    Rows are where a decay ends: the tokens, then the chunk's end.  Columns are where it begins: the chunk's start, then
    the tokens.  Above the tokens' diagonal nothing; on it alpha does not occur.
    """
    X = np.zeros((len(k) + 1, len(k) + 1), dtype=k.dtype)
    meets = (dO @ R.T) * (q @ k.T) - np.tril((dV @ R.T) * (k @ k.T), -1)                # [C, C]
    X[:-1, 1:] = Gamma * meets * beta[None, :]
    X[:-1, 0] = gamma * np.sum(dO * (q @ S) - dV * (k @ S), axis=1)
    X[-1, 1:] = Gamma[-1] * beta * np.sum(R * (k @ dS), axis=1)
    X[-1, 0] = gamma[-1] * np.sum(S * dS)
    return X


def decay_backward(X):
    """dg [C] from ``decay_shares``: token t adds the decays that lie across it, from j < t to i >= t.  (9.13)"""
    ended_later = np.cumsum(X[::-1], axis=0)[::-1]             # row t: the sum over all ends i >= t
    return np.sum(np.tril(ended_later[:-1]), axis=1)


def chunk_backward(q, k, v, alpha, beta, S, dO, dS):
    """Gradients through one chunk of C > 0 tokens, from the state S [K, V] before it and dS [K, V] after it."""
    gamma, Gamma = decay(alpha)                                # [C], [C, C]
    A_r = right_inverse(k, beta, Gamma)                        # [C, C]
    R = chunk_errors(k, v, A_r, gamma, S)                      # [C, V]
    dV = values_backward(q, k, beta, A_r, Gamma, dO, dS)       # [C, V]
    chunk = q, k, beta, gamma, Gamma, R, dO, dV, S, dS
    dq, a, c = rows_backward(*chunk)                           # [C, K]
    dk, dbeta = a + beta[:, None] * c, np.sum(k * c, axis=1)   # (9.10)
    return Gradients(dq, dk, dV, decay_backward(decay_shares(*chunk)), dbeta, state_backward(q, k, gamma, dO, dV, dS))


def chunk_starts(k, v, alpha, beta, S0, chunk_size):
    """The state [K, V] before every chunk: all that is kept of the forward pass, T / chunk_size states."""
    starts, S = [], S0
    for start in range(0, len(k), chunk_size):
        c = slice(start, start + chunk_size)
        starts.append(S)
        S = chunk(k[c], k[c], v[c], alpha[c], beta[c], S).S
    return starts


def chunkwise_backward(q, k, v, alpha, beta, S0=None, dO=None, dS=None, chunk_size=64):
    """Gradients of a loss through ``chunkwise``: the values of ``recurrence_backward``, whatever the chunk length.

    Arguments as there.  Keeps one state a chunk and computes the rest of a chunk again when its turn comes, the last
    one first.  Returns Gradients.  Raises ValueError when the shapes disagree or chunk_size < 1.  Source: chapter 9.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size: found {chunk_size}, expected an integer >= 1")
    q, k, v, alpha, beta, S0, dO, dS = _upstream(q, k, v, alpha, beta, S0, dO, dS)
    starts = chunk_starts(k, v, alpha, beta, S0, chunk_size)
    found = [np.zeros_like(x) for x in (q, k, v, alpha, beta)]
    dS = dS.copy()
    for n in reversed(range(len(starts))):
        c = slice(n * chunk_size, (n + 1) * chunk_size)
        *own, dS = chunk_backward(q[c], k[c], v[c], alpha[c], beta[c], starts[n], dO[c], dS)
        for gradient, rows in zip(found, own, strict=True):
            gradient[c] = rows
    return Gradients(*found, dS)


# ---- arguments -------------------------------------------------------------------------------------------------------


def _cast(*arrays):
    """One scalar type for all: object as soon as one of them holds Fractions or expressions."""
    arrays = [np.asarray(a) for a in arrays]
    dtype = np.result_type(*arrays)
    return [a.astype(dtype) for a in arrays]


def _arrays(q, k, v, alpha, beta, S0):
    k, v = np.asarray(k), np.asarray(v)
    for name, a in (("k", k), ("v", v)):
        if a.ndim != 2:
            raise ValueError(f"{name}: found {a.ndim} dimensions, expected 2 (token, width)")
    (T, K), V = k.shape, v.shape[1]
    S0 = np.zeros((K, V), dtype=v.dtype) if S0 is None else S0
    q, k, v, alpha, beta, S = _cast(q, k, v, alpha, beta, S0)
    wanted = {"q": (q, (T, K)), "v": (v, (T, V)), "alpha": (alpha, (T,)), "beta": (beta, (T,)), "S0": (S, (K, V))}
    for name, (a, shape) in wanted.items():
        if a.shape != shape:
            raise ValueError(f"{name}: found shape {a.shape}, expected {shape} from k {k.shape} and v {v.shape}")
    return q, k, v, alpha, beta, S


def _upstream(q, k, v, alpha, beta, S0, dO, dS):
    q, k, v, alpha, beta, S = _arrays(q, k, v, alpha, beta, S0)
    dO = np.zeros_like(v) if dO is None else dO
    dS = np.zeros_like(S) if dS is None else dS
    arrays = _cast(q, k, v, alpha, beta, S, dO, dS)
    for name, a, shape in (("dO", arrays[6], v.shape), ("dS", arrays[7], S.shape)):
        if a.shape != shape:
            raise ValueError(f"{name}: found shape {a.shape}, expected {shape}")
    return arrays

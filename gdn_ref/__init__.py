"""gdn_ref: the reference for Gated DeltaNet. Proved in the book, exact over rationals, run in torch."""

from . import library as _library  # noqa: F401 - registers the compiler's op
from .arguments import BACKENDS
from .chunks import prepare_chunk_indices
from .chunkwise import chunk_local_cumsum, chunk_scaled_dot_kkt_fwd, recompute_w_u_fwd, solve_tril
from .gates import l2norm
from .layer import GatedDeltaNet
from .ops import (
    Backend,
    BackendNotice,
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    recompute_states,
    which_backend,
)
from .serving import gdn_decode, gdn_extend_chunkwise, gdn_extend_chunkwise_torch, gdn_rollback

__version__ = "0.1.0"

__all__ = [
    "BACKENDS",
    "Backend",
    "BackendNotice",
    "GatedDeltaNet",
    "chunk_gated_delta_rule",
    "chunk_local_cumsum",
    "chunk_scaled_dot_kkt_fwd",
    "fused_recurrent_gated_delta_rule",
    "gdn_decode",
    "gdn_extend_chunkwise",
    "gdn_extend_chunkwise_torch",
    "gdn_rollback",
    "l2norm",
    "prepare_chunk_indices",
    "recompute_states",
    "recompute_w_u_fwd",
    "solve_tril",
    "which_backend",
]

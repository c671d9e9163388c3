"""The public functions: check the arguments, choose a backend, run it.

Names and keywords are those of flash-linear-attention, so that its users and transformers can drop these in.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import Sizes, check_backend, check_backend_query, check_delta_rule, compute_dtype, readable
from .chunkwise_backward import chunkwise_gated_delta_rule
from .gates import l2norm, log_decay, write_strength
from .recurrent import recurrent_gated_delta_rule

LARGEST_KERNEL_WIDTH = 256


class Backend(NamedTuple):
    """What which_backend answers: the name of the backend that serves a call, and the reason in one sentence."""

    name: str  # "triton", "torch" or "recurrent"
    reason: str  # why this one serves


class BackendNotice(UserWarning):
    """Said once when a backend serves that the caller may not expect. GDN_REF_STRICT=1 makes it an error."""


def which_backend(x: Tensor, backend: str = "auto", *, decode: bool = False, others: tuple = ()) -> Backend:
    """Which backend serves a call on x, and why.

    x: an input, q say; its device, dtype and last axis (the head width) count. backend: what the call asks for, "auto",
    "triton", "torch" or "recurrent". decode: ask for fused_recurrent_gated_delta_rule instead of
    chunk_gated_delta_rule. others: further inputs, or None, which count like x. Whether a gradient is wanted makes no
    difference: every backend has one.

    Raises TypeError where x or one of the others is no tensor (a device or its name is none), ValueError on another
    name and RuntimeError where the backend asked for cannot serve.
    """
    check_backend_query(x, others)
    check_backend(backend)
    if backend in ("torch", "recurrent"):
        return Backend(backend, "asked for by name")
    if backend == "triton":
        if obstacle := _obstacle(x, others):
            raise RuntimeError(f"backend 'triton' cannot serve: {obstacle}; use 'torch'")
        return Backend(backend, "asked for by name")
    name = "recurrent" if decode else "torch"
    if x.device.type == "cpu":
        return Backend(name, f"'auto' on a CPU tensor: PyTorch, {'token by token' if decode else 'by chunks'}")
    if obstacle := _obstacle(x, others):
        return Backend(name, f"'auto' on {x.device}: {obstacle}, so PyTorch serves, slower")
    return Backend("triton", f"'auto' on {x.device}: the Triton kernels{_kernels().stand_in(x.device)}")


def _obstacle(x: Tensor, others: tuple) -> str | None:
    """Why the Triton kernels cannot serve these inputs; None where they can. Nothing is compiled to find out."""
    tensors = [x, *(t for t in others if t is not None)]
    if x.device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1" or ((kernels := _kernels()) and not kernels.INTERPRETED):
            return "triton runs on a GPU, and on the CPU only under TRITON_INTERPRET=1, set before triton is imported"
    elif x.device.type != "cuda":
        return f"gdn_ref has no Triton kernels for {x.device.type}"
    if _kernels() is None:
        return "triton is not installed, or older than 3.4"
    if x.device.type == "cuda" and not torch.version.hip:
        major, minor = torch.cuda.get_device_capability(x.device)
        if major < 8:
            return f"the Triton kernels need compute capability 8.0, and {x.device} has {major}.{minor}"
    if torch.float64 in {t.dtype for t in tensors}:
        return "the Triton kernels do not calculate in float64"
    if (width := max(t.shape[-1] for t in tensors if t.dim() > 3 or t is x)) > LARGEST_KERNEL_WIDTH:
        return f"the Triton kernels take heads up to {LARGEST_KERNEL_WIDTH} wide, and these are {width}"
    return None


@functools.cache
def _kernels() -> ModuleType | None:
    """The launcher of the kernels; imported when first needed, since that imports triton."""
    try:
        from .kernels import launch
    except (ImportError, AttributeError):  # AttributeError: a release that lacks what the kernels need
        return None
    return launch


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet over whole sequences, by chunks: training and prefill.

    S_t = e^g_t (I - beta_t k_t^T k_t) S_{t-1} + beta_t k_t^T v_t,   o_t = scale * q_t S_t.

    Arguments beyond beta are best given by name.

    q, k: [B, T, H, K]; v: [B, T, HV, V], HV a multiple of H: value head h reads with key head h // (HV // H). Any
        mix of bfloat16, float16, float32, float64; any strides; T may be 0.
    g: [B, T, HV], natural-log decay, g <= 0; -inf forgets everything before the token, None decays nothing. With
        use_gate_in_kernel it is the raw gate a, and g = -exp(A_log) * softplus(a + dt_bias) (A_log, dt_bias: [HV]).
    beta: [B, T, HV], write strength; None is 1. With use_beta_sigmoid_in_kernel it is the raw gate b and
        beta = sigmoid(b), doubled by allow_neg_eigval. beta * |k|^2 must not exceed 2, or the recurrence itself
        diverges: normalise the keys, here by use_qk_l2norm_in_kernel (x * rsqrt(sum x^2 + 1e-6) on q and k).
    scale: finite Python number; K**-0.5 if None.
    initial_state: [N, HV, K, V], or [N, HV, V, K] with state_v_first; zeros if None; never modified.
    cu_seqlens: [N + 1] int32 or int64, boundaries of N sequences packed into one row (B = 1), on the CPU to save a
        wait for the device. Tokens beyond the last boundary give 0.
    chunk_size: the most tokens a chunk may have, 1 to 256 (torch takes 64 at most, fewer for narrow keys; the Triton
        kernels take what suits the device); it changes rounding and speed, not the result.
    backend: "auto" (Triton on a GPU, torch elsewhere), "triton", "torch" or "recurrent" (token by token, the
        definition); see which_backend.

    Returns (o [B, T, HV, V] in v's dtype, final state like initial_state in float32, or float64 for float64 q, k or
    v; None unless output_final_state). Differentiable in every floating input; gradients come in the dtype of their
    input, and the same bits come out of every run. A second derivative (create_graph=True) is taken through the token
    recurrence by torch, and is an error by Triton. There is no mask: pad a plain batch with beta = 0 and g = 0.

    A float16 output cannot hold more than 65504 and overflows to inf beyond: take bfloat16 or float32 for v where a
    readout may grow so large. Autocast does not reach inside: the dtypes of the inputs decide. Under torch.compile the
    call is one node of the graph: see library.py.

    Raises ValueError or TypeError, naming the argument, before anything is computed; RuntimeError if the backend
    asked for cannot serve.

    Source: Gated Delta Networks (arXiv 2412.06464), section 3; book (1.1), (5.3) to (5.6).
    """
    call = Call(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, state_v_first, cu_seqlens, use_gate_in_kernel, A_log, dt_bias, chunk_size, backend,
    )  # fmt: skip
    if torch.compiler.is_compiling():  # one node of the compiler's graph; what is checked here, it checks when it runs
        o, state = torch.ops.gdn_ref.chunk_gated_delta_rule(*call)
        return o, state if output_final_state else None
    done = run_as_before(call)
    return run(call) if done is None else done


class Call(NamedTuple):
    """The arguments of chunk_gated_delta_rule, in their order."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    scale: float | None
    initial_state: Tensor | None
    output_final_state: bool
    use_qk_l2norm_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    state_v_first: bool
    cu_seqlens: Tensor | None
    use_gate_in_kernel: bool
    A_log: Tensor | None
    dt_bias: Tensor | None
    chunk_size: int
    backend: str

    def tensors(self) -> tuple:
        """As the kernels' launchers order them."""
        return (*self[:5], self.A_log, self.dt_bias, self.cu_seqlens, self.initial_state)

    def options(self) -> tuple:
        """As the kernels' launchers order them."""
        return self[7:12]


def check_call(call: Call) -> Sizes:
    """Check all arguments by themselves."""
    check_backend(call.backend)
    given = call._asdict()
    for name in ("output_final_state", "use_qk_l2norm_in_kernel", "backend"):
        del given[name]
    return check_delta_rule(**given)


def choose(call: Call) -> tuple[Call, Sizes, str]:
    """Check all arguments, fill in the scale, choose the backend: the call, its sizes and the backend's name."""
    sizes = check_call(call)
    inputs = (*call[1:5], call.initial_state, call.A_log, call.dt_bias)
    chosen = _announce(which_backend(call.q, call.backend, others=inputs), call.q).name
    return (call if call.scale is not None else call._replace(scale=sizes.K**-0.5)), sizes, chosen


def run_as_before(call: Call) -> tuple[Tensor, Tensor | None] | None:
    """What chunk_gated_delta_rule returns, by the plan of an earlier call of the same kind; None if there is none."""
    if call.backend not in ("auto", "triton") or call.chunk_size != 64:
        return None
    if call.use_gate_in_kernel != (call.A_log is not None):
        return None
    tensors, options, scale = call.tensors(), call.options(), call.scale
    wanted = _wants_gradient(tensors)
    plan = _recall(tensors, scale, options, wanted)
    if plan is None:
        return None
    if not wanted:
        return plan.run(*tensors)
    return FusedDeltaRule.apply(plan, call.q.shape[-1] ** -0.5 if scale is None else scale, options, *tensors)


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """The same where there is no such plan."""
    call, sizes, chosen = choose(call)
    if chosen == "triton":
        options, tensors = call.options(), call.tensors()
        if _wants_gradient(tensors):
            return _differentiated(call.scale, options, tensors)
        return fused_forward(call.scale, options, tensors)
    with torch.autocast(call.q.device.type, enabled=False):
        inputs = rule_inputs(call, sizes)
        if chosen == "recurrent":
            dtype, bounds = inputs.g.dtype, None if call.cu_seqlens is None else call.cu_seqlens.cpu()
            q, k, v = (x.to(dtype) for x in inputs[:3])
            o, state = recurrent_gated_delta_rule(q, k, v, *inputs[3:5], call.scale, inputs.state, bounds)
        else:
            rest = call.scale, inputs.state, call.cu_seqlens, call.chunk_size
            o, state = chunkwise_gated_delta_rule(*inputs[:5], *rest)
    o = o.to(call.v.dtype)
    if not call.output_final_state:
        return o, None
    return o, (state.transpose(-1, -2) if call.state_v_first else state).contiguous()


class RuleInputs(NamedTuple):
    """What the recurrence itself is given: gates and keys as they are, nothing left out, the state [N,HV,K,V]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor


def rule_inputs(call: Call, sizes: Sizes) -> RuleInputs:
    """Gates from the raw ones, normalised keys, zeros and ones for what was left out; g, beta and the state in the
    dtype of the arithmetic."""
    q, k, v, g, beta = call[:5]
    dtype = compute_dtype(q, k, v)
    if call.use_gate_in_kernel:
        g = log_decay(g, call.A_log, call.dt_bias)
    if call.use_beta_sigmoid_in_kernel:
        beta = write_strength(beta, call.allow_neg_eigval)
    if call.use_qk_l2norm_in_kernel:
        q, k = (l2norm(x.to(dtype)) for x in (q, k))
    g, beta = (
        v.new_full(v.shape[:3], fill, dtype=dtype) if x is None else x.to(dtype) for x, fill in ((g, 0), (beta, 1))
    )
    state = call.initial_state
    if state is None:
        state = q.new_zeros(sizes.N, sizes.HV, sizes.K, sizes.V, dtype=dtype)
    elif call.state_v_first:
        state = state.transpose(-1, -2)
    return RuleInputs(q, k, v, g, beta, state.to(dtype))


@contextlib.contextmanager
def recompute_states(on: bool = True):
    """Within it, calls that will be differentiated keep nothing but their inputs: the Triton backward makes the states
    before every chunk, and what else it needs of the forward, again. That saves 1 KB for each token and value head (at
    K = V = 128 and 16 bits) from the forward to the backward, for time. Outside of it, and within
    recompute_states(False), they are kept where both passes cut chunks alike: on Hopper and in float32, for keys up to
    128 wide; GDN_REF_RECOMPUTE=1 has them made again outside too. The torch backend always keeps one state a chunk, and
    what torch.compile has compiled its inputs alone.

    It holds for the whole process, since autograd runs in threads of its own, and is meant for whole steps: what
    torch.utils.checkpoint runs again must find it as the forward pass did, so stay within until the backward is done.
    """
    if torch.compiler.is_compiling():  # see library.py
        yield
        return
    before, _States.made_again = _States.made_again, on
    try:
        yield
    finally:
        _States.made_again = before


class _States:
    made_again = os.environ.get("GDN_REF_RECOMPUTE") == "1"


class FusedDeltaRule(torch.autograd.Function):
    """The Triton kernels forward and backward."""

    @staticmethod
    def forward(ctx, plan, scale, options, *tensors):
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.options, ctx.kept = scale, options, plan and plan.kept
        if plan is None:  # no tokens
            ctx.save_for_backward(*tensors, None)
            return fused_forward(scale, options, tensors)
        o, final, memory = plan.run_and_keep(*tensors)
        ctx.save_for_backward(*tensors, memory)
        return o, final

    @staticmethod
    def backward(ctx, do, dstate):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph: found True, but the Triton kernels have no second derivative; backend='torch' has"
            )
        *tensors, memory = ctx.saved_tensors
        kept = ctx.kept and (ctx.kept, memory)
        return None, None, None, *fused_gradients(ctx.scale, ctx.options, tensors, do, dstate, kept)


def _differentiated(scale: float, options: tuple, tensors: tuple) -> tuple[Tensor, Tensor | None]:
    """fused_forward, remembered for the backward pass."""
    q, cu_seqlens, plan = tensors[0], tensors[7], None
    if _kernels().has_tokens(q, cu_seqlens):
        plan = _kernels().plan_of(tensors, (scale, *options), _keep())
    return FusedDeltaRule.apply(plan, scale, options, *tensors)


def _keep():
    """What tells the forward pass how the backward pass would have what is kept; None where nothing is to be."""
    if _States.made_again:
        return None
    from .kernels.launch_backward import wanted

    return wanted


def fused_forward(scale: float, options: tuple, tensors: tuple) -> tuple[Tensor, Tensor | None]:
    """o and the final state, or None, by the Triton kernels; options and tensors as Call has them for kernels."""
    leading, named = _for_kernels(scale, options, tensors)
    return _kernels().chunk_forward(*leading, **named, output_final_state=options[0])


def fused_gradients(
    scale: float, options: tuple, tensors: tuple, do: Tensor | None, dstate: Tensor | None, kept: tuple | None = None
) -> tuple:
    """Gradients by the Triton kernels, in the order of tensors; None for what is None, and for boundaries. kept: what
    the forward plan kept, and the memory that it lies in."""
    from .kernels.launch_backward import Kept, chunk_backward

    leading, named = _for_kernels(scale, options, tensors)
    *found, dinitial = chunk_backward(*leading, do, dstate, **named, saved=kept and Kept(*kept))
    return *found, None, dinitial


def _for_kernels(scale: float, options: tuple, tensors: tuple) -> tuple[tuple, dict]:
    """The arguments that both passes take, by place and by name."""
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state = tensors
    names = ("use_qk_l2norm", "beta_is_raw", "allow_neg_eigval", "state_v_first")
    named = dict(zip(names, options[1:], strict=True), A_log=A_log, dt_bias=dt_bias)
    return (q, k, v, g, beta, scale, initial_state, cu_seqlens), named


def _wants_gradient(tensors: tuple) -> bool:
    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors)


def _recall(tensors: tuple, scale: float | None, options: tuple, differentiated: bool):
    """The plan of an earlier call of this very kind, or None. Its arguments have passed their checks then, and to check
    them again would cost half as much processor time as the rest of the call."""
    q, cu_seqlens = tensors[0], tensors[7]
    try:
        if not q.is_cuda or (cu_seqlens is not None and readable(cu_seqlens)) or not (kernels := _kernels()):
            return None  # boundaries that may be looked at are, for they may be new ones
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        keep = _keep() if differentiated else None
        return kernels.recall(kernels.kind_of_call(tensors, (scale, *options, *((keep,) if keep else ()))))
    except (AttributeError, TypeError):  # what is no tensor the checks will name
        return None


def _named_beyond_g(function: Callable) -> Callable:
    """The function, with the same signature, and a fifth argument by place told why it cannot be one: Python itself
    only counts them, and beta is what stands there in chunk_gated_delta_rule."""

    @functools.wraps(function)
    def called(*args, **named):
        if len(args) > 4:
            raise TypeError(
                f"{function.__name__}: found {len(args)} arguments by place, expected q, k, v and g, and everything "
                "beyond them by name: beta=beta (flash-linear-attention's fifth is another decay, gk)"
            )
        return function(*args, **named)

    return called


@_named_beyond_g
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet token by token: decoding, and the definition itself.

    Arguments, results and errors are those of chunk_gated_delta_rule, with everything beyond g by name; "auto" runs
    the token recurrence on a CPU and the Triton kernels on a GPU. Training through it keeps a state a token (it warns
    where that is much): train by chunks.

    Source: Gated Delta Networks (arXiv 2412.06464), equation 10; book (1.1).
    """
    if torch.compiler.is_compiling():
        chosen = "recurrent" if backend == "auto" and q.device.type == "cpu" else backend
    else:
        inputs = [x for x in (k, v, g, beta, initial_state, A_log, dt_bias) if isinstance(x, Tensor)]
        usable = isinstance(q, Tensor) and q.dim() == 4
        chosen = _announce(which_backend(q, backend, decode=True, others=inputs), q).name if usable else "recurrent"
    return chunk_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, state_v_first, cu_seqlens, use_gate_in_kernel=use_gate_in_kernel, A_log=A_log,
        dt_bias=dt_bias, backend=chosen,
    )  # fmt: skip


def _announce(chosen: Backend, x: Tensor) -> Backend:
    if x.device.type != "cpu" and chosen.name != "triton" and chosen.reason.startswith("'auto'"):
        if os.environ.get("GDN_REF_STRICT") == "1":
            raise RuntimeError(f"GDN_REF_STRICT=1 and {chosen.reason}")
        if not _announced:
            _announced.append(chosen)
            warnings.warn(chosen.reason, BackendNotice, stacklevel=3)
    return chosen


_announced: list[Backend] = []

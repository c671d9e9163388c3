"""How a property asks: it makes inputs, calls the implementation, compares with float64, and keeps every number.

A property's function is given a Probe and calls its methods; what a call raises is kept too, and the next case runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from . import cases
from .cases import Recipe
from .records import BOUNDS, Call, Implementation, Measurement, NotOffered, Result

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# How many times the movement of an ill-conditioned gradient is allowed. Half a unit of a 16-bit number is a large step
# already, so that the exact gradient moves by much of the bound in ordinary cases too.
SLACK = {"float64": 6.0, "float32": 6.0, "float16": 2.0, "bfloat16": 2.0}


class Probe:
    """One implementation under one property."""

    def __init__(self, implementation: Implementation, device: str = "cpu", full: bool = False):
        self.implementation, self.device, self.full = implementation, device, full
        self.measurements: list[Measurement] = []
        self.refusals: list[str] = []

    # ---- inputs

    def has(self, feature: str) -> bool:
        """Whether the implementation offers a feature."""
        return feature in self.implementation.offers.features

    def fit(self, **changes) -> Recipe:
        """A recipe with these fields, as near as the implementation can take it."""
        changes = {"dtype": self.dtypes[0], **changes}
        return cases.fit(Recipe(**changes), self.implementation.offers)

    def fitting(self, recipes: list[dict], wanted: Callable[[Recipe], bool], why: str) -> list[dict]:
        """Those of the recipes that are still what is wanted within the implementation's limits; a refusal if none."""
        fitted = dict.fromkeys(r for r in (self.fit(**changes) for changes in recipes) if wanted(r))
        if not fitted:
            self.refusals.append(why)
        return [r._asdict() for r in fitted]

    @property
    def dtypes(self) -> list[str]:
        """What a case runs in: on a GPU first bfloat16, else the first on offer; a second one in the full check."""
        offered = list(self.implementation.offers.dtypes)
        if self.device != "cpu" and "bfloat16" in offered:
            offered.sort(key=lambda name: name != "bfloat16")
        return offered[:2] if self.full else offered[:1]

    def make(self, recipe: Recipe) -> Call:
        """The tensors of a recipe on the device, normalised by the implementation where it always does that."""
        return cases.make(recipe, self.device)._replace(l2norm=self.has("normalises"))

    # ---- calls

    def run(self, call: Call, step: bool = False) -> Result:
        """Call the implementation, or what it decodes with; refuse results of another shape than was asked for."""
        function = (self.implementation.step or self.implementation.run) if step else self.implementation.run
        with contextlib.nullcontext() if any(_wants(x) for x in call) else torch.no_grad():
            o, state = function(call)
        if not self.has("final_state"):
            state = None
        elif state is None:
            raise ValueError("final state: found None, expected a tensor")
        _check_shape("o", o, tuple(call.v.shape))
        if state is not None:
            _check_shape("final state", state, _state_shape(call))
        return Result(o, state)

    def forward(self, call: Call) -> dict[str, Tensor]:
        """{"o", "state"}, without the state where none is given back."""
        return {name: x for name, x in zip(("o", "state"), self.run(call), strict=True) if x is not None}

    def with_gradients(self, call: Call) -> dict[str, Tensor]:
        """forward, and the gradient of every input for the fixed upstream gradients."""
        call, leaves = cases.with_leaves(call)
        o, state = self.run(call)
        if not o.requires_grad:
            raise NotOffered("the output carries no gradient")
        if state is not None and not state.requires_grad:
            state = None
        like = cases.upstream(o, torch.empty(_state_shape(call)))
        found = {"o": o.detach(), **cases.gradients(o, state, leaves, like)}
        return found if state is None else {**found, "state": state.detach()}

    # ---- judgements

    @contextlib.contextmanager
    def case(self, recipe: Recipe) -> Iterator[None]:
        """One case: what is raised inside becomes a measurement or, where it is a refusal, a note."""
        try:
            yield
        except (NotOffered, NotImplementedError) as refusal:
            self.refusals.append(str(refusal) or "it is not implemented")
        except Exception as error:  # anybody's code may raise anything; the report says what
            refusal = self.implementation.refusal
            if refusal and refusal in str(error):
                self.refusals.append(str(error))
                return
            said = f"{type(error).__name__}: {error}"
            self.measurements.append(Measurement(float("inf"), 0.0, "raised", recipe._asdict(), said))

    def agrees(self, gradients: bool = False, options: dict | None = None, **recipe) -> None:
        """The whole call is what the definition gives. options: further arguments of the call."""
        recipe, options = self.fit(**recipe), options or {}
        with self.case(recipe):
            call = self.make(recipe)._replace(**options)
            found = self.with_gradients(call) if gradients else self.forward(call)
            options = {"l2norm": call.l2norm, **options}
            right = _remembered(recipe._replace(note=""), tuple(sorted(options.items())), gradients, "state" in found)
            self.compare(found, right, call, recipe)

    def compare(self, found: dict, right: dict, call: Call, recipe: Recipe, reference: Callable | None = None) -> None:
        """Each tensor found against the right one, sequence by sequence and head by head; the worst of each is kept.

        reference: what gives `right` for a call, where that is not cases.expected with gradients.

        A gradient may cancel to next to nothing, and then no code in this dtype can be right to the bound. So where it
        is out of bounds, a multiple (SLACK) of what the exact gradient itself moves by is allowed, if that is more,
        when the inputs move by half a unit in their last place.
        """
        bounds = BOUNDS[recipe.dtype]
        errors = {n: cases.relative_l2(found[n], right[n], call, cases.kind_of(n)) for n in right if n in found}
        allowed = {n: torch.full_like(e, getattr(bounds, n, bounds.gradient)) for n, e in errors.items()}
        over = [n for n in errors if n.startswith("d") and (errors[n] > allowed[n]).any()]
        if over:
            reference = reference or functools.partial(cases.expected, wanted=True, with_state="state" in found)
            moved = cases.conditioning(call, right, over, UNIT_ROUNDOFF[recipe.dtype], reference)
            allowed |= {n: torch.maximum(allowed[n], SLACK[recipe.dtype] * moved[n]) for n in over}
        for name, error in errors.items():
            self._keep_worst(name, error, allowed[name], recipe)

    def _keep_worst(self, name: str, error: Tensor, allowed: Tensor, recipe: Recipe) -> None:
        if not error.numel():
            return
        n, head = divmod(int((error / allowed).argmax()), error.shape[1])
        where = f"{name}, sequence {n}, head {head}"
        self.record(float(error[n, head]), where, recipe, float(allowed[n, head]))

    def record(self, error: float, what: str, recipe: Recipe, bound: float) -> None:
        """Keep one number."""
        self.measurements.append(Measurement(error, bound, what, recipe._asdict()))

    def same(self, found: Tensor, right: Tensor, what: str, recipe: Recipe, bound: float | None = None) -> None:
        """Two tensors agree in relative L2 as a whole; to the bound for outputs if none is given."""
        bound = BOUNDS[recipe.dtype].o if bound is None else bound
        found, right = found.detach().cpu().double(), right.detach().cpu().double()
        error = float((found - right).norm() / right.norm().clamp_min(cases.FLOOR))
        self.record(error if error == error else float("inf"), what, recipe, bound)

    def claim(self, true: bool, what: str, recipe: Recipe) -> None:
        """Something that is so or not."""
        self.record(0.0 if true else float("inf"), what, recipe, 0.0)


@functools.lru_cache(maxsize=512)
def _remembered(recipe: Recipe, options: tuple, gradients: bool, with_state: bool) -> dict:
    """The reference of a recipe: implementations and properties share it."""
    call = cases.make(recipe)._replace(**dict(options))
    return cases.expected(call, gradients, with_state)


def _wants(x) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _state_shape(call: Call) -> tuple[int, ...]:
    N = call.v.shape[0] if call.cu_seqlens is None else len(call.cu_seqlens) - 1
    K, (HV, V) = call.q.shape[-1], call.v.shape[2:]
    return (N, HV, V, K) if call.state_v_first else (N, HV, K, V)


def _check_shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: found shape {list(x.shape)}, expected {list(shape)}")

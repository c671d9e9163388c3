"""Hugging Face transformers on our functions: Qwen3-Next, Qwen3.5, Qwen3.5-MoE and their kin.

    from gdn_ref.integrations import transformers as gdn_transformers

    print(gdn_transformers.use())       # from here on every such model runs on gdn_ref
    with gdn_transformers.use():        # or for as long as a block lasts
        model(tokens)

A layer of these models looks its rule up in its module's globals at every call, so a function put there serves models
made before and after.  transformers' own way, its decorator given another package's name, is not taken: it goes back to
PyTorch without a word when a name is not found, and the name of the token rule changed between releases.

Ours is the rule alone.  Projections, gates, the short convolution and the norm stay transformers'.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from ..arguments import check_backend
from ..ops import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

OLDEST, NEWEST = (5, 15), (5, 24)       # the releases of transformers that this was tried on
EXPECTED = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
CHUNK, TOKEN = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"  # the names in each model's module

# What a layer hands over by name.  A release whose functions do not have these is not one that we know.
CONTRACT = {"query", "key", "value", "g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel"}
OPTIONS = frozenset(inspect.signature(fused_recurrent_gated_delta_rule).parameters) - {"q", "k", "v", "g", "backend"}


class Served(NamedTuple):
    """Who serves one of the two functions in one family of models."""

    model: str  # such as "qwen3_next"
    rule: str  # CHUNK or TOKEN, the name it is called by there
    function: str  # the function that does the work, with the package it is from


class Report(tuple):
    """A tuple of Served that prints as a table."""

    def __repr__(self) -> str:
        lines = [f"transformers {importlib.metadata.version('transformers')}: the gated delta rule is served by"]
        for model, rows in itertools.groupby(self, key=lambda row: row.model):
            first, second = (row.function for row in rows)
            lines += [f"  {model:<14}{first}", f"  {'':<14}{second}"]
        return "\n".join(lines)


class Use:
    """What `use` returns: it prints as a table of who serves, and as a context manager it restores on leaving."""

    def __init__(self, slots: list[tuple[ModuleType, str]]):
        self._slots = slots

    @property
    def served(self) -> Report:
        """Who serves at this moment, where this use has put our functions."""
        return _report(self._slots)

    def restore(self) -> None:
        """Take our functions out again; a second time does nothing.  Where another `use` still holds, it serves."""
        for module, rule in self._slots:
            _held(module, rule).release(self)

    def __enter__(self) -> Use:
        return self

    def __exit__(self, *_) -> None:
        self.restore()

    def __repr__(self) -> str:
        return repr(self.served)


class _Slot:
    """One global of one module: what stood there at first, and the uses that hold it, the last of which serves."""

    def __init__(self, module: ModuleType, rule: str):
        self.module, self.rule, self.holders = module, rule, []

    def take(self, holder: Use, backend: str) -> None:
        if not self.holders:
            self.original = getattr(self.module, self.rule)
        function = _MAKERS[self.rule](backend, self.original)
        self.holders.append((holder, function))
        setattr(self.module, self.rule, function)

    def release(self, holder: Use) -> None:
        placed = [function for _, function in self.holders]
        self.holders = [held for held in self.holders if held[0] is not holder]
        if getattr(self.module, self.rule) not in placed:
            return  # somebody else has put a function there since: it is theirs to take out
        setattr(self.module, self.rule, self.holders[-1][1] if self.holders else self.original)


@functools.cache
def _held(module: ModuleType, rule: str) -> _Slot:
    return _Slot(module, rule)


# ---- the public functions --------------------------------------------------------------------------------------------


def use(backend: str = "auto", *, untried: bool = False) -> Use:
    """Put our functions in place in transformers, for models made before and after, in this whole process.

    backend: handed to every call, "auto", "triton", "torch" or "recurrent".  untried: accept a release of transformers
    newer than those this was tried on, should its functions still look the same.

    Returns a Use.  Print it to see which functions now serve; as a context manager it puts back what stood there, and
    so does its restore().  Uses may be nested and repeated: the last one serves, and what was there before all of
    them comes back with the last to go.

    Packed sequences (cu_seq_lens_q) are kept apart by our rule; the convolution before it is transformers', and needs
    its own package and seq_idx for that, of which a warning reminds when seq_idx is missing.  Under torch.export
    transformers takes its own PyTorch, whatever else is installed, and so it does here.

    Raises ImportError, naming the release found and those expected, when transformers is missing or not of them, and
    ValueError on another backend.
    """
    check_backend(backend)
    slots = [(module, rule) for module in _modules(untried) for rule in (CHUNK, TOKEN)]
    used = Use(slots)
    for module, rule in slots:
        _held(module, rule).take(used, backend)
    return used


def report() -> Report:
    """Who serves the rule in transformers now, ours or not: a tuple of Served that prints as a table.

    Raises ImportError as `use` does.
    """
    return _report([(module, rule) for module in _modules(untried=True) for rule in (CHUNK, TOKEN)])


# ---- our functions under transformers' names -------------------------------------------------------------------------


def _chunk_rule(backend: str, original: Callable) -> Callable:
    def gdn_ref_chunk_gated_delta_rule(query, key, value, g, beta, chunk_size=64, **options):
        if _exporting():
            return original(query, key, value, g, beta, chunk_size, **options)
        options = _known(options)
        return chunk_gated_delta_rule(query, key, value, g, beta, chunk_size=chunk_size, backend=backend, **options)

    gdn_ref_chunk_gated_delta_rule.serves = f"gdn_ref.chunk_gated_delta_rule, backend {backend}"
    return gdn_ref_chunk_gated_delta_rule


def _token_rule(backend: str, original: Callable) -> Callable:
    def gdn_ref_recurrent_gated_delta_rule(query, key, value, g, beta, **options):
        if _exporting():
            return original(query, key, value, g, beta, **options)
        return fused_recurrent_gated_delta_rule(query, key, value, g, beta=beta, backend=backend, **_known(options))

    gdn_ref_recurrent_gated_delta_rule.serves = f"gdn_ref.fused_recurrent_gated_delta_rule, backend {backend}"
    return gdn_ref_recurrent_gated_delta_rule


_MAKERS = {CHUNK: _chunk_rule, TOKEN: _token_rule}


def _exporting() -> bool:
    """Inside torch.export, where transformers takes its own PyTorch, whatever else is installed."""
    # Of is_exporting() the compiler of torch 2.11 believes that it is True wherever it compiles, so that ours would
    # never serve a compiled model. This is what it returns; torch 2.6 has neither.
    return getattr(torch.compiler, "_is_exporting_flag", False)


def _known(options: dict) -> dict:
    """Of all that a model's call hands down, what concerns the rule; the rest is meant for its other parts."""
    if options.get("cu_seqlens") is not None and options.get("seq_idx") is None:
        warnings.warn(
            "cu_seqlens without seq_idx: gdn_ref keeps the packed sequences apart, and transformers' convolution, "
            "which is not gdn_ref's, mixes the first tokens of each with the last ones before it",
            stacklevel=4,
        )
    return {name: value for name, value in options.items() if name in OPTIONS}


# ---- finding the models, and who serves there ------------------------------------------------------------------------


def _modules(untried: bool) -> list[ModuleType]:
    """The modules of all model families that have the rule's two functions, imported; ImportError when that fails."""
    _check_version(untried)
    models = _families()
    if missing := [model for model in EXPECTED if model not in models]:
        raise ImportError(f"transformers: found no gated delta rule in {', '.join(missing)}, expected one")
    modules = [importlib.import_module(f"transformers.models.{model}.modeling_{model}") for model in models]
    for module, rule in itertools.product(modules, (CHUNK, TOKEN)):
        if not callable(function := getattr(module, rule, None)):
            raise ImportError(f"{module.__name__}: found no function {rule}, expected one")
        if hasattr(function, "serves"):
            continue
        if missing := CONTRACT - set(inspect.signature(function).parameters):
            raise ImportError(f"{module.__name__}.{rule}: found no argument {', '.join(sorted(missing))}, expected it")
    return modules


def _check_version(untried: bool) -> None:
    expected = f"{_dotted(OLDEST)} to {_dotted(NEWEST)}"
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"transformers: found none, expected {expected}: pip install transformers") from None
    numbers = tuple(int(number) for number in re.match(r"(\d+)\.(\d+)", found).groups())
    if numbers < OLDEST or (numbers > NEWEST and not untried):
        hint = "" if numbers < OLDEST else "; use(untried=True) takes a newer one all the same"
        raise ImportError(f"transformers: found {found}, expected {expected}{hint}")


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


@functools.cache
def _families() -> list[str]:
    """The models whose source has the rule, found by reading: importing every model would take minutes."""
    folder = Path(importlib.util.find_spec("transformers").origin).parent / "models"
    mark = f"def {CHUNK}(".encode()
    return sorted(file.parent.name for file in folder.glob("*/modeling_*.py") if mark in file.read_bytes())


def _report(slots: list[tuple[ModuleType, str]]) -> Report:
    return Report(
        Served(module.__name__.split(".")[-2], rule, _working(getattr(module, rule))) for module, rule in slots
    )


def _working(function: Callable) -> str:
    """The name of the function that does the work, behind transformers' wrapper too."""
    if hasattr(function, "serves"):
        return function.serves
    around = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    function = inspect.unwrap(around.get("implementation", function))
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__name__', type(function).__name__)}"

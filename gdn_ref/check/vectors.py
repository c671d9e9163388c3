"""python -m gdn_ref vectors: small inputs with float64 outputs, states and gradients, for ports in other languages.

A case is one safetensors file (eight bytes of length, a JSON header, raw numbers); manifest.json lists the cases. All
inputs are bfloat16 numbers kept as float32, so that one reference serves a port in any precision.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import plain
from .records import BOUNDS

VERSION = 1  # of the set: it changes when a byte does
INPUTS = ("q", "k", "v", "g", "beta", "initial_state")
DTYPES = {"<f4": "F32", "<f8": "F64", "<i8": "I64"}

CONVENTIONS = {
    "definition": "S_t = exp(g_t) (I - beta_t k_t^T k_t) S_(t-1) + beta_t k_t^T v_t;  o_t = scale * q_t S_t",
    "order": "decay first, then the error against the decayed state",
    "q, k": "[B,T,H,K]",
    "v, o": "[B,T,HV,V]; value head h reads with key head h // (HV // H)",
    "g": "[B,T,HV], natural log of the decay, g <= 0, -inf is a reset",
    "beta": "[B,T,HV], write strength",
    "initial_state, state": "[N,HV,K,V]; N = B, or the number of packed sequences",
    "cu_seqlens": "[N+1], boundaries of sequences packed into one row (B = 1), where it is given",
    "scale": "K^-1/2",
    "do, dstate": "gradients of o and of state; dq, dk, dv, dg, dbeta, dinitial_state follow from both",
    "raw gates": "where A_log is given: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b)",
    "l2norm": "where it is true q and k are first x / sqrt(sum of x^2 + 1e-6); no gradients are given then",
    "inputs": "bfloat16 numbers kept as float32; everything expected is float64",
}

README = """\
# Test vectors for Gated DeltaNet, version {version}, seed {seed}

{count} cases. `manifest.json` says for each: file, sizes, the property it is for, and why; also the conventions and,
by dtype, the bound on the relative L2 error **of each sequence and head by itself** (one norm over a whole tensor hides
a fault in one head). All inputs are bfloat16 numbers, so that the same references serve float32 and 16-bit code.

A file is in the safetensors format: 8 bytes, little endian, the length n of the header; n bytes of JSON,
`{{name: {{"dtype": "F32" | "F64" | "I64", "shape": [...], "data_offsets": [from, to]}}}}`; then the numbers, little
endian, row by row, offsets counted from the end of the header. In NumPy:

```python
def read(path):
    data = open(path, "rb").read()
    n = int.from_bytes(data[:8], "little")
    kinds = {{"F32": "<f4", "F64": "<f8", "I64": "<i8"}}
    return {{name: np.frombuffer(data[8 + n + x["data_offsets"][0] : 8 + n + x["data_offsets"][1]], kinds[x["dtype"]])
            .reshape(x["shape"]) for name, x in json.loads(data[8 : 8 + n]).items()}}
```

and the definition, for one head of one sequence, all in float64:

```python
def recurrence(q, k, v, g, beta, S, scale):
    o = []
    for t in range(len(k)):
        S = np.exp(g[t]) * S
        S = S + beta[t] * np.outer(k[t], v[t] - k[t] @ S)
        o.append(scale * q[t] @ S)
    return np.array(o), S
```

Inputs: q, k, v, g, beta (or a, b, A_log, dt_bias), initial_state, cu_seqlens where sequences are packed, do, dstate.
Expected: o, state, dq, dk, dv, dg, dbeta, dinitial_state. Where a reference is zero the result should be.

The set is made by `python -m gdn_ref vectors DIR --seed {seed}`, byte for byte the same on any machine. Its version is
raised when a byte changes; `manifest.json` has the SHA-256 of every file.
"""


class Case(NamedTuple):
    """How one case is made."""

    name: str
    property: str
    reason: str
    T: int = 70
    H: int = 2
    HV: int = 4
    K: int = 16
    V: int = 24
    B: int = 1
    keys: str = "random"
    decays: str = "ordinary"
    beta: str = "unit"
    lengths: tuple[int, ...] | None = None
    raw: bool = False  # raw gates and queries and keys of any length


CASES = (
    Case("tiny", "agreement", "small enough to follow by hand", T=4, H=1, HV=1, K=4, V=3),
    Case("ordinary", "agreement", "decays of a fresh layer; the last chunk is not full"),
    Case("one_token", "lengths", "a chunk of one", T=1),
    Case("correlated_keys", "correlated keys", "a poor inverse of I + L shows, and a swapped WY recursion", T=130,
         keys="correlated", decays="slow"),
    Case("repeated_key", "repeated key", "beta = 1 and one key: o_t = scale |k|^2 v_t, closely", T=64, keys="repeated",
         decays="none", beta="one"),
    Case("no_decay", "no decay", "g = 0 must not be taken for a masked entry", decays="none"),
    Case("strong_decay", "strong decay", "1 / gamma overflows in float32", decays="strong"),
    Case("huge_then_small", "strong decay", "small decays beside one of -1000 keep their digits", decays="huge"),
    Case("reset", "exact reset", "g = -inf, forward and backward, without NaN", decays="reset"),
    Case("wide_beta", "negative eigenvalues", "beta up to 1.9", beta="wide"),
    Case("batch", "grouped heads", "a batch of two, three value heads a key head", B=2, HV=6, T=33),
    Case("packed", "packing", "sequences of 70, 1 and 33 tokens, each from its own state", lengths=(70, 1, 33),
         decays="slow"),
    Case("raw_gates", "raw gates", "a, b, A_log, dt_bias; q and k are normalised inside", T=33, raw=True),
    Case("width_128", "width 128", "the width of models, one and a bit chunks", T=66, H=1, HV=1, K=128, V=128),
)  # fmt: skip


# ---- inputs ----------------------------------------------------------------------------------------------------------


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded to the nearest bfloat16 number, ties to even, and kept as float32."""
    bits = np.asarray(x, dtype="<f4").view("<u4").astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    infinite = np.isinf(x)
    return np.where(infinite, np.asarray(x, dtype="<f4"), rounded.astype("<u4").view("<f4")).astype("<f4")


class Numbers:
    """Random numbers that are the same everywhere: Python's generator, and sums of twelve for a bell shape."""

    def __init__(self, seed: int, name: str):
        self.random = random.Random(f"{seed} {name}").random

    def uniform(self, *shape: int) -> np.ndarray:
        """Numbers in [0, 1), float64."""
        count = int(np.prod(shape))
        return np.array([self.random() for _ in range(count)]).reshape(shape)

    def normal(self, *shape: int) -> np.ndarray:
        """About normal: the sum of twelve uniform numbers less six."""
        return plain.total(self.uniform(*shape) for _ in range(12)) - 6.0


def unit(x: np.ndarray) -> np.ndarray:
    """Vectors of the last axis at length 1."""
    return x / np.sqrt(plain.total(x[..., i] * x[..., i] for i in range(x.shape[-1])))[..., None]


def inputs(case: Case, seed: int) -> dict[str, np.ndarray]:
    """Everything a port is given, float32 of bfloat16 numbers."""
    numbers = Numbers(seed, case.name)
    T = case.T if case.lengths is None else sum(case.lengths)
    N = case.B if case.lengths is None else len(case.lengths)
    B, H, HV, K, V = case.B, case.H, case.HV, case.K, case.V
    shared = 1.0 if case.keys == "correlated" else 0.0
    x = {"q": numbers.normal(B, T, H, K) + shared, "k": numbers.normal(B, T, H, K) + shared}
    if case.keys == "repeated":
        x["k"] = np.repeat(x["k"][:, :1], T, 1)
    if not case.raw:
        x = {name: unit(vectors) for name, vectors in x.items()}
    x["v"] = numbers.normal(B, T, HV, V)
    if case.raw:
        x |= {n: 2 * numbers.normal(B, T, HV) for n in ("a", "b")}
        x |= {n: numbers.normal(HV) for n in ("A_log", "dt_bias")}
    else:
        x |= {"g": decays(case, numbers, (B, T, HV)), "beta": strengths(case, numbers, (B, T, HV))}
    x["initial_state"] = numbers.normal(N, HV, K, V)
    if not case.raw:
        x |= {"do": numbers.normal(B, T, HV, V), "dstate": numbers.normal(N, HV, K, V)}
    x = {name: bfloat16(values) for name, values in x.items()}
    if case.lengths is not None:
        x["cu_seqlens"] = np.array([0, *itertools.accumulate(case.lengths)], dtype="<i8")
    return x


def decays(case: Case, numbers: Numbers, shape: tuple[int, ...]) -> np.ndarray:
    """Log decays, never above 0."""
    jitter, fifth = 0.5 + numbers.uniform(*shape), numbers.uniform(*shape) < 0.2
    return {
        "none": np.zeros(shape),
        "slow": -1e-3 * jitter,
        "ordinary": -2.0 * jitter * jitter * numbers.uniform(*shape),
        "strong": -5.0 * jitter,
        "huge": np.where(fifth, -1000.0 * jitter, -0.01 * jitter),
        "reset": np.where(fifth, -np.inf, -1e-3 * jitter),
    }[case.decays]


def strengths(case: Case, numbers: Numbers, shape: tuple[int, ...]) -> np.ndarray:
    """Write strengths."""
    some = numbers.uniform(*shape)
    return {"unit": some, "wide": 1.9 * some, "one": np.ones(shape)}[case.beta]


# ---- what is expected ------------------------------------------------------------------------------------------------


def expected(case: Case, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """o, state and, where gates are not raw, the gradients; float64."""
    x = {n: values.astype("<f8") for n, values in given.items()}
    if case.raw:
        x |= gates(x) | {n: plain.l2norm(x[n]) for n in ("q", "k")}
    right = {"o": np.zeros_like(x["v"]), "state": np.zeros_like(x["initial_state"])}
    if not case.raw:
        right |= {"d" + n: np.zeros_like(x[n]) for n in INPUTS}
    for n, h, where in runs(case, given):
        one_head(case, x, right, n, h, where)
    return right


def gates(x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """g and beta of raw gates."""
    g, beta = np.empty_like(x["a"]), np.empty_like(x["b"])
    for index in np.ndindex(g.shape):
        h = index[-1]
        g[index] = plain.log_decay(x["a"][index], x["A_log"][h], x["dt_bias"][h])
        beta[index] = plain.sigmoid(x["b"][index])
    return {"g": g, "beta": beta}


def runs(case: Case, given: dict[str, np.ndarray]):
    """(sequence, value head, its place in [B,T]) of everything there is to run."""
    for h in range(case.HV):
        if case.lengths is None:
            yield from ((b, h, (b, slice(None))) for b in range(case.B))
        else:
            bounds = given["cu_seqlens"].tolist()
            yield from ((n, h, (0, slice(a, b))) for n, (a, b) in enumerate(itertools.pairwise(bounds)))


def one_head(case: Case, x: dict, right: dict, n: int, h: int, where: tuple) -> None:
    """One sequence and head, forward and backward; a key head's gradients add up over its value heads."""
    key = h // (case.HV // case.H)
    q, k = x["q"][where][:, key], x["k"][where][:, key]
    v, g, beta = (x[name][where][:, h] for name in ("v", "g", "beta"))
    scale = 1 / np.sqrt(case.K)
    run = plain.forward(q, k, v, g, beta, x["initial_state"][n, h], scale)
    right["o"][where][:, h], right["state"][n, h] = run.o, run.state
    if case.raw:
        return
    d = plain.backward(q, k, beta, g, scale, run, x["do"][where][:, h], x["dstate"][n, h])
    right["dq"][where][:, key] += d.q
    right["dk"][where][:, key] += d.k
    right["dv"][where][:, h], right["dg"][where][:, h], right["dbeta"][where][:, h] = d.v, d.g, d.beta
    right["dinitial_state"][n, h] = d.initial_state


# ---- files -----------------------------------------------------------------------------------------------------------


def safetensors(tensors: dict[str, np.ndarray]) -> bytes:
    """The bytes of a safetensors file; the header is padded so that numbers start at a multiple of 8."""
    header, offset = {}, 0
    for name, x in tensors.items():
        ends = [offset, offset := offset + x.nbytes]
        header[name] = {"dtype": DTYPES[x.dtype.str], "shape": list(x.shape), "data_offsets": ends}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(np.ascontiguousarray(x).tobytes() for x in tensors.values())


def write(folder: Path, seed: int = 0, done: Callable = lambda case: None) -> dict:
    """Write all cases, manifest.json and README.md into `folder`; the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {"format": "gdn_ref test vectors", "version": VERSION, "seed": seed, "conventions": CONVENTIONS,
                "bounds": {dtype: bound._asdict() for dtype, bound in BOUNDS.items()}, "cases": []}  # fmt: skip
    for case in CASES:
        given = inputs(case, seed)
        right = expected(case, given)
        data = safetensors({**dict(sorted(given.items(), key=lambda item: item[0] == "cu_seqlens")), **right})
        (folder / f"{case.name}.safetensors").write_bytes(data)
        manifest["cases"].append(entry(case, given, right, data))
        done(case)
    (folder / "manifest.json").write_bytes((json.dumps(manifest, indent=1) + "\n").encode())
    (folder / "README.md").write_bytes(README.format(version=VERSION, seed=seed, count=len(CASES)).encode())
    return manifest


def entry(case: Case, given: dict, right: dict, data: bytes) -> dict:
    """What the manifest says of one case."""
    sizes = {n: getattr(case, n) for n in ("B", "H", "HV", "K", "V")}
    sizes["T"] = given["v"].shape[1]
    return {
        "name": case.name,
        "file": f"{case.name}.safetensors",
        "property": case.property,
        "reason": case.reason,
        "sizes": sizes,
        "lengths": case.lengths,
        "l2norm": case.raw,
        "inputs": {name: list(x.shape) for name, x in given.items()},
        "expected": {name: list(x.shape) for name, x in right.items()},
        "sha256": hashlib.sha256(data).hexdigest(),
    }


# ---- the command -----------------------------------------------------------------------------------------------------

EXAMPLES = """\
examples:
  python -m gdn_ref vectors build/vectors            fourteen files, a manifest and a README, 4 MB
  python -m gdn_ref vectors other --seed 7           other numbers, the same cases
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m gdn_ref vectors`."""
    parser.epilog = EXAMPLES
    parser.add_argument("folder", type=Path, metavar="DIR", help="where to write; made if it is not there")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random numbers (default 0)")


def main(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """python -m gdn_ref vectors.  0 written, 2 could not be."""
    def say(case):
        if sys.stderr.isatty():
            print(f"\r{case.name:<30}", end="", file=sys.stderr, flush=True)

    try:
        manifest = write(args.folder, args.seed, say)
    except OSError as error:
        parser.error(f"DIR: found {args.folder}, which cannot be written to: {error.strerror}")
    if sys.stderr.isatty():
        print("\r" + " " * 30 + "\r", end="", file=sys.stderr, flush=True)
    size = sum(path.stat().st_size for path in args.folder.glob("*.safetensors"))
    print(f"wrote {len(manifest['cases'])} cases, {size / 1e6:.1f} MB, to {args.folder}; see its README.md")
    return 0

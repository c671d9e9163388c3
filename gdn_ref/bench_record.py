"""What a run of `python -m gdn_ref bench` records: cases, the least a call can cost, and the table that shows it.

Plain Python over the JSON document: a recorded run is read, and drawn, without a GPU.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

WIDTH, CHUNK = 128, 64  # K = V; the chunk that the FLOPs are counted for
OPS = ("fwd", "decode", "cpu_call", "cold_fwd", "cold_decode")


class Shape(NamedTuple):
    """Sequences and heads of one case, written "1x8192 16/64", or "4096+28672 16/64" for packed sequences."""

    text: str
    lengths: tuple[int, ...]
    packed: bool
    H: int
    HV: int

    @property
    def rows(self) -> tuple[int, int]:
        """B and T of the tensors."""
        return (1, sum(self.lengths)) if self.packed else (len(self.lengths), self.lengths[0])


def parse_shape(text: str) -> Shape:
    """Read "BxT H/HV" or "T+T+... H/HV".  Raises ValueError, saying what was found and what is expected."""
    try:
        tokens, heads = text.split()
        packed = "x" not in tokens
        H, HV = (int(h) for h in heads.split("/"))
        if packed:
            lengths = tuple(int(t) for t in tokens.split("+"))
        else:
            B, T = (int(n) for n in tokens.split("x"))
            lengths = (T,) * B
    except ValueError:
        raise ValueError(f"shape: found {text!r}, expected 'BxT H/HV' or 'T+T H/HV', such as '1x8192 16/64'") from None
    if not lengths or min(*lengths, H, HV) < 1 or HV % H:
        raise ValueError(f"shape: found {text!r}, expected positive sizes and HV a multiple of H")
    return Shape(text, lengths, packed, H, HV)


# ---- what a call costs at least --------------------------------------------------------------------------------------


def forward_cost(shape: Shape) -> tuple[int, int]:
    """(bytes, FLOPs) of one forward call: every input read once, every output written once; products by chunks.

    A token of a value head takes S k, S q and the state update, 6 K V; its row of A times the values and of the masked
    scores times the deltas, 4 C V; and its share of the triangular inverse, C^2 / 3.  A token of a key head takes its
    row of K K^T and Q K^T, 4 C K.
    """
    K = V = WIDTH
    tokens, states = sum(shape.lengths), len(shape.lengths) * shape.HV * K * V
    moved = tokens * (2 * (2 * shape.H * K + 2 * shape.HV * V) + 4 * 2 * shape.HV) + 4 * states
    flops = tokens * (shape.HV * (6 * K * V + 4 * CHUNK * V + CHUNK**2 // 3) + shape.H * 4 * CHUNK * K)
    return moved, flops


def decode_cost(shape: Shape) -> tuple[int, int]:
    """(bytes, FLOPs) of one decode step: the float32 state read and written; 6 K V FLOPs a head, beside a few."""
    states = len(shape.lengths) * shape.HV
    return 2 * 4 * states * WIDTH**2, 6 * states * WIDTH**2


def limit_ms(cost: tuple[int, int], limits: dict) -> float:
    """Milliseconds that (bytes, FLOPs) take at the measured rates, whichever is the longer."""
    moved, flops = cost
    return max(moved / limits["copy_TBps"], flops / limits["matmul_TFLOPs"]) * 1e-9


# ---- what it says ----------------------------------------------------------------------------------------------------


def check_document(document: dict) -> None:
    """Raise ValueError, naming the place, unless the document is one that `bench` writes."""
    for field, kind in dict(device=str, torch=str, date=str, versions=dict, limits=dict, rows=list).items():
        if not isinstance(document.get(field), kind):
            raise ValueError(f"{field}: found {document.get(field)!r:.60}, expected a {kind.__name__}")
    for field in ("copy_TBps", "matmul_TFLOPs"):
        if not document["limits"].get(field, 0) > 0:
            raise ValueError(f"limits.{field}: found {document['limits'].get(field)!r}, expected a positive number")
    for n, row in enumerate(document["rows"]):
        if row.get("op") not in (*OPS, "fwdbwd"):
            raise ValueError(f"rows[{n}].op: found {row.get('op')!r}, expected one of {', '.join(OPS)} or fwdbwd")
        if row.get("impl") not in document["versions"]:
            raise ValueError(f"rows[{n}].impl: found {row.get('impl')!r}, expected one of {list(document['versions'])}")
        if not isinstance(row.get("ms"), int | float) or not row["ms"] > 0:
            raise ValueError(f"rows[{n}].ms: found {row.get('ms')!r}, expected a positive number")
        parse_shape(row.get("shape", ""))


def by_case(document: dict) -> dict[str, dict[str, dict[str, dict]]]:
    """{op: {shape: {impl: row}}}, in the order of the rows."""
    cases: dict = {}
    for row in document["rows"]:
        cases.setdefault(row["op"], {}).setdefault(row["shape"], {})[row["impl"]] = row
    return cases


def ratios(shapes: dict[str, dict[str, dict]], impl: str) -> dict[str, float]:
    """{shape: how many times as long as ours `impl` takes}, where both were timed."""
    both = {shape: row for shape, row in shapes.items() if impl in row and "gdn_ref" in row}
    return {shape: row[impl]["ms"] / row["gdn_ref"]["ms"] for shape, row in both.items()}


def table(document: dict) -> str:
    """Milliseconds, ratios and limits of a document, as text."""
    names, limits = list(document["versions"]), document["limits"]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = [f"{document['device']}, torch {document['torch']}, triton {document.get('triton')}, {document['date']}",
             versions, f"copy {limits['copy_TBps']:.2f} TB/s, bf16 matmul {limits['matmul_TFLOPs']:.0f} TFLOP/s"]
    for op, shapes in by_case(document).items():
        lines += ["", f"{op:<20}{'limit':>9}  " + "".join(f"{name:>20}" for name in names)]
        for shape, rows in shapes.items():
            limit = next(iter(rows.values())).get("limit_ms")
            first = f"{limit:>9.4f}" if limit else f"{'':>9}"
            lines.append(f"{shape:<20}{first}  " + "".join(f"{_cell(rows, name):>20}" for name in names))
        lines += _verdicts(shapes, names)
    missing: dict = {}
    for failure in document.get("failures", []):
        missing.setdefault((failure["impl"], failure["error"]), []).append(f"{failure['op']} {failure['shape']}")
    lines += [f"missing: {impl}, {'; '.join(where)}: {why}" for (impl, why), where in missing.items()]
    return "\n".join(lines)


def _cell(rows: dict[str, dict], name: str) -> str:
    """"0.0930 (44 %)" for ours: time and share of the limit; "0.9290 (9.99x)" for a peer: time and ratio."""
    if name not in rows:
        return "-"
    ms, ours = rows[name]["ms"], rows.get("gdn_ref", {}).get("ms")
    if name != "gdn_ref":
        return f"{ms:.4f}" + (f" ({ms / ours:.2f}x)" if ours else "")
    return f"{ms:.4f}" + (f" ({100 * rows[name]['limit_ms'] / ms:.0f} %)" if rows[name].get("limit_ms") else "")


def _verdicts(shapes: dict[str, dict[str, dict]], names: list[str]) -> list[str]:
    """For each peer the geometric mean of its ratios, and the rows on which it is ahead."""
    lines = []
    for name in names:
        found = ratios(shapes, name) if name != "gdn_ref" else {}
        if found:
            ahead = [shape for shape, ratio in found.items() if ratio < 1]
            mean = math.exp(statistics.fmean(map(math.log, found.values())))
            line = f"  {name}: {mean:.2f}x in geometric mean, {min(found.values()):.2f}x at least"
            lines.append(line + (f"; ahead on {', '.join(ahead)}" if ahead else ""))
    return lines



"""What a run of `python -m gdn_ref bench` records: cases, the least a call can cost, and the tables that show it.

Plain Python over the JSON document: a recorded run is read, and drawn, without a GPU.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

WIDTH, CHUNK = 128, 64  # K = V; the chunk that the FLOPs are counted for
OPS = ("fwd", "decode", "fwdbwd", "cpu_call", "cold_fwd", "cold_decode", "cold_fwdbwd")
OURS = ("gdn_ref", "gdn_ref_recompute")  # the second makes states again: less held from forward to backward


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


def training_cost(shape: Shape) -> tuple[int, int]:
    """(bytes, FLOPs) of a forward and a backward call; nothing is made twice, and no state of it goes to memory.

    The forward pass as above, without the final state. The backward pass reads its inputs and do, and writes as many
    gradients as there are inputs. A token of a value head takes six products with states, 12 K V: K dS, and what do,
    dv and E read of S and dS (do S^T, dv S^T, E dS^T), and two updates of dS. It takes four products of C by V, with P,
    with A, and do E^T and dv E^T; and four of C by K, two each for dq with dk and for what keys get from later tokens.
    """
    K = V = WIDTH
    tokens, states = sum(shape.lengths), len(shape.lengths) * shape.HV * K * V
    moved, flops = forward_cost(shape)
    moved -= 4 * states
    values, keys, gates = 2 * tokens * shape.HV * V, 2 * tokens * shape.H * K, 4 * tokens * shape.HV
    moved += 3 * values + 4 * keys + 4 * gates
    return moved, flops + tokens * shape.HV * (12 * K * V + 8 * CHUNK * V + 8 * CHUNK * K)


def cost_of(op: str, shape: Shape) -> tuple[int, int]:
    """(bytes, FLOPs) of one call of "fwd", "decode" or "fwdbwd"."""
    return {"fwd": forward_cost, "decode": decode_cost, "fwdbwd": training_cost}[op](shape)


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
    if not isinstance(document, dict):
        raise ValueError(f"found a {type(document).__name__}, expected the JSON document that --out writes")
    for field, kind in dict(device=str, torch=str, date=str, versions=dict, limits=dict, rows=list).items():
        if not isinstance(document.get(field), kind):
            raise ValueError(f"{field}: found {document.get(field)!r:.60}, expected a {kind.__name__}")
    for field in ("copy_TBps", "matmul_TFLOPs"):
        if not document["limits"].get(field, 0) > 0:
            raise ValueError(f"limits.{field}: found {document['limits'].get(field)!r}, expected a positive number")
    for n, row in enumerate(document["rows"]):
        if row.get("op") not in OPS:
            raise ValueError(f"rows[{n}].op: found {row.get('op')!r}, expected one of {', '.join(OPS)}")
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
        timed = [name for name in names if any(name in rows for rows in shapes.values())]
        lines += ["", f"{op:<20}{'limit':>9}  " + "".join(f"{name:>20}" for name in timed)]
        for shape, rows in shapes.items():
            limit = next(iter(rows.values())).get("limit_ms")
            first = f"{limit:>9.4f}" if limit else f"{'':>9}"
            lines.append(f"{shape:<20}{first}  " + "".join(f"{_cell(rows, name):>20}" for name in timed))
        lines += _verdicts(shapes, timed) + _memory(shapes, timed)
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
    if name not in OURS:
        return f"{ms:.4f}" + (f" ({ms / ours:.2f}x)" if ours else "")
    return f"{ms:.4f}" + (f" ({100 * rows[name]['limit_ms'] / ms:.0f} %)" if rows[name].get("limit_ms") else "")


def _verdicts(shapes: dict[str, dict[str, dict]], names: list[str]) -> list[str]:
    """For each peer the geometric mean of its ratios, and the rows on which it is ahead."""
    lines = []
    for name in names:
        found = ratios(shapes, name) if name not in OURS else {}
        if found:
            ahead = [shape for shape, ratio in found.items() if ratio < 1]
            line = f"  {name}: {geometric_mean(found):.2f}x in geometric mean, {min(found.values()):.2f}x at least"
            lines.append(line + (f"; ahead on {', '.join(ahead)}" if ahead else ""))
    return lines


def _memory(shapes: dict[str, dict[str, dict]], names: list[str]) -> list[str]:
    """The same table for the peak of memory, where it was taken."""
    if not any("peak_MB" in row for rows in shapes.values() for row in rows.values()):
        return []
    lines = [f"{'peak MB':<20}{'':>9}  " + "".join(f"{name:>20}" for name in names)]
    for shape, rows in shapes.items():
        cells = (f"{rows[name]['peak_MB']:.0f}" if "peak_MB" in rows.get(name, {}) else "-" for name in names)
        lines.append(f"{shape:<20}{'':>9}  " + "".join(f"{cell:>20}" for cell in cells))
    return lines


def geometric_mean(found: dict[str, float]) -> float:
    """Of the ratios of several shapes."""
    return math.exp(statistics.fmean(map(math.log, found.values())))


# ---- the README's tables ---------------------------------------------------------------------------------------------

LABELS = dict(gdn_ref="gdn_ref", gdn_ref_recompute="states made again", fla="FLA", flash_qla="FlashQLA",
              flashinfer="FlashInfer", transformers="transformers")  # fmt: skip
FIRST_COLUMN = dict(fwd="forward, tokens and H/HV", decode="decode, batch (HV = {HV})",
                    fwdbwd="forward + backward, ms / peak MB")  # fmt: skip
LAST_COLUMN = dict(fwd="of the roofline", decode="of the copy bandwidth", fwdbwd="of the roofline")


def markdown(document: dict) -> str:
    """The README's tables, one each for "fwd", "decode" and "fwdbwd" as far as they were timed, and what is said below
    them: who is ahead where, first calls, and the processor's time."""
    cases = by_case(document)
    parts = [_markdown_table(op, cases[op], document) for op in FIRST_COLUMN if op in cases]
    return "\n\n".join([*parts, "\n".join(sentences(document))])


def _markdown_table(op: str, shapes: dict[str, dict[str, dict]], document: dict) -> str:
    """Ours and the peers that have kernels; milliseconds, and in brackets how many times as long as ours."""
    peers = [name for name in document["versions"] if any(name in rows for rows in shapes.values())]
    peers = [name for name in peers if name != "gdn_ref" and (name != "transformers" or op == "fwdbwd")]
    heads = [LABELS[name] + (f" {document['versions'][name]}" if name not in OURS else "") for name in peers]
    first = FIRST_COLUMN[op].format(HV=parse_shape(next(iter(shapes))).HV)
    lines = [f"| {' | '.join([first, 'gdn_ref', *heads, LAST_COLUMN[op]])} |", "|" + "---|" * (len(peers) + 3)]
    for shape, rows in shapes.items():
        if "gdn_ref" in rows:
            ours = rows["gdn_ref"]
            name = f"{len(parse_shape(shape).lengths)}" if op == "decode" else shape
            cells = [_markdown_cell(rows, peer) for peer in ("gdn_ref", *peers)]
            share = f"{100 * ours['limit_ms'] / ours['ms']:.0f} %"
            lines.append(f"| {' | '.join([name, *cells, share])} |")
    return "\n".join(lines)


def _markdown_cell(rows: dict[str, dict], name: str) -> str:
    if name not in rows:
        return "–"
    ms, memory = rows[name]["ms"], rows[name].get("peak_MB")
    ratio = "" if name == "gdn_ref" else f" ({ms / rows['gdn_ref']['ms']:.2f}×)"
    return f"{ms:.3f}{ratio}" + ("" if memory is None else f" / {memory:.0f}")


def sentences(document: dict) -> list[str]:
    """Lines for the text below the tables: means, rows on which a peer is ahead, first calls, time of the processor."""
    cases, lines = by_case(document), []
    for op in FIRST_COLUMN:
        for name in document["versions"]:
            found = ratios(cases.get(op, {}), name) if name not in OURS else {}
            if found:
                ahead = ", ".join(shape for shape, ratio in found.items() if ratio < 1) or "no row"
                mean, least = geometric_mean(found), min(found.values())
                said = f"{mean:.2f}× in geometric mean, {least:.2f}× at least; ahead on {ahead}"
                lines.append(f"{op}, {LABELS[name]}: {said}")
    for op in ("cold_fwd", "cold_decode", "cold_fwdbwd"):
        for row in (rows["gdn_ref"] for rows in cases.get(op, {}).values() if "gdn_ref" in rows):
            lines.append(f"{op}: {row['ms'] / 1e3:.1f} s")
    for shape, rows in cases.get("cpu_call", {}).items():
        if "gdn_ref" in rows:
            lines.append(f"cpu_call {shape}: {rows['gdn_ref']['ms'] * 1e3:.0f} µs")
    return lines

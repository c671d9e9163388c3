"""The figure of a recorded benchmark: times beside their limit, bandwidth of the decode step, memory of training.

It needs matplotlib, so it is imported late.
"""

from __future__ import annotations

import math

import matplotlib
import matplotlib.ticker
from matplotlib.figure import Figure

from .bench_record import LABELS, OURS, by_case, parse_shape
from .notebook import PALETTE, STYLE

COLOURS = dict(gdn_ref="blue", gdn_ref_recompute="sky", fla="vermilion", flash_qla="orange", flashinfer="green",
               transformers="purple")  # fmt: skip
MARKERS = dict(gdn_ref="o", gdn_ref_recompute="P", fla="s", flash_qla="D", flashinfer="^", transformers="v")


def draw(document: dict) -> Figure:
    """A panel each for forward times, decode bandwidth, forward+backward times and their memory, as far as the document
    has rows for them.

    document: what `bench` writes, see bench_record.check_document.  Raises ValueError where it has none of them.
    """
    cases = by_case(document)
    panels = [(op, panel) for op, panel in (("fwd", draw_forward), ("decode", draw_decode), ("fwdbwd", draw_training),
                                            ("fwdbwd", draw_memory)) if op in cases]  # fmt: skip
    if not panels:
        raise ValueError("rows: found none of fwd, decode and fwdbwd, expected one of them to draw")
    columns, rows = min(2, len(panels)), math.ceil(len(panels) / 2)
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(6.5 * columns, 5 * rows), layout="constrained")
        axes = fig.subplots(rows, columns, squeeze=False).flat
        for ax, (op, panel) in zip(axes, panels, strict=False):
            panel(ax, cases[op], document)
        for ax in list(axes)[len(panels) :]:
            ax.remove()
        fig.suptitle(f"{document['device']}, K = V = 128, bfloat16", fontsize=12)
    return fig


def draw_forward(ax, shapes: dict, document: dict) -> None:
    """Times of the forward pass."""
    _draw_times(ax, shapes, document, "Forward pass")


def draw_training(ax, shapes: dict, document: dict) -> None:
    """Times of a forward and a backward pass."""
    _draw_times(ax, shapes, document, "Forward and backward pass")


def draw_memory(ax, shapes: dict, document: dict) -> None:
    """Peak of memory of a forward and a backward pass, above the tensors that were given."""
    _draw_points(ax, shapes, document, "peak_MB", 1e-3)
    ax.set(title="Forward and backward pass: memory", xlabel="GB above the inputs, at the peak")


def _draw_times(ax, shapes: dict, document: dict, title: str) -> None:
    """A row a shape, milliseconds on a logarithmic axis; the bar ends at the limit, which nothing can undercut."""
    limits = [next(iter(rows.values())).get("limit_ms", float("nan")) for rows in shapes.values()]
    floor = 0.7 * min(row["ms"] for rows in shapes.values() for row in rows.values())
    floor = min([floor, *(0.7 * limit for limit in limits if limit == limit)])
    widths = [limit - floor for limit in limits]
    ax.barh(range(len(shapes)), widths, left=floor, height=0.7, color="#dddddd", label="below the limit")
    _draw_points(ax, shapes, document, "ms")
    ax.set(title=title, xlabel="milliseconds a call")
    ax.set_xlim(left=floor)


def _draw_points(ax, shapes: dict, document: dict, field: str, unit: float = 1) -> None:
    """One field of the rows: shapes downwards, a marker each for everybody."""
    for name, version in document["versions"].items():
        timed = [(rows[name][field] * unit, n) for n, rows in enumerate(shapes.values()) if field in rows.get(name, {})]
        if timed:
            colour, order = PALETTE[COLOURS[name]], 3 if name in OURS else 2
            label = f"gdn_ref, {LABELS[name]}" if name == "gdn_ref_recompute" else f"{LABELS[name]} {version}"
            ax.plot(*zip(*timed, strict=True), MARKERS[name], color=colour, zorder=order, label=label)
    ax.set_yticks(range(len(shapes)), list(shapes))
    ax.invert_yaxis()
    ax.set(xscale="log", ylabel="batch × tokens, H/HV")
    ax.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, handlelength=1.2)


def draw_decode(ax, shapes: dict, document: dict) -> None:
    """TB/s of the state, read and written once, against the batch; solid on the GPU alone, dashed as called."""
    for name in document["versions"]:
        colour, marker = PALETTE[COLOURS[name]], MARKERS[name]
        for field, style, label in (("device_ms", "-", "the GPU alone"), ("ms", "--", "by call")):
            timed = [
                (len(parse_shape(shape).lengths), rows[name]["bytes"] / rows[name][field] * 1e-9)
                for shape, rows in shapes.items()
                if field in rows.get(name, {})
            ]
            if timed:
                label = f"{LABELS[name]}, {label}"
                ax.plot(*zip(*timed, strict=True), style, marker=marker, color=colour, label=label)
    ax.axhline(document["limits"]["copy_TBps"], color=PALETTE["black"], linestyle=":", label="copy, measured")
    ax.set(title="Decode step", xscale="log", xlabel="batch", ylabel="TB/s of state read and written", ylim=(0, None))
    batches = [len(parse_shape(shape).lengths) for shape in shapes]
    ax.set_xticks(batches, [str(batch) for batch in batches], minor=False)
    ax.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, handlelength=2.4)

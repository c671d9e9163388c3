"""The figure of a recorded benchmark: times beside their limit, and bandwidth of the decode step.

It needs matplotlib, so it is imported late.
"""

from __future__ import annotations

import matplotlib
import matplotlib.ticker
from matplotlib.figure import Figure

from .bench_record import by_case, parse_shape
from .notebook import PALETTE, STYLE

COLOURS = dict(gdn_ref="blue", fla="vermilion", flash_qla="orange", flashinfer="green", transformers="purple")
MARKERS = dict(gdn_ref="o", fla="s", flash_qla="D", flashinfer="^", transformers="v")


def draw(document: dict) -> Figure:
    """A panel of forward times and one of decode bandwidth, whichever the document has rows for.

    document: what `bench` writes, see bench_record.check_document.  Raises ValueError where it has neither.
    """
    cases = by_case(document)
    panels = [(op, panel) for op, panel in (("fwd", draw_forward), ("decode", draw_decode)) if op in cases]
    if not panels:
        raise ValueError("rows: found neither fwd nor decode, expected one of them to draw")
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(6.5 * len(panels), 5), layout="constrained")
        axes = fig.subplots(1, len(panels), squeeze=False)[0]
        for ax, (op, panel) in zip(axes, panels, strict=True):
            panel(ax, cases[op], document)
        fig.suptitle(f"{document['device']}, K = V = 128, bfloat16", fontsize=12)
    return fig


def draw_forward(ax, shapes: dict, document: dict) -> None:
    """A row a shape, milliseconds on a logarithmic axis; the bar ends at the limit, which nothing can undercut."""
    places = range(len(shapes))
    limits = [next(iter(rows.values())).get("limit_ms", float("nan")) for rows in shapes.values()]
    floor = 0.7 * min(row["ms"] for rows in shapes.values() for row in rows.values())
    floor = min([floor, *(0.7 * limit for limit in limits if limit == limit)])
    widths = [limit - floor for limit in limits]
    ax.barh(places, widths, left=floor, height=0.7, color="#dddddd", label="below the limit")
    for name, version in document["versions"].items():
        timed = [(rows[name]["ms"], place) for place, rows in zip(places, shapes.values(), strict=True) if name in rows]
        if timed:
            colour, order = PALETTE[COLOURS[name]], 3 if name == "gdn_ref" else 2
            ax.plot(*zip(*timed, strict=True), MARKERS[name], color=colour, zorder=order, label=f"{name} {version}")
    ax.set_yticks(places, list(shapes))
    ax.invert_yaxis()
    ax.set(xscale="log", title="Forward pass", xlabel="milliseconds a call", ylabel="batch × tokens, H/HV")
    ax.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    ax.set_xlim(left=floor)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, handlelength=1.2)


def draw_decode(ax, shapes: dict, document: dict) -> None:
    """TB/s of the state, read and written once, against the batch; solid on the GPU alone, dashed as called."""
    for name in document["versions"]:
        colour, marker = PALETTE[COLOURS[name]], MARKERS[name]
        for field, style, label in (("device_ms", "-", f"{name}, the GPU alone"), ("ms", "--", f"{name}, by call")):
            timed = [
                (len(parse_shape(shape).lengths), rows[name]["bytes"] / rows[name][field] * 1e-9)
                for shape, rows in shapes.items()
                if field in rows.get(name, {})
            ]
            if timed:
                ax.plot(*zip(*timed, strict=True), style, marker=marker, color=colour, label=label)
    ax.axhline(document["limits"]["copy_TBps"], color=PALETTE["black"], linestyle=":", label="copy, measured")
    ax.set(title="Decode step", xscale="log", xlabel="batch", ylabel="TB/s of state read and written", ylim=(0, None))
    batches = [len(parse_shape(shape).lengths) for shape in shapes]
    ax.set_xticks(batches, [str(batch) for batch in batches], minor=False)
    ax.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, handlelength=2.4)

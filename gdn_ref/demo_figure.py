"""The demo's figure: what the two layers learnt from real text.  It needs matplotlib, so it is imported late."""

import matplotlib
import matplotlib.ticker
import numpy as np
from matplotlib.figure import Figure

from .notebook import PALETTE, STYLE

LAYER_COLOURS = (PALETTE["blue"], PALETTE["orange"])


def draw(losses, held_out, bigram, layers, *, step_bytes, key_width):
    """Four panels.  losses: one a step of step_bytes; held_out, bigram: nats a byte; layers: a demo.Statistics each."""
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(11, 8), layout="constrained")
        axes = fig.subplots(2, 2)
        draw_loss(axes[0, 0], losses, held_out, bigram, step_bytes)
        draw_half_lives(axes[0, 1], layers)
        draw_write_strength(axes[1, 0], layers)
        draw_cosines(axes[1, 1], layers, key_width)
    return fig


def save(fig, out):
    """Write the figure to `out`, a Path: the same bytes for the same picture, on opaque white for dark pages too."""
    dated = {".svg": "Date", ".pdf": "CreationDate"}.get(out.suffix)
    with matplotlib.rc_context(STYLE):
        fig.savefig(out, metadata={dated: None} if dated else None)


def draw_loss(ax, losses, held_out, bigram, step_bytes):
    """Loss against the text read; the bigram is the line to come below."""
    read = np.arange(1, len(losses) + 1) * step_bytes / 1000
    width = max(1, len(losses) // 40)
    mean = np.convolve(losses, np.ones(width) / width, mode="valid")
    ax.plot(read, losses, color=PALETTE["sky"], linewidth=0.6)
    ax.plot(read[width - 1 :], mean, color=PALETTE["blue"], label="training, running mean")
    ax.axhline(bigram, color=PALETTE["vermilion"], linestyle="--", label=f"byte bigram, held-out: {bigram:.2f}")
    ax.plot(read[-1], held_out, "o", color=PALETTE["black"], zorder=3, label=f"model, held-out: {held_out:.2f}")
    ax.set(title="Loss", xlabel="training text read (thousand bytes)", ylabel="nats a byte", ylim=(1, 4.5))
    ax.legend(loc="upper right")


def draw_half_lives(ax, layers):
    """A bar a head, from the 10 % to the 90 % quantile over tokens, with the median as a point."""
    places, names = [], []
    for index, (layer, colour) in enumerate(zip(layers, LAYER_COLOURS, strict=True)):
        low, median, high = np.quantile(layer.half_life, [0.1, 0.5, 0.9], axis=0)  # [HV] each
        rows = index * (len(median) + 0.6) + np.arange(len(median))
        ax.hlines(rows, low, high, color=colour, linewidth=6, alpha=0.4)
        ax.plot(median, rows, "o", color=colour)
        places += list(rows)
        names += [f"layer {index + 1}, head {head + 1}" for head in range(len(median))]
    ax.set_yticks(places, names)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set(title="Half-life of the memory, by head", xscale="log")
    ax.set_xlabel("ln 2 / −g in tokens: median, and 10–90 % of the text")


def draw_write_strength(ax, layers):
    """How strongly each layer overwrites."""
    _histograms(ax, [layer.beta.ravel() for layer in layers], np.linspace(0, 1, 31))
    ax.set(title="Write strength", xlabel="β = sigmoid(b)", ylabel="density", xlim=(0, 1))
    _legend_above(ax, 2)


def draw_cosines(ax, layers, key_width):
    """How alike the keys of a chunk are: random unit vectors would hardly meet, and then no rule would be needed."""
    bins = np.linspace(-1, 1, 81)
    _histograms(ax, [layer.cosines for layer in layers], bins)
    x = np.linspace(-1, 1, 401)
    density = (1 - x**2) ** ((key_width - 3) / 2)  # of the cosine of two random unit vectors
    density /= density.sum() * (x[1] - x[0])
    ax.plot(x, density, color=PALETTE["black"], linestyle=":", linewidth=1.5, label="random keys")
    ax.set(title="Likeness of keys within a chunk of 64", xlabel="cosine of two keys", ylabel="density", xlim=(-1, 1))
    _legend_above(ax, 3)


def _histograms(ax, data, bins):
    for index, (values, colour) in enumerate(zip(data, LAYER_COLOURS, strict=True)):
        ax.hist(values, bins, density=True, histtype="step", linewidth=2, color=colour, label=f"layer {index + 1}")


def _legend_above(ax, columns):
    """The legend in a row of its own, above all that is drawn, whatever came out of the training."""
    ax.set_ylim(0, 1.15 * ax.get_ylim()[1])
    ax.legend(loc="upper center", ncols=columns, handlelength=1.5, borderaxespad=0.2)

"""What a chapter's first cell needs: the same seeds, threads, dtype and figure style everywhere.

Imported by the book only; the package itself needs neither matplotlib nor sympy.
"""

import inspect
import os
import random
import sys
import textwrap
import warnings
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure

SEED = 20241209

#: Okabe and Ito's eight colours, told apart with every common kind of colour vision.
PALETTE = {
    "black": "#000000",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "purple": "#CC79A7",
}

_CYCLE = [PALETTE[name] for name in ("blue", "vermilion", "green", "orange", "purple", "sky", "black")]

STYLE = {
    "figure.figsize": (7.0, 4.0),
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.bbox": "tight",
    "savefig.pad_inches": 0.15,
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "image.cmap": "cividis",
    "svg.hashsalt": "gdn_ref",  # else the ids inside the file change with every run
    "svg.fonttype": "path",  # letters as outlines: the same picture whatever fonts the reader has
}


def setup(seed: int = SEED) -> None:
    """Put the chapter on the ground every chapter stands on; prints nothing.

    Sets the seeds of random, NumPy and torch, one torch thread, float64 as torch's default dtype, the Agg
    backend and the book's figure style, short print options, and turns warnings into errors.
    Where there is no GPU, asks Triton for its interpreter, which it reads once, at its first import.
    """
    if not torch.cuda.is_available() and "triton" not in sys.modules:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.set_printoptions(precision=4, sci_mode=False, linewidth=110)
    np.set_printoptions(precision=4, suppress=True, linewidth=110)
    warnings.simplefilter("error")
    # The kernel runs in this same process; its own housekeeping is not the chapter's business.
    warnings.filterwarnings("ignore", module=r"ipykernel|IPython|jupyter_client|traitlets|tornado|zmq|asyncio")
    matplotlib.use("Agg")
    matplotlib.rcParams.update(STYLE)
    matplotlib.rcParams["axes.prop_cycle"] = matplotlib.cycler(color=_CYCLE)


def figures_folder() -> Path:
    """The folder figures are written to: $GDN_REF_FIGURES, or figures/ beside the notebooks' folder.

    Raises FileNotFoundError when run from somewhere that has no such folder.
    """
    if named := os.environ.get("GDN_REF_FIGURES"):
        return Path(named)
    here = Path.cwd()
    for root in (here, *here.parents):
        if (root / "notebooks").is_dir() and (root / "gdn_ref").is_dir():
            return root / "figures"
    raise FileNotFoundError(f"found no notebooks/ and gdn_ref/ in {here} or above; expected to run inside the checkout")


def save(fig: Figure, name: str) -> None:
    """Write `fig` to figures/`name`.svg, the same bytes for the same picture, and close it; prints nothing.

    `name` is "05_gamma": the chapter's number and one word. The background is opaque white, so that the
    figure also reads on a dark page.
    """
    if not name.replace("_", "").isalnum():
        raise ValueError(f"name: found {name!r}, expected letters, digits and _ only, such as '05_gamma'")
    folder = figures_folder()
    folder.mkdir(exist_ok=True)
    fig.savefig(folder / f"{name}.svg", format="svg", metadata={"Date": None}, transparent=False)

    import matplotlib.pyplot as plt  # late: after setup() has chosen the backend

    plt.close(fig)


def prove(*tags: str) -> None:
    """Prove the identities with these tags, such as "5.1", and print one line each.

    Raises gdn_ref.identities.ProofError with what is left over when a proof does not come out, and
    KeyError for a tag that the book does not have.
    """
    from . import identities  # late: SymPy is slow to load, and not every chapter's reader proves

    for tag in tags:
        result = identities.prove(tag)
        print(f"({result.tag}) {result.verdict}")


def show_source(*functions) -> None:
    """Print the source of each function or class of gdn_ref, as it stands in the installed file."""
    for index, function in enumerate(functions):
        if index:
            print()
        print(textwrap.dedent(inspect.getsource(inspect.unwrap(function))).rstrip())

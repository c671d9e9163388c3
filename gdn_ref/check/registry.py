"""The decorator that makes a function a property, and the list of all of them, by module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from .records import FEATURES, Property

REGISTERED: dict[str, list[Property]] = defaultdict(list)

CHAPTERS = {
    1: "notebooks/01_memory_that_overwrites.ipynb",
    2: "notebooks/02_geometry.ipynb",
    3: "notebooks/03_wy.ipynb",
    4: "notebooks/04_one_chunk.ipynb",
    5: "notebooks/05_gate.ipynb",
    6: "notebooks/06_inverse.ipynb",
    7: "notebooks/07_range_and_precision.ipynb",
    8: "notebooks/08_backward_token.ipynb",
    9: "notebooks/09_backward_chunk.ipynb",
    10: "notebooks/10_affine_maps_compose.ipynb",
    11: "notebooks/11_serving.ipynb",
}


def holds(name: str, reason: str, chapter: int, needs: str = "", full: bool = False) -> Callable:
    """Make a function of a Probe the property `name`.

    reason: one line. chapter: where the book shows it. needs: features without which it is not offered. full: only with
    --full.
    """
    wanted = frozenset(needs.split())
    if unknown := wanted - set(FEATURES):
        raise ValueError(f"needs: found {', '.join(sorted(unknown))}, expected names of FEATURES")

    def register(test: Callable) -> Callable:
        REGISTERED[test.__module__].append(Property(name, reason, CHAPTERS[chapter], wanted, test, full))
        return test

    return register

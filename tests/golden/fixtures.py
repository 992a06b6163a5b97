"""Tiny checkpoints with the published implementations' logits, and how they are compared (relative to their std)."""

import json
from pathlib import Path

import numpy as np

from tests.conftest import SHARED

TOLERANCE = 1e-4


def folders() -> list[Path]:
    """Every fixture folder: those beside this file, and those of the reference material where there is any."""
    places = [Path(__file__).with_name("files"), SHARED / "fixtures"]
    found = {path.parent.name: path.parent for place in reversed(places) for path in place.glob("*/case.json")}
    return [found[name] for name in sorted(found)]


def load_case(folder: Path) -> tuple[dict, dict]:
    """case.json and the expected arrays."""
    return json.loads((folder / "case.json").read_text()), dict(np.load(folder / "expected.npz"))


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest absolute difference over the standard deviation of the expected values."""
    return float(np.abs(found - expected).max() / expected.std())

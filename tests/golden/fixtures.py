"""Tiny checkpoints with the published implementations' logits, and how they are compared (relative to their std)."""

import json
from pathlib import Path

import numpy as np

from tests.conftest import shared

TOLERANCE = 1e-4


def folders() -> list[Path]:
    """Every fixture folder; skips the module where the reference material is absent."""
    return sorted(path.parent for path in shared("fixtures").glob("*/case.json"))


def load_case(folder: Path) -> tuple[dict, dict]:
    """case.json and the expected arrays."""
    return json.loads((folder / "case.json").read_text()), dict(np.load(folder / "expected.npz"))


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest absolute difference over the standard deviation of the expected values."""
    return float(np.abs(found - expected).max() / expected.std())

"""Distances between colours, for normal vision and for the two common kinds of red-green blindness (1 man in 12).

Colour blindness is simulated as by Machado, Oliveira and Fernandes (2009) at full severity, in linear sRGB. The
distance is that of CIELAB (CIE 1976). Below about 10 two lines look the same.
"""

import numpy as np

EYES = {
    "normal": np.eye(3),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                              [-0.011820, 0.042940, 0.968881]]),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                            [-0.003882, -0.048116, 1.051998]]),
}
_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
                 [0.0193339, 0.1191920, 0.9503041]]) / np.array([[0.95047], [1.0], [1.08883]])  # by the white of D65


def distance(a: str, b: str, eye: str = "normal") -> float:
    """CIELAB distance of two colours (such as "#1f77b4") for a kind of vision in EYES."""
    return float(np.linalg.norm(_lab(EYES[eye] @ _linear(a)) - _lab(EYES[eye] @ _linear(b))))


def least_distance(a: str, b: str) -> float:
    """The smallest distance over all kinds of vision."""
    return min(distance(a, b, eye) for eye in EYES)


def _linear(colour: str) -> np.ndarray:
    """Hexadecimal colour -> linear sRGB [3]."""
    c = np.array([int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def _lab(rgb: np.ndarray) -> np.ndarray:
    """Linear sRGB [3] -> CIELAB [3]."""
    x = _XYZ @ np.clip(rgb, 0, 1)
    f = np.where(x > 216 / 24389, np.cbrt(x), (24389 / 27 * x + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

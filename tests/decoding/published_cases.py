"""Strategies and logits for comparing numflow with published implementations."""

import zlib

import numpy as np

SIZE = 120
TEXT = [5, 17, 3, 88, 5, 17, 40, 5, 17]
# name -> (settings in the order of their application, tokens so far, spread of the logits)
CASES = {
    "temperature": ({"temperature": 0.6}, TEXT, 2.0),
    "top_k": ({"top_k": 7}, TEXT, 2.0),
    "top_p": ({"top_p": 0.8}, TEXT, 2.0),
    "top_p of a flat distribution": ({"top_p": 0.95}, TEXT, 0.05),
    "min_p": ({"min_p": 0.07}, TEXT, 2.0),
    "typical_p": ({"typical_p": 0.7}, TEXT, 2.0),
    "typical_p of a flat distribution": ({"typical_p": 0.9}, TEXT, 0.2),
    "typical_p of a steep distribution": ({"typical_p": 0.3}, TEXT, 5.0),
    "temperature, min_p, top_k, top_p": ({"temperature": 1.3, "min_p": 0.02, "top_k": 30, "top_p": 0.9}, TEXT, 2.0),
    "top_p, temperature": ({"top_p": 0.9, "temperature": 1.7}, TEXT, 2.0),
    "top_k, typical_p, top_p, min_p, temperature": (
        {"top_k": 40, "typical_p": 0.9, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8}, TEXT, 1.5),
    "repetition_penalty": ({"repetition_penalty": 1.3}, TEXT, 3.0),
    "presence and frequency": ({"presence_penalty": 0.6, "frequency_penalty": 0.4}, TEXT, 2.0),
    "repetition_penalty, temperature, top_p": (
        {"repetition_penalty": 1.2, "temperature": 0.7, "top_p": 0.9}, TEXT, 2.0),
    "dry": ({"dry_multiplier": 0.8, "dry_base": 1.75, "dry_allowed_length": 2}, TEXT, 1.0),
    "dry of a long repetition": (
        {"dry_multiplier": 0.5, "dry_base": 1.3, "dry_allowed_length": 3}, [*TEXT, 60, *TEXT, 60, *TEXT], 1.0),
    "mirostat": ({"mirostat": 2, "mirostat_tau": 2.0}, TEXT, 2.0),
}


def logits_of(name: str, spread: float) -> np.ndarray:
    """Logits float32 [SIZE], multiples of 1/1000, so that rounding does not matter."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return (np.round(spread * rng.standard_normal(SIZE) * 1000) / 1000).astype(np.float32)

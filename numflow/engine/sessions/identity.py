"""Identity of a model on this machine: keys and values are valid only for the same identity."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

import numflow
from numflow.errors import RequestError
from numflow.quant.state import STATE_BLOCK

PROBE = STATE_BLOCK + 1  # tokens of the probe: enough that stored states, which are kept per block, matter too
_DESCRIPTIONS = {"name": "model", "vocabulary": "vocabulary", "numflow": "numflow", "executor": "executor",
          "block": "tokens of a block", "bytes": "bytes of a block (the types of keys and values)"}


def identity(model) -> dict[str, Any]:
    """Facts of a numflow.engine.model.Model that keys and values depend on, as JSON values.

    probe: checksum of the logits of a few tokens: equal bits mean equal weights, quantisation and arithmetic.
    """
    network, program = model.network, model.program
    ids = [(1 + 7919 * index) % model.vocabulary for index in range(min(PROBE, model.context))]
    with model.runner.open(len(ids)) as sequence:
        logits = np.ascontiguousarray(sequence.last(ids), np.float32)
    return {"name": network.name, "numflow": numflow.__version__, "executor": type(program).__module__,
            "vocabulary": model.vocabulary, "block": program.block_size,
            "bytes": {str(pool.window): pool.size for pool in model.runner.pools},
            "probe": zlib.crc32(logits.tobytes())}


def check_same(path, found: Any, expected: Mapping[str, Any]) -> None:
    """Refuse a file of another model.

    Raises:
        RequestError: the message names the file and the first fact that differs.
    """
    if not isinstance(found, dict):
        raise RequestError(f"{path}: damaged: it does not say which model it is of")
    for key, description in _DESCRIPTIONS.items():
        if found.get(key) != expected[key]:
            raise RequestError(f"{path}: a session of another model: its {description} is {str(found.get(key))[:80]}, "
                               f"here it is {str(expected[key])[:80]}")
    if found.get("probe") != expected["probe"]:
        raise RequestError(f"{path}: a session of another model: {expected['name']} computes other numbers here (other "
                           "weights, quantisation, activations, types of keys, values or states, or another machine)")

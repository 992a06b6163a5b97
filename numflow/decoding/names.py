"""Inferflow's names and JSON configurations of decoding strategies, mapped to sampling settings.

The values are those of Inferflow: a pool of the 50 best tokens, within which all probabilities are normalised, and
at most `max_k` tokens after `top_p`. "pool_size": 0 uses the whole vocabulary instead.
"""

import json
from collections.abc import Mapping
from typing import Any

from numflow.decoding.settings import is_count
from numflow.errors import RequestError, did_you_mean, quoted

POOL_SIZE, MAX_K = 50, 8
_NUCLEUS = {"samplers": ("temperature", "top_p", "top_k"), "top_k": MAX_K}

# name -> settings beside temperature and pool
ALGORITHMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "std": {**_NUCLEUS, "top_p": 0.9},
    "top_p": {**_NUCLEUS, "top_p": 0.9},
    "top_k": {"top_k": MAX_K},
    "min_p": {"min_p": 0.05},
    "tfs": {"tfs_z": 0.95},
    "typical": {"typical_p": 0.95},
    "mirostat": {"mirostat": 2, "mirostat_tau": 5.0, "mirostat_eta": 0.1},
    "fsd": {"fsd": True, "fsd_k": 6, "fsd_n": 3, "fsd_alpha": 0.5, "fsd_beta": 0.9},
    "random_fsd": {"fsd": "random", "fsd_k": 6, "fsd_n": 3, "fsd_alpha": 0.5, "fsd_beta": 0.9, "fsd_random": 10,
                   **_NUCLEUS, "top_p": 0.93},
}


def inferflow(algorithm: str | Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an algorithm: "sample.top_p", "top_p", or {"name": "sample.top_p", "top_p": 0.9, ...}, also as text.

    "" and "auto" are "sample.std". The temperature is 1, and 0 for greedy.

    Raises:
        RequestError: an unknown name or parameter.
    """
    given = _parsed(algorithm)
    name = given.pop("name", "") or "std"
    if not isinstance(name, str):
        raise RequestError(f"decoding_alg: name should be text, is {quoted(name)}")
    short = "std" if name == "auto" else name.removeprefix("sample.")
    if short not in ALGORITHMS:
        raise RequestError(f"there is no decoding_alg {quoted(name)}{did_you_mean(short, ALGORITHMS)}")
    strategy = ALGORITHMS[short]
    settings = {"temperature": 1.0, "pool_size": POOL_SIZE, **strategy}
    for key, value in given.items():
        key = "top_k" if key == "max_k" and "top_k" in strategy else key
        if key not in {*strategy, "pool_size", "eos_bypassing_max", "min_k"} - {"samplers"}:
            known = {*strategy, "pool_size", "eos_bypassing_max"} - {"samplers"}
            raise RequestError(f"decoding_alg {quoted(name)} has no parameter {quoted(key)}{did_you_mean(key, known)}")
        settings[key] = value
    if settings.pop("min_k", 1) != 1:
        raise RequestError("decoding_alg: min_k has no effect in the original but as 1")
    if short == "greedy":  # the pool size has no effect on the best token
        settings |= {"temperature": 0.0}
        if not is_count(settings["pool_size"]):
            raise RequestError("decoding_alg: pool_size should be a whole number from 0, is "
                               f"{quoted(settings['pool_size'])}")
        del settings["pool_size"]
    return settings


def _parsed(algorithm) -> dict[str, Any]:
    if isinstance(algorithm, Mapping):
        return dict(algorithm)
    if not isinstance(algorithm, str):
        raise RequestError(f"decoding_alg should be a name or a JSON object, is {quoted(algorithm)}")
    if not algorithm.strip().startswith("{"):
        return {"name": algorithm.strip()}
    try:
        return dict(json.loads(algorithm))
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"decoding_alg is no JSON object: {error}") from None

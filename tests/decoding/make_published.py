"""Write expected/published.json: results of transformers and llama.cpp on the same logits, strategy by strategy.

    python -m tests.decoding.make_published FOLDER_OF_LIBLLAMA

Run it from the repository root in an environment with torch and transformers; the folder has libllama.so. Logits are
those of tests/decoding/published_cases.py.
"""

import ctypes
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import generation as hf

from tests.decoding.published_cases import CASES, logits_of
from tests.decoding.published_cases import SIZE as SIZE_OF_VOCABULARY


class TokenData(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int32), ("logit", ctypes.c_float), ("p", ctypes.c_float)]


class TokenArray(ctypes.Structure):
    _fields_ = [("data", ctypes.POINTER(TokenData)), ("size", ctypes.c_size_t), ("selected", ctypes.c_int64),
                ("sorted", ctypes.c_bool)]


FLOAT, INT, SIZE = ctypes.c_float, ctypes.c_int32, ctypes.c_size_t
SAMPLERS = {  # setting -> (function, arguments after the value)
    "top_k": ("top_k", [INT], []), "top_p": ("top_p", [FLOAT, SIZE], [1]), "min_p": ("min_p", [FLOAT, SIZE], [1]),
    "typical_p": ("typical", [FLOAT, SIZE], [1]), "temperature": ("temp", [FLOAT], []),
}


def llama(library, settings, text, logits):
    """(ids, scores) after llama.cpp's samplers, in the order of the settings."""
    data = (TokenData * len(logits))(*((i, float(x), 0.0) for i, x in enumerate(logits)))
    array = TokenArray(data, len(logits), -1, False)
    for sampler in chain(library, settings, text):
        for token in text:
            library.llama_sampler_accept(sampler, token)
        library.llama_sampler_apply(sampler, ctypes.byref(array))
        library.llama_sampler_free(sampler)
    return {array.data[i].id: array.data[i].logit for i in range(array.size)}


def chain(library, settings, text):
    def make(name, types, values):
        function = getattr(library, f"llama_sampler_init_{name}")
        function.restype, function.argtypes = ctypes.c_void_p, types
        return function(*values)

    own = dict(settings)
    if "repetition_penalty" in own or "frequency_penalty" in own or "presence_penalty" in own:
        yield make("penalties", [INT, INT, FLOAT, FLOAT, FLOAT], [
            SIZE_OF_VOCABULARY, len(text), own.pop("repetition_penalty", 1.0), own.pop("frequency_penalty", 0.0),
            own.pop("presence_penalty", 0.0)])
    if "dry_multiplier" in own:
        yield make("dry", [ctypes.c_void_p, FLOAT, FLOAT, INT, INT, ctypes.c_void_p, SIZE], [
            None, own.pop("dry_multiplier"), own.pop("dry_base"), own.pop("dry_allowed_length"), 1000, None, 0])
    if "mirostat" in own:
        own.pop("mirostat")
        yield make("mirostat_v2", [ctypes.c_uint32, FLOAT, FLOAT], [1, own.pop("mirostat_tau"), 0.1])
    for name, value in own.items():
        function, types, more = SAMPLERS[name]
        yield make(function, types, [value, *more])


PROCESSORS = {
    "repetition_penalty": hf.RepetitionPenaltyLogitsProcessor, "temperature": hf.TemperatureLogitsWarper,
    "top_k": hf.TopKLogitsWarper, "top_p": hf.TopPLogitsWarper, "min_p": hf.MinPLogitsWarper,
    "typical_p": hf.TypicalLogitsWarper,
}


def published(settings, text, logits):
    """(ids, scores) after transformers' logits processors; None without an equivalent."""
    if not settings.keys() <= PROCESSORS.keys():
        return None
    scores, ids = torch.tensor(logits)[None], torch.tensor(text)[None]
    for name, value in settings.items():
        scores = PROCESSORS[name](value)(ids, scores)
    return {i: float(x) for i, x in enumerate(scores[0]) if x > -float("inf")}


def result(scores):
    """Remaining ids and their probabilities."""
    if scores is None:
        return None
    ids = sorted(scores)
    values = np.array([scores[i] for i in ids], np.float64)
    p = np.exp(values - values.max())
    return {"ids": ids, "p": [float(f"{x:.6g}") for x in p / p.sum()]}


if __name__ == "__main__":
    library = ctypes.CDLL(str(Path(sys.argv[1]) / "libllama.so"))
    library.llama_sampler_accept.argtypes = [ctypes.c_void_p, INT]
    library.llama_sampler_apply.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.llama_sampler_free.argtypes = [ctypes.c_void_p]
    lines = []
    for name, (settings, text, spread) in CASES.items():
        logits = logits_of(name, spread)
        lines.append(json.dumps({"case": name, "transformers": result(published(settings, text, logits)),
                                 "llama.cpp": result(llama(library, settings, text, logits))}))
    head = json.dumps({"transformers": transformers.__version__})
    path = Path(__file__).parent / "expected" / "published.json"
    path.write_text("[" + ",\n".join([head, *lines]) + "]\n", encoding="utf-8")

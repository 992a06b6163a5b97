"""llama.cpp: logits, or last hidden states, that its library computes from a GGUF file.

This is a separate process, because a failed assertion of the library ends it. Requests and answers are lines of JSON,
as in theirs.py.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.specs.llama_cpp import numbers, opened


def compute(request: dict, library) -> dict:
    """Write peer.npz: an array [ids, width] of each prompt."""
    folder = Path(request["folder"])
    log = os.open(folder / "peer.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    os.close(log)
    found = {f"logits_{at}": numbers(library, folder / request["file"], each["ids"], request["width"],
                                     request["hidden"]) for at, each in enumerate(request["prompts"])}
    if not all(np.isfinite(value).all() for value in found.values()):
        raise RuntimeError("NaN")
    np.savez(folder / "peer.npz", **found)
    return {}


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    llama_cpp = opened(Path(sys.argv[1]).resolve())
    for line in sys.stdin:
        try:
            answer = {"ok": compute(json.loads(line), llama_cpp)}
        except RuntimeError as problem:
            answer = {"refused": str(problem).rpartition(": ")[2]}
        print(json.dumps(answer), file=answers, flush=True)

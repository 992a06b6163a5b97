"""A variant as a GGUF file by llama.cpp's converter: outputs of numflow, llama.cpp and transformers are compared.

llama.cpp is the reference if it runs the file. It computes GELU with a float16 table, so small differences count only
where it agrees with transformers. If numflow agrees only with llama.cpp, the file has less information than
config.json; if numflow agrees only with transformers, the file has information that llama.cpp does not read.
"""

import re
from pathlib import Path

import numpy as np

NEAR, FAR = 1e-4, 4e-3
FILE, NOT_ASKED = "model.gguf", "not asked"
DECODERS = re.compile("ForCausalLM|LMHead|ConditionalGeneration")
LIKE_PEER, LIKE_THEIRS = "as llama.cpp alone", "as transformers alone"


def converted(sides, config: dict, place: str, converter: str) -> str:
    """Write the file. Returns "", or the reason of a failure."""
    made = sides.theirs.ask(do="convert", config=config, folder=place, converter=converter)
    return "" if "ok" in made else f"not converted: {made['refused']}"


def peers(sides, config: dict, place: str, given: list[dict], width: int) -> list[np.ndarray] | str:
    """llama.cpp's outputs, or the reason why there are none."""
    if sides.peer is None or "decoder_ids" in given[0]:
        return NOT_ASKED
    hidden = not DECODERS.search(str(config.get("architectures")))
    found = sides.peer.ask(folder=place, file=FILE, prompts=given, width=width, hidden=hidden)
    if "ok" not in found:
        said = re.findall(r"(?:error[^:\n]*: |ASSERT).*", (Path(place) / "peer.log").read_text(errors="replace"))
        return said[-1][:160] if said else found["refused"]
    with np.load(Path(place) / "peer.npz") as file:
        return [file[f"logits_{at}"] for at in range(len(given))]


def distance(found: list[np.ndarray], wanted: list[np.ndarray]) -> float | None:
    """The largest difference divided by the standard deviation of `wanted`; None if the shapes differ."""
    if any(a.shape != b.shape for a, b in zip(found, wanted, strict=True)):
        return None
    with np.errstate(invalid="ignore"):
        return max(float(np.abs(a - b).max() / (float(b.std()) if b.size > 8 else 1.0))
                   for a, b in zip(found, wanted, strict=True))


def judged(ours: list[np.ndarray], peer: list[np.ndarray] | str, wanted: list[np.ndarray],
           moved: float) -> tuple[str, str]:
    """The result, and a line that describes it. moved: relative error that rounding alone causes."""
    theirs, near, far = distance(ours, wanted), max(NEAR, moved / 10), max(FAR, 2 * moved)
    if isinstance(peer, str):
        if theirs is not None and theirs <= near:
            return "right", ""
        asked = theirs is None or peer != NOT_ASKED  # a file that llama.cpp refuses may lack what config.json says
        return "passed over" if asked else "wrong", f"llama.cpp: {peer}; {theirs or 0:.2g} from transformers"
    apart, between = distance(ours, peer), distance(peer, wanted)
    if apart is None:
        return "wrong", f"{ours[0].shape}, llama.cpp has {peer[0].shape}"
    line = f"{apart:.2g} from llama.cpp" + (
        "" if between is None else f", {theirs:.2g} from transformers; these two differ by {between:.2g}")
    if not apart <= far:
        return LIKE_THEIRS if theirs is not None and theirs <= near else "wrong", line
    if between is None or theirs <= near:
        return "right", ""
    return ("wrong" if between <= near else LIKE_PEER if between > far else "right"), line

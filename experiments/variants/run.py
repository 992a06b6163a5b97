"""Variants: random configurations of known families, computed by numflow and by transformers.

Each variant begins with the configuration of a tiny checkpoint and changes some of its keys at random. transformers
saves a random checkpoint of it, and both programs run it in float32. Variants that transformers refuses, that give NaN,
or whose result depends on rounding, are counted and not compared. If results differ, transformers also computes in
float64; numflow is not wrong if it is as close to these results as transformers' float32. If numflow is wrong, or
refuses the variant, the experiment undoes changes one by one as long as the fault remains; the remaining keys cause it.
Family, seed and number reproduce a variant. With `each=true`, each variant changes one key, and each key is changed
once. With `format=gguf`, llama.cpp's converter makes a GGUF file of each
checkpoint (`converter=PATH`, convert_hf_to_gguf.py), and llama.cpp's library (`library=FOLDER`, of libllama.so) is the
reference if it runs the file.
"""

import collections
import contextlib
import importlib.util
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .bases import bases
from .changes import PARTS, applied, draw, singles
from .gguf_files import FILE, LIKE_PEER, LIKE_THEIRS, NOT_ASKED, converted, judged, peers

OPTIONS = {"family": "", "bases": "", "n": 20, "seed": 1, "python": "", "backend": "cpu", "chunk": 7, "limit_s": 120,
           "format": "safetensors", "each": False, "converter": "", "library": ""}
TOLERANCE, STEADY, MARGIN = 1e-4, 3e-3, 1e-3
FORMS = ("", "", "shards", "half", "unnamed")  # of a checkpoint: see theirs.py
LENGTHS = (9, 45, 71)
CONTEXT = re.compile("(?<!original_)max_position_embeddings|n_positions|n_ctx|max_length|context_length|max_seq|"
                     "seq_length")
RIGHT, NEARER, REFUSED, WRONG, PASSED = "right", "nearer to float64", "refused", "wrong", "passed over"


class Theirs:
    """A process that answers, a line of JSON each; started again where it ends, or is ended for want of an answer.

    command: Python, a file beside this one, what that is given. limit_s: how long a request may take.
    """

    def __init__(self, python: str, file: str | Path, *more: str, limit_s: float = 120):
        self.command, self.process = [python, str(Path(__file__).parent / file), *more], None
        self.limit_s = limit_s

    def ask(self, **request) -> dict:
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(self.command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=subprocess.DEVNULL)
        late = threading.Event()
        timer = threading.Timer(self.limit_s, lambda process: (late.set(), process.kill()), [self.process])
        timer.start()
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line.endswith("\n") and not late.is_set():
            return json.loads(line)
        self.close()
        return {"refused": f"no answer within {self.limit_s:g} s" if late.is_set() else "its process ended"}

    def close(self) -> None:
        if self.process is not None:
            self.process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            self.process.wait()
            self.process = None


@dataclass(frozen=True)
class Sides:
    """The processes of transformers, and of llama.cpp where it is asked."""

    theirs: Theirs
    peer: Theirs | None

    def close(self) -> None:
        self.theirs.close()
        if self.peer is not None:
            self.peer.close()


def run(lab):
    options, python = lab.options, lab.options["python"] or sys.executable
    if lab.quick:
        options |= {"n": min(options["n"], 2), "family": options["family"] or ("" if options["bases"] else "llama")}
    lab.text(__doc__.split("\n\n", 1)[1].replace("\n", " "))
    if not (available() if python == sys.executable else Path(python).exists()):
        lab.text("transformers and torch are not installed, so nothing was compared. Name a Python interpreter that "
                 "has them: `--set python=/path/to/python`.")
        return
    limit = options["limit_s"]
    peer = Theirs(sys.executable, "peer.py", options["library"], limit_s=limit) if options["library"] else None
    sides, found = Sides(Theirs(python, "theirs.py", limit_s=limit), peer), {}
    try:
        for name, base in bases(options["bases"], options["family"]).items():
            found[name] = family(lab, sides, name, base)
            kinds = collections.Counter(row["result"] for row in found[name])
            lab.say(f"{name}: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}")
    finally:
        sides.close()
    lab.results |= {"variants": found}
    report(lab, found)


def available() -> bool:
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def family(lab, sides: Sides, name: str, base: dict) -> list[dict]:
    """A row for each variant: its number, the result, the message, and the changes that cause it."""
    with tempfile.TemporaryDirectory() as place:
        own = sides.theirs.ask(do="keys", config=base, folder=place)
    if "ok" not in own:
        return [{"number": 0, "saved": False, "form": "", "result": PASSED, "line": own["refused"], "changes": []}]
    rows, known = [], set()
    alone = singles(base, own["ok"], random.Random(f"{name} {lab.options['seed']}")) if lab.options["each"] else []
    for number in range(len(alone) or lab.options["n"]):
        dice = random.Random(f"{name} {lab.options['seed']} {number}")
        changes = alone[number] if alone else draw(base, own["ok"], dice) if number else []
        saved = dice.random() < 0.4
        form = dice.choice(FORMS) if lab.options["format"] != "gguf" else ""
        row = {"number": number, "saved": saved, "form": form}
        row |= tried(lab, sides, applied(base, changes), row)
        if row["result"] not in (RIGHT, NEARER, PASSED) and (row["result"] != REFUSED or row["line"] not in known):
            known.add(row["line"])
            changes, row = smallest(lab, sides, base, changes, row)
            lab.say(f"  {name} {number}, {row['result']}: {row['line']}; {'saved; ' * saved}{form}; "
                    f"{json.dumps(changes)}")
        rows.append(row | {"changes": changes})
    return rows


def smallest(lab, sides: Sides, base: dict, changes: list[dict], row: dict) -> tuple[list[dict], dict]:
    """Fewer changes of which the same comes, and what comes of them."""
    for change in list(changes):
        fewer = [each for each in changes if each is not change]
        again = tried(lab, sides, applied(base, fewer), row)
        if again["result"] == row["result"]:
            changes, row = fewer, row | again
    return changes, row


def tried(lab, sides: Sides, config: dict, row: dict) -> dict:
    """The result of one configuration. row: its number, and how its checkpoint is written."""
    with tempfile.TemporaryDirectory() as place:
        seed = row["number"]
        given, gguf = prompts(config, seed), lab.options["format"] == "gguf"
        decoder = "ForCausalLM" in str(config.get("architectures")) or "LMHead" in str(config.get("architectures"))
        made = sides.theirs.ask(do="make", config=config, folder=place, saved=row["saved"], seed=seed, prompts=given,
                                greedy=decoder and not gguf, form=row["form"])
        if "ok" not in made:
            return {"result": PASSED, "line": made["refused"]}
        if made["ok"]["moved"] > STEADY:
            return {"result": PASSED, "line": f"rounding decides ({made['ok']['moved']:.2g})"}
        with np.load(Path(place) / "expected.npz") as file:
            wanted = [file[f"logits_{at}"] for at in range(len(given))]
        if gguf:
            return as_gguf(lab, sides, config, place, given, wanted, made["ok"])
        found = guarded(lambda numflow: [ours(numflow, place, given, made["ok"], wanted[0].ndim == 1,
                                              lab.options["backend"], **chunks)
                                         for chunks in ({}, {"chunk": lab.options["chunk"]})], place)
        if isinstance(found, dict):
            return found
        (whole, texts), (cut, _) = found
        line = compared(whole, cut, wanted, max(TOLERANCE, made["ok"]["moved"] / 10))
        if line:
            near, told = nearer(sides, config, place, given, [whole, cut], wanted)
            return {"result": NEARER if near else WRONG, "line": f"{line}; {told}"}
    line = as_chosen(texts, made["ok"])
    return {"result": WRONG if line else RIGHT, "line": line}


def as_gguf(lab, sides: Sides, config: dict, place: str, given: list[dict], wanted: list, made: dict) -> dict:
    """The result of what llama.cpp's converter makes of the checkpoint."""
    problem = converted(sides, config, place, lab.options["converter"])
    if problem:
        return {"result": PASSED, "line": problem}
    found = guarded(lambda numflow: ours(numflow, str(Path(place) / FILE), given, made, wanted[0].ndim == 1,
                                         lab.options["backend"])[0], place)
    refused = isinstance(found, dict)
    scores = wanted[0].ndim == 1
    peer = NOT_ASKED if scores else peers(sides, config, place, given, 1 if refused else found[0].shape[-1])
    if refused:
        runs = not isinstance(peer, str) or found["result"] == WRONG
        return found if runs else {"result": PASSED, "line": f"llama.cpp: {peer}; numflow: {found['line']}"}
    result, line = judged(found, peer, wanted, made["moved"])
    return {"result": result, "line": line}


def guarded(run, place: str):
    """Numbers of numflow, or a result where there are none."""
    import numflow

    try:
        return run(numflow)
    except numflow.NumflowError as problem:
        return {"result": REFUSED, "line": str(problem).replace(place, "")}
    except Exception as problem:  # a fault of ours, which is what is looked for
        return {"result": WRONG, "line": f"{type(problem).__name__}: {problem}"}


def prompts(config: dict, seed: int) -> list[dict]:
    """Texts of words that are none of the special ones, as long as the positions allow."""
    part = next((config[name] for name in PARTS if isinstance(config.get(name), dict)), config)
    vocabulary, dice = part.get("vocab_size", 144), random.Random(seed)
    most = min([value for key, value in part.items() if CONTEXT.search(key) and value] or [128])
    pair = config.get("is_encoder_decoder") or "encoder" in config
    found = []
    for length in LENGTHS:
        ids = [dice.randrange(5, min(vocabulary, 130)) for _ in range(min(length, most - 8))]
        found.append({"ids": ids} | ({"decoder_ids": ids[::-1][:length // 2]} if pair else {}))
    return found


def ours(numflow, place: str, given: list[dict], made: dict, scores: bool, backend: str, **options):
    """What numflow computes, and the tokens that it chooses. scores: of whole texts."""
    with numflow.load(place, backend=backend, activations="f32", threads=1, **options) as model:
        rows = [one(model, each, scores) for each in given]
        text = list(model.generate(given[-1]["ids"], max_tokens=len(made["greedy"]), ignore_eos=True).ids
                    ) if made["greedy"] else []
    return rows, text


def one(model, given: dict, scores: bool) -> np.ndarray:
    if "decoder_ids" in given:
        return model.logits_batch([given["decoder_ids"]], [given["ids"]])[0]
    if scores:
        return np.asarray(model.scores(given["ids"]))
    if "logits" not in model.network.outputs:
        return model.hidden(given["ids"])
    return np.concatenate([rows for _, rows in model.iter_logits(given["ids"])]) if model.is_decoder else model.logits(
        given["ids"])


def compared(whole, cut, wanted, tolerance: float) -> str:
    """The worst difference in a line, "" where there is none."""
    for how, found in (("whole", whole), ("in chunks", cut)):
        for rows, right in zip(found, wanted):
            if rows.shape != right.shape:
                return f"{how}: {rows.shape}, not {right.shape}"
            worst = difference(rows, right)
            if not worst <= tolerance:
                return f"{how}, {len(right)} rows: {worst:.2g}"
    return ""


def difference(rows, right) -> float:
    return float(np.abs(rows - right).max() / (float(right.std()) if right.size > 8 else 1.0))  # or few scores


def as_chosen(texts: list[int], made: dict) -> str:
    wrong = made["greedy"] and made["margin"] > MARGIN and texts != made["greedy"]
    return f"tokens {texts}, not {made['greedy']}" if wrong else ""


def nearer(sides: Sides, config: dict, place: str, given: list[dict], found: list, wanted: list) -> tuple[bool, str]:
    """Whether every text's numbers are as near as those of transformers to what it computes in float64; the errors."""
    made = sides.theirs.ask(do="exact", config=config, folder=place, prompts=given)
    if "ok" not in made:
        return False, f"float64: {made['refused']}"
    with np.load(Path(place) / "exact.npz") as file:
        exact = [file[f"logits_{at}"] for at in range(len(given))]
    if any(rows.shape != right.shape for each in found for rows, right in zip(each, exact)):
        return False, "other shapes"
    ours, theirs = (np.array([np.max([difference(rows[at], right) for rows in each]) for at, right in enumerate(exact)])
                    for each in (found, [wanted]))
    return (bool((ours <= np.maximum(TOLERANCE, theirs)).all()),
            f"from float64 {ours.max():.2g}, transformers {theirs.max():.2g}")


def report(lab, found: dict[str, list[dict]]) -> None:
    results = (RIGHT, NEARER, LIKE_PEER, LIKE_THEIRS, WRONG, REFUSED, PASSED)
    counts = {name: collections.Counter(row["result"] for row in rows) for name, rows in found.items()}
    lab.table(["family", *results], [[name, *(count[kind] for kind in results)] for name, count in counts.items()]
              + [["all", *(sum(count[kind] for count in counts.values()) for kind in results)]])
    lab.claim("Nothing was wrong.", not any(count[WRONG] for count in counts.values()), "Some variants were wrong.")
    for kind, title in ((WRONG, "Wrong"), (REFUSED, "Refused by numflow"), (LIKE_THEIRS, "Not as llama.cpp has it"),
                        (LIKE_PEER, "Not as transformers has it")):
        rows = [(name, row) for name, each in found.items() for row in each if row["result"] == kind]
        if rows:
            lab.heading(title)
            lab.table(["family", "number", "config.json", "changes", "result"],
                      [[name, row["number"], " ".join(["saved" if row["saved"] else "as asked", row["form"]]),
                        f"`{json.dumps(row['changes'])}`", row["line"].replace("|", "/")] for name, row in rows])
    said = collections.Counter(row["line"].split(":")[0] for rows in found.values() for row in rows
                               if row["result"] == PASSED)
    if said:
        lab.heading("Passed over")
        lab.table(["reason", "variants"], said.most_common(12))

"""Divergence of quantised language models from their own weights, against bits per weight, beside llama.cpp's types."""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from numflow.engine.quantise.sensitivity import MatrixGroup, allocate
from numflow.errors import NumflowError
from numflow.lab import style
from numflow.quant.layout import ROW_SCHEMES
from numflow.quant.recipe import KEEP

from . import drawing, mixing, outputs, peer

PLAIN = ("q3h", "q4")
PEERS = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "Q4_0 pure")
INFERFLOW = ("q3h_b64t1", "q4_b32t1a")
TARGETS = (2.75, 3.25, 3.75, 5.5)
_PROTOCOL = """The base of each model is its own weights, decoded to float32. Divergence is measured on the first
{chunks} windows of 512 tokens of WikiText-2's test split, at one token of {every}. Calibration uses
{calibration_chunks} windows of 512 tokens from the second half of the same file, from articles that no measured window
contains (the train split is not available). llama.cpp's importance matrix is made from the same text, with its own
program, from the same weights in float32. All models run in numflow with float32 arithmetic, so only the weights
differ. numflow's calibrated schemes use error feedback (GPTQ-style), or importances where there is no second moment.
One scheme is applied to every matrix, including the token embeddings. "auto" is the choice of --target-bpw: schemes by
measured sensitivity, so that all matrices together meet a size. It may leave the token embeddings, which are published
as Q8_0, unchanged; most of llama.cpp's types do so too, and lose nothing there. Matrices of the layers must change
here, although --target-bpw would allow them to stay: otherwise every size above that of the published file would be
that file. KL is in nats per token, with the standard error over windows."""
TOGETHER = 8  # models that run beside the base at a time
CALIBRATED = ("numflow", "numflow, auto")


@dataclass(frozen=True)
class Candidate:
    """A model to measure; `make` creates and returns its file."""

    name: str
    family: str
    make: Callable[[], Path] = field(repr=False)
IDENTICAL = 1e-5  # nats per token, below which a file holds the base's own numbers


def frontier(lab, places):
    """KL and perplexity on held-out text, for each language model and all its quantised forms."""
    names = [name for name in places["language_models"].split(",") if name]
    lab.heading("Language models: divergence against size")
    if not names:
        lab.text("Left out: no language model was named (option `language_models`; the quick form names none).")
        return
    if not places["text"]:
        lab.text("Left out: WikiText-2 was not available (option `text`).")
        return
    text = Path(places["text"]).read_text(encoding="utf-8")
    lab.text(_PROTOCOL.format(**lab.options).replace("\n", " "))
    for name in names:
        try:
            _model(lab, places, name, text)
            if not lab.options["merge"]:
                lab.write()
        except NumflowError as error:
            lab.text(f"`{Path(name).name}` is left out: {error}".replace(name, Path(name).name))
    if lab.results.get("frontier"):
        lab.heading("All language models")
        picture(lab, lab.results["frontier"])


def _model(lab, places, name: str, text: str) -> None:
    from numflow.engine.quantise.calibrate import calibrate
    from numflow.network.quantise.calibration import read_calibration
    from numflow.registry import resolve

    source, name, chunks = resolve(name), Path(name).name, lab.options["calibration_chunks"]
    with _work(places["keep"], name) as folder:
        work = Path(folder)
        imatrix = work / "calibration.safetensors"
        if not imatrix.exists():
            lab.say(f"{name}: calibrating")
            calibrate(source, text[len(text) // 2:], 512, chunks).write(imatrix)
        calibration = read_calibration(imatrix)
        quantiser = peer.Quantiser(places["llama_cpp"], source, work)
        candidates = _candidates(lab, name, source, work, calibration, quantiser, text)
        rows = _measure(lab, name, source, work, candidates, text)
        lab.results.setdefault("frontier", {})[name] = rows
        _report(lab, name, rows, _kinds(source))
        if not late(lab) or (work / outputs.ERRORS).exists():
            outputs.output_error(lab, peer.library(places["llama_cpp"]), name, source, work, calibration)


def _work(keep: str, name: str):
    """The folder of a model's intermediate files; one that goes afterwards, unless it is to be kept."""
    if not keep:
        return tempfile.TemporaryDirectory()
    folder = Path(keep) / name
    folder.mkdir(parents=True, exist_ok=True)
    return contextlib.nullcontext(folder)


def _candidates(lab, name, source, work, calibration, quantiser, text) -> list[Candidate]:
    """All measurements of one model, the most important first."""
    files, plain = (mixing.Files(source, work, known) for known in (calibration, None))
    peers = _peers(lab, name, quantiser, text)
    groups, costs = outputs.sensitivity(lab, name, source, work, calibration)
    groups = [_offered(group) for group in groups]
    sizes: list[float] = []
    for _, bits in sorted(peers, key=lambda pair: pair[1]):  # equals are compared
        if not any(0.97 * bits < size <= bits for size in sizes):
            sizes.append(float(np.floor(bits * 100) / 100))

    def auto(bits: float) -> Candidate:
        chosen = {tensor: scheme for group, scheme in zip(groups, allocate(groups, costs, bits))
                  for tensor in group.tensors if scheme != KEEP}
        return Candidate(f"auto {bits:g}", "numflow, auto", partial(files.mixed, f"auto-{bits:g}", chosen))

    return [*map(auto, sizes), *(candidate for candidate, _ in peers),
            *(Candidate(scheme, "numflow", partial(files.whole, scheme)) for scheme in ROW_SCHEMES),
            *map(auto, TARGETS),
            *(Candidate(f"{s} plain", "numflow, not calibrated", partial(plain.whole, s)) for s in PLAIN),
            *(Candidate(s, "Inferflow", partial(plain.whole, s)) for s in INFERFLOW)]


def _offered(group: MatrixGroup) -> MatrixGroup:
    """The group without the choice KEEP, except for token embeddings, the output matrix, or if KEEP is the only one."""
    if group.modules[0] in ("token_embd", "output") or len(group.sizes) == 1:
        return group
    return replace(group, sizes={name: size for name, size in group.sizes.items() if name != KEEP})


def _peers(lab, name, quantiser, text) -> list[tuple[Candidate, float]]:
    """llama.cpp's types with their bits per weight."""
    from numflow import formats, network

    if not quantiser.there:
        lab.text(f"`{name}`: llama.cpp's types are left out: no llama-quantize, or the model is no GGUF file.")
        return []
    lab.say(f"{name}: llama.cpp's importance matrix")
    if quantiser.imatrix(text[len(text) // 2:], lab.options["calibration_chunks"]) is None:
        lab.text(f"`{name}`: llama-imatrix was not found; llama.cpp's types are made without an importance matrix.")
    found: list[tuple[Candidate, float]] = []
    contents: dict[str, str] = {}
    for kind in PEERS:
        lab.say(f"{name}: llama.cpp's {kind}")
        path = quantiser.model(kind)
        checkpoint = formats.open_checkpoint(path)
        content = _content(checkpoint)
        if content in contents:
            lab.text(f"`{name}`: llama.cpp's {kind} has the same tensors as its {contents[content]}.")
            continue
        contents[content] = kind
        bits = network.bits_per_weight(network.build(network.choose_spec(checkpoint), checkpoint), checkpoint)
        found.append((Candidate(kind, "GGUF", partial(Path, path)), bits))
    return found


def _content(checkpoint) -> str:
    """A hash of all tensors."""
    found = hashlib.sha256()
    for name, tensor in sorted(checkpoint.tensors.items()):
        found.update(f"{name} {tensor.type.name} {tensor.shape}".encode())
        found.update(np.ascontiguousarray(tensor.raw()).data)
    return found.hexdigest()


def _measure(lab, name, source, work: Path, candidates: list[Candidate], text: str) -> list[dict]:
    """Some candidates at a time, beside one run of the base; what `work` has rows of is not measured again."""
    import numflow
    from numflow.engine.measure.divergence import divergences

    kept = work / "rows.json"
    rows = json.loads(kept.read_text()) if kept.exists() else []
    rows = [row for row in rows if (row["chunks"], row.get("every")) == (lab.options["chunks"], lab.options["every"])]
    candidates = [c for c in candidates if c.name not in {row["name"] for row in rows}]
    with numflow.load(source, activations="f32", progress=False) as base:
        for first in range(0, len(candidates), TOGETHER):
            models, some = {}, candidates[first:first + TOGETHER]
            if late(lab):
                lab.text(f"`{name}`: not measured, because the time limit was reached: "
                         f"{', '.join(c.name for c in candidates[first:])}.")
                break
            for c in some:
                lab.say(f"{name}: {c.name}")
                models[c.name] = numflow.load(c.make(), activations="f32", progress=False)
            found = divergences(models, base, text, min(512, base.context), lab.options["chunks"],
                                every=lab.options["every"])
            for c in some:
                types = sorted({t for w in models[c.name].network.weights.values() for t in w.types} - {"F32"})
                rows.append({"name": c.name, "family": c.family, "bits": models[c.name].bits_per_weight,
                             "types": types, "every": lab.options["every"], **found[c.name]})
                models[c.name].close()
                lab.say(f"{name}: {c.name} {rows[-1]['bits']:.3f} bits, KL {rows[-1]['kl']['mean']:.5f}")
            kept.write_text(json.dumps(rows))
    return rows


def late(lab) -> bool:
    """Whether the time limit forbids further long runs."""
    return 0 < 60 * lab.options["minutes"] < lab.seconds


def _kinds(path: Path) -> list[str]:
    """The types of a file's matrices, as rows of results have them."""
    from numflow import formats, network

    checkpoint = formats.open_checkpoint(path)
    built = network.build(network.choose_spec(checkpoint), checkpoint)
    return sorted({kind for weight in built.weights.values() for kind in weight.types} - {"F32"})


def _report(lab, name, rows, shipped):
    lab.heading(f"{name}: quantised, on WikiText-2")
    base = rows[0]["base_perplexity"]
    lab.text(f"{rows[0]['tokens']} tokens in {rows[0]['chunks']} windows; perplexity of the base {base:.3f}.")
    rows = sorted(rows, key=lambda r: r["bits"])
    lab.table(["name", "family", "bits", "KL", "±", "median", "99.9 %", "max", "same top", "perplexity"],
              [[r["name"], r["family"], f"{r['bits']:.4f}", f"{r['kl']['mean']:.5f}", f"{r['kl']['stderr']:.5f}",
                f"{r['kl']['median']:.5f}", f"{r['kl']['p99.9']:.3f}", f"{r['kl']['max']:.3f}",
                f"{100 * r['same_top']:.2f} %", f"{r['perplexity']:.3f}"] for r in rows])
    _verdict(lab, name, rows, shipped)


def _verdict(lab, name, rows, shipped):
    """Each of llama.cpp's types beside our best that is no larger. shipped: types of the file that the base is."""
    ours = [r for r in rows if r["family"] in CALIBRATED]
    table, lost, same = [], [], []
    for theirs in sorted((r for r in rows if r["family"] == "GGUF"), key=lambda r: r["bits"]):
        fitting = [r for r in ours if r["bits"] <= theirs["bits"] + 1e-6]
        best = min(fitting, key=lambda r: r["kl"]["mean"], default=None)
        won = best is not None and best["kl"]["mean"] < theirs["kl"]["mean"]
        if not won:
            (same if theirs["types"] == shipped else lost).append(theirs["name"])
        table.append([theirs["name"], f"{theirs['bits']:.3f}", f"{theirs['kl']['mean']:.5f}",
                      ", ".join(theirs["types"]), *((best["name"], f"{best['bits']:.3f}", f"{best['kl']['mean']:.5f}",
                      best["kl"]["mean"] / max(theirs["kl"]["mean"], 1e-9)) if best else (None,) * 4),
                      "yes" if won else "shipped" if theirs["name"] in same else "no"])
    if not table:
        return
    lab.text("llama.cpp's types, each beside numflow's best calibrated scheme of the same size or smaller. "
             "llama.cpp's K types have blocks of 256, which do not divide most rows of these models. llama-quantize "
             "then uses a larger type; the columns of types and bits show it.")
    lab.table(["llama.cpp", "bits", "KL", "types", "numflow", "bits", "KL", "ratio", "lower"], table)
    if same:
        lab.text(f"{', '.join(same)} is the type of the published file: its grid represents the base's numbers almost "
                 f"exactly, which says nothing about other weights. numflow would leave such a file unchanged "
                 f"(--target-bpw reports that the file already has no more bits).")
    if lost:
        lab.text(f"Not lower at: {', '.join(lost)}. The base's numbers were quantised before. A type whose grid "
                 f"contains the published grid (Q8_0 that of the token embeddings; Q5_1, which replaces Q5_K_M, that "
                 f"of Q4_1) loses nothing there; numflow's grids are different.")
    lab.results.setdefault("verdict", {})[name] = {"lost": lost, "shipped": same, "compared": len(table)}


def picture(lab, models):
    """KL against bits, one panel per model; a line joins the models of --target-bpw."""
    made, axes = style.figure(1, len(models), (5.6 * len(models), 5.6))
    models = {name: [r for r in rows if r["kl"]["mean"] > IDENTICAL] for name, rows in models.items()}
    axes = np.ravel(axes)
    for axis, (name, rows) in zip(axes, models.items()):
        for family in drawing.STYLES:
            found = sorted((r["bits"], r["kl"]["mean"], r["kl"]["stderr"]) for r in rows if r["family"] == family)
            if found:
                drawing.points(axis, family, *zip(*found), line=family == "numflow, auto",
                               label="llama.cpp, its importance matrix" if family == "GGUF" else None)
        axis.set(xlabel=f"bits per weight, all matrices of {name}", yscale="log",
                 ylabel="" if axis is not axes[0] else "KL divergence from the base, nats a token (logarithmic)")
        axis.legend(loc="lower left", fontsize=8)
    style.layout(made)
    for axis, rows in zip(axes, models.values()):
        drawing.names(axis, [(r["bits"], r["kl"]["mean"], r["name"].removeprefix("auto "), r["family"]) for r in rows])
    lower = compared = 0
    for rows in models.values():
        own = [row for row in rows if row["family"] in CALIBRATED]
        for other in (row for row in rows if row["family"] == "GGUF"):
            smaller = [row["kl"]["mean"] for row in own if row["bits"] <= other["bits"]]
            compared, lower = compared + bool(smaller), lower + bool(smaller and min(smaller) < other["kl"]["mean"])
    lab.figure(made, "kl_against_bits", f"numflow diverges less than {lower} of {compared} llama.cpp types of its size",
               "WikiText-2", part="frontier",
               caption="Lower and further left is better; bars are standard errors; names of `numflow, auto` are the "
                       "target sizes of --target-bpw; candidates that equal the base are left out")

"""`numflow quantize`, `numflow verify` and `numflow imatrix`."""

import sys
from functools import reduce
from pathlib import Path
from typing import Annotated

import typer

from numflow.cli import options
from numflow.cli.inputs import read_text
from numflow.cli.running import asked_name, print_json
from numflow.cli.tables import print_fields, print_table, printable
from numflow.errors import FormatError, RequestError

Target = Annotated[Path, typer.Argument(metavar="DST", show_default=False, help="The file to write.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")]
Context = Annotated[int | None, typer.Option(metavar="N", show_default="512", help="Tokens per chunk of the "
                                             "calibration text.")]
Chunks = Annotated[int | None, typer.Option(metavar="N", show_default="all", help="Number of chunks of the calibration "
                                            "text.")]


def quantize(
    source: Annotated[str, typer.Argument(metavar="SRC", show_default=False, help="A model: a file, a folder, a name "
                                          "from `numflow models`, or ORG/NAME.")],
    target: Target,
    weights: Annotated[str | None, typer.Option("--weights", metavar="NAME", show_default=False, help="Type of the "
                       "quantised weights: a scheme (q2, q3, q3h, q4, q5, q6, q8, or a full name of Inferflow's), a "
                       "scheme with a share of outliers in float (q3h+0.5%), a preset (q4-mix), a GGUF type (Q8_0, "
                       "Q4_0, Q4_K, ...) or a GGUF mix (Q4_K_M, Q5_K_S, IQ4_XS, ...). In a GGUF file q8 means Q8_0 "
                       "and q4 means Q4_0.")] = None,
    recipe: Annotated[Path | None, typer.Option("--recipe", metavar="FILE", show_default=False, help="TOML file with "
                      "a scheme for each tensor; --weights is then the scheme of all other tensors.")] = None,
    imatrix: Annotated[Path | None, typer.Option("--imatrix", metavar="FILE", show_default=False, help="Importance "
                       "matrix: a file of `numflow imatrix` or of GGML's programs, or a text to calibrate on.")] = None,
    calibration: Annotated[bool, typer.Option("--calibration/--no-calibration", help="Without --imatrix, for schemes "
                           "below 6 bits: calibrate on text that the model generates.")] = True,
    target_bpw: Annotated[float | None, typer.Option("--target-bpw", metavar="BITS", show_default=False, help="Choose "
                          "the scheme of every matrix by measured sensitivity, for this average of bits per weight. "
                          "Schemes of --recipe stay; sensitivity is measured with the scheme of --weights.")] = None,
    context: Context = None,
    chunks: Annotated[int | None, typer.Option(metavar="N", show_default="32", help="Number of chunks of the "
                                               "calibration text.")] = None,
    spec: options.SpecFile = None,
    threads: options.Threads = None,
    force: Force = False,
    json: options.Json = False,
    offline: options.Offline = False,
) -> None:
    """Quantise a model and write it to one file.

    The file is complete (`numflow generate -m DST` runs it) and contains a report of the quantisation. If DST ends in
    .gguf, a GGUF file for other programs is written, with GGUF types or mixes such as Q8_0 and Q4_K_M.
    """
    from numflow import formats, registry
    from numflow.engine.quantise.export import export_gguf
    from numflow.engine.quantise.quantize import check_target
    from numflow.engine.quantise.quantize import quantize as run
    from numflow.engine.quantise.sensitivity import FREE, automatic_recipe, check_bits
    from numflow.network.gguf.mixes import named
    from numflow.network.quantise.quantise import already_quantised
    from numflow.quant.recipe import KEEP, Recipe, read_recipe
    from numflow.registry.progress import megabytes, reporter

    if weights is None and recipe is None and target_bpw is None:
        raise RequestError("say what to quantise to with --weights, --recipe or --target-bpw")
    if target_bpw is not None and imatrix is None and not calibration:
        raise RequestError("--target-bpw measures the sensitivity of tensors: leave out --no-calibration, or give a "
                           "text or a calibration with --imatrix")
    if imatrix is not None and not calibration:
        raise RequestError("--imatrix and --no-calibration contradict each other: leave one out")
    if imatrix is None and (context, chunks) != (None, None):
        raise RequestError("--context and --chunks are for a calibration text: give the text with --imatrix")
    as_gguf = target.suffix.lower() == ".gguf"
    if as_gguf and target_bpw is not None:
        raise RequestError(f"{target}: --target-bpw does not write GGUF files; name a mix with --weights instead")
    # All arguments are checked before the calibration, which takes long.
    given = [named(name, as_gguf) if target_bpw is None else read_recipe(name)
             for name in (recipe, weights) if name is not None]
    chosen = reduce(Recipe.over, given) if given else FREE
    if target_bpw is not None and chosen.weights == KEEP:  # a recipe file without a scheme for the other tensors
        chosen = chosen.over(FREE)
    path = registry.resolve(source, offline=offline)
    checkpoint = formats.open_checkpoint(path)
    check_target(target, checkpoint, force)
    if lost := already_quantised(checkpoint):
        print(printable(f"warning: {lost}"), file=sys.stderr, flush=True)
    if target_bpw is not None:
        check_bits(path, target_bpw, spec, chosen)
    progress = reporter()
    try:
        found = None if imatrix is None else _calibration(path, imatrix, context, chunks, spec, progress,
                                                            moments=not as_gguf)
        own = _OwnText(checkpoint, spec, threads, progress, not as_gguf) if calibration else None
        if target_bpw is not None:
            found = found or own()
            if found is None:
                raise RequestError(f"--target-bpw measures the sensitivity of tensors: {own.why}; give a text or a "
                                   "calibration with --imatrix")
            progress.stage("measuring sensitivity", 0)
            chosen = automatic_recipe(path, target_bpw, found, spec,
                                      lambda done, total: progress.part(done, total, "group of matrices"), chosen)
        progress.stage(f"quantising to {chosen.name}", 0)
        if as_gguf:
            report = export_gguf(checkpoint, target, chosen, spec, lambda done, total: progress.done(done), force,
                                 found, threads, own)
        else:
            report = run(checkpoint, target, chosen, found, spec, threads,
                         lambda done, total: progress.done(done), force, own)
    finally:
        progress.close()
    if json:
        print_json(report)
        return
    _print_kinds(report)
    for pattern in report["idle"]:
        print(f"the recipe's pattern {pattern!r} fits no matrix")
    if report["uncalibrated"]:
        print(printable(report["uncalibrated"]))
    if report["calibration"] is None and _could_be_calibrated(report):
        why = f" ({own.why})" if own is not None and own.why else ""
        print(f"quantised without calibration{why}: at so few bits --imatrix TEXT gives a much better model of the "
              "same size")
    elif report["calibration"] is not None and "text" in report["calibration"]:
        print(f"calibrated on {report['calibration']['tokens']} tokens, {report['calibration']['text']}")
    unquantised = {name: why for name, why in report["kept"].items() if why}
    for name, why in unquantised.items():
        print(printable(f"{name} is not quantised: {why}"))
    bits = f", {report['bits_per_weight']:.4f} bits per weight of its quantised matrices" if report["weights"] else ""
    print(f"{target}: {megabytes(target.stat().st_size)}{bits}")


def verify(
    model: Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="A file that `numflow quantize` has "
                                          "written.")],
    against: Annotated[str | None, typer.Option("--against", metavar="SRC", show_default=False, help="The original "
                       "model: check its hash, and the quantisation error of every tensor, too.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FIGURE", show_default=False, help="SVG or PNG file "
                                              "for a figure of every tensor's error.")] = None,
    json: options.Json = False,
    offline: options.Offline = False,
) -> None:
    """Check a quantised model against the report in its file.

    A GGUF file contains no report: use --against to compare its tensors with the original model.
    """
    from numflow import registry
    from numflow.engine.quantise.verify import verify as run

    report = run(model, None if against is None else registry.resolve(against, offline=offline))
    if plot is not None:
        from numflow.lab.errors_figure import draw_errors

        draw_errors(report, model.name, plot)
    if json:
        print_json(report)
        return
    _print_kinds(report)
    print_fields([("recipe", report["recipe"]["name"]), ("bits per weight", report["bits_per_weight"]),
                  ("source", ", ".join(file["name"] for file in report["source"]["files"])),
                  ("checked", "sizes and hashes" + (", source and errors" if against else ""))])


def imatrix(
    text: Annotated[str, typer.Option("--text", metavar="FILE", show_default=False, help="The calibration text; - is "
                                      "standard input.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", show_default=False, help="The file to write. A "
                             "name that ends in .gguf or .dat gives the imatrix format of GGML's programs.")],
    model: options.Model = None,
    context: Context = None,
    chunks: Chunks = None,
    moments: Annotated[bool, typer.Option(help="Also store the second moments of the inputs: quantisation gets better, "
                                          "the file much larger.")] = True,
    spec: options.SpecFile = None,
    offline: options.Offline = False,
) -> None:
    """Measure the importance matrix of a model on a text.

    The importance of a matrix's input column is its mean squared activation. The file is for --imatrix of `quantize`
    and of the commands that run models.
    """
    from numflow import registry
    from numflow.engine.quantise.calibrate import is_imatrix_name, save
    from numflow.registry.progress import megabytes, reporter

    _check_out(out)
    moments = moments and not is_imatrix_name(out)
    path = registry.resolve(asked_name(model, offline), offline=offline)
    progress = reporter()
    try:
        found = _calibrate(path, read_text(text), context, chunks, moments, spec, progress)
    finally:
        progress.close()
    save(found, out, path, spec)
    print(f"{out}: {len(found.importances)} matrices, {found.facts['tokens']} tokens, {megabytes(out.stat().st_size)}")


def _check_out(out: Path) -> None:
    """Refuse a path that cannot be written, or an existing file that is no calibration."""
    from numflow.formats.folder import made_here
    from numflow.formats.writer import check_place, found
    from numflow.network.quantise.calibration import KIND
    from numflow.network.quantise.imatrix_files import read_imatrix

    check_place(out)
    if not found(out) or (out.is_file() and made_here(out) == KIND):
        return
    try:
        is_imatrix = out.is_file() and bool(read_imatrix(out))
    except FormatError:
        is_imatrix = False
    if not is_imatrix:
        raise RequestError(f"{out} is there already, and is no calibration")


def _calibration(model: Path, file: Path, context: int | None, chunks: int | None, spec: str | None, progress,
                 moments: bool):
    """The calibration in a file, or of a run over the text in the file."""
    from numflow.network.quantise.calibration import is_calibration, read_calibration

    if is_calibration(file):
        if (context, chunks) != (None, None):
            raise RequestError(f"{file} is a calibration already: --context and --chunks have no effect")
        return read_calibration(file)
    return _calibrate(model, read_text(file), context, 32 if chunks is None else chunks, moments, spec, progress)


class _OwnText:
    """Calibrates a model on text that it generates itself.

    why: the reason why a call has returned None.
    """

    def __init__(self, checkpoint, spec: str | None, threads: int | None, progress, moments: bool):
        self._checkpoint, self._spec, self._threads = checkpoint, spec, threads
        self._progress, self._moments, self.why = progress, moments, ""

    def __call__(self):
        from numflow import network
        from numflow.engine.calibration.own_text import calibration_or_why
        from numflow.engine.load import model_of

        found, self.why = calibration_or_why(
            model_of, self._checkpoint, network.choose_spec(self._checkpoint, self._spec), moments=self._moments,
            threads=self._threads, reporter=self._progress)
        self._progress.stage("quantising", 0)
        return found


def _calibrate(model: Path, text: str, context: int | None, chunks: int | None, moments: bool, spec: str | None,
               progress):
    from numflow.engine.quantise.calibrate import calibrate

    progress.stage("calibrating", 0)
    context = 512 if context is None else context
    return calibrate(model, text, context, chunks, moments,
                     lambda done, total: progress.part(done, total, "window"), spec=spec)


def _could_be_calibrated(report: dict) -> bool:
    """Whether any matrix has at most 4 bits per weight and a scheme that uses a calibration."""
    from math import prod

    from numflow.formats.gguf_writer import SEARCHED
    from numflow.quant import SCHEMES, takes_calibration

    helped = {*SEARCHED, *(name for name, scheme in SCHEMES.items() if takes_calibration(scheme))}
    return any(8 * row["bytes"] <= 4 * prod(row["shape"]) and row["type"] in helped for row in report["tensors"])


def _print_kinds(report: dict) -> None:
    """Print a row per type: tensors, weights, bits per weight, and the errors over all its weights."""
    import numpy as np

    table: dict[str, list[tuple[int, int, float]]] = {}
    for row in report["tensors"]:
        if "error" in row:
            size = int(np.prod(row["shape"]))
            table.setdefault(row["type"], []).append((size, row["bytes"], row["error"]))
    rows = []
    for kind, found in table.items():
        sizes, bytes_, errors = map(np.array, zip(*found))
        rows.append((kind, len(found), f"{sizes.sum():,}", f"{8 * bytes_.sum() / sizes.sum():.4f}",
                     f"{np.sqrt(np.average(errors ** 2, weights=sizes)):.4f}", f"{errors.max():.4f}"))
    print_table(["type", ">tensors", ">weights", ">bits", ">error", ">largest"], rows)

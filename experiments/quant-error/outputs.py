"""Effect of weight errors on the outputs of a layer, and of a layer's errors on the predictions of the model."""

import json

import numpy as np

from numflow.errors import NumflowError
from numflow.lab import style
from numflow.quant import decode, encode, find
from numflow.quant.layout import ROW_SCHEMES

from . import peer

INFERFLOW = ("q2_b32t1b", "q3_b32t1b", "q3h_b64t1", "q4_b32t1a", "q8_b32t2")
MATRICES = 7
ERRORS = "outputs.json"  # in the folder of intermediate files
GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # whose blocks divide every row


def sensitivity(lab, name, source, work, calibration):
    """Groups of matrices and the divergence that quantising each to q3 alone causes; a heat map of it.

    Results in the folder `work` are not measured again.
    """
    from numflow import formats, network
    from numflow.engine.quantise.sensitivity import groups, sensitivities

    checkpoint = formats.open_checkpoint(source)
    spec = network.choose_spec(checkpoint)
    found = groups(network.build(spec, checkpoint, fuse=False), checkpoint, calibration)
    samples = [np.asarray(ids, np.int32) for ids in calibration.facts["sample"]]

    def progress(done: int, total: int) -> None:
        if done % 8 == 0:
            lab.say(f"{name}: sensitivity {done} of {total}")

    kept = work / "sensitivity.json"
    if kept.exists():
        costs = json.loads(kept.read_text())
    else:
        costs = sensitivities(spec, checkpoint, found, calibration, samples, progress)
        kept.write_text(json.dumps(costs))
    kinds = list(dict.fromkeys(_kind(group.modules[0]) for group in found))
    table: dict[str, list[float]] = {kind: [] for kind in kinds}
    for group, cost in zip(found, costs):
        table[_kind(group.modules[0])].append(cost)
    lab.results.setdefault("sensitivity", {})[name] = table
    sensitivity_figure(lab, name, table)
    return found, costs


def sensitivity_figure(lab, name: str, table: dict[str, list[float]]) -> None:
    """Divergence by kind of matrix and part of the depth, as a heat map with its numbers."""
    depth, kinds = max(map(len, table.values())), list(table)
    made, axis = style.figure(size=(7.2, 0.34 * len(kinds) + 1.6))
    values = np.array([table[kind] + [np.nan] * (depth - len(table[kind])) for kind in kinds])
    axis.imshow(np.log10(np.maximum(values, 1e-9)), aspect="auto", cmap="Blues")
    middle = np.nanmean(np.log10(np.maximum(values, 1e-9)))
    for row, costs in enumerate(table.values()):
        for column, cost in enumerate(costs):
            axis.text(column, row, f"{cost:.4f}", ha="center", va="center", fontsize=8,
                      color="white" if np.log10(max(cost, 1e-9)) > middle + 0.5 else "black")
    axis.set(xlabel=f"part of the depth, of {depth} (numbers: divergence in nats when only these are q3)",
             xticks=range(depth), yticks=range(len(kinds)), yticklabels=kinds)
    axis.grid(visible=False)
    worst = max((kind for kind in kinds if len(table[kind]) > 1), key=lambda kind: max(table[kind]))
    least = min((kind for kind in kinds if len(table[kind]) > 1), key=lambda kind: max(table[kind]))
    lab.figure(made, f"sensitivity_{name}", f"{worst} needs bits most: {max(table[worst]) / max(table[least]):.0f} "
               f"times the divergence of {least}", name, part="frontier", left=1.4,
               caption=f"{name}: measured sensitivity of the matrices to few bits")


def _kind(module: str) -> str:
    return ".".join(word for word in module.split(".") if not word.isdigit()).removeprefix("blk.")


def output_error(lab, library, name, source, work, calibration) -> None:
    """Error of matrices weighted by their inputs: sqrt(tr(E M E^T) / tr(W M W^T)), with M the inputs' second moment.

    Results in the folder `work` are not measured again.
    """
    kept = work / ERRORS
    if not kept.exists():
        kept.write_text(json.dumps(_output_errors(lab, library, name, source, calibration)))
    rows = json.loads(kept.read_text())
    lab.results.setdefault("output_error", {})[name] = rows
    lab.heading(f"{name}: error weighted by activations")
    lab.text(f"Relative error of the outputs of the {MATRICES} matrices of a middle layer, for inputs with the "
             f"calibration's second moment M: sqrt(tr(E M E^T) / tr(W M W^T)). Importances are the diagonal of M; "
             f"error feedback uses all of M.")
    lab.table(["scheme", "bits", "error of outputs"], sorted(rows, key=lambda row: float(row[1])))


def _output_errors(lab, library, name, source, calibration) -> list[list[str]]:
    """(label, bits, error) of each scheme."""
    from numflow import formats

    checkpoint = formats.open_checkpoint(source)
    names = [n for n in calibration.shared if checkpoint.tensors[n].rows < 10_000]
    names = names[len(names) // 2:][:MATRICES]  # a layer in the middle
    matrices = [(checkpoint.tensors[n].f32(), calibration.moment(n)) for n in names]
    rows = []
    for label, bits, coder in _coders(library):
        lab.say(f"{name}: outputs of {label}")
        try:
            sums = np.sum([_outputs(x, coder(x, moment), moment) for x, moment in matrices], axis=0)
        except NumflowError:  # blocks do not divide the rows
            continue
        rows.append([label, f"{bits(matrices[0][0].shape[1]):.4f}", f"{np.sqrt(sums[0] / sums[1]):.4f}"])
    return rows


def _coders(library):
    """(label, columns -> bits, (x, moment) -> decoded x)"""
    for name in ROW_SCHEMES:
        scheme = find(name)
        for label, arguments in ((name, lambda m: {}),
                                 (f"{name}, importances", lambda m: {"importance": np.diagonal(m)}),
                                 (f"{name}, feedback", lambda m: {"moment": m})):
            yield label, scheme.bits_per_weight, lambda x, m, s=scheme, a=arguments: decode(
                encode(x, s, **a(m)), s, x.shape[1])
    for name in INFERFLOW:
        scheme = find(name)
        yield name, scheme.bits_per_weight, lambda x, m, s=scheme: decode(encode(x, s), s, x.shape[1])
    for name in GGUF if library else ():
        yield f"{name}, importances", lambda columns, b=peer.TYPES[name]: b, lambda x, m, n=name: peer.roundtrip(
            library, x, n, np.diagonal(m))


def _outputs(x, y, moment) -> tuple[float, float]:
    return tuple(float(np.sum((part @ moment) * part, dtype=np.float64)) for part in (y - x, x))

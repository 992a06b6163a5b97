"""Recipe for a target size: schemes chosen by the sensitivity of each part of a model (`numflow quantize
--target-bpw`).

Matrices are grouped by module and depth. Each group in turn is quantised to PROBE, and the divergence of the model's
predictions from the original predictions is measured on a sample of the calibration text (for an encoder without head:
the squared distance of hidden states, which scales the same way). Divergence is proportional to the squared error of
the weights, which is measured for each scheme on some rows of each matrix; so one measurement of divergence predicts
the divergence of every scheme. The choice with the least predicted sum that meets the size is taken (a knapsack
problem). A matrix that is quantised already may also stay unchanged: quantising it again would add an error and save
nothing. Matrices named by a recipe get its scheme; the other matrices get the rest of the size.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from numflow import formats, network
from numflow.engine.measure.divergence import mean_divergence
from numflow.engine.model import Model
from numflow.errors import RequestError
from numflow.formats.checkpoint import Tensor
from numflow.formats.types import tensor_type
from numflow.network.quantise.calibration import Calibration
from numflow.network.quantise.quantise import check_calibration, plan_of, quantised
from numflow.network.quantise.transposed import transposed
from numflow.quant import ROW_SCHEMES, decode, encode
from numflow.quant.recipe import AUTOMATIC, KEEP, Recipe

PROBE = "q3"
FREE = Recipe("free", PROBE)  # a recipe without rules
DEPTHS = 4
_BINS = 20_000     # resolution of sizes when schemes are chosen
SAMPLED_ROWS = 32  # rows of each matrix on which errors of schemes are measured


@dataclass(frozen=True)
class MatrixGroup:
    """Matrices that get one scheme.

    modules: module names in the network. sizes: bytes by scheme, or KEEP (unchanged).
    errors:  sum of squared errors by scheme, weighted by importance, in any unit.
    """

    tensors: tuple[str, ...]
    modules: tuple[str, ...]
    weights: int
    sizes: Mapping[str, int]
    errors: Mapping[str, float]


def automatic_recipe(path: Path, bits: float, calibration: Calibration, spec: str | Path | None = None,
                     progress: Callable[[int, int], None] = lambda done, total: None, given: Recipe = FREE) -> Recipe:
    """Recipe with at most `bits` bits per weight and the least predicted divergence.

    given: its rules are applied; its default scheme replaces PROBE.

    Raises:
        RequestError: no scheme reaches the size, or the model is smaller already; the calibration has no sample of its
            text, or is of another model; `given` is refused by `check_bits`.
    """
    samples = [np.asarray(ids, np.int32) for ids in calibration.facts.get("sample", ())]
    if not samples:
        raise RequestError("the calibration has no sample of its text: calibrate again with `numflow imatrix`")
    checkpoint = formats.open_checkpoint(path)
    chosen = network.choose_spec(checkpoint, spec)
    checkpoint = transposed(checkpoint, chosen)
    built = network.build(chosen, checkpoint, fuse=False)
    check_calibration(calibration, plan_of(built, checkpoint, given), checkpoint)
    found = groups(built, checkpoint, calibration, given=given)
    check_size(found, bits)
    costs = sensitivities(chosen, checkpoint, found, calibration, samples, progress, given.weights)
    schemes = allocate(found, costs, bits, given.weights)
    if set(schemes) == {KEEP}:
        raise RequestError(f"{checkpoint.path} already has no more than {bits:g} bits per weight")
    rules = tuple((module, scheme) for group, scheme in zip(found, schemes) for module in group.modules)
    return Recipe(f"{AUTOMATIC}{bits:g}", given.weights, rules + given.rules)


def check_bits(path: Path, bits: float, spec: str | Path | None = None, given: Recipe = FREE) -> None:
    """Refuse a size that cannot be met, before anything is measured.

    Raises:
        RequestError: as `check_size`; or the default scheme of `given` is not one of numflow's.
    """
    if given.weights not in ROW_SCHEMES:
        raise RequestError(f"--target-bpw measures with one of {', '.join(ROW_SCHEMES)}; {given.weights!r} is none")
    checkpoint = formats.open_checkpoint(path)
    chosen = network.choose_spec(checkpoint, spec)
    checkpoint = transposed(checkpoint, chosen)
    built = network.build(chosen, checkpoint, fuse=False)
    check_size(groups(built, checkpoint, measure=False, given=given), bits)


def groups(built, checkpoint, calibration: Calibration | None = None, measure: bool = True,
           given: Recipe = FREE) -> list[MatrixGroup]:
    """Groups of quantisable or quantised matrices of a network (built with fuse=False), by module and depth.

    measure: whether to measure errors. given: matrices named by its rules have one scheme only. Matrices that must stay
    unchanged, but count as quantised, have KEEP only.
    """
    plan = plan_of(built, checkpoint, given)
    names = [name for name in plan.modules if name in plan.schemes or checkpoint.tensors[name].type.block > 1]
    layers = [_split_layer(plan.modules[name][0])[1] for name in names]
    table: dict[tuple[str, int, str | None], list[str]] = {}
    for name, layer in zip(names, layers):
        kind, depth = _split_layer(plan.modules[name][0])[0], -1 if layer < 0 else layer * DEPTHS // (max(layers) + 1)
        fixed = given.rule(*plan.modules[name], name) if name in plan.schemes else KEEP
        table.setdefault((kind, depth, fixed), []).append(name)
    found = []
    for (_, _, fixed), names in table.items():
        tensors = [checkpoint.tensors[name] for name in names]
        modules = tuple(module for name in names for module in plan.modules[name])
        sizes = {name: _bytes(tensors, name) for name in ([fixed] if fixed else ROW_SCHEMES)}
        measured = [_errors(tensor, calibration) for tensor in tensors] if measure and not fixed else []
        errors = {name: sum(table[name] for table in measured) for name in sizes}
        if not fixed and all(tensor.type.block > 1 for tensor in tensors):
            sizes[KEEP], errors[KEEP] = _bytes(tensors, KEEP), 0.0
        found.append(MatrixGroup(tuple(names), modules, sum(t.rows * t.columns for t in tensors), sizes, errors))
    return found


def _bytes(tensors: list[Tensor], scheme: str) -> int:
    """Bytes of tensors in a scheme, or unchanged for KEEP."""
    return sum(t.nbytes if scheme == KEEP else t.rows * tensor_type(scheme).row_bytes(t.columns) for t in tensors)


def _errors(tensor: Tensor, calibration: Calibration | None) -> dict[str, float]:
    """Sum of squared errors of each scheme, weighted by importances, estimated from a sample of rows."""
    what = f"a sample of the rows of {tensor.name}"
    rows = np.unique(np.linspace(0, tensor.rows - 1, SAMPLED_ROWS).astype(np.int64))
    x, importance = tensor.f32(rows), None if calibration is None else calibration.importance(tensor.name)
    if importance is not None and importance.ndim == 2:  # one row per expert
        importance = importance[rows * len(importance) // tensor.rows]
    weighted = np.ones(1, np.float32) if importance is None else importance
    found = {}
    for name, scheme in ROW_SCHEMES.items():
        squares = np.square(decode(encode(x, scheme, importance, name=what), scheme, tensor.columns) - x)
        found[name] = float(np.sum(weighted * squares, dtype=np.float64)) * tensor.rows / len(rows)
    return found


def _split_layer(module: str) -> tuple[str, int]:
    """ "dec.blk.7.attn_q" -> ("dec.attn_q", 7); layer -1 for modules outside of layers."""
    words = module.split(".")
    if "blk" not in words[:-1]:
        return module, -1
    index = words.index("blk")
    return ".".join(words[:index] + words[index + 2:]), int(words[index + 1])


def sensitivities(spec, checkpoint, found: list[MatrixGroup], calibration: Calibration, samples: list[np.ndarray],
                  progress: Callable[[int, int], None] = lambda done, total: None, probe: str = PROBE) -> list[float]:
    """For each group, mean divergence of the model's predictions on `samples` if only this group is quantised to
    `probe`; 0 for groups with a single scheme."""
    from numflow.reference.program import Program

    live = replace(checkpoint, tensors=dict(checkpoint.tensors))
    built = network.build(spec, checkpoint)
    program = Program(built, network.WeightSource(built, live))
    plan = plan_of(network.build(spec, checkpoint, fuse=False), checkpoint, Recipe("probe", probe))
    probes = quantised(checkpoint, plan, replace(calibration, moments={}, shared={}))
    with Model(built, program) as model:
        base = [list(_outputs(model, ids)) for ids in samples]
        distance = mean_divergence if "logits" in built.outputs else _mean_distance
        costs = []
        for done, group in enumerate(found, 1):
            if len(group.sizes) == 1:
                costs.append(0.0)
                continue
            _swap_tensors(program, built, live, probes, group)
            costs.append(distance(pair for rows, ids in zip(base, samples) for pair in zip(rows, _outputs(model, ids))))
            _swap_tensors(program, built, live, checkpoint, group)
            progress(done, len(found))
    return costs


def _outputs(model: Model, ids: np.ndarray) -> Iterator[np.ndarray]:
    """Outputs of a model for a text, float32 [n, N] piece by piece: logits, or hidden states without a head."""
    if model.runner.has_encoder:
        yield model.logits(ids, encoder_ids=ids)
    elif "logits" in model.network.outputs:
        yield from (rows for _, rows in model.iter_logits(ids))
    else:
        yield model.hidden(ids)


def _mean_distance(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> float:
    """Mean of |q - p|^2 / |p|^2 over rows p and q; float32 [n, N]."""
    return float(np.mean(np.concatenate([np.sum((q - p) ** 2, axis=1) / np.sum(p ** 2, axis=1) for p, q in pairs])))


def _swap_tensors(program, built, live, source, group: MatrixGroup) -> None:
    """Replace a group's tensors in the program by those of another checkpoint."""
    for name in group.tensors:
        live.tensors[name] = source.tensors[name]
    program.forget(name for name, weight in built.weights.items()
                   if any(part.tensor in group.tensors for part in weight.parts))


def check_size(found: list[MatrixGroup], bits: float) -> None:
    """Refuse a size that cannot be met.

    Raises:
        RequestError: fewer bits than the smallest schemes take, or no matrices at all.
    """
    if all(set(group.sizes) == {KEEP} for group in found):
        raise RequestError("the model has no matrices that could be quantised")
    weights = sum(group.weights for group in found)
    minimum = 8 * sum(min(group.sizes.values()) for group in found) / weights
    if not bits >= minimum:  # true for NaN too
        smallest = dict.fromkeys(min(group.sizes, key=group.sizes.__getitem__) for group in found)
        what = " and ".join("the unquantised matrices" if name == KEEP else name for name in smallest)
        raise RequestError(f"{bits:g} bits per weight are too few: the smallest choice ({what}) takes {minimum:.4f}")


def _pareto(group: MatrixGroup) -> list[str]:
    """Schemes of a group on the Pareto front of size and error, from small to large."""
    options: list[str] = []
    for name in sorted(group.sizes, key=lambda name: (group.sizes[name], group.errors[name])):
        if not options or group.errors[name] < group.errors[options[-1]]:
            options.append(name)
    return options


def allocate(found: list[MatrixGroup], costs: list[float], bits: float, probe: str = PROBE) -> list[str]:
    """Scheme of each group with the least sum of predicted divergences (knapsack by dynamic programming).

    costs: divergence when a group is quantised to `probe`.

    Raises:
        RequestError: fewer bits than the smallest scheme takes.
    """
    check_size(found, bits)
    names = [_pareto(group) for group in found]
    more = [[group.sizes[name] - group.sizes[options[0]] for name in options] for group, options in zip(found, names)]
    spare = bits * sum(group.weights for group in found) / 8
    spare -= sum(group.sizes[options[0]] for group, options in zip(found, names))
    limit = _BINS + len(found)  # sizes are rounded up to bins, so the total may fit even with some more bins
    bins = [[0 if not extra else int(np.ceil(extra / spare * _BINS)) if extra <= spare else limit + 1 for extra in row]
            for row in more]
    predicted = [[cost * group.errors[name] / max(group.errors.get(probe, 0.0), 1e-30) for name in options]
                for group, cost, options in zip(found, costs, names)]
    taken = _knapsack(bins, predicted, limit)
    for capacity in range(limit, _BINS - 1, -1):
        chosen = _backtrack(taken, bins, capacity)
        if sum(row[option] for row, option in zip(more, chosen)) <= spare:
            break
    return [options[option] for options, option in zip(names, chosen)]


def _knapsack(bins: list[list[int]], predicted: list[list[float]], limit: int) -> np.ndarray:
    """uint8 [groups, limit + 1]: option of a group if all groups up to this one may fill so many bins."""
    cost, taken = np.zeros(limit + 1), np.zeros((len(bins), limit + 1), np.uint8)
    for sizes, values, choice in zip(bins, predicted, taken):
        before, cost = cost, np.full(limit + 1, np.inf)
        for option, (size, value) in enumerate(zip(sizes, values)):
            if size <= limit:
                total = before[:limit + 1 - size] + value
                better = total < cost[size:]
                cost[size:][better], choice[size:][better] = total[better], option
    return taken


def _backtrack(taken: np.ndarray, bins: list[list[int]], capacity: int) -> list[int]:
    """Option of each group if all groups together may fill `capacity` bins."""
    chosen = []
    for choice, sizes in zip(taken[::-1], bins[::-1]):
        chosen.append(int(choice[capacity]))
        capacity -= sizes[chosen[-1]]
    return chosen[::-1]

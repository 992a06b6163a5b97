"""Statistics of the inputs of matrices, collected while a model on the reference executor reads windows of token
ids."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from numflow.decoding.sampler import NOT_FINITE
from numflow.errors import NotFiniteError, RequestError
from numflow.network.quantise.calibration import Calibration
from numflow.network.quantise.quantise import matrices
from numflow.ops import Network, Step, View

SAMPLE = 256   # tokens of each of two windows stored with the calibration, to measure sensitivity
WIDEST = 8192  # maximum columns of second moments: a moment of K columns takes 4 K^2 bytes


class Collector:
    """Sums over the inputs of matrices; used as a program's observer.

    network: network of the program. widest: maximum columns of inputs with second moments.
    """

    def __init__(self, network: Network, widest: int):
        self._network, self._widest = network, widest
        self._matrices = matrices(network)
        self._squares: dict[str, np.ndarray] = {}
        self._counts: dict[str, np.ndarray] = {}
        self._products: dict[str, np.ndarray] = {}
        self._shared: dict[str, str] = {}
        self._holders: dict[View, str] = {}  # input whose moment was just added -> the tensor that stores it
        self._expanding = _expanding(network)

    def __call__(self, step: Step, inputs: list[np.ndarray]) -> None:
        """Add the inputs of a step that is about to run."""
        if step.op == "linear":
            self.linear(step, inputs[0])
        elif step.op == "expert_linear":
            self._experts(step, *inputs)
        elif step.op == "head_linear":
            self._heads(step, inputs[0])
        elif step.op == "cache_write" and step.params["cache"] in self._expanding:
            k, prefix = step.inputs[0], self._network.caches[step.params["cache"]].prefix
            self._dense(self._expanding[step.params["cache"]], View(k.buffer, k.start, prefix), inputs[0][:, :prefix])
        for view in [view for view in self._holders if any(view.overlaps(written) for written in step.outputs)]:
            del self._holders[view]

    def linear(self, step: Step, x: np.ndarray) -> None:
        """Add the input x float32 [rows, K] of a linear step."""
        self._dense([name for name in self._tensors(step) if name in self._matrices], step.inputs[0], x)

    def _dense(self, tensors: list[str], view: View, x: np.ndarray) -> None:
        if not tensors:
            return
        squares = np.einsum("tk,tk->k", x, x, dtype=np.float64)
        for name in tensors:
            self._add(name, squares, np.full(1, len(x)))
        if x.shape[1] > self._widest:
            return
        holder = self._holders.get(view)
        if holder is None:
            holder = self._holders[view] = self._shared.get(tensors[0], tensors[0])
            self._products.setdefault(holder, np.zeros((x.shape[1],) * 2, np.float32))
            self._products[holder] += x.T @ x
        for name in tensors:
            self._shared[name] = holder

    def _experts(self, step: Step, x: np.ndarray, ids: np.ndarray) -> None:
        """Add the input x float32 [T or T * S, K] of experts ids i32 [T, S]. Ids behind the last matrix have none."""
        weight = self._network.weights[step.weights["weight"]]
        tensors, routes = self._tensors(step), ids.ravel()
        # A buffer of routes has rows for the layer with the largest S.
        by_route = self._network.buffers[step.inputs[0].buffer].rows == "routes"
        rows = x[:len(routes)] if by_route else np.repeat(x, ids.shape[1], axis=0)
        rows, routes = rows[routes < weight.groups], routes[routes < weight.groups]
        squares, counts = np.zeros((weight.groups, x.shape[1])), np.bincount(routes, minlength=weight.groups)
        np.add.at(squares, routes, np.square(rows, dtype=np.float64))
        if len(tensors) == weight.groups > 1:  # a tensor for each expert
            for expert, name in enumerate(tensors):
                self._add(name, squares[expert], counts[expert:expert + 1])
        else:
            for name in tensors:
                self._add(name, squares, counts)

    def _heads(self, step: Step, x: np.ndarray) -> None:
        """Add the input x float32 [T, H * K] of per-head matrices, except tensors that expand cached rows (_expanding):
        their input is the cached row."""
        weight, expanding = self._network.weights[step.weights["weight"]], set().union(*self._expanding.values())
        squares = np.square(x.reshape(len(x), weight.groups, -1), dtype=np.float64).sum(axis=0)
        for name in [name for name in self._tensors(step) if name not in expanding]:
            self._add(name, squares, np.full(weight.groups, len(x)))

    def _tensors(self, step: Step) -> list[str]:
        weight = self._network.weights[step.weights["weight"]]
        parts = () if weight.project else weight.parts  # a product of two tensors has no separate input
        return list(dict.fromkeys(part.tensor for part in parts))

    def _add(self, name: str, squares: np.ndarray, counts: np.ndarray) -> None:
        self._squares[name] = self._squares.get(name, 0) + squares
        self._counts[name] = self._counts.get(name, 0) + counts

    def calibration(self, facts: dict) -> Calibration:
        """The calibration: means over all inputs. Experts without tokens get the mean of the other experts."""
        importances = {}
        for name, squares in self._squares.items():
            counts = self._counts[name]
            means = squares / np.maximum(counts, 1)[:, None] if squares.ndim == 2 else squares / max(counts[0], 1)
            if squares.ndim == 2 and not counts.all():
                means[counts == 0] = squares.sum(axis=0) / max(counts.sum(), 1)
            importances[name] = means.astype(np.float32)
        moments = {name: product / np.float32(self._counts[name][0]) for name, product in self._products.items()}
        return Calibration(importances, moments, dict(self._shared), facts)


def _expanding(network: Network) -> dict[str, list[str]]:
    """Cache -> tensors of the file that expand its rows (latent attention). They are stored transposed for the
    queries."""
    found: dict[str, list[str]] = {}
    for steps in network.entries.values():
        cache = ""
        for step in reversed(steps):  # the attention behind these matrices names the cache
            cache = step.params["cache"] if step.op == "attention" else cache
            parts = network.weights[step.weights["weight"]].parts if step.op == "head_linear" else ()
            if any(part.turned for part in parts):
                found[cache] = list(dict.fromkeys([*found.get(cache, ()), *(part.tensor for part in parts)]))
    return found


def over_windows(model: Any, windows: Sequence[Sequence[int]], widest: int,
                 progress: Callable[[int, int], None] | None = None) -> Calibration:
    """Calibration of a model (engine.model.Model) on the reference executor over windows of token ids, with second
    moments of inputs of up to `widest` columns.

    Raises:
        RequestError: the model computes NaN, or has no matrices.
    """
    collector = Collector(model.network, widest)
    linears = [step for step in model.network.entries["main"] if step.op == "linear"]
    head = [step for step in linears if step.inputs[0] == model.network.outputs["hidden"]]
    deep = bool(head) and linears[-1] not in head  # as a masked-LM head: its later matrices need the head to run
    model.program.observer = collector
    for done, window in enumerate(windows, 1):
        encoder_ids = window if model.runner.has_encoder else None
        result = (model.logits if deep else model.hidden)(window, encoder_ids=encoder_ids)
        for step in () if deep else head:  # the head does not run: its input is expanding
            collector.linear(step, result)
        if np.isnan(result).any():
            raise model.runner.explain(NotFiniteError(NOT_FINITE))
        if progress is not None:
            progress(done, len(windows))
    if not collector._squares:
        raise RequestError(f"{model.network.name} has no matrices that could be calibrated")
    samples = [list(window[:SAMPLE]) for window in windows[::max(1, len(windows) // 2)][:2]]
    return collector.calibration({"model": model.network.name, "tokens": sum(map(len, windows)), "sample": samples})

"""A view of a checkpoint with quantised matrices, each quantised when it is read.

    plan = plan_of(network, checkpoint, recipe)     # scheme of each tensor, and why others are kept
    quantised(checkpoint, plan)                     # a Checkpoint whose tensors have those types

Readers of the checkpoint see the new types: networks are built and fused for them, executors pack them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from numflow.errors import RequestError
from numflow.formats import gguf_writer
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.types import tensor_type
from numflow.network.cost import PRODUCTS
from numflow.network.quantise.calibration import Calibration, LaterCalibration
from numflow.network.quantise.imatrix_files import for_tensors
from numflow.network.quantise.kept import KeptTensors
from numflow.ops import Network
from numflow.quant import RowsOf, encode, find, takes_calibration
from numflow.quant.recipe import KEEP, Recipe

FINE, _LONG = 6, 4096  # bits per weight; columns of the row that the bits are computed for
SMALLEST = 4096  # matrices with fewer weights are kept: they save no memory, but precision may matter


@dataclass(frozen=True)
class QuantisePlan:
    """Schemes for the matrices of a checkpoint, by tensor name.

    schemes: the scheme of each quantised matrix. kept: reasons for the others; vectors are not listed.
    modules: modules of the tensors in `schemes` and `kept`.
    idle: patterns of the recipe that match no matrix. multiplied: tensors used in matrix products.
    """

    recipe: Recipe
    schemes: Mapping[str, str]
    kept: Mapping[str, str]
    modules: Mapping[str, tuple[str, ...]]
    idle: tuple[str, ...] = ()
    multiplied: frozenset[str] = frozenset()

    def says(self) -> str:
        """One line about parts of the recipe without effect, "" for none."""
        against = {name: why for name, why in self.kept.items() if why}
        lines = [f"the recipe's pattern {pattern!r} fits no matrix" for pattern in self.idle]
        if against:
            name, why = next(iter(against.items()))
            lines.append(f"{len(against)} of {len(self.modules)} matrices stay as they are, such as {name}: {why}")
        return "; ".join(lines)


def plan_of(network: Network, checkpoint: Checkpoint, recipe: Recipe) -> QuantisePlan:
    """The plan of a recipe for a network that was built with fuse=False.

    Candidates are matrices of linears, and embedding tables; not norms, biases, position tables, routers, or gates of
    residual streams. Small matrices, and those whose columns are no multiple of the block, are kept.
    """
    modules = matrices(network)
    schemes, kept = {}, {}
    for name, found in modules.items():
        scheme = recipe.scheme(*found, name)
        if scheme == KEEP:
            kept[name] = ""
        elif why := _obstacle(network, checkpoint.tensors[name], found, scheme):
            kept[name] = why
        else:
            schemes[name] = scheme
    linears = {step.weights["weight"] for steps in network.entries.values() for step in steps
               if step.op in PRODUCTS}
    idle = recipe.idle([(*found, name) for name, found in modules.items()])
    return QuantisePlan(recipe, schemes, kept, modules, idle,
                        frozenset(part.tensor for name in linears for part in network.weights[name].parts))


def matrices(network: Network) -> dict[str, tuple[str, ...]]:
    """Tensor name -> modules, for all matrices that may be quantised."""
    found: dict[str, list[str]] = {}
    other: set[str] = set()
    routers = {view for steps in network.entries.values() for step in steps if step.op == "moe_route"
               for view in step.inputs}
    # the gates of residual streams are products that a linear step with a constant weight scales
    routers |= {step.inputs[0] for steps in network.entries.values() for step in steps
                if step.op == "linear" and network.weights[step.weights["weight"]].constant is not None}
    for steps in network.entries.values():
        for step in steps:
            for role, name in step.weights.items():
                wanted = (role == "weight" and step.op in PRODUCTS) or (
                    role == "table" and step.op in ("embed", "embed_ids"))
                router = step.op == "linear" and step.outputs[0] in routers
                weight = network.weights[name]
                wanted, parts = wanted and not weight.project, list(weight.parts)
                if weight.project:  # the matrix counts where it is used otherwise
                    del parts[weight.project.index("matrix")]
                for part in parts:
                    if wanted and not router:
                        names = found.setdefault(part.tensor, [])
                        module = name.removesuffix(".weight")
                        names += [] if module in names else [module]
                    else:
                        other.add(part.tensor)
    return {name: tuple(modules) for name, modules in found.items() if name not in other}


def _obstacle(network: Network, tensor: Tensor, modules: tuple[str, ...], scheme: str) -> str:
    """Reason against quantising a tensor to a scheme; "" for none."""
    uses = [network.weights[key] for module in modules if (key := f"{module}.weight") in network.weights]
    if any(part.transpose for weight in uses for part in weight.parts if part.tensor == tensor.name):
        return "its file has columns where rows are wanted"
    if any(weight.normalize_rows for weight in uses):
        return "its rows are normalised when they are read"
    if tensor.rows == 1:
        return "it is one row"
    if tensor.rows * tensor.columns < SMALLEST:
        return f"it has less than {SMALLEST} weights"
    kind = tensor_type(scheme)
    if tensor.columns % kind.block:
        return f"{scheme} has blocks of {kind.block} weights, which do not divide {tensor.columns} columns"
    try:
        kind.row_bytes(tensor.columns)
    except RequestError as error:
        return str(error)
    return ""


def already_quantised(checkpoint: Checkpoint) -> str:
    """Warning about source matrices that are already quantised, "" for none."""
    if checkpoint.quantised:
        return (f"{checkpoint.path} is quantised already, by {checkpoint.quantised}: what that lost stays lost, and "
                "rounding again adds to it; take the float weights where there are any")
    matrices = [tensor for tensor in checkpoint.tensors.values()
                if len(tensor.shape) > 1 and tensor.rows * tensor.columns >= SMALLEST]
    few = [tensor for tensor in matrices if tensor.type.block > 1 and tensor.nbytes < tensor.rows * tensor.columns]
    if not few:
        return ""
    kinds = ", ".join(sorted({tensor.type.name for tensor in few}))
    return (f"{len(few)} of {len(matrices)} matrices of {checkpoint.path} are quantised already ({kinds}): what that "
            "lost stays lost, and rounding them again adds to it; take the float weights where there are any")


def _takes_calibration(scheme: str) -> bool:
    """Whether a scheme or GGUF type can use a calibration."""
    if scheme in gguf_writer.WRITTEN.values():
        return scheme in gguf_writer.SEARCHED
    return takes_calibration(find(scheme))


def wants_calibration(plan: QuantisePlan) -> bool:
    """Whether a calibration matters: some scheme has less than FINE bits per weight and can use one."""
    return any(_takes_calibration(scheme) and 8 * tensor_type(scheme).row_bytes(_LONG) < FINE * _LONG
               for scheme in set(plan.schemes.values()))


def renamed(calibration: Calibration, own: Mapping[str, tuple[str, ...]], plan: QuantisePlan,
            checkpoint: Checkpoint) -> Calibration:
    """A calibration with the names of the plan's tensors.

    own: tensor -> modules, for the model of the calibration.
    """
    return for_tensors(calibration, own, plan.modules, lambda name: checkpoint.tensors[name].columns)


def check_calibration(calibration: Calibration, plan: QuantisePlan, checkpoint: Checkpoint) -> None:
    """Refuse a useless or wrong calibration.

    Raises:
        RequestError: it has none of the matrices, or other widths; or no scheme of the plan can use it.
    """
    if plan.schemes and not any(_takes_calibration(scheme) for scheme in set(plan.schemes.values())):
        raise RequestError(f"{', '.join(sorted(set(plan.schemes.values())))}: Inferflow's schemes have one way to find "
                           "codes, like GGUF's plain types, which uses no calibration; leave it out")
    of = f"the calibration is of another model ({calibration.facts.get('model', 'unknown')})"
    known = [name for name in plan.schemes if calibration.importance(name) is not None]
    if plan.schemes and not known:
        raise RequestError(f"{of}: it has none of the {len(plan.schemes)} matrices, such as {next(iter(plan.schemes))}")
    for name in known:
        columns, found = checkpoint.tensors[name].columns, calibration.importances[name].shape[-1]
        if found != columns:
            raise RequestError(f"{of}: {name} has {columns} columns, the calibration {found}")


def uncalibrated(calibration: Calibration | None, plan: QuantisePlan) -> str:
    """Warning about matrices that could use a calibration but are missing in it, "" for none."""
    names = [] if calibration is None else [
        name for name, scheme in plan.schemes.items()
        if name in plan.multiplied and _takes_calibration(scheme) and calibration.importance(name) is None]
    if not names:
        return ""
    return f"{len(names)} of {len(plan.schemes)} matrices are unknown to the calibration, such as {names[0]}"


def quantised(checkpoint: Checkpoint, plan: QuantisePlan, calibration: Calibration | LaterCalibration | None = None,
              threads: int | None = None, kept: KeptTensors | None = None,
              told: Callable[[Tensor, bool], None] = lambda tensor, there: None,
              rows_of: RowsOf | None = None) -> Checkpoint:
    """The checkpoint with the tensors of `plan` quantised.

    A tensor is quantised each time it is read, except the last read tensor, so that parts of a fused tensor cost no
    more than the whole, and tensors in the disk cache.

    kept: disk cache for this checkpoint and calibration. told: called with (tensor, False) before quantising, and with
    (tensor, True) when the tensor is available. rows_of: as in `encoded`.
    """
    last: dict[str, np.ndarray] = {}

    def read(tensor: Tensor, scheme: str) -> np.ndarray:
        found = None if kept is None else kept.take(tensor, scheme)
        if found is None:
            told(tensor, False)
            found = encoded(tensor, scheme, calibration, threads, rows_of)
            if kept is not None:
                kept.keep(tensor, scheme, found)
        told(tensor, True)
        return found

    def lazy(tensor: Tensor, scheme: str) -> Tensor:
        def read_once() -> np.ndarray:
            found = last.get(tensor.name)  # another device's thread may read another tensor at any time
            if found is None:
                last.clear()
                last[tensor.name] = found = read(tensor, scheme)
            return found

        return Tensor(tensor.name, tensor.shape, tensor_type(scheme), read_once, tensor.turned)

    tensors = {name: lazy(tensor, plan.schemes[name]) if name in plan.schemes else tensor
               for name, tensor in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors)


def encoded(tensor: Tensor, scheme: str, calibration: Calibration | LaterCalibration | None = None,
            threads: int | None = None, rows_of: RowsOf | None = None) -> np.ndarray:
    """A tensor quantised to a scheme or a GGUF type, uint8 [rows, row_bytes], with the calibration if the scheme can
    use it.

    rows_of: another search for numflow's own schemes (on a GPU), with the same result.

    Raises:
        RequestError, FormatError: as `numflow.quant.encode` and `numflow.formats.gguf_writer.encode`.
    """
    x = tensor.f32().reshape(tensor.rows, tensor.columns)
    importance = moment = None
    of_gguf = scheme in gguf_writer.WRITTEN.values()
    if calibration is not None and _takes_calibration(scheme):
        moment = None if of_gguf else calibration.moment(tensor.name)
        importance = None if moment is not None else calibration.importance(tensor.name)
    if importance is not None and importance.ndim == 2:  # one row per expert
        if tensor.rows % len(importance):
            raise RequestError(f"{tensor.name}: {tensor.rows} rows, but importances of {len(importance)} experts")
        importance = np.repeat(importance, tensor.rows // len(importance), axis=0)
    if of_gguf:
        return gguf_writer.encode(x, scheme, tensor.name, threads, importance)
    return encode(x, find(scheme), importance, moment, tensor.name, threads, rows_of)

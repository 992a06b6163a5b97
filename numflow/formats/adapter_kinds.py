"""PEFT's methods beside LoRA: the changed matrix of W [N, K] for each method, from its tensors of a module.

    AdaLoRA  W + alpha / init_r * B diag(E) A                        arXiv 2303.10512
    LoHa     W + alpha / r * (W1a W1b) o (W2a W2b), by elements      arXiv 2108.06098
    LoKr     W + alpha / r * W1 (x) W2, Kronecker's product          arXiv 2309.14859
    VeRA     W + diag(b) B diag(d) A, B and A for all modules        arXiv 2310.11454
    IA3      diag(l) W and diag(l) bias, or W diag(l)                arXiv 2205.05638
    OFT      W R^T, R with orthogonal blocks on its diagonal         arXiv 2306.07280
    BOFT     diag(s) W R^T, without butterflies                      arXiv 2311.06243

The first four are low-rank changes. An elementwise product of two has rank r^2, by pairs of rows and pairs of columns.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from numflow.errors import FormatError, quoted
from numflow.formats.adapter import LowRank, Multiplied, check_floats, check_pair, computed
from numflow.formats.checkpoint import Tensor


@dataclass(frozen=True)
class Module:
    """Tensors of one module in a file.

    where:  file and module, for messages. config: path of the configuration, for messages.
    parts:  "hada_w1_a", "oft_R", ... -> tensor. shared: tensors for all modules.
    stated: (key, key of patterns) -> value in the configuration for this module.
    """

    where: str
    config: str
    parts: Mapping[str, Tensor]
    shared: Mapping[str, Tensor]
    stated: Callable[[str, str], Any]

    def get(self, name: str, dimensions: int) -> Tensor:
        """A float tensor with so many dimensions.

        Raises:
            FormatError: the tensor is missing or different.
        """
        found = self.parts.get(name)
        if found is None:
            raise FormatError(f"{self.where}: {name} is missing")
        check_floats(self.where, found)
        if len(found.shape) != dimensions or not all(found.shape):
            raise self.fail(name, f"{dimensions} dimensions")
        return found

    def fail(self, name: str, wanted: str) -> FormatError:
        return FormatError(f"{self.where}: {name} {list(self.parts[name].shape)}: expected {wanted}")

    def number(self, key: str, patterns: str = "", least: float = -math.inf) -> float:
        found = self.stated(key, patterns)
        if not isinstance(found, int | float) or isinstance(found, bool) or not math.isfinite(found) or found < least:
            raise FormatError(f"{self.config}: {key}: expected a number{f' from {least} on' if least > 0 else ''}, "
                              f"found {quoted(found)}")
        return found

    def flag(self, key: str) -> bool:
        found = self.stated(key, "")
        if not isinstance(found, bool | None):
            raise FormatError(f"{self.config}: {key}: expected true or false, found {quoted(found)}")
        return bool(found)


def _adalora(module: Module) -> LowRank | None:
    if "lora_A" in module.parts and not module.parts["lora_A"].rows:
        return None  # all ranks were pruned
    a, b = check_pair(module.where, module.parts.get("lora_A"), module.parts.get("lora_B"), (2,))
    e = module.get("lora_E", 2)
    if e.shape != (a.shape[0], 1):
        raise module.fail("lora_E", f"[{a.shape[0]}, 1]")
    alpha = module.number("lora_alpha")
    return LowRank(computed(a.name, a.shape, lambda: a.f32() * e.f32()), b,
                   (alpha if alpha > 0 else a.shape[0]) / (module.number("init_r", least=1) + 1e-5))


def _loha(module: Module) -> LowRank:
    (a1, b1), (a2, b2) = (check_pair(module.where, module.parts.get(f"hada_w{n}_b"), module.parts.get(f"hada_w{n}_a"),
                                     (2,)) for n in (1, 2))
    if a1.shape != a2.shape or b1.shape != b2.shape:
        raise module.fail("hada_w2_a", f"shapes as hada_w1_a {list(b1.shape)} and hada_w1_b {list(a1.shape)} have")
    (r, k), (n, _) = a1.shape, b1.shape
    return LowRank(computed(a1.name, (r * r, k), lambda: (a1.f32()[:, None] * a2.f32()).reshape(r * r, k)),
                   computed(b1.name, (n, r * r), lambda: (b1.f32()[:, :, None] * b2.f32()[:, None]).reshape(n, r * r)),
                   _factor(module))


def _lokr(module: Module) -> LowRank:
    (b1, a1), (b2, a2) = (_product(module, f"lokr_w{n}") for n in (1, 2))
    shapes = [(x.shape[0] * y.shape[0], x.shape[1] * y.shape[1]) for x, y in ((a1, a2), (b1, b2))]
    return LowRank(computed(a2.name, shapes[0], lambda: np.kron(a1.f32(), a2.f32())),
                   computed(b2.name, shapes[1], lambda: np.kron(b1.f32(), b2.f32())), _factor(module))


def _product(module: Module, name: str) -> tuple[Tensor, Tensor]:
    """A matrix as a product of two: the stored factors, or itself and an identity."""
    if f"{name}_a" in module.parts:
        a, b = check_pair(module.where, module.parts.get(f"{name}_b"), module.parts[f"{name}_a"], (2,))
        return b, a
    whole = module.get(name, 2)
    n, k = whole.shape
    size = min(n, k)
    ones = computed(whole.name, (size, size), lambda: np.eye(size))
    return (whole, ones) if k <= n else (ones, whole)


def _factor(module: Module) -> float:
    return module.number("alpha", "alpha_pattern") / module.number("r", "rank_pattern", least=1)


def _vera(module: Module) -> LowRank:
    if not {"vera_A", "vera_B"} <= module.shared.keys():
        raise FormatError(f"{module.config}: save_projection is false: the adapter's file has no vera_A and vera_B, "
                          f"which are random numbers of one program: save them too")
    a, b = check_pair(module.where, module.shared["vera_A"], module.shared["vera_B"], (2,))
    rows, ranks = module.get("vera_lambda_b", 1), module.get("vera_lambda_d", 1)
    (n,), (rank,) = rows.shape, ranks.shape
    if n > b.shape[0] or rank > a.shape[0]:
        raise module.fail("vera_lambda_b", f"at most {b.shape[0]} rows and rank {a.shape[0]}, as vera_B and vera_A "
                                           f"have, is the rank {rank}")
    return LowRank(computed(a.name, (rank, a.shape[1]), lambda: a.f32()[:rank] * ranks.f32().reshape(-1, 1)),
                   computed(b.name, (n, rank), lambda: b.f32()[:n, :rank] * rows.f32().reshape(-1, 1)), 1.0, wide=True)


def _ia3(module: Module) -> Multiplied:
    numbers = module.get("ia3_l", 2)
    count = max(numbers.shape)
    if min(numbers.shape) != 1:
        raise module.fail("ia3_l", "[N, 1] or [1, K]")
    if numbers.shape[1] == 1:
        return Multiplied(rows=numbers, bias=True)
    return Multiplied(turn=computed(numbers.name, (count, 1, 1), numbers.f32))


def _oft(module: Module) -> Multiplied:
    table = "oft_embedding_R" in module.parts
    name = "oft_embedding_R" if table else "oft_R"
    found, blocks, length = module.parts[name], *module.get(name, 2).shape
    size = (1 + math.isqrt(1 + 8 * length)) // 2
    if size * (size - 1) // 2 != length:
        raise module.fail(name, "as many columns as a square matrix has above its diagonal")
    terms = int(module.number("num_cayley_neumann_terms", least=1)) if module.flag("use_cayley_neumann") else 0
    most = module.number("eps") / math.sqrt(blocks) if module.flag("coft") else math.inf

    def turn() -> np.ndarray:
        skew = np.zeros((blocks, size, size), np.float32)
        skew[:, *np.triu_indices(size, 1)] = found.f32()
        skew -= skew.swapaxes(1, 2)
        norms = np.linalg.norm(skew, axis=(1, 2), keepdims=True)
        r = _orthogonal(skew * np.minimum(1, most / np.maximum(norms, 1e-30)), terms)
        return r if table else r.swapaxes(1, 2)

    return Multiplied(turn=computed(found.name, (blocks, size, size), turn), every=module.flag("block_share"))


def _orthogonal(skew: np.ndarray, terms: int) -> np.ndarray:
    """Cayley transform (I - Q) (I + Q)^-1 of blocks [X, s, s]; with `terms`, the Neumann series I + 2 Q + 2 Q^2 ...
    + Q^n."""
    one = np.eye(skew.shape[-1], dtype=skew.dtype)
    if not terms:
        return np.linalg.solve((one + skew).swapaxes(1, 2), (one - skew).swapaxes(1, 2)).swapaxes(1, 2)
    found, power, last = np.broadcast_to(one, skew.shape).copy(), one, terms - 1 if terms < 3 else max(3, terms - 1)
    for exponent in range(1, last + 1):
        power = power @ skew
        found += power * (1 if exponent == last > 1 else 2)
    return found


def _boft(module: Module) -> Multiplied:
    blocks = module.get("boft_R", 4)
    butterflies, count, size, other = blocks.shape
    if butterflies != 1 or size != other:
        raise module.fail("boft_R", "[1, blocks, size, size] (boft_n_butterfly_factor 1)")

    def turn() -> np.ndarray:
        values = blocks.f32().reshape(count, size, size)
        return _orthogonal((values - values.swapaxes(1, 2)) / 2, 0).swapaxes(1, 2)

    return Multiplied(rows=module.get("boft_s", 2), turn=computed(blocks.name, (count, size, size), turn))


@dataclass(frozen=True)
class AdapterMethod:
    """A method: names of its tensors per module, and the function that makes the change (None: no change)."""

    parts: tuple[str, ...]
    made: Callable[[Module], LowRank | Multiplied | None]


KINDS = {
    "ADALORA": AdapterMethod(("lora_A", "lora_B", "lora_E"), _adalora),
    "LOHA": AdapterMethod(("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"), _loha),
    "LOKR": AdapterMethod(("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b"), _lokr),
    "VERA": AdapterMethod(("vera_lambda_b", "vera_lambda_d", "vera_A", "vera_B"), _vera),
    "IA3": AdapterMethod(("ia3_l",), _ia3),
    "OFT": AdapterMethod(("oft_R", "oft_embedding_R"), _oft),
    "BOFT": AdapterMethod(("boft_R", "boft_s"), _boft),
}

"""Constants of positions: rotary frequencies, ALiBi slopes, sinusoids.

RoPE: Su et al. (arXiv 2104.09864). YaRN: Peng et al. (arXiv 2309.00071), section 3. LongRoPE: Ding et al.
(arXiv 2402.13753). ALiBi: Press et al. (arXiv 2108.12409), section 3.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numflow.errors import SpecError
from numflow.formats.checkpoint import Tensor
from numflow.network.steps.builder import Builder
from numflow.ops import View
from numflow.spec.schema import SECTIONS

_LARGEST_TABLE = 1 << 25  # values of a table of sinusoids; the largest known one is 4096 x 2048
_FASTEST = 1e30  # largest frequency; angles of all positions are then finite in float32


def check_rotary(options: Mapping[str, Any], columns: int, where: str) -> None:
    """Check that the values of section rope fit together, before arrays of their sizes are allocated.

    columns: columns of a head. where: prefix of messages.

    Raises:
        SpecError: naming the option and what was expected.
    """
    dims, scaling, original = options["dims"], options["scaling"], options["original_context"]
    if 2 * pairs(dims) > columns:
        raise SpecError(f"{where}: rope.dims: expected up to {columns // 2 * 2}, the columns of a head in pairs, found "
                        f"{dims}", ("rope.dims",))
    if dims % 2 and (scaling == "proportional" or (scaling == "yarn" and dims != 3)):
        raise SpecError(f"{where}: rope.dims: expected an even number with scaling {scaling!r}, found {dims}",
                        ("rope.dims",))
    if scaling == "dynamic" and dims == 2:
        raise SpecError(f"{where}: rope.dims: expected 4 or more with scaling 'dynamic', found 2", ("rope.dims",))
    if scaling == "llama3" and options["low_freq_factor"] >= options["high_freq_factor"]:
        raise SpecError(f"{where}: rope.low_freq_factor: expected less than high_freq_factor "
                        f"{options['high_freq_factor']:g}, found {options['low_freq_factor']:g}",
                        ("rope.low_freq_factor", "rope.high_freq_factor"))
    if scaling == "yarn" and options["base"] <= 1:
        raise SpecError(f"{where}: rope.base: expected more than 1 with scaling 'yarn', found {options['base']:g}",
                        ("rope.base",))
    if scaling == "longrope" and original < 2:
        raise SpecError(f"{where}: rope.original_context: expected 2 or more with scaling 'longrope', found {original}",
                        ("rope.original_context",))


def pairs(dims: int) -> int:
    """Number of rotated pairs for `dims` rotated columns. With an odd number one column more is rotated; the
    frequencies remain base^(-2i / dims)."""
    return (dims + 1) // 2


@dataclass(frozen=True)
class Rotary:
    """Frequencies float32 [pairs(dims)] and the factor on cosines and sines, of op `rope_angles`.

    border: sequence length beyond which `long` and `long_scale` hold; 0 for none. long: frequencies beyond the border;
    None: computed for the length from inv_freq, `stretch` and, for odd dims, `span`.
    """

    inv_freq: np.ndarray
    scale: float
    border: int = 0
    long: np.ndarray | None = None
    long_scale: float = 1.0
    stretch: float = 1.0
    span: float = 0.0


def rotary(options: Mapping[str, Any], short: np.ndarray | None = None, long: np.ndarray | None = None) -> Rotary:
    """The frequencies that a spec's [rope] section describes.

    options: the section's values. short, long: a file's divisors of the frequencies up to and beyond the original
    context, None for 1.

    Raises:
        SpecError: angles overflow float32, or the number of divisors is wrong.
    """
    inv_freq, scale = _frequencies(options, "short", short)
    further, further_scale = _frequencies(options, "long", long)
    border = int(options["original_context"])
    if options["scaling"] == "dynamic":
        if scale != further_scale:
            raise SpecError(f"rope.long_attention_factor: expected {scale:g} as up to the original context, where "
                            f"rope.scaling is dynamic; found {further_scale:g}", ("rope.long_attention_factor",))
        odd = options["dims"] / 2 - 1 if options["dims"] % 2 else 0.0
        return Rotary(inv_freq, scale, border, None, scale, float(options["factor"]), odd)
    if scale == further_scale and np.array_equal(inv_freq, further):
        return Rotary(inv_freq, scale)
    return Rotary(inv_freq, scale, border, further, further_scale)


def as_stored(how: Rotary, tensor: Tensor | None, where: str) -> Rotary:
    """`how` with the frequencies of a stored tensor, if the file has one. where: prefix of messages.

    Raises:
        SpecError: their number is wrong, or one is not finite.
    """
    if tensor is None:
        return how
    inv_freq = np.array(tensor.f32().reshape(-1), np.float32)
    if inv_freq.shape != how.inv_freq.shape or not np.isfinite(inv_freq).all() or how.border:
        raise SpecError(f"{where}: tensor {tensor.name!r}: expected {len(how.inv_freq)} frequencies for texts of any "
                        f"length")
    return replace(how, inv_freq=inv_freq)


def _learned(how: Rotary, tensor: Tensor | None, where: str) -> Rotary:
    """`how` with each frequency times exp(v) of a stored tensor v, if the file has one. where: prefix of messages.

    Raises:
        SpecError: their number is wrong, one is not finite, or frequencies are computed for the length of a text.
    """
    if tensor is None:
        return how
    with np.errstate(over="ignore"):
        factors = np.exp(np.array(tensor.f32().reshape(-1), np.float32))
    if factors.shape != how.inv_freq.shape or not (factors < _FASTEST).all():
        raise SpecError(f"{where}: tensor {tensor.name!r}: expected {len(how.inv_freq)} logarithms of factors, each "
                        f"less than {math.log(_FASTEST):.3g}")
    if how.border and how.long is None:
        raise SpecError(f"{where}: rope.scaling: expected another method than 'dynamic' with learned factors of the "
                        f"frequencies, tensor {tensor.name!r}", ("rope.scaling",))
    return replace(how, inv_freq=how.inv_freq * factors, long=None if how.long is None else how.long * factors)


def _frequencies(options: Mapping[str, Any], side: str, divisors: np.ndarray | None) -> tuple[np.ndarray, float]:
    """inv_freq and scale for texts within ("short") or beyond ("long") the original context. divisors: as in
    `rotary`."""
    dims, base = options["dims"], options["base"]
    powers = base ** (np.arange(0, dims, 2, dtype=np.float64) / dims)
    given = (options["scaling"] != "none" and options[f"{side}_attention_factor"]) or options["attention_factor"]
    attention_factor = given or 1.0
    match options["scaling"]:
        case "linear" | "proportional":
            powers *= options["factor"]
        case "llama3":
            powers = 1 / _by_wavelength(1 / powers, options)
        case "yarn":
            powers = 1 / _yarn(1 / powers, options)
            attention_factor = given or _yarn_attention_factor(options)
        case "longrope":
            if divisors is None or options[f"{side}_factor"] is not None:
                powers *= _longrope_divisors(options, pairs(dims), f"{side}_factor")
            attention_factor = given or _longrope_attention_factor(options)
    if not (powers >= 1 / _FASTEST).all():
        raise SpecError(f"rope.base and rope.factor: expected frequencies of up to {_FASTEST:g} in each pair",
                        ("rope.base", "rope.factor"))
    inv_freq = (1.0 / powers).astype(np.float32)
    if options["scaling"] == "proportional":
        inv_freq[int(options["share"] * dims // 2):] = 0
    if options["reverse"]:
        inv_freq = -inv_freq
    if divisors is not None:
        inv_freq = (inv_freq / divisors[:len(inv_freq)]).astype(np.float32)
    return inv_freq, float(attention_factor)


def _by_wavelength(inv_freq: np.ndarray, options: Mapping[str, Any]) -> np.ndarray:
    """Frequencies of long wavelengths divided by the factor, short ones unchanged, blended between."""
    wavelength = 2 * math.pi / inv_freq
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    smooth = np.clip((options["original_context"] / wavelength - low) / (high - low), 0, 1)
    return inv_freq * (smooth + (1 - smooth) / options["factor"])


def _yarn(inv_freq: np.ndarray, options: Mapping[str, Any]) -> np.ndarray:
    dims, base = options["dims"], options["base"]

    def dimension_of(rotations: float) -> float:
        return dims * math.log(options["original_context"] / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(options["beta_fast"]), dimension_of(options["beta_slow"])
    if options["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / (high - low or 0.001), 0, 1)
    return inv_freq / options["factor"] * ramp + inv_freq * (1 - ramp)


def _yarn_attention_factor(options: Mapping[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(options["factor"]) + 1.0 if options["factor"] > 1 else 1.0

    if options["mscale"] and options["mscale_all_dim"]:
        return mscale(options["mscale"]) / mscale(options["mscale_all_dim"])
    return mscale(1.0)


def _longrope_divisors(options: Mapping[str, Any], count: int, key: str) -> np.ndarray:
    divisors = options[key]
    if divisors is None or len(divisors) != count:
        raise SpecError(f"rope.{key}: expected a list of {count} numbers, found "
                        f"{'nothing' if divisors is None else len(divisors)}", (f"rope.{key}",))
    return np.asarray(divisors, np.float64)


def _longrope_attention_factor(options: Mapping[str, Any]) -> float:
    factor, original = options["factor"], options["original_context"]
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def rotate(b: Builder, x: View, heads: int, head_dim: int, label: str, pairing: str = "", back: bool = False,
           ago: int = 0) -> None:
    """Rotate the first (or last) columns of every head in place. Steps with equal frequencies share their angles.

    back: rotate by the negative angle. ago: rotate by the angle of the position so many tokens before.
    """
    options = {key: b.option("rope", key) for key in SECTIONS["rope"]}
    options["reverse"] = options["reverse"] != back
    check_rotary(options, head_dim, b.where)
    how = rotary(options, *_divisors(b, pairs(options["dims"])))
    how = _learned(as_stored(how, b.names.find("rope_inv_freq"), b.where), b.names.find("rope_log_factors"), b.where)
    angles = _angles(b, how, ago)
    start: dict[str, Any] = {"start": head_dim - angles.width} if options["last"] else {}
    b.emit("rope", (x, angles), (x,), label, heads=heads, head_dim=head_dim, pairing=pairing or options["pairing"],
           **start)


def _angles(b: Builder, how: Rotary, ago: int) -> View:
    """View of cosines and sines of each row's position minus `ago`. The step is emitted once per entry."""
    weights = {"inv_freq": _constant(b, how.inv_freq)}
    params: dict[str, float] = {"scale": how.scale}
    if how.border:
        params |= {"border": how.border, "long_scale": how.long_scale}
        if how.long is None:
            params |= {"stretch": how.stretch} | ({"span": how.span} if how.span else {})
        else:
            weights["long"] = _constant(b, how.long)
    if ago:
        params["offset"] = -ago
    words = [*weights.values(), *(f"{value:g}" for value in params.values())]
    angles = b.view(".".join(("angles", *words)), 2 * len(how.inv_freq))
    if not any(step.op == "rope_angles" and step.outputs == (angles,) for step in b.entries.get(b.entry, [])):
        b.emit("rope_angles", (), (angles,), "angles", weights, **params)
    return angles


def _constant(b: Builder, inv_freq: np.ndarray) -> str:
    """Name of a constant weight with these frequencies; equal ones are shared."""
    known = {name: weight.constant for name, weight in b.weights.items() if name.startswith("rope.")}
    name = next((name for name, value in known.items() if value is not None and np.array_equal(value, inv_freq)), None)
    return name or b.constant(f"rope.{len(known)}", inv_freq)


def _divisors(b: Builder, count: int) -> list[np.ndarray | None]:
    """Frequency divisors stored as tensors: one, or one each for short and long texts.

    Raises:
        SpecError: a tensor has fewer than `count` divisors, or one that is not positive and finite.
    """
    if not b.option("rope", "divisors"):
        return [None, None]
    tensors = [b.names.find(name) or b.names.find("rope_freqs") for name in ("rope_factors_short", "rope_factors_long")]
    divisors: list[np.ndarray | None] = []
    for tensor in tensors:
        if tensor is None:
            divisors.append(None)
            continue
        found = tensor.f32().reshape(-1)[:count]
        if not (len(found) == count and (found > 0).all() and np.isfinite(found).all()):
            raise SpecError(f"{b.where}: tensor {tensor.name!r}: expected {count} positive divisors of frequencies")
        divisors.append(found)
    return divisors


def alibi_slopes(heads: int, largest_exponent: float) -> np.ndarray:
    """float32 [heads]: 2^(-max k / n), k = 1 .. n, n the power of two <= heads; the rest are the odd k of 2 n."""
    n = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-largest_exponent * (k + 1) / n) for k in range(n)]
    slopes += [2.0 ** (-largest_exponent * (2 * k + 1) / (2 * n)) for k in range(heads - n)]
    return np.array(slopes, np.float32)


def sinusoids(context: int, width: int, layout: str, span: int) -> np.ndarray:
    """float32 [context, width]: sin and cos of position * 10000^(-i / (width / 2 - span)).

    Raises:
        SpecError: the table is larger than any model's, or has no frequencies.
    """
    half = width // 2
    if context * width > _LARGEST_TABLE:
        raise SpecError(f"stack.context: positions {context} by width {width} make a table of more than "
                        f"{_LARGEST_TABLE} values; no model with sinusoidal positions has one", ("stack.context",))
    if half <= span:
        raise SpecError(f"embedding.sinusoid_span: expected less than half the width, {half}, found {span}",
                        ("embedding.sinusoid_span",))
    angle = np.arange(context)[:, None] * np.exp(np.arange(half) * -(math.log(10000.0) / (half - span)))
    table = np.zeros((context, width), np.float32)
    if layout == "halves":
        table[:, :half], table[:, half:2 * half] = np.sin(angle), np.cos(angle)
    else:
        table[:, 0:2 * half:2], table[:, 1:2 * half:2] = np.sin(angle), np.cos(angle)
    return table

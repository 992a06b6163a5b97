"""GGML imatrix files as calibrations: importances without second moments, by GGUF tensor names.

GGUF  general.type "imatrix"; imatrix.datasets, .chunk_count, .chunk_size; for each matrix NAME.in_sum2 F32 [K] or
      [X, K], sums of squares of its inputs, and NAME.counts F32 [1] or [X, 1], numbers of inputs
old   i32 matrices; for each i32 length, name, i32 calls, i32 count, f32 [count]: mean squares times calls, experts
      concatenated; then, in most files, i32 chunks, i32 length, name of the text
"""

import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from numflow.errors import FormatError
from numflow.formats import gguf, gguf_writer
from numflow.formats.gguf_pairs import encode_pairs
from numflow.formats.mapped import MappedFile, show
from numflow.formats.writer import TensorEntry, write_whole
from numflow.network.quantise.calibration import Calibration

_MAGIC, _TYPE = b"GGUF", "imatrix"
_MOST, _LONGEST = 1 << 16, 1 << 10  # limits of matrices and name bytes in an old file, which has no magic number
_SUMS, _COUNTS = ".in_sum2", ".counts"
_EXPERTS = "_exps"  # suffix of modules of experts
OLD = (".dat", ".imatrix")  # file suffixes of the old format


def is_imatrix(path: Path) -> bool:
    """Whether a file is a GGUF file, or looks like an old imatrix.

    Raises:
        FormatError: the file cannot be read.
    """
    file = MappedFile(path)
    return file.bytes(0, 4) == _MAGIC or _is_old(file)


def read_imatrix(path: Path) -> Calibration:
    """Read an imatrix of either format.

    Raises:
        FormatError: the file is no imatrix, or damaged.
    """
    return _read_gguf(path) if MappedFile(path).bytes(0, 4) == _MAGIC else _read_old(path)


def write_imatrix(calibration: Calibration, path: Path) -> None:
    """Write the importances of a calibration with GGUF tensor names: in the old format for .dat and .imatrix files,
    else as GGUF.

    Raises:
        RequestError: the file cannot be written.
    """
    (_write_old if path.suffix.lower() in OLD else _write_gguf)(calibration, path)


def _read_gguf(path: Path) -> Calibration:
    tensors, metadata = gguf.read_file(path)
    if metadata.get("general.type") != _TYPE:
        raise FormatError(f"{path}: a GGUF file, but no imatrix: its general.type is {metadata.get('general.type')!r}, "
                          f"not {_TYPE!r}")
    found = {}
    for name in (name.removesuffix(_SUMS) for name in tensors if name.endswith(_SUMS)):
        sums, counts = tensors[name + _SUMS], tensors.get(name + _COUNTS)
        if counts is None or sums.type.name != "F32" or counts.type.name != "F32":
            raise FormatError(f"{path}: {_shown(name)}: expected {_SUMS} and {_COUNTS}, both F32")
        means = _means(sums.f32().reshape(sums.rows, sums.columns), counts.f32().reshape(-1), f"{path}: {_shown(name)}")
        found[name] = means if len(means) > 1 else means[0]
    chunks, size = (metadata.get(f"imatrix.{key}", 0) for key in ("chunk_count", "chunk_size"))
    tokens = chunks * size if type(chunks) is int and type(size) is int else 0
    return Calibration(_checked(found, path), facts={"model": path.name, "tokens": tokens})


def _shown(name: str) -> str:
    """A matrix's name, printable on one line."""
    return name if name.isprintable() and len(name) <= 200 else show(name)


def _means(sums: np.ndarray, counts: np.ndarray, where: str) -> np.ndarray:
    """Mean squares f32 [X, K]; experts without tokens get the mean of the others, or 1 if none has tokens."""
    if len(sums) != len(counts) or not (np.isfinite(counts).all() and counts.min(initial=0) >= 0):
        raise FormatError(f"{where}: sums of {len(sums)} matrices, counts of {len(counts)}, which should be as many "
                          "numbers from 0")
    with np.errstate(over="ignore", invalid="ignore"):
        means = sums / np.maximum(counts, 1)[:, None]
        others = sums.sum(axis=0) / counts.sum() if counts.sum() > 0 else np.ones(sums.shape[1], np.float32)
    means[counts == 0] = others
    return means.astype(np.float32)


def _checked(found: dict[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    if not found:
        raise FormatError(f"{path}: an imatrix of no matrices")
    for name, values in found.items():
        if not (values.size and values.min() >= 0 and np.isfinite(values.max())):
            raise FormatError(f"{path}: {_shown(name)}: mean squares should be finite and not negative")
    return found


def _is_old(file: MappedFile) -> bool:
    if file.size < 20:
        return False
    count, length = struct.unpack("<ii", file.bytes(0, 8))
    return 0 < count <= _MOST and 0 < length <= _LONGEST and all(33 <= byte < 127 for byte in file.bytes(8, length))


def _read_old(path: Path) -> Calibration:
    file, offset, found = MappedFile(path), 0, dict[str, np.ndarray]()

    def take(size: int, what: str) -> bytes:
        nonlocal offset
        if size < 0 or offset + size > file.size:
            raise FormatError(f"{path}: {what} ends after the file (is it truncated?)")
        offset += size
        return file.bytes(offset - size, size)

    def number(what: str) -> int:
        return struct.unpack("<i", take(4, what))[0]

    for index in range(number("the number of matrices")):
        name = take(number(f"matrix {index}"), f"the name of matrix {index}").decode(errors="replace")
        calls, count = number(f"{_shown(name)}: calls"), number(f"{_shown(name)}: count")
        values = np.frombuffer(take(4 * count, _shown(name)), "<f4")
        with np.errstate(invalid="ignore"):  # a signalling NaN
            found[name] = values / np.float32(max(calls, 1))
    return Calibration(_checked(found, path), facts={"model": path.name, "tokens": 0})


def _write_gguf(calibration: Calibration, path: Path) -> None:
    tokens = np.float32(max(1, calibration.facts.get("tokens", 1)))
    entries = []
    for name, means in calibration.importances.items():
        counts = np.full((len(means), 1) if means.ndim == 2 else 1, tokens, np.float32)
        entries += [TensorEntry.of(name + _SUMS, np.ascontiguousarray(means * tokens)),
                    TensorEntry.of(name + _COUNTS, counts)]
    size, chunks = _chunks(calibration.facts)
    pairs = encode_pairs({"general.type": _TYPE, "imatrix.datasets": ["numflow imatrix"],
                          "imatrix.chunk_count": chunks, "imatrix.chunk_size": size})
    gguf_writer.write(path, pairs, 32, entries)


def _chunks(facts: Mapping) -> tuple[int, int]:
    """Tokens per window, and number of windows."""
    size = max(1, facts.get("context", 512))
    return size, max(1, -(-facts.get("tokens", size) // size))


def _write_old(calibration: Calibration, path: Path) -> None:
    _, chunks = _chunks(calibration.facts)

    def entry(name: str, means: np.ndarray) -> bytes:
        sums = (means * np.float32(chunks)).astype("<f4")
        return _text(name) + struct.pack("<ii", chunks, sums.size) + sums.tobytes()

    body = b"".join(entry(name, means) for name, means in calibration.importances.items())
    write_whole(path, struct.pack("<i", len(calibration.importances)) + body + struct.pack("<i", chunks)
                + _text("numflow imatrix"), [])


def _text(name: str) -> bytes:
    data = name.encode()
    return struct.pack("<i", len(data)) + data


def for_tensors(calibration: Calibration, own: Mapping[str, tuple[str, ...]], wanted: Mapping[str, tuple[str, ...]],
                columns: Callable[[str], int]) -> Calibration:
    """The calibration with importances for tensors of another file of the same model.

    own:     tensor -> modules, for the file of the calibration. wanted: the same for the new tensors, which may be
    split
             otherwise, such as one tensor for all experts.
    columns: returns the columns of a new tensor. Importances that already have a new tensor's name are kept.
    """
    sharing: dict[str, list[str]] = {}
    for name, modules in wanted.items():
        for module in modules:
            sharing.setdefault(module, []).append(name)
    found = dict(calibration.importances)
    for name, modules in wanted.items():
        known = calibration.importance(name)
        for module in modules if known is None else ():
            known = _of_module(calibration, own, module)
            if known is not None and known.ndim == 2 and len(sharing[module]) == len(known):  # a tensor for each expert
                known = known[sharing[module].index(name)]
            if known is not None:
                break
        if known is None:
            continue
        width = columns(name)
        found[name] = known.reshape(-1, width) if known.ndim == 1 and known.size > width and known.size % width == 0 \
            else known
    return Calibration(found, calibration.moments, calibration.shared, calibration.facts)


def _of_module(calibration: Calibration, own: Mapping[str, tuple[str, ...]], module: str) -> np.ndarray | None:
    """Importances of a module: f32 [K], or [X, K] for experts."""
    tensors = [name for name, modules in own.items() if module in modules]
    parts = [found for name in (*tensors, f"{module}.weight") if (found := calibration.importance(name)) is not None]
    if module.endswith(_EXPERTS) and len(parts) == len(tensors) > 1 and {part.shape for part in parts} == {
            (parts[0].size,)}:
        return np.stack(parts)
    return parts[0] if parts else None

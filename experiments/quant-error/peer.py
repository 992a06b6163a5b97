"""llama.cpp beside numflow: its library quantises matrices, its programs whole models with its own calibration."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np

WIDE = 256  # columns of a block of GGUF's K types
_NAMES = ("Q2_K", "Q3_K", "Q4_0", "Q4_1", "IQ4_NL", "IQ4_XS", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")


def _bits(name: str) -> float:
    from numflow.formats.types import TYPES

    return 8 * TYPES[name].size / TYPES[name].block


TYPES = {name: _bits(name) for name in _NAMES}


def library(folder: str):
    """llama.cpp's library with its quantisers, None if the folder has none."""
    path = Path(folder) / "libggml-base.so" if folder else None
    if path is None or not path.exists():
        return None
    found = ctypes.CDLL(str(path))
    found.ggml_quantize_chunk.restype = ctypes.c_size_t
    found.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3,
                                          ctypes.c_void_p]
    return found


def roundtrip(library, x: np.ndarray, name: str, importance: np.ndarray | None = None) -> np.ndarray:
    """x float32 [N, K] after GGUF type `name`.

    Without importances rows are put one behind the other, so that blocks of 256 fit all of K; the last weights that
    fill no block are left as they are. importance: float32 [K], for types whose blocks divide K.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    kind = GGMLQuantizationType[name]
    block, size = GGML_QUANT_SIZES[kind]
    y = x.copy()
    if importance is None:
        whole = y.reshape(-1)[:x.size // WIDE * WIDE].reshape(-1, WIDE)
    else:
        whole, importance = y, np.ascontiguousarray(importance, np.float32)
    rows, columns = whole.shape
    raw = np.empty((rows, columns // block * size), np.uint8)
    library.ggml_quantize_init(int(kind))
    library.ggml_quantize_chunk(int(kind), whole.ctypes.data, raw.ctypes.data, 0, rows, columns,
                                None if importance is None else importance.ctypes.data)
    whole[:] = quants.dequantize(raw, kind)
    return y


class Quantiser:
    """llama-quantize and llama-imatrix on one model. Files are made in `work`.

    folder: where the programs are, else they are looked for on the PATH.
    """

    def __init__(self, folder: str, source: Path, work: Path):
        self._folder, self._source, self._work = folder, source, work
        self._base: Path | None = None
        self._imatrix: Path | None = None

    def program(self, name: str) -> str | None:
        """Path of one of llama.cpp's programs; None if it is missing."""
        return shutil.which(name, path=self._folder) if self._folder else shutil.which(name)

    @property
    def there(self) -> bool:
        """Whether models can be quantised."""
        return self._source.suffix == ".gguf" and self.program("llama-quantize") is not None

    def base(self) -> Path:
        """The model's weights, decoded to float32."""
        if self._base is None:
            self._base = self._work / "base.gguf"
            if not self._base.exists():
                self._run("llama-quantize", "--allow-requantize", self._source, self._base, "F32")
        return self._base

    def imatrix(self, text: str, chunks: int) -> Path | None:
        """Its own importance matrix from so many windows of 512 tokens of a text; None without the program."""
        if self._imatrix is None and self.program("llama-imatrix"):
            file, found = self._work / "calibration.txt", self._work / "imatrix.gguf"
            file.write_text(text, encoding="utf-8")
            if not found.exists():
                self._run("llama-imatrix", "-m", self.base(), "-f", file, "-o", found, "--chunks", chunks, "-c", 512,
                          "--no-ppl", "--process-output")
            self._imatrix = found
        return self._imatrix

    def model(self, name: str) -> Path:
        """The model as `name`: a type such as "Q4_K_M", or "Q4_0 pure" with all matrices of that type."""
        kind, _, pure = name.partition(" ")
        target = self._work / f"{name.replace(' ', '-')}.gguf"
        options = ["--pure", "--token-embedding-type", kind.lower()] if pure else []
        if self._imatrix:
            options += ["--imatrix", self._imatrix]
        if not target.exists():
            self._run("llama-quantize", *options, self.base(), target, kind)
        return target

    def _run(self, name: str, *words) -> None:
        run = subprocess.run([self.program(name), *map(str, words)], capture_output=True, text=True, timeout=3600)
        if run.returncode:
            raise RuntimeError(f"{name} failed: {run.stderr.strip().splitlines()[-1:]}")

"""Run as a program: which instruction set this process has, and a digest of what `linear` returns for KIND:MODE ..."""

import hashlib
import sys

from numflow.cpu.simd_isa import isa
from numflow.formats.types import TYPES
from tests.cpu.matrices import activations, pack_stored, run_linear


def digest(kind: str, mode: str) -> str:
    """Hash of the bits of `linear`, for tiles of 8, 4, 2 and 1 tokens."""
    raw, packed = pack_stored(kind, 37, {1: 75, 32: 96, 64: 192, 256: 512}[TYPES[kind].block])
    x = activations(15, raw.shape[1])
    results = (run_linear(packed, x[:rows], mode) for rows in (15, 2, 1))
    return hashlib.sha256(b"".join(y.tobytes() for y in results)).hexdigest()


if __name__ == "__main__":
    print(isa(), *(digest(*case.split(":")) for case in sys.argv[1:]))

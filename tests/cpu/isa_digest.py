"""Run as a program: print the instruction set of this process, and a digest for each argument: of the results of
`linear` for KIND:MODE, of whole networks for network:MODE or cache:TYPE (type of keys and values), both with optional
:THREADS, or of stored rows for stored:SCHEME."""

import hashlib
import sys
from collections.abc import Iterable

import numpy as np

from numflow.cpu.simd.isa import isa
from numflow.quant import encode, find
from numflow.quant.stored import STORED
from tests.cpu.matrices import activations, columns_of, pack_stored, run_linear


def one_of_each(kinds: Iterable[str]) -> list[str]:
    """The first type for each code width, kind of header and table; kernels of other types differ only in constants."""
    alike = {}
    for kind in kinds:
        of = STORED[kind].kind
        alike.setdefault((of.bits, of.header, of.by_16, of.with_base, of.table), kind)
    return list(alike.values())


def digest(kind: str, mode: str, threads: int | str = 2) -> str:
    """Hash of the bits of `linear`, for tiles of 8, 4, 2 and 1 tokens; for the kind "network", of whole networks."""
    if kind == "network":
        return network_digest(mode, int(threads))
    if kind == "cache":
        return cache_digest(mode, int(threads))
    if kind == "stored":
        values = np.random.default_rng(5).standard_t(4, (8, 256)).astype(np.float32)
        return hashlib.sha256(encode(values, find(mode)).tobytes()).hexdigest()
    raw, packed = pack_stored(kind, 37, columns_of(kind))
    x = activations(15, raw.shape[1])
    results = (run_linear(packed, x[:rows], mode) for rows in (15, 2, 1))
    return hashlib.sha256(b"".join(y.tobytes() for y in results)).hexdigest()


def network_digest(mode: str, threads: int) -> str:
    """Hash of the bits of two networks: norms, activations, additions fused with matrices; attention over 150 keys."""
    from tests.cpu.test_patterns import run
    from tests.cpu.test_program import in_pieces, program

    kind = "Q8_0" if mode == "int8" else "F32"
    results = [array for norm, act in (("rms_norm", "act_mul"), ("layer_norm", "act"))
               for array in run(norm, act, kind, 13, threads=threads)[0]]
    results.append(in_pieces(program(threads=threads, kv_k="f16", kv_v="f16"), 150, [140, 1]))
    return hashlib.sha256(b"".join(y.tobytes() for y in results)).hexdigest()


def cache_digest(kind: str, threads: int) -> str:
    """Hash of the bits of a network with a type of keys and values; codes are multiplied as integers."""
    from tests.cpu.test_program import in_pieces, program

    made = program(threads=threads, kv_k=kind, kv_v=kind, activations="int8")
    return hashlib.sha256(in_pieces(made, 150, [140, 1]).tobytes()).hexdigest()


if __name__ == "__main__":
    print(isa(), *(digest(*case.split(":")) for case in sys.argv[1:]))

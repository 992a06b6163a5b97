"""Bytes of quantised matrices in memory against bytes in files, for both executors, at the widths of real models."""

import pytest

from numflow.cpu.weights.layout import SCHEMES as CPU
from numflow.cuda.weights.layout import SCHEMES as CUDA
from numflow.quant.stored import STORED

# Type, columns of a group (0: the row), and what the file has for a group besides its codes, in bits.
FORMATS = {
    "GPTQ 4 bits of 128": ("U4_F16_128", 128, 16 + 4), "GPTQ 4 bits of 32": ("U4_F16_32", 32, 16 + 4),
    "GPTQ 3 bits of 32": ("U3_F16_32", 32, 16 + 3), "GPTQ 2 bits of 32": ("U2_F16_32", 32, 16 + 2),
    "GPTQ 8 bits of 32": ("Z8_F16_32", 32, 16 + 8), "GPTQ 4 bits of a row": ("U4_F16_ROW", 0, 16 + 4),
    "AWQ of 128": ("U4_F16_128", 128, 16 + 4), "AWQ of 64": ("U4_F16_64", 64, 16 + 4),
    "4 bits of 16 with zeros": ("U4_F16_16", 16, 16 + 4), "pack-quantized of 16": ("I4_BF16_16", 16, 16),
    "pack-quantized of 32": ("I4_BF16_32", 32, 16), "pack-quantized with zeros": ("U4_BF16_64", 64, 16 + 4),
    "NF4": ("NF4_64", 64, 32), "NF4, double quantisation": ("NF4_64", 64, 8.125), "FP4": ("FP4_64", 64, 32),
    "HQQ 4 bits": ("Z4_BF16_64", 64, 32), "HQQ 8 bits": ("Z8_BF16_32", 32, 32),
    "FP8 by blocks": ("E4M3_128", 128, 32 / 128), "MXFP8": ("E4M3_32", 32, 8), "FP8 by row": ("E4M3_ROW", 0, 32),
    "FP8 by tensor": ("E4M3_ROW", 0, 0), "int8 by row": ("I8_BF16_ROW", 0, 16), "bitsandbytes": ("I8_F32_ROW", 0, 32),
    "NVFP4": ("E2M1_ROW", 16, 8), "MXFP4": ("MXFP4", 32, 8)}


@pytest.mark.parametrize("columns", [128, 1024, 1152, 4096])
@pytest.mark.parametrize("name", FORMATS)
def test_at_most_a_tenth_more(name, columns):
    type_, group, header = FORMATS[name]
    kind = STORED[type_].kind
    in_file = columns * kind.bits + (columns // group if group else 1) * header
    cpu, cuda = sum(CPU[kind.name].tile_bytes(columns)) / 16, CUDA[kind.name].row_bytes(columns)
    assert 0.95 * in_file < 8 * cpu < 1.1 * in_file
    assert 0.95 * in_file < 8 * cuda < 1.1 * in_file

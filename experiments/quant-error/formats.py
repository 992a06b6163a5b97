"""The part on file formats: bytes in memory and in the file, and decoding speed of each format."""

import os

from numflow.cpu.runtime.cores import default_threads
from numflow.cpu.weights.layout import SCHEMES
from numflow.formats.types import TYPES
from numflow.quant.stored import STORED

from .speed import speed_table

COLUMNS = 4096
# Formats of quantised checkpoints: type, and bits of a weight in the file besides those of its codes.
HUB = {"GPTQ 4 bits, groups of 128": ("U4_F16_128", 20 / 128), "GPTQ 4 bits, groups of 32": ("U4_F16_32", 20 / 32),
       "GPTQ 3 bits, groups of 32": ("U3_F16_32", 19 / 32), "GPTQ 2 bits, groups of 32": ("U2_F16_32", 18 / 32),
       "pack-quantized 4 bits, groups of 32": ("I4_BF16_32", 16 / 32), "HQQ 4 bits, groups of 64": ("Z4_BF16_64", 0.5),
       "int-quantized 8 bits by row": ("I8_BF16_ROW", 16 / COLUMNS), "FP8 by row": ("E4M3_ROW", 32 / COLUMNS),
       "FP8 by blocks of 128": ("E4M3_128", 32 / 128**2), "NF4": ("NF4_64", 0.5), "NVFP4": ("E2M1_ROW", 0.5)}
GGUF = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M",
        "IQ1_S", "TQ2_0", "TQ1_0")


def rows_of_formats() -> list[tuple[str, str, float, float]]:
    """Format, type, bits per weight in the file and in memory."""
    found = [(name, kind, STORED[kind].kind.bits + more) for name, (kind, more) in HUB.items()]
    found += [(kind, kind, 8 * TYPES[kind].size / TYPES[kind].block) for kind in GGUF]
    return [(name, kind, bits, sum(SCHEMES[STORED[kind].kind.name].tile_bytes(COLUMNS)) / (2 * COLUMNS))
            for name, kind, bits in found]


def formats_part(lab, places):
    """Decode speed of each format on matrices larger than the cache, with all cores; types that were not requested keep
    the report's values."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    only = lab.options["types"].split(",") if lab.options["types"] else None
    formats = [row for row in rows_of_formats() if not lab.quick or row[1] == "Q4_0"]
    before = (lab.before().get("results") or {}).get("formats", []) if lab.options["merge"] else []
    rows = {row["type"]: row for row in before} | {row["type"]: row for row in speed_table(
        lab.quick, tuple(dict.fromkeys(kind for _, kind, _, _ in formats if only is None or kind in only)),
        default_threads(), columns=COLUMNS, tokens=8)}
    formats = [row for row in formats if row[1] in rows]
    lab.results |= {"formats": list(rows.values()), "load_before_formats": load}
    lab.heading("Formats of files on the CPU")
    slowest, fastest = (pick(row["read_gb_s"][end] for row in rows.values()) for end, pick in ((0, min), (1, max)))
    lab.text(f"Bits per weight in rows of {COLUMNS} columns, and decoding from 1 GiB of each format with "
             f"{default_threads()} threads as in the part above. Plain reads reached {slowest:.1f} to {fastest:.1f} "
             f"GB/s, and the load average was {load:.1f} at the start. Activations are int8, for FP8 float32."
             + (f" Measured in this run: {', '.join(only)}; the others earlier." if only else ""))
    lab.table(["format", "type", "bits in the file", "in memory", "memory / file", "decode GB/s", "share of reading",
               "GB/s in the cache"],
              [[name, kind, f"{bits:.2f}", f"{resident:.2f}", f"{resident / bits:.2f}",
                f"{rows[kind]['decode_gb_s']:.1f}", f"{rows[kind]['decode_fraction']:.0%}",
                f"{rows[kind]['cached_gb_s']:.1f}"] for name, kind, bits, resident in formats])

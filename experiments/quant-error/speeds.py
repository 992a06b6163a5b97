"""The part about speed and memory: speed.py's table in the report."""

import json
import os
import subprocess
import sys
from pathlib import Path

from numflow.cpu.runtime.cores import default_threads
from numflow.cpu.simd.isa import FORCED, X86, isa
from numflow.quant.layout import ROW_SCHEMES

from .speed import speed_table

_PACKAGE = Path(__file__).resolve().parents[2]


def speed_part(lab, places):
    """Decode and prefill speed of each width on matrices larger than the cache, by one core and by all."""
    load, cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, default_threads()
    tables = [speed_table(quick=lab.quick, threads=threads) for threads in sorted({cores} if lab.quick else {1, cores})]
    lab.results |= {"speed": [row for rows in tables for row in rows], "load_before_speed": load}
    lab.heading("Speed and memory on the CPU")
    lab.text(f"One `linear` after the other on matrices that fit no cache; decoding reads every byte once for one "
             f"token. The share is relative to a plain read right before it, the median of the rounds. \"GB/s in the "
             f"cache\" is the speed with a matrix in the L2 cache, which shows the speed of the instructions: if it is "
             f"above the speed of plain reads, decoding is memory-bound. The load average was {load:.1f} at the start "
             f"of this part; if it is far from 0, other programs ran, and the numbers are too low and uneven.")
    for rows in tables:
        _table(lab, rows)
    if X86 and not lab.quick:  # compiling all kernels anew takes minutes
        _by_isa(lab, tables)


def _table(lab, rows):
    slowest, fastest = rows[0]["read_gb_s"]
    lab.text(f"Threads: {rows[0]['threads']}. They read {slowest:.1f} to {fastest:.1f} GB/s.")
    lab.table(["type", "bits in memory", "decode GB/s", "share of reading", "GB/s in the cache", "decode Gweights/s",
               "prefill GOP/s"],
              [[r["type"], f"{r['bits_per_weight']:.3f}", f"{r['decode_gb_s']:.1f}", f"{r['decode_fraction']:.0%}",
                f"{r['cached_gb_s']:.1f}", f"{r['decode_gweights_s']:.1f}", f"{r['prefill_gop_s']:.0f}"] for r in rows])
    above = [r for r in rows if r["decode_fraction"] > 1]
    if above:
        lab.text(f"{', '.join(r['type'] for r in above)}: faster than the plain read right before, at most "
                 f"{max(r['decode_fraction'] for r in above):.0%} of it. The memory of this machine is shared with "
                 "other machines, and its speed changes between a read and the decoding after it. Such a share only "
                 "means that decoding is memory-bound.")
    by_type = {r["type"]: r for r in rows}
    if {"q3h", "q4"} <= by_type.keys():
        compared(lab, by_type["q3h"], by_type["q4"])


def compared(lab, q3h, q4):
    """The speeds of 3.5 and 4 bits beside their bytes: bytes alone explain a ratio up to that of the bytes."""
    ratio = q3h["decode_gweights_s"] / q4["decode_gweights_s"]
    fewer = q4["bits_per_weight"] / q3h["bits_per_weight"]
    sentence = f"Decoding with q3h is {ratio:.2f} times as fast as with q4, which has {fewer:.2f} times its bytes."
    lab.claim(sentence, ratio <= 1.05 * fewer,
              f"{sentence} That is more than the bytes explain: q4 reads {q4['decode_gb_s']:.1f} GB/s "
              f"({q4['decode_fraction']:.0%} of a read right before), q3h {q3h['decode_gb_s']:.1f} "
              f"({q3h['decode_fraction']:.0%}), so q4 is not bound by the memory alone here.")


def _by_isa(lab, tables):
    """The same with the instruction sets that this processor has besides, in processes of their own."""
    names = list(FORCED)[list(FORCED).index(isa()) + 1 if isa() in FORCED else 1:]
    found = {isa(): tables, **{name: [_forced(lab, name, rows[0]["threads"]) for rows in tables] for name in names}}
    lab.results["speed_by_isa"] = {name: [row for rows in found[name] for row in rows] for name in names}
    lab.text("Decoding by instruction set: GB/s, the share of a plain read right before, and GB/s in the cache, where "
             "only instructions take time. All instruction sets give the same bits.")
    columns = ["type", *(f"{name}, {_threads(rows)}" for name in found for rows in found[name])]
    by_type = {name: [{row["type"]: row for row in rows} for rows in found[name]] for name in found}
    lab.table(columns, [[kind, *(_cell(rows[kind]) for name in found for rows in by_type[name])]
                        for kind in ROW_SCHEMES])


def _forced(lab, name, threads):
    """Rows of speed_table with a lesser instruction set."""
    lab.say(f"{name}, {threads} threads")
    arguments = {"types": list(ROW_SCHEMES), "threads": threads, "mebibytes": 512, "tokens": 8}
    path = os.pathsep.join(filter(None, [str(_PACKAGE), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("speed.py")), json.dumps(arguments)],
                          env=os.environ | FORCED[name] | {"PYTHONPATH": path}, text=True, stdout=subprocess.PIPE,
                          check=True)
    found = json.loads(done.stdout)
    assert found["isa"] == name, found["isa"]
    return found["rows"]


def _threads(rows):
    return f"{rows[0]['threads']} thread{'s' if rows[0]['threads'] > 1 else ''}"


def _cell(row):
    return f"{row['decode_gb_s']:.1f} ({row['decode_fraction']:.0%}; {row['cached_gb_s']:.1f})"

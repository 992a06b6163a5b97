"""Writes llama_cpp/NAME.npz: results of llama.cpp for tiny GGUF files (configs_llama_cpp.py) of random weights.

    python -m tests.specs.make_llama_cpp_cases FOLDER_OF_LIBLLAMA [NAME ...]

Run it from the repository root. Weights, keys and values are float32; llama.cpp computes in float32 except for GELU,
which it reads from a float16 table. Metadata, names, shapes and results are stored, not weights, which the tests derive
again.
"""

import json
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

from tests.specs.case import LLAMA_CPP_FOLDER
from tests.specs.configs_llama_cpp import CASES
from tests.specs.llama_cpp import numbers, opened
from tests.specs.weights import values

LENGTHS = (9, 30)


def write(path: Path, metadata: dict, tensors: dict[str, tuple[int, ...]]) -> None:
    """Write the GGUF file of a case; its vocabulary only has ids."""
    architecture = metadata["general.architecture"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string("tokenizer.ggml.model", "none")
    writer.add_vocab_size(tensors["token_embd.weight"][0])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
                 list: writer.add_array}
        kinds[type(value)](key, value)
    for name, shape in tensors.items():
        writer.add_tensor(name, values(name, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make(library, name: str) -> None:
    metadata, tensors, options = CASES[name]
    vocabulary, width = tensors["token_embd.weight"]
    hidden = bool(options.get("hidden"))
    inputs, rows, arrays = [], [], {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write(path, metadata, tensors)
        for i, length in enumerate(options.get("lengths", LENGTHS)):
            random = np.random.PCG64(i + 7).random_raw(length)
            ids = [int(n % vocabulary) for n in random]
            kept = list(range(length))[:: max(1, length // 3)]
            pooled, flash = bool(options.get("pooled")), bool(options.get("flash"))
            found = numbers(library, path, ids, width if hidden else vocabulary, hidden, pooled, flash)
            assert np.isfinite(found).all()
            arrays[f"{'pooled' if pooled else 'hidden' if hidden else 'logits'}_{i}"] = found if pooled else found[kept]
            inputs.append({"ids": ids})
            rows.append({"rows": kept})
    about = {"configs": [metadata], "tensors": tensors, "inputs": inputs, "rows": rows}
    path = LLAMA_CPP_FOLDER / f"{name}.npz"
    np.savez_compressed(path, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)
    print(name, path.stat().st_size, flush=True)


if __name__ == "__main__":
    LLAMA_CPP_FOLDER.mkdir(exist_ok=True)
    opened_library = opened(Path(sys.argv[1]).resolve())
    for case_name in sys.argv[2:] or CASES:
        make(opened_library, case_name)

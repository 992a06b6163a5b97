"""Writes gguf/NAME.npz: how llama.cpp's converter rearranges the tensors of the cases that it supports.

    python -m tests.specs.make_gguf_cases LLAMA_CPP_FOLDER [NAME ...]

Run it from the repository root, with the environment of make_transformers_cases.py. The elements of a case's tensors
are numbered, so that the converted file shows where each element went. The metadata and this permutation are stored,
not weights: the tests fill in the values of weights.py and compare with transformers' results.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

from tests.specs.case import load_case, names

FOLDER = Path(__file__).parent / "gguf"
# Values are STEP * (number of the element) + what the converter adds to it.
STEP = 4
# What the converter or the format leaves out, so that the numbers cannot agree.
LEFT_OUT = {
    "ernie4_5_moe": "no last layer with experts",
    "falcon_h1": "all factors are multiplied into the weights",
    "falcon_h1_normed": "all factors are multiplied into the weights",
    "granitemoehybrid_dense": "no rotation beside recurrent layers",
    "kimi_linear": "no names of dense layers",
    "qwen3_next": "no dense layers",
    "bamba": "rows of queries and keys are put in another order over whole heads, of which a half rotates",
    "falcon2_11b": "the width of the feed-forward part is written as 4 * hidden",
    "gemma_embedding": "no query scale and no pattern of windows",
    "gpt_bigcode": "the width of the feed-forward part is written as 4 * hidden",
    "falcon_mamba_biased": "no names of biases",
    "flan_t5": "no bucket distance",
    "gemma2_scaled": "no query scale",
    "gemma3": "no query scale and no pattern of windows",
    "gpt_oss_clamped": "no limit",
    "granite_swa": "no bases of layers",
    "granitemoe_swa": "no bases of layers",
    "laguna": "no pattern of windows",
    "laguna_by_column": "no pattern of windows",
    "llama_dynamic": "no dynamic scaling",
    "mellum": "no dense layers",
    "minicpm3_plain_query": "no factors, and no original context",
    "mistral": "no window",
    "qwen2_window": "no window",
    "step3p7": "no word that gates are divided by their sum",
    "starcoder2_window": "no window",
    "youtu_plain_query": "no word on neighbours that rotate together",
}
LOGARITHMS = "A_log"  # of which the converter makes -exp
SPARE = ("GGUF.", "general.name", "general.type", "general.size_label", "general.file_type", "general.quant",
         "tokenizer.")


def numbered(tensors: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """float32 tensors whose elements count from 0 across all tensors."""
    first, arrays = 0, {}
    for name, shape in tensors.items():
        count = int(np.prod(shape))
        numbers = (STEP * np.arange(first, first + count)).astype(np.float32).reshape(shape)
        arrays[name] = np.log(numbers + STEP) if name.endswith(LOGARITHMS) else numbers
        first += count
    assert STEP * first < 1 << 24, "float32 cannot count so far"
    return arrays


def convert(config: dict, tensors: dict[str, tuple[int, ...]], folder: Path, filled: bool):
    """A reader of the converted file; raises what the converter raises for an unsupported model.

    filled: give the converter the configuration with the defaults that transformers adds, rather than as published.
    """
    import conversion
    import gguf

    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {str(i): i for i in range(config.get("text_config", config)["vocab_size"])}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    save_file(numbered(tensors), folder / "model.safetensors", {"format": "pt"})
    hparams = transformers.AutoConfig.from_pretrained(folder).to_dict() | config if filled else config
    conversion.ModelBase.load_hparams = staticmethod(lambda *args, **options: dict(hparams))
    known = conversion.get_model_class(conversion.get_model_architecture(hparams, conversion.ModelType.TEXT))
    plain = type(known.__name__, (known,), {"set_vocab": lambda self: None, "model_arch": known.model_arch,
                                           "no_mtp": True})
    path = folder / "model.gguf"
    with torch.inference_mode():
        plain(folder, gguf.LlamaFileType.ALL_F32, path).write()
    return gguf.GGUFReader(path)


def make(name: str) -> None:
    case = load_case(name)
    with tempfile.TemporaryDirectory() as folder:
        try:
            reader = convert(case.configs[0], case.tensors, Path(folder), filled=False)
        except (KeyError, TypeError, AttributeError):
            reader = convert(case.configs[0], case.tensors, Path(folder), filled=True)
        metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith(SPARE)}
        tensors, places, literals = {}, [], {}
        for tensor in reader.tensors:
            values = np.array(tensor.data, np.float32)
            tensors[tensor.name] = {"shape": [int(n) for n in reversed(tensor.shape)]}
            if tensor.name.startswith("rope_"):  # made from the configuration
                literals[tensor.name] = values
                continue
            if tensor.name.endswith("ssm_a"):
                tensors[tensor.name]["negative_exp"] = True
                values = STEP * np.rint(-values / STEP) - STEP
            number = values.astype(np.int64).reshape(-1)
            assert np.all(number % STEP == number[0] % STEP), tensor.name
            tensors[tensor.name]["add"] = int(number[0] % STEP)
            places.append(number // STEP)
    about = np.frombuffer(json.dumps({"metadata": metadata, "tensors": tensors}).encode(), np.uint8)
    places = np.diff(np.concatenate(places), prepend=0).astype(np.int32)
    path = FOLDER / f"{name}.npz"
    np.savez_compressed(path, about=about, places=places, **literals)
    print(name, metadata["general.architecture"], path.stat().st_size, *literals, flush=True)


if __name__ == "__main__":
    llama_cpp = Path(sys.argv[1]).resolve()
    sys.path[:0] = [str(llama_cpp / "gguf-py"), str(llama_cpp)]
    FOLDER.mkdir(exist_ok=True)
    for case_name in sys.argv[2:] or names():
        if case_name in LEFT_OUT:
            print(f"{case_name}: left out: {LEFT_OUT[case_name]}")
            continue
        try:
            make(case_name)
        except Exception as error:
            print(f"{case_name}: not converted: {type(error).__name__}: {error}", flush=True)

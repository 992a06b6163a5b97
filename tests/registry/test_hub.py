"""Models of the hub: files fetched from repositories laid out like real ones, on a fake hub."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from numflow.errors import ModelNotFoundError
from numflow.registry import hub, store
from tests.registry.fake_hub import Hub

CHILD = """
import json, sys
from huggingface_hub import constants
from numflow import registry
from numflow.errors import NumflowError
for line in sys.stdin:
    name, offline, constants.HF_HUB_CACHE = json.loads(line)
    try:
        if name.startswith("rm "):
            answer = "%s %d" % registry.remove(name[3:])
        elif name.startswith("adapter "):
            answer = str(registry.adapter(name[8:], offline=offline))
        else:
            answer = str(registry.resolve(name, offline=offline))
    except NumflowError as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
"""

QUANTS = ("Q2_K", "Q2_K_L", "Q3_K_L", "IQ4_XS", "Q4_0", "Q4_0_4_4", "Q4_K_M", "Q6_K", "Q6_K_L", "Q8_0", "bf16", "f16")
FLAT = ("README.md", ".gitattributes", "config.json", "Qwen-imatrix.gguf", "Qwen.imatrix", "imatrix.dat",
        "mmproj-Qwen-Q8_0.gguf", "mmproj-Qwen-f16.gguf", *(f"Qwen-{quant}.gguf" for quant in QUANTS))
TWO, THREE = (tuple(f"-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)) for count in (2, 3))
FOLDERS = ("README.md", "mmproj-BF16.gguf", "mmproj-F16.gguf", "imatrix_unsloth.dat", "imatrix_unsloth.gguf_file",
           *(f"{q}/Big-{q}{end}" for q in ("BF16", "F16") for end in TWO),
           *(f"{q}/Big-{q}{end}" for q in ("Q4_K_M", "UD-Q4_K_M", "Q8_0") for end in THREE),
           "Big-UD-IQ1_S.gguf", "UD-Q4_K_XL/Big-UD-Q4_K_XL.gguf", "MTP/Big-Q8_0-mtp.gguf", "mtp-Big-Q6_K.gguf")
LOWER = ("readme.md", "phi-3-mini-4k-instruct-fp16.gguf", "phi-3-mini-4k-instruct-q4.gguf", "model_q5_k_m.gguf")
WEIGHTED = ("m.imatrix.dat", *(f"m.i1-{quant}.gguf" for quant in ("IQ1_M", "Q4_K_M", "Q6_K", "IQ3_XXS")))
SPLIT = tuple(f"model-{n:05}-of-00002.safetensors" for n in (1, 2))
WHOLE = ("README.md", "config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json", *SPLIT,
         "consolidated.safetensors", "extra.safetensors", "pytorch_model.bin", "onnx/model.onnx", "training_args.bin",
         "original/params.json", "figures/a.png")
INDEX = json.dumps({"weight_map": {"a": SPLIT[0], "b": SPLIT[1]}}).encode()


@dataclass
class Shelf:
    """A hub with repositories, and a process that takes models from it.

    take: the path within the snapshot, or the error, and which files were fetched.
    """

    hub: Hub
    child: subprocess.Popen
    cache: Path

    def take(self, name: str, offline: bool = False) -> tuple[str, list[str]]:
        self.hub.fetched.clear()
        self.child.stdin.write(json.dumps([name, offline, str(self.cache)]) + "\n")
        self.child.stdin.flush()
        answer = json.loads(self.child.stdout.readline())
        return answer.partition("/snapshots/")[2].partition("/")[2] or answer, sorted(self.hub.fetched)

    def told(self, name: str) -> str:
        return self.take(name)[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with Hub() as server:
        server.add("org/flat", *FLAT)
        server.add("org/folders", *FOLDERS)
        server.add("org/lower", *LOWER)
        server.add("org/weighted", *WEIGHTED)
        server.add("org/whole", *WHOLE, **{"model.safetensors.index.json": INDEX})
        server.add("org/flat", "Qwen-Q4_K_M.gguf", revision="v2")
        server.add("org/two", "a-Q4_K_M.gguf", "b-Q4_K_M.gguf", "b-Q8_0.gguf")
        server.add("org/mlx-lora", "adapter_config.json", "adapters.safetensors", "0000100_adapters.safetensors")
        server.add("org/lora", "README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json",
                   "training_args.bin", "checkpoint-1/adapter_model.safetensors")
        server.add("org/gguf-lora", "README.md", "lora-f16.gguf")
        server.add("org/odd", "m [Q4_K_M].gguf", "m Q.gguf")
        environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(home), "NUMFLOW_HOME": str(home),
                       "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                       "no_proxy": "127.0.0.1,localhost"}
        for variable in ("NUMFLOW_OFFLINE", "HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
            environment.pop(variable, None)
        with open(home / "errors", "w") as errors, subprocess.Popen(
                [sys.executable, "-c", CHILD], env=environment, text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=errors) as child:
            yield server, child, home / "errors"
            child.stdin.close()


@pytest.fixture
def shelf(served, tmp_path) -> Shelf:
    return Shelf(*served[:2], tmp_path / "cache")


@pytest.mark.parametrize("name, opened, fetched", [
    *((f"org/flat:{quant}", f"Qwen-{quant}.gguf", 1) for quant in QUANTS),
    ("org/flat:F16", "Qwen-f16.gguf", 1),
    ("org/flat:q4_k_m", "Qwen-Q4_K_M.gguf", 1),
    ("org/flat:Qwen-Q8_0.gguf", "Qwen-Q8_0.gguf", 1),
    ("org/flat:*iq4*", "Qwen-IQ4_XS.gguf", 1),
    ("org/folders:F16", f"F16/Big-F16{TWO[0]}", 2),
    ("org/folders:BF16", f"BF16/Big-BF16{TWO[0]}", 2),
    ("org/folders:Q4_K_M", f"Q4_K_M/Big-Q4_K_M{THREE[0]}", 3),
    ("org/folders:UD-Q4_K_M", f"UD-Q4_K_M/Big-UD-Q4_K_M{THREE[0]}", 3),
    ("org/folders:Q4_K_XL", "UD-Q4_K_XL/Big-UD-Q4_K_XL.gguf", 1),
    ("org/folders:IQ1_S", "Big-UD-IQ1_S.gguf", 1),
    ("org/folders:Q8_0", f"Q8_0/Big-Q8_0{THREE[0]}", 3),
    (f"org/folders:Q8_0/Big-Q8_0{THREE[1]}", f"Q8_0/Big-Q8_0{THREE[0]}", 3),
    ("org/folders:Q8_0/", f"Q8_0/Big-Q8_0{THREE[0]}", 3),
    ("org/folders:mtp-Big-Q6_K.gguf", "mtp-Big-Q6_K.gguf", 1),
    ("org/lower:f16", LOWER[1], 1),
    ("org/lower:Q4", LOWER[2], 1),
    ("org/lower:Q5_K_M", LOWER[3], 1),
    ("org/weighted:Q6_K", "m.i1-Q6_K.gguf", 1),
    ("org/weighted:i1-Q6_K", "m.i1-Q6_K.gguf", 1),
    ("org/odd:q4_k_m", "m [Q4_K_M].gguf", 1),
])
@pytest.mark.thin(2)
def test_a_quantisation_is_one_model(shelf, name, opened, fetched):
    path, files = shelf.take(name)
    assert path == opened
    assert opened in files and len(files) == fetched
    assert {file.partition("-0000")[0] for file in files} == {opened.partition("-0000")[0]}
    assert shelf.take(name, offline=True) == (opened, [])
    assert shelf.take(name) == (opened, [])  # what is here is not fetched again


@pytest.mark.parametrize("name, line", [
    ("org/flat:Q5_K_M", "no weights match 'Q5_K_M'; it has .*Qwen-Q8_0.gguf"),
    ("org/flat:mmproj-Qwen-f16.gguf", "no weights match .* not a complete model"),
    ("org/flat:Q4_K", "no weights match 'Q4_K'"),
    ("org/folders:Q6_K", "no weights match 'Q6_K' but mtp-Big-Q6_K.gguf, not a complete model"),
    ("org/two:Q4_K_M", "several models that match 'Q4_K_M': a-Q4_K_M.gguf, b-Q4_K_M.gguf; choose one, such as "
                       "org/two:a-Q4_K_M.gguf$"),
    ("org/two", "several models in Q4_K_M: a-Q4_K_M.gguf, b-Q4_K_M.gguf"),
    ("org/none", "no repository 'org/none'"),
    ("org/flat@v3", "org/flat has no revision 'v3'"),
])
def test_what_cannot_be_is_one_line_and_no_download(shelf, name, line):
    said, files = shelf.take(name)
    assert re.search(line, said) and said.startswith("ModelNotFoundError: ") and "\n" not in said
    assert files == []


@pytest.mark.parametrize("name, opened", [
    ("org/flat", "Qwen-Q4_K_M.gguf"),
    ("hf.co/org/flat:latest", "Qwen-Q4_K_M.gguf"),
    ("org/folders", f"Q4_K_M/Big-Q4_K_M{THREE[0]}"),
    ("org/weighted", "m.i1-Q4_K_M.gguf"),
    ("org/lower", "model_q5_k_m.gguf"),
])
def test_without_a_quantisation_the_usual_one_is_taken_and_named(shelf, served, name, opened):
    before = len(served[2].read_text())
    path, files = shelf.take(name)
    assert path == opened and opened in files
    assert {file.partition("-0000")[0] for file in files} == {opened.partition("-0000")[0]}
    assert f"GGUF models: taking {opened}; org/" in served[2].read_text()[before:]


def test_safetensors_come_with_what_is_beside_them(shelf):
    path, files = shelf.take("org/whole")
    assert path.endswith(shelf.hub.commit("org/whole", "main"))
    wanted = [*SPLIT, "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json"]
    assert files == sorted(wanted)
    assert shelf.take("org/whole", offline=True) == (path, [])


def test_adapters_by_name(shelf, tmp_path):
    path, files = shelf.take("adapter org/lora")
    assert path.endswith(shelf.hub.commit("org/lora", "main"))
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    assert shelf.take("adapter org/lora", offline=True) == (path, [])
    assert shelf.take("adapter org/mlx-lora")[1] == ["adapter_config.json", "adapters.safetensors"]
    assert shelf.take("adapter hf.co/org/gguf-lora") == ("lora-f16.gguf", ["lora-f16.gguf"])
    assert shelf.told("adapter org/whole").startswith("ModelNotFoundError: org/whole: no adapter: expected adapter_")
    assert shelf.told("adapter org/none").startswith("ModelNotFoundError: no repository 'org/none'")
    assert shelf.told(f"adapter {tmp_path}/none/x") == f"{tmp_path}/none/x"


def test_a_revision_is_another_model(shelf):
    assert shelf.take("org/flat:Q4_K_M") == ("Qwen-Q4_K_M.gguf", ["Qwen-Q4_K_M.gguf"])
    assert shelf.take("org/flat:Q4_K_M@v2") == ("Qwen-Q4_K_M.gguf", ["Qwen-Q4_K_M.gguf"])
    commit = shelf.hub.commit("org/flat", "v2")
    assert (shelf.cache / "models--org--flat/snapshots" / commit / "Qwen-Q4_K_M.gguf").read_text().endswith(" of v2")
    assert shelf.take(f"org/flat@{commit}", offline=True) == ("Qwen-Q4_K_M.gguf", [])


def test_a_repository_is_removed_whole(shelf):
    shelf.take("org/flat:Q4_K_M")
    shelf.take("org/flat:Q8_0")
    size = sum(file.stat().st_size for file in (shelf.cache / "models--org--flat/blobs").iterdir())
    assert size > 0 and shelf.told("rm org/flat:Q8_0") == f"{shelf.cache}/models--org--flat {size}"
    assert not (shelf.cache / "models--org--flat").exists()
    assert shelf.told("rm org/flat") == "ModelNotFoundError: org/flat is not on this disk"


def test_offline_takes_what_is_whole_and_here(shelf):
    assert "org/folders is not on this disk" in shelf.take("org/folders:Q8_0", offline=True)[0]
    shelf.take("org/folders:Q8_0")
    assert "not all of it" in shelf.take("org/folders:F16", offline=True)[0]
    assert shelf.take("org/folders", offline=True) == (f"Q8_0/Big-Q8_0{THREE[0]}", [])
    next(shelf.cache.rglob(f"*{THREE[1]}")).unlink()
    assert "2 of 3 shards of Q8_0/Big-Q8_0.gguf are there" in shelf.take("org/folders:Q8_0", offline=True)[0]
    assert shelf.take("org/folders:Q8_0")[0] == f"Q8_0/Big-Q8_0{THREE[0]}"
    shelf.take("org/whole")
    next(shelf.cache.rglob(SPLIT[1])).unlink()
    assert f"names {SPLIT[1]}, which is not there" in shelf.take("org/whole", offline=True)[0]


@pytest.mark.parametrize("name, parsed", [
    ("hf.co/org/name:Q4_K_M", ("org/name", "Q4_K_M", None)),
    ("HF.co/org/name", ("org/name", "", None)),
    ("huggingface.co/org/name/", ("org/name", "", None)),
    ("hf:org/name:q8_0@v1", ("org/name", "q8_0", "v1")),
    ("hf://org/name/sub/x.gguf", ("org/name", "sub/x.gguf", None)),
    ("hf:org/name/x.gguf@v1", ("org/name", "x.gguf", "v1")),
    ("org/name:latest", ("org/name", "", None)),
    ("https://huggingface.co/org/name", ("org/name", "", None)),
    ("http://www.huggingface.co/org/name/", ("org/name", "", None)),
    ("https://hf.co/org/name:Q4_K_M", ("org/name", "Q4_K_M", None)),
    ("https://huggingface.co/org/name?show_file_info=x.gguf", ("org/name", "x.gguf", None)),
    ("https://huggingface.co/org/name/tree/main", ("org/name", "", "main")),
    ("https://huggingface.co/org/name/tree/v1/Q4_K_M", ("org/name", "Q4_K_M/", "v1")),
    ("https://huggingface.co/org/name/tree/refs%2Fpr%2F3", ("org/name", "", "refs/pr/3")),
    ("https://huggingface.co/org/name/blob/main/a%20b.gguf", ("org/name", "a b.gguf", "main")),
    ("https://huggingface.co/org/name/resolve/main/Q8_0/x.gguf?download=true", ("org/name", "Q8_0/x.gguf", "main")),
    ("org/name/x.gguf", None), ("hf", None),
])
def test_names_as_people_paste_them(name, parsed):
    assert hub.parse(name) == parsed


@pytest.mark.parametrize("name, line", [
    ("https://huggingface.co/datasets/org/name", "no model of the hub is named so"),
    ("https://huggingface.co/org", "no model of the hub is named so"),
    ("https://huggingface.co/org/name/discussions/3", "this page is no model"),
    ("https://huggingface.co/org/name/tree", "a revision should stand behind /tree/"),
    ("hf:name", "no model of the hub is named so"),
    ("https://example.org/a/x.gguf", r"fetches from the Hugging Face hub only; download this file "
                                     r"\(curl -LO https://example\.org/a/x\.gguf\) and give its path"),
])
def test_other_addresses_are_refused_in_one_line(name, line):
    with pytest.raises(ModelNotFoundError, match=line):
        store.resolve(name)


def test_addresses_of_the_endpoint_are_of_the_hub(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    assert hub.parse("https://mirror.example/org/name/blob/main/x.gguf") == ("org/name", "x.gguf", "main")


def test_pasted_addresses_are_fetched(shelf):
    name = "Qwen-Q4_K_M.gguf"
    assert shelf.take(f"{shelf.hub.url}/org/flat/blob/v2/{name}") == (name, [name])
    assert shelf.take("https://huggingface.co/org/folders/tree/main/Q8_0")[0] == f"Q8_0/Big-Q8_0{THREE[0]}"
    assert shelf.told("hf:org/flat/Qwen-Q8_0.gguf") == "Qwen-Q8_0.gguf"
    assert shelf.told("org/flat:Qwen-Q6_K.gguf") == "Qwen-Q6_K.gguf"

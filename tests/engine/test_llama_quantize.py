"""K types and IQ4 beside those of llama-quantize, on the same weights and imatrix, and the files in llama.cpp.

NUMFLOW_LLAMA_CPP names the folder of llama.cpp's programs.
"""

import subprocess

import gguf
import numpy as np
import pytest

from numflow import formats
from numflow.engine.quantise.calibrate import calibrate, save
from numflow.engine.quantise.export import export_gguf
from numflow.engine.quantise.verify_gguf import verify_gguf
from numflow.formats.types import to_f32
from numflow.network.gguf.mixes import named
from numflow.network.quantise.calibration import read_calibration
from tests.engine.test_export import write_gguf
from tests.engine.test_export_folders import check_llama_cpp, llama_cpp
from tests.quant.small import TEXT

pytestmark = pytest.mark.slow
MIXES = ("Q2_K_S", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    def heavy(tensors):
        rng = np.random.default_rng(5)
        for name, x in tensors.items():
            if x.ndim == 2:
                tensors[name] = (0.05 * rng.standard_t(4, x.shape)).astype(np.float32)

    return write_gguf(tmp_path_factory.mktemp("llama") / "wide.gguf", heavy, width=256, ffn=512, rope=64)


@pytest.fixture(scope="module")
def imatrix(source):
    path = source.with_name("imatrix.gguf")
    save(calibrate(source, TEXT, 64, 6, moments=False), path, source)
    return path


def theirs(source, target, mix, imatrix):
    done = subprocess.run([llama_cpp("llama-quantize"), *(["--imatrix", imatrix] if imatrix else []), source, target,
                           mix, "1"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-800:]
    return gguf.GGUFReader(target)


def weighted_errors(path, source, importances) -> dict[str, float]:
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        x = source.tensors[tensor.name].f32().astype(np.float64)
        if x.ndim == 2 and tensor.tensor_type.name != "F32":
            c = importances.get(tensor.name, np.ones(1))
            y = to_f32(tensor.data.reshape(len(x), -1).view(np.uint8), tensor.tensor_type.name)
            found[tensor.name] = float(np.sqrt((c * (y - x) ** 2).sum() / (c * x ** 2).sum()))
    return found


@pytest.mark.parametrize(("mix", "with_imatrix"), [(mix, known) for mix in MIXES for known in (False, True)
                                                   if known or mix != "Q2_K_S"])  # which it wants an imatrix for
def test_same_types_and_errors_at_most_as_large(source, imatrix, tmp_path, mix, with_imatrix):
    calibration = read_calibration(imatrix) if with_imatrix else None
    checkpoint = formats.open_checkpoint(source)
    reader = theirs(source, tmp_path / "theirs.gguf", mix, imatrix if with_imatrix else None)
    export_gguf(checkpoint, tmp_path / "ours.gguf", named(mix, True), calibration=calibration)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "ours.gguf").tensors}
    assert kinds == {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    importances = calibration.importances if calibration else {}
    ours, them = (weighted_errors(tmp_path / f"{who}.gguf", checkpoint, importances) for who in ("ours", "theirs"))
    worse = {name: (ours[name], them[name]) for name in ours if ours[name] > 1.002 * them[name]}
    assert ours.keys() == them.keys() and not worse
    assert np.mean([ours[name] / them[name] for name in ours]) < 1


@pytest.mark.parametrize("mix", ["Q2_K_S", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS", "IQ4_NL"])
def test_the_files_run_there_with_the_same_logits(source, imatrix, tmp_path, mix):
    """Made float32 by llama.cpp: from codes it multiplies with activations of 8 bits."""
    target = tmp_path / "x.gguf"
    export_gguf(formats.open_checkpoint(source), target, named(mix, True), calibration=read_calibration(imatrix))
    done = subprocess.run([llama_cpp("llama-quantize"), "--allow-requantize", target, tmp_path / "f32.gguf", "F32",
                           "1"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-800:]
    check_llama_cpp(target, tmp_path / "f32.gguf", tmp_path, 1e-4)
    check_llama_cpp(target, target, tmp_path, 0.4)
    verify_gguf(target, source)


def test_their_imatrix_is_ours(source, tmp_path):
    """Of the same text; theirs leaves out the output matrix."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    for name in ("i.gguf", "i.dat"):
        done = subprocess.run([llama_cpp("llama-imatrix"), "-m", source, "-f", text, "-c", "64", "-b", "64", "--chunks",
                               "4", "-t", "1", "-fa", "off", "-o", tmp_path / name, "--output-format",
                               name.removeprefix("i.")], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (done.stdout + done.stderr)[-800:]
        assert ((tmp_path / name).read_bytes()[:4] == b"GGUF") == (name == "i.gguf")
        found, own = read_calibration(tmp_path / name), calibrate(source, TEXT, 64, 4, moments=False)
        for tensor in ("blk.0.attn_q.weight", "blk.1.ffn_down.weight", "blk.1.attn_output.weight"):
            a, b = found.importance(tensor).ravel(), own.importance(tensor)
            assert np.corrcoef(a, b)[0, 1] > 0.98, (name, tensor)


@pytest.mark.parametrize("kind", [
    "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "q2_0", "q1_0", "q6_k", "q5_k", "q4_k", "q3_k", "q2_k",
    "iq4_nl", "iq4_xs", "iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s", "tq2_0", "tq1_0", "mxfp4",
    "nvfp4"])
def test_every_type_of_theirs_is_expanded_as_they_do(source, imatrix, tmp_path, kind):
    for options in (["--imatrix", imatrix, "--tensor-type", f"attn={kind}", "--tensor-type", f"ffn={kind}", source,
                     tmp_path / "coded.gguf", "Q8_0", "1"],
                    ["--allow-requantize", tmp_path / "coded.gguf", tmp_path / "plain.gguf", "F32", "1"]):
        done = subprocess.run([llama_cpp("llama-quantize"), *options], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (done.stdout + done.stderr)[-800:]
    coded, plain = (formats.open_checkpoint(tmp_path / name).tensors for name in ("coded.gguf", "plain.gguf"))
    assert {t.type.name for name, t in coded.items() if ".ffn_" in name and "norm" not in name} == {kind.upper()}
    assert coded.keys() == plain.keys()
    for name, tensor in coded.items():
        np.testing.assert_array_equal(tensor.f32(), plain[name].f32())

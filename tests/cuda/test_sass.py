"""Instructions that must be in the machine code, if a disassembler is installed."""

import functools
import re

import pytest

from numflow.cuda.compiler.sass import disassembler, instructions
from numflow.cuda.state.cache_code import pitch
from numflow.quant.kv import CODED
from numflow.quant.stored import KINDS, STORED
from tests.cuda.kernels import APART, GROUPED, NEWER, TENSOR, binary, compiler_is_there
from tests.cuda.matrices import FLOAT4, FLOAT8, QUANTISED

pytestmark = [pytest.mark.slow,  # .ci/cuda runs them
              pytest.mark.skipif(not compiler_is_there(), reason="no numba-cuda, or not the wheels it compiles with"),
              pytest.mark.skipif(disassembler() is None, reason="nvdisasm is not installed")]
NAMES = sorted({STORED[kind].kind.name for kind in QUANTISED})


@functools.cache
def listing(name: str, capability: tuple[int, int]) -> list[str]:
    """A kernel's SASS instructions; disassembling a large kernel takes a second."""
    return instructions(binary(name, capability))


def found(name: str, pattern: str, capability=(9, 0)) -> int:
    """Instructions of a kernel that match a pattern."""
    return sum(re.match(pattern, text) is not None for text in listing(name, capability))


@pytest.mark.parametrize("kind", NAMES)
def test_matrix_times_vector(kind):
    floats = KINDS[kind].floats_only
    name = f"gemv_{kind}_{'f32' if floats else 'int8'}_1"
    if KINDS[kind].bits not in (1, 2, 3):  # those read 4 or 8 bytes a lane
        assert found(name, r"LDG\.E\.NA\.LTC128B\.128")
    assert found(name, r"LDG\.E\.128")  # activations
    assert found(name, "FFMA" if floats else r"IDP\.4A\.U8\.S8")
    assert not found(name, "LDL|STL")


@pytest.mark.parametrize("kind", ["f16", "bf16", *NAMES])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def test_tensor_cores(kind, capability):
    for tokens in (16, 128):
        few = tokens == 16 and kind in NAMES  # the kernel that decodes weights in registers
        name = f"gemm_{kind}_{tokens}{'_16' * few}"
        assert found(name, r"HMMA\.16816\.F32", capability) == (32 if few else tokens // 2)
        assert bool(found(name, r"LDSM\.16\.M88\.4", capability)) == (not few)
        assert bool(found(name, r"LDGSTS\.E\.BYPASS\.\S*128", capability)) == (not few)
        assert not found(name, "LDL|STL", capability)


@pytest.mark.parametrize("kind", ["f16", "bf16", *NAMES])
def test_warpgroups(kind):
    """A step's four wgmma are issued together, and only one wait is in the loop: ptxas has not serialised them, as it
    does around function calls. No full memory barrier is in the loop."""
    name = f"wgmma_{kind}_tma"
    assert found(name, r"HGMMA\.64x128x16\.F32") == 4
    assert found(name, r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1") == found(name, r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0") == 1
    assert not found(name, "LDL|STL|CALL")
    assert found(name, r"UBLKCP\.S\.G\.MULTICAST") == 3  # for two tiles before the loop and one within
    assert found(name, r"UBLKCP\.S\.G ") == 6           # both halves, for a block without a cluster
    assert bool(found(name, "LDGSTS")) == (kind in ("f16", "bf16"))
    code = "\n".join(listing(name, (9, 0)))
    begin, end = code.index("HGMMA"), code.index("WARPGROUP.DEPBAR.LE gsb0, 0x1")
    assert code.count("MEMBAR.ALL.GPU") == 2 and "MEMBAR.ALL.GPU" not in code[begin:end]   # two cluster barriers


@pytest.mark.parametrize("kind", sorted(STORED[kind].kind.name for kind in FLOAT8))
def test_warpgroups_of_8_bit_floats(kind):
    """The same; for matrices with block scales, accumulators wait for the products before the next block's."""
    name = f"wgmma_{kind}_float8_tma"
    assert found(name, rf"QGMMA\.64x128x32\.F32\.{kind[:4].upper()}\.E4M3") == 4 and not found(name, "LDL|STL|CALL")
    waits = found(name, r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0")
    assert waits == (1 if kind.endswith("row") else 2) and found(name, r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1") == 1
    assert found("operand_e4m3", r"F2FP\.SATFINITE\.E4M3") > 0


@pytest.mark.parametrize("capability", NEWER, ids=["sm_89", "sm_120"])
@pytest.mark.parametrize("kind", sorted(STORED[kind].kind.name for kind in FLOAT8))
def test_tensor_cores_of_8_bit_floats(kind, capability):
    """Two tiles are asked for before the loop and one within."""
    for name in (f"mma_{kind}_float8", f"mma_{kind}_float8_grouped"):
        assert found(name, rf"QMMA\.16832\.F32\.{kind[:4].upper()}\.E4M3", capability) == 64
        assert found(name, r"LDSM\.16\.M88\.4", capability) == 16
        assert found(name, r"LDGSTS\.E\.BYPASS\.128", capability) == 24
        assert not found(name, "LDL|STL|HMMA", capability)


@pytest.mark.parametrize("kind", sorted(STORED[kind].kind.name for kind in FLOAT8))
def test_tensor_memory(kind):
    """Four products and one commit in the loop. Loads of 8 columns: 16 for the last group, 16 in the loop for matrices
    with block scales."""
    for form in ("_tma", "", "_grouped"):
        name = f"tcgen05_{kind}_float8{form}"
        assert found(name, "UTCQMMA", TENSOR) == 4 and found(name, "UTCBAR", TENSOR) == 1
        assert found(name, r"LDTM\.x8", TENSOR) == (16 if kind.endswith("row") else 32)
        assert not found(name, "LDL|STL|QMMA|HMMA", TENSOR)
        assert found(name, r"UBLKCP\.S\.G\.MULTICAST", TENSOR) == 2 * (form == "_tma")


@pytest.mark.parametrize("kind", FLOAT4)
def test_tensor_memory_of_4_bit_floats(kind):
    """As of 8-bit floats; copies bring the scales of three times 128 rows and twice 64 columns to tensor memory."""
    for form in ("_tma", "", "_grouped"):
        name = f"tcgen05_{STORED[kind].kind.name}_float4{form}"
        assert found(name, "UTCOMMA", TENSOR) == 4 and found(name, "UTCBAR", TENSOR) == 1
        assert found(name, "UTCCP", TENSOR) == 6 and found(name, r"LDTM\.x8", TENSOR) == 16
        assert not found(name, "LDL|STL|OMMA|QMMA|HMMA", TENSOR)
    assert found(f"operand_{FLOAT4[kind]}_tcgen05", r"F2FP\.SATFINITE\.E2M1", TENSOR) == 8


@pytest.mark.parametrize("kind", FLOAT4)
def test_tensor_cores_of_4_bit_floats(kind):
    """As of 8-bit floats; scales come by loads of the lanes."""
    scales = "E8" if FLOAT4[kind] == "mxfp4" else r"UE4M3\.4X"
    for grouped in ("", "_grouped"):
        name = f"mma_{STORED[kind].kind.name}_float4{grouped}"
        assert found(name, rf"OMMA\.SF\.16864\.F32\.E2M1\.E2M1\.{scales}", (12, 0)) == 64
        assert found(name, r"LDSM\.16\.M88\.4", (12, 0)) == 16
        assert found(name, r"LDGSTS\.E\.BYPASS\.128", (12, 0)) == 24
        assert not found(name, "LDL|STL|HMMA|QMMA", (12, 0))
    assert found(f"operand_{FLOAT4[kind]}", r"F2FP\.SATFINITE\.E2M1", (12, 0)) == 8


@pytest.mark.parametrize("kind", sorted({STORED[kind].kind.name for kind in GROUPED}))
def test_warpgroups_without_the_copy_engine(kind):
    for name in (f"wgmma_{kind}", f"wgmma_{kind}_grouped"):
        assert found(name, r"HGMMA\.64x128x16\.F32") == 4 and found(name, r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1") == 1
        assert found(name, r"FENCE\.VIEW\.ASYNC") == 1 and not found(name, "MEMBAR.ALL.GPU|LDL|STL|CALL|UBLKCP")


@pytest.mark.parametrize("kind", sorted({STORED[kind].kind.name for kind in GROUPED}))
def test_grouped_tensor_cores(kind):
    for tokens in (16, 64, 128):
        few = tokens == 16 and kind in NAMES
        name = f"gemm_{kind}_{tokens}{'_8' * few}_grouped"
        assert found(name, r"HMMA\.16816\.F32") == (32 if few else tokens // 2)
        assert bool(found(name, r"LDGSTS\.E\.BYPASS\.\S*128")) == (not few)
        assert not found(name, "LDL|STL")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
@pytest.mark.parametrize("kind", [kind.partition("+")[0] for kind in APART])
def test_outliers(kind, capability):
    """In addition to the loads of kernels without outliers: a lane's first outlier is loaded before its codes."""
    for name in (f"gemv_{kind}_int8_1_apart", f"gemv_{kind}_int8_1_split4_apart"):
        loads = [text for text in listing(name, capability) if text.startswith("LDG")]
        first = next(place for place, text in enumerate(loads) if "LTC128B.128" in text)
        assert sum(text.startswith("LDG.E R") for text in loads[:first]) == 1  # the number of rows is LDG.E.NA
        assert found(name, r"IDP\.4A\.U8\.S8", capability) and not found(name, "LDL|STL", capability)
    for tokens in (16, 64, 128):
        name = f"gemm_{kind}_{tokens}_apart"
        assert found(name, r"HMMA\.16816\.F32", capability) == tokens // 2
        assert found(name, r"LDGSTS\.E\.BYPASS\.\S*128", capability)
        assert not found(name, "LDL|STL", capability)


def test_choosing_tokens():
    """Rows are read 16 bytes a lane; histograms are filled without compare-and-swap loops."""
    for name in ("argmax", "sample", "sample_follow"):
        assert found(name, r"LDG\.E\.128")
        assert not found(name, "LDL|STL|DADD|DMUL|DFMA")


@pytest.mark.parametrize("kind", ["f16", *CODED])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def test_attention(kind, capability):
    """64 rows and 64 keys a step for prompts, 8 rows and 32 keys for decoding; heads of 128 columns."""
    of = f"{kind}_{pitch(kind, 128)}_{kind}_{pitch(kind, 128)}"
    many, few = f"attention_many_{of}", f"attention_few_{of}_8"
    assert found(many, r"HMMA\.16816\.F32", capability) == 128
    assert found(many, r"LDSM\.16\.M88\.4", capability) == 32 + 8  # keys, and queries once
    assert found(many, r"LDSM\.16\.MT88\.4", capability) == 32
    assert (found(many, r"LDGSTS\.E\.BYPASS\.\S*128", capability) > 0) == (kind == "f16")
    assert found(few, r"MOVM\.16\.MT88", capability) == 4
    assert found(few, r"HMMA\.16816\.F32", capability) >= 8
    assert not found(few, "LDSM", capability)
    if kind == "f16":
        assert found(few, r"LDG\.E\.128", capability) == 32
    for name in (many, few):
        assert not found(name, "LDL|STL", capability)

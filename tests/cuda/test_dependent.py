"""PTX for programmatic dependent launch (compiler/dependent.py)."""

from numflow.cuda.compiler.dependent import RELEASE, dependent
from numflow.cuda.lang.intrinsic import NEWER, WAIT
from tests.cuda.ptx.parse import parse

HEAD = """.version 9.0
.target sm_80
.address_size 64
.visible .entry probe(.param .u64 p)
.maxntid 128, 1, 1
{
\t.reg .pred \t%p<2>;
\t.reg .b64 \t%rd<4>;
\t// demoted variable
\t.shared .align 16 .b8 room[64];
"""
PLAIN = HEAD + "\n\tld.param.u64 \t%rd1, [p];\n\tret;\n}\n"
OWN = HEAD + f"\n\tld.param.u64 \t%rd1, [p];\n\t{NEWER}prefetch.global.L2 [%rd1];\n\t{NEWER}{WAIT}\n\tret;\n}}\n"


def instructions(text: str) -> list[str]:
    return [step.text for step in parse(text).instructions]


def test_a_kernel_waits_first_of_all():
    assert instructions(PLAIN) == ["ld.param.u64 %rd1, [p]", "ret"]
    assert instructions(dependent(PLAIN)) == [RELEASE[:-1], WAIT[:-1], "ld.param.u64 %rd1, [p]", "ret"]
    assert ".target sm_90" in dependent(PLAIN) and parse(dependent(PLAIN)).shared == {"room": 0}


def test_or_where_it_says():
    assert instructions(OWN) == instructions(PLAIN)
    assert instructions(dependent(OWN)) == [RELEASE[:-1], "ld.param.u64 %rd1, [p]", "prefetch.global.L2 [%rd1]",
                                            WAIT[:-1], "ret"]
    assert not parse(OWN).awaits and parse(dependent(OWN)).awaits

"""Kernels that several processes compile: numflow/cpu/runtime/processes.py."""

import json
import os
import stat
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
from numflow.cpu.runtime import code_files, kernel, processes
if sys.argv[2]:
    sys.executable = sys.argv[2]
heard, done, kernels = [], [], kernel.Code("numflow.cpu.elementwise.act_kernels").kernels()
kernel.on_compile.append(lambda name, seconds, loaded: heard.append((name, loaded)))
chosen = [kernels[name] for name in ("clamp", "signed_sqrt", "xielu", "swiglu_clamp", "softcap", "clamp")]
starts, popen = [], processes.subprocess.Popen
processes.subprocess.Popen = lambda *args, **more: starts.append(args) or popen(*args, **more)
processes.compile_missing(chosen, int(sys.argv[1]), done.append)
there = [code_files.exists(each.module, each.file) for each in chosen]
compiled = [name for name, loaded in heard if not loaded]
for each in chosen:
    each.prepare()
print(json.dumps([len(starts), there, compiled, len(done), sorted({name for name, _ in heard})]))
"""


def compiled(tmp_path, processes=4, executable="", most=None, warns=""):
    environment = os.environ | {"NUMFLOW_CACHE": str(tmp_path / "cache")}
    environment.pop("NUMFLOW_COMPILERS")
    if most is not None:
        environment["NUMFLOW_COMPILERS"] = most
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(processes), executable], env=environment, text=True,
                          capture_output=True, check=False)
    assert done.returncode == 0 and (warns in done.stderr if warns else done.stderr == ""), done.stderr
    return json.loads(done.stdout)


def test_each_kernel_is_compiled_once(tmp_path):
    starts, there, names, count, heard = compiled(tmp_path)
    assert starts == 1 and all(there) and count == 5
    assert sorted(names) == heard == ["clamp", "signed_sqrt", "softcap", "swiglu_clamp", "xielu"]
    assert compiled(tmp_path)[:3] == [0, there, []]  # all are on disk


@pytest.mark.parametrize(("processes", "most"), [(1, None), (4, "1")])
@pytest.mark.merge
def test_by_itself(tmp_path, processes, most):
    starts, there, names, count, heard = compiled(tmp_path, processes, most=most)
    assert (starts, any(there), names, count) == (0, False, [], 0) and len(heard) == 5


@pytest.mark.merge
def test_without_a_folder_that_lasts(tmp_path):
    """A file is where the folder should be: kernels are kept in a folder of this process, which others do not know."""
    (tmp_path / "cache").write_text("")
    starts, there, names, _, heard = compiled(tmp_path, warns="compiled kernels")
    assert (starts, any(there), names) == (0, False, []) and len(heard) == 5


@pytest.mark.skipif(os.name != "posix", reason="a script that is a program")
@pytest.mark.parametrize("name", ["python-that-ends", "python-that-lies", "an-application", "python-that-is-not-there"])
@pytest.mark.thin(4)
def test_processes_that_do_not_work(tmp_path, name):
    program = tmp_path / name
    if not name.endswith("there"):
        program.write_text("#!/bin/sh\n" + ("read line\necho five\n" if name.endswith("lies") else ""))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    starts, _, _, _, heard = compiled(tmp_path, executable=str(program))
    assert starts == (name != "an-application") and len(heard) == 5

"""Students' files that are wrong, too slow, print too much or crash: each gets a verdict of one line."""

import json
import re

import pytest

from numflow.learn.catalogue import lab_of, labs
from numflow.learn.check import KEPT, bench, check
from numflow.learn.child import Unusable, checked
from numflow.learn.show import bar_lines
from tests.server.tiny import write_chat_model

LAB = lab_of("1")
HEAD = "import numpy as np\n\n\ndef rms_norm(x, weight=None, *, eps, groups):\n"


def verdict(tmp_path, source, seconds=60.0):
    (tmp_path / LAB.file_name).write_text(source, encoding="utf-8")
    facts = check(LAB, tmp_path, seconds)
    assert "\n" not in facts["message"]
    assert facts["lab"] == 1 and facts["name"] == "rms-norm"
    return facts


def test_a_right_file(tmp_path):
    facts = verdict(tmp_path, LAB.solution())
    assert facts["passed"] and facts["message"] == "right: 7 cases pass" and facts["printed"] == ""


def test_a_file_that_is_not_there(tmp_path):
    facts = check(LAB, tmp_path)
    assert not facts["passed"] and facts["message"].startswith("no rms_norm.py in ")


def test_a_wrong_file_names_case_place_size_and_cause(tmp_path):
    facts = verdict(tmp_path, HEAD + "    return x / np.sqrt((x * x).mean(-1, keepdims=True)) * weight\n")
    assert not facts["passed"]
    assert re.fullmatch(r"case rms_norm-tiny-values \(1 of 7\): run 0, row 0, column 0: got \S+, expected \S+, off by "
                        r"\S+ \(allowed \S+\); 320 of 320 numbers are wrong, in 5 of 5 rows; each row has the "
                        r"expected values times a different factor, 28\.\d to 30\.\d", facts["message"])
    assert facts["cause"] == "a norm without eps"
    assert facts["place"]["wrong_rows"] == 5 and facts["case"] == "rms_norm-tiny-values"


def test_numbers_that_are_nearly_right_are_not_said_to_stand_elsewhere(tmp_path):
    """The mean with n - 1 in place of n: off by 8e-6 where eps makes up nearly all of the sum."""
    facts = verdict(tmp_path, HEAD + "    g = x.reshape(len(x), groups, -1)\n    n = g.shape[2]\n"
                    "    mean = (g * g).sum(-1, keepdims=True) / np.float32(n - 1)\n"
                    "    y = g / np.sqrt(mean + np.float32(eps))\n"
                    "    return (y if weight is None else y * weight.reshape(-1, n)).reshape(x.shape)\n")
    assert not facts["passed"] and facts["case"] == "rms_norm-tiny-values"
    assert re.search(r"; each of them is nearly right, too small by \S+e-06( to \S+e-0[56])? of itself$",
                     facts["message"])


@pytest.mark.parametrize(("source", "message"), [
    ("def rms_norm(x:\n", r"rms_norm\.py, line 1: SyntaxError: .+"),
    ("x = '\0'", r"rms_norm\.py.*: (SyntaxError|ValueError): .+"),
    ("def other():\n    pass\n", r"rms_norm\.py has no function rms_norm"),
    ("rms_norm = 3\n", r"rms_norm\.py: rms_norm should be a function, is of type int"),
    ("import nothing_of_that_name\n", r"rms_norm\.py fails before .*: ModuleNotFoundError: .* \(line 1\)"),
    ("raise SystemExit(0)\n", r"rms_norm\.py fails before any function is called: SystemExit: 0 \(line 1\)"),
    (HEAD + "    return None\n", r"case \S+ \(1 of 7\): rms_norm returns nothing: is a return missing\?"),
    (HEAD + "    return x[:, 0]\n", r"case .*: rms_norm returns the shape \[5\], expected \[5, 64\]"),
    (HEAD + "    return x.astype(int)\n", r"case .*: rms_norm returns an array of type int64, expected float32"),
    (HEAD + "    return [1.0]\n", r"case .*: rms_norm should return an array, but returns list"),
    (HEAD + "    return x / nothing\n", r"case .*: NameError: name 'nothing' is not defined \(line 5\)"),
    (HEAD + "    x *= 2\n    return x\n", r"case .*: ValueError: .*read-only.* \(line 5\)"),
    (HEAD + "    return rms_norm(x, weight, eps=eps, groups=groups)\n", r"case .*: RecursionError: .* \(line 5\)"),
    ("def rms_norm(x, weight):\n    return x\n", r"case .*: TypeError: .*unexpected keyword argument 'eps'")])
def test_messages(source, message, tmp_path):
    """Check in this process instead of a child process."""
    file = tmp_path / LAB.file_name
    file.write_text(source, encoding="utf-8")
    facts = said(file)
    assert not facts["passed"] and re.fullmatch(message, facts["message"]), facts["message"]


def said(file, lab=LAB):
    try:
        return checked(lab, file, None)
    except Unusable as error:
        return {"passed": False, "message": str(error)}


@pytest.mark.parametrize("lab", labs(), ids=lambda lab: lab.name)
def test_no_blank_passes(lab, tmp_path):
    file = tmp_path / lab.file_name
    file.write_text(lab.blank(), encoding="utf-8")
    facts = said(file, lab)
    assert not facts["passed"] and (lab.facts.get("start") or "blank" in facts["message"]), facts["message"]


def test_the_blank_is_still_blank(tmp_path):
    assert verdict(tmp_path, LAB.blank())["message"] == "rms_norm.py is still blank: write rms_norm"
    file = tmp_path / LAB.file_name
    file.write_text(LAB.blank().replace("    raise", "    y = 0\n    raise"), encoding="utf-8")
    assert said(file)["message"] == "rms_norm is still blank: write it"


def test_what_is_no_number_is_a_word_in_json(tmp_path):
    file = tmp_path / LAB.file_name
    file.write_text(HEAD + "    return x * np.float32(np.nan)\n", encoding="utf-8")
    facts = said(file)
    assert facts["place"]["got"] == "nan" and facts["place"]["off"] == "inf"
    json.dumps(facts, allow_nan=False)


def test_a_model_writes_with_what_is_right(tmp_path):
    model = write_chat_model(tmp_path / "model")
    (tmp_path / LAB.file_name).write_text(LAB.solution(), encoding="utf-8")
    assert check(LAB, tmp_path, model=str(model))["text"]
    facts = check(LAB, tmp_path, model=str(tmp_path / "nowhere"))
    assert facts["passed"] and "; the model cannot generate text: " in facts["message"]


def test_code_that_only_a_model_finds_wrong_is_told(tmp_path):
    file = tmp_path / LAB.file_name
    body = LAB.solution().split('"""')[-1]
    file.write_text(HEAD + "    if x.shape[1] == 96:\n        raise KeyError('wide')" + body, encoding="utf-8")
    facts = checked(LAB, file, "tiny")
    assert facts["passed"]
    assert re.search(r"the model cannot generate text: KeyError: 'wide' \(line \d+\)", facts["message"])


@pytest.mark.parametrize(("name", "fault"), [
    ("rounding", "quantise__from_nothing"), ("gptq", "feedback__wrong_way"), ("gemv", "gemv__halves"),
    ("choosing", "top_p__rarest"), pytest.param("warp-sum", "gemv__swapped", marks=pytest.mark.slow)])
@pytest.mark.thin(2)
def test_a_model_writes_with_weights_and_choices_of_a_lab(name, fault):
    own = lab_of(name).loaded()
    solved = {each: own[each] for each in lab_of(name).functions}
    text = own["story"](solved, "tiny")
    assert text.startswith("Once upon a time there was a ")
    assert own["story"]({**solved, fault.partition("__")[0]: own[fault]}, "tiny") != text


def test_requests_are_drawn_step_by_step():
    from numflow.learn.graders.clock import FEW, gantt, static

    drawn = gantt(static)
    assert len(drawn) == len(FEW)
    for (_, wanted), line in zip(FEW, drawn, strict=True):
        assert line.count("█") == wanted - 1 and "▒" in line  # the step that ends a prompt writes the first token


def test_what_is_right_is_measured(tmp_path):
    lab = lab_of("online-softmax")
    (tmp_path / lab.file_name).write_text(lab.solution(), encoding="utf-8")
    facts = bench(lab, tmp_path)
    whole, yours = (value for _, value in facts["bars"])
    assert facts["unit"] == "MB" and whole > 10 * yours
    (tmp_path / lab.file_name).write_text(lab.blank(), encoding="utf-8")
    assert "still blank" in bench(lab, tmp_path)["message"]


@pytest.mark.slow
@pytest.mark.parametrize("lab", [lab for lab in labs() if "bench" in lab.loaded()], ids=lambda lab: lab.name)
def test_every_measurement_runs(lab, tmp_path):
    (tmp_path / lab.file_name).write_text(lab.solution(), encoding="utf-8")
    facts = bench(lab, tmp_path, 300)
    assert facts["passed"], facts["message"]
    assert all(value >= 0 for _, value in facts["bars"]) and bar_lines(facts["bars"], facts["unit"])
    assert lab.name != "gemv" or {"yours", "numflow, q3h", "reading the bytes"} <= {label for label, _ in facts["bars"]}


@pytest.mark.slow
@pytest.mark.parametrize("lab", labs(), ids=lambda lab: lab.name)
def test_every_solution_passes_and_every_blank_fails_in_a_process_of_its_own(lab, tmp_path):
    for source, passed in ((lab.blank(), False), (lab.solution(), True)):
        (tmp_path / lab.file_name).write_text(source, encoding="utf-8")
        facts = check(lab, tmp_path)
        assert facts["passed"] is passed, facts["message"]
        assert passed or "still blank" in facts["message"]


@pytest.mark.merge
def test_a_loop_that_does_not_end_is_ended(tmp_path):
    facts = verdict(tmp_path, HEAD + "    while True:\n        pass\n", seconds=3)
    assert not facts["passed"] and facts["message"].startswith("no end after 3 seconds")


def test_a_flood_of_prints_is_cut(tmp_path):
    facts = verdict(tmp_path, HEAD + "    print('flood ' * 4_000_000)\n    return x\n")
    assert not facts["passed"] and facts["case"] == "rms_norm-tiny-values"
    assert facts["printed"].startswith("flood flood") and len(facts["printed"]) <= KEPT


@pytest.mark.parametrize(("body", "message"), [
    ("    import ctypes\n    ctypes.string_at(0)\n", "the code crashed Python: SIGSEGV"),
    ("    import os\n    os._exit(0)\n", "the code ended Python with exit code 0"),
    ("    return np.ones((1 << 20, 1 << 20))\n", "Memory")])
@pytest.mark.thin(2)
def test_a_crash_is_a_verdict(body, message, tmp_path):
    facts = verdict(tmp_path, HEAD + body)
    assert not facts["passed"] and message in facts["message"]


def test_processes_that_the_code_leaves_are_ended(tmp_path):
    source = ("import subprocess, sys\n" + HEAD
              + "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n    return x\n")
    facts = verdict(tmp_path, source, seconds=30)
    assert not facts["passed"] and facts["case"]

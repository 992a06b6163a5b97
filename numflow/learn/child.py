"""The child process that runs a student's code: `python -m numflow.learn.child`, which reads its job as a JSON line.

The job has the lab's file, the student's file, the file for the result, and the wanted action: "check" or "bench". The
result is JSON too. The code prints to the standard output of this process.
"""

import importlib
import json
import os
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numflow.errors import NumflowError
from numflow.learn.catalogue import BLANK, LabFile, labs, untouched

MEMORY = 6 << 30  # bytes of address space
PROMPT = "Once upon a time"


class Unusable(Exception):
    """The student's file cannot be used; the message is one line."""


def main(line: str) -> None:
    """Run a job and write its result."""
    job = json.loads(line)
    _limit_memory()
    path = Path(job["lab"])
    lab = next(lab for lab in labs(path.parent) if lab.path == path)
    try:
        result = {"check": checked, "bench": measured}[job["wanted"]](lab, Path(job["file"]), job.get("model"))
    except Unusable as error:
        result = {"passed": False, "message": str(error)}
    temporary = Path(f"{job['result']}.part")
    temporary.write_text(json.dumps(result), encoding="utf-8")
    temporary.replace(job["result"])
    sys.stdout.flush()
    os._exit(0)  # also if the student's code has left threads


def checked(lab: LabFile, file: Path, model: str | None) -> dict[str, Any]:
    """The verdict on a file. If it passes, the facts contain a text that a model generates with the functions."""
    functions, own = student(lab, file), lab.loaded()
    grade = grader(lab, own)
    verdict = grade(functions)
    if not verdict.passed:
        from numflow.learn.cases.verdict import cause_of

        if isinstance(verdict.error, NotImplementedError) and str(verdict.error) == BLANK:
            return {"passed": False, "message": _blank(lab, verdict.error)}
        if verdict.error is not None:
            verdict.message += line_in(file, verdict.error)
        known = [(function, sentence, own[name]) for function, name, sentence in lab.mistakes()]
        verdict.cause = cause_of(verdict, known, {name: own[name] for name in lab.functions}, grade)
    facts = verdict.facts()
    if verdict.passed and model is not None:
        try:
            facts["text"] = written(lab, own, functions, model)
        except NumflowError as error:
            facts["message"] += f"; the model cannot generate text: {' '.join(str(error).split())}"
        except Exception as error:  # in code that no case has reached
            said = f"{type(error).__name__}: {' '.join(str(error).split())}{line_in(file, error)}"
            facts["message"] += f"; the model cannot generate text: {said}"
    return facts


def measured(lab: LabFile, file: Path, _: str | None) -> dict[str, Any]:
    """Measurements of a file's functions and of numflow's own: bars (label, value) and their unit."""
    functions, own = student(lab, file), lab.loaded()
    verdict = grader(lab, own)(functions)
    if not verdict.passed:
        raise Unusable(f"the file must pass its check before it is measured: {verdict.message}")
    if "bench" in own:
        return {"passed": True, "message": "", **own["bench"](functions)}
    raise Unusable(f"{lab.title} has nothing to measure")


def grader(lab: LabFile, own: dict[str, Any]) -> Callable:
    """The function that grades the student's functions of a lab."""
    if "grade" in own:
        return own["grade"]
    module = importlib.import_module(f"numflow.learn.graders.{lab.facts['grader']}")
    return lambda functions: module.grade(functions, lab.facts)


def student(lab: LabFile, file: Path) -> dict[str, Callable]:
    """The functions of the student's file.

    Raises:
        Unusable: the file cannot be read, is no Python, fails, is still blank, or lacks a function.
    """
    source = _source(file)
    try:
        code = compile(source, str(file), "exec")
        blank = untouched(source, lab)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        said = error.msg if isinstance(error, SyntaxError) else error
        raise Unusable(f"{file.name}{line}: {type(error).__name__}: {said}") from None
    if blank:
        raise Unusable(f"{file.name} is {BLANK}: write {_listed(lab.functions)}")
    module = types.ModuleType(f"student_{file.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        raise Unusable(f"{file.name} fails before any function is called: {type(error).__name__}: "
                       f"{' '.join(str(error).split())}{line_in(file, error)}") from None
    missing = [name for name in lab.functions if name not in module.__dict__]
    if missing:
        raise Unusable(f"{file.name} has no function {_listed(missing)}")
    functions = {name: getattr(module, name) for name in lab.functions}
    for name, function in functions.items():
        if not callable(function):
            raise Unusable(f"{file.name}: {name} should be a function, is of type {type(function).__name__}")
    return functions


def written(lab: LabFile, own: dict[str, Any], functions: dict[str, Callable], model: str) -> str:
    """Text that a model generates with the student's functions; "" for functions without a place in a model."""
    import numflow

    if "story" in own:
        return own["story"](functions, model)
    if "grade" in own:
        return ""
    module = importlib.import_module(f"numflow.learn.graders.{lab.facts['grader']}")
    if not hasattr(module, "installed"):
        return ""
    with module.installed(functions, lab.facts, True), numflow.load(model, backend="reference") as loaded:
        return PROMPT + loaded.generate(PROMPT, max_tokens=24, temperature=0).text


def line_in(file: Path, error: BaseException) -> str:
    """The last line of the student's file in an exception's traceback, as " (line 12)"; "" if none."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f" (line {lines[-1]})" if lines else ""


def _source(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Unusable(f"{file.name} cannot be read: {' '.join(str(error).split())}") from None


def _blank(lab: LabFile, error: BaseException) -> str:
    """The message about the blank function that raised `error`."""
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__) if frame.name in lab.functions]
    name = names[-1] if names else _listed(lab.functions)
    return f"{name} is {BLANK}: write it"


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _limit_memory() -> None:
    """Limit the address space, so that a huge array is a MemoryError and does not stop the machine by swapping."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard), hard))


if __name__ == "__main__":
    main(sys.stdin.readline())

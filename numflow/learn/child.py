"""The process that runs a student's code: `python -m numflow.learn.child`, told what to do by a line of JSON.

The line has the lab's file, the student's file, the file for the result, and what is wanted: "check" or "bench". The
result is JSON too. What the code prints goes wherever this process prints.
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
    """Do what the line says and write the result."""
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
    os._exit(0)  # whatever threads the student's code has left


def checked(lab: LabFile, file: Path, model: str | None) -> dict[str, Any]:
    """The verdict on a file, and what a model writes with it."""
    functions, own = student(lab, file), lab.loaded()
    grade = grader(lab, own)
    verdict = grade(functions)
    if not verdict.passed:
        from numflow.learn.cases.verdict import cause_of

        if isinstance(verdict.error, NotImplementedError) and str(verdict.error) == BLANK:
            return {"passed": False, "message": _blank(lab, verdict.error)}
        if verdict.error is not None:
            verdict.message += at(file, verdict.error)
        known = [(function, sentence, own[name]) for function, name, sentence in lab.mistakes()]
        verdict.cause = cause_of(verdict, known, {name: own[name] for name in lab.functions}, grade)
    facts = verdict.facts()
    if verdict.passed and model is not None:
        try:
            facts["text"] = written(lab, own, functions, model)
        except NumflowError as error:
            facts["message"] += f"; the model does not write: {' '.join(str(error).split())}"
        except Exception as error:  # of code that no case has led here
            said = f"{type(error).__name__}: {' '.join(str(error).split())}{at(file, error)}"
            facts["message"] += f"; the model does not write: {said}"
    return facts


def measured(lab: LabFile, file: Path, _: str | None) -> dict[str, Any]:
    """The times of a file's functions, beside numflow's own: bars (label, value) and their unit."""
    functions, own = student(lab, file), lab.loaded()
    verdict = grader(lab, own)(functions)
    if not verdict.passed:
        raise Unusable(f"only what is right is measured: {verdict.message}")
    if "bench" in own:
        return {"passed": True, "message": "", **own["bench"](functions)}
    raise Unusable(f"{lab.title} has nothing to measure")


def grader(lab: LabFile, own: dict[str, Any]) -> Callable:
    """The function that grades a lab's functions."""
    if "grade" in own:
        return own["grade"]
    module = importlib.import_module(f"numflow.learn.graders.{lab.facts['grader']}")
    return lambda functions: module.grade(functions, lab.facts)


def student(lab: LabFile, file: Path) -> dict[str, Callable]:
    """The functions of the student's file.

    Raises:
        Unusable: it cannot be read, is no Python, fails, is still blank, or lacks a function.
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
        raise Unusable(f"{file.name} is {BLANK}: {_listed(lab.functions)} {_are(lab.functions)} to be written")
    module = types.ModuleType(f"student_{file.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        raise Unusable(f"{file.name} fails before anything is called: {type(error).__name__}: "
                       f"{' '.join(str(error).split())}{at(file, error)}") from None
    missing = [name for name in lab.functions if name not in module.__dict__]
    if missing:
        raise Unusable(f"{file.name} has no function {_listed(missing)}")
    functions = {name: getattr(module, name) for name in lab.functions}
    for name, function in functions.items():
        if not callable(function):
            raise Unusable(f"{file.name}: {name} should be a function, is of type {type(function).__name__}")
    return functions


def written(lab: LabFile, own: dict[str, Any], functions: dict[str, Callable], model: str) -> str:
    """The text that a model writes with the functions in their places; "" if they have none in a model."""
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


def at(file: Path, error: BaseException) -> str:
    """" (line 12)": the last line of the student's file that an exception passed; "" if none."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f" (line {lines[-1]})" if lines else ""


def _source(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Unusable(f"{file.name} cannot be read: {' '.join(str(error).split())}") from None


def _blank(lab: LabFile, error: BaseException) -> str:
    """The message about the function that raised it."""
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__) if frame.name in lab.functions]
    name = names[-1] if names else _listed(lab.functions)
    return f"{name} is {BLANK}: it is to be written"


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _limit_memory() -> None:
    """An array of all the memory is an error here, and no machine that stands still."""
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard), hard))


if __name__ == "__main__":
    main(sys.stdin.readline())

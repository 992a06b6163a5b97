"""What a quick look at the source must not find, and lists that must agree with each other."""

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

import numflow
from tests.conftest import REPO

LONGEST = 400
# Families that have no spec of their own name; specs/*.toml adds the rest.
FAMILIES = {"llama", "mistral", "mixtral", "falcon", "bloom", "bloomz", "baichuan", "chatglm", "qwen", "gemma",
            "internlm", "xverse", "minicpm", "deepseek", "orion", "yi", "aquila", "roberta", "whisper", "smollm",
            "starcoder", "pythia", "olmo", "granite", "cohere", "stablelm", "nllb", "marian", "fusellm"}


def sources(*patterns: str) -> list[Path]:
    found = sorted(path for pattern in patterns for path in REPO.glob(pattern))
    assert found, f"nothing matches {patterns}"
    return found


def hits(pattern: re.Pattern, files: list[Path]) -> list[str]:
    """file:line: text of every line that the pattern matches."""
    return [f"{path.relative_to(REPO)}:{number}: {line.strip()}" for path in files
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if pattern.search(line)]


def family_pattern() -> re.Pattern:
    """Names of specs as they are (seed_oss), those of one word without their version (gemma3), and FAMILIES."""
    stems = {path.stem for path in sources("specs/[a-z]*.toml")}
    families = {stem.rstrip("0123456789") for stem in stems if "_" not in stem}
    names = {name for name in stems | families if len(name) > 3} | FAMILIES  # shorter ones mean other things
    by_letter = groupby(sorted(names), lambda name: name[0])  # a search that tries every name takes three times as long
    names = "|".join(f"{letter}(?:{'|'.join(name[1:] for name in of_it)})" for letter, of_it in by_letter)
    # "llama3" in quotes is what configurations call one way of scaling rotary positions.
    return re.compile(rf"(?<![a-z0-9])(?!llama3\")({names}|phi-?\d)[\d.]*(?![a-z0-9])", re.I)


def test_files_have_one_idea_each():
    files = sources("numflow/**/*.py", "tests/**/*.py", "experiments/**/*.py")
    lengths = {str(path.relative_to(REPO)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST} == {}


def test_a_public_class_name_has_one_meaning():
    """The executors share names on purpose: each has its Program, World and KVCache."""
    places: dict[str, list[str]] = {}
    for path in sources("numflow/**/*.py"):
        if path.relative_to(REPO).parts[1] not in ("reference", "cpu", "cuda"):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(str(path.relative_to(REPO)))
    assert len(places) > 200  # else they were not found
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_model_family_is_named_in_code():
    files = [path for path in sources("numflow/**/*.py") if path.relative_to(REPO).parts[1] != "formats"]
    assert hits(family_pattern(), files) == []


@pytest.mark.parametrize("text, found", [
    ("if name == 'llama':", True), ("Qwen2.5", True), ("llama_style", True), ("gemma3", True), ("llama.cpp", True),
    ("llama2c", False), ("philosophy", False), ("dolphin", False), ("config.OPT", False),
    ("builder.phi(x)", False), ("phi2", True), ('scaling = "llama3"', False), ("Llama3 8B", True)])
def test_the_family_pattern(text, found):
    assert bool(family_pattern().search(text)) is found


def test_no_path_of_a_machine_and_no_index_host():
    files = sources("numflow/**/*.py", "numflow/**/*.toml", "tests/**/*.py", "experiments/**/*.py", "specs/*.toml",
                    "docs/*.md", "docs/*/*.md", "*.md", "Makefile", "pyproject.toml", ".ci/*")
    here = re.escape(f"{REPO.parent}/") if len(REPO.parent.parts) > 1 and "tmp" not in REPO.parts else "(?!)"
    hosts = "|".join(re.escape(".".join(parts)) for parts in (("pypi", "org"), ("pythonhosted", "org")))
    assert hits(re.compile(rf"/(?:home|Users|root)/[\w.]|{hosts}|{here}"), files) == []


def test_nothing_looks_unfinished():
    marks = "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X"))
    files = sources("numflow/**/*.py", "tests/**/*.py", "experiments/**/*.py")
    assert hits(re.compile(rf"#.*\b(?:{marks})\b|except[^:]*: *pass$"), files) == []


def wall_clock_assertions(source: str) -> list[str]:
    """Lines of assertions on a clock that others' work moves on, or on a name that was given such a time."""
    clock = re.compile(r"\btime\.(?:time|monotonic|perf_counter)(?:_ns)?\(")
    if not re.search(r"\btime\b", source):
        return []
    tree, found = ast.parse(source), []
    for test in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        times = {name for node in ast.walk(test) if isinstance(node, ast.Assign) for name, value in _assigned(node)
                 if clock.search(ast.unparse(value))}
        for node in (node for node in ast.walk(test) if isinstance(node, ast.Assert)):
            named = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            if clock.search(ast.unparse(node)) or times & named:
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def _assigned(node: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    """Names that a statement gives values, each with its value."""
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = zip(target.elts, node.value.elts, strict=False)
        else:
            pairs = [(target, node.value)]
        yield from ((name.id, value) for part, value in pairs for name in ast.walk(part) if isinstance(name, ast.Name))


@pytest.mark.parametrize("source, count", [
    ("def f():\n    a = time.time()\n    assert time.time() - a < 1", 1),
    ("def f():\n    a = time.perf_counter()\n    b, c = work(), time.perf_counter() - a\n    assert c < 9", 1),
    ("async def f():\n    end = time.monotonic() + 9\n    while work():\n        assert time.monotonic() < end", 1),
    ("def f():\n    a = time.process_time()\n    assert time.process_time() - a < 1", 0),
    ("def f():\n    end, faults = time.time() + 60, []\n    assert faults == []", 0),
    ("def f():\n    path.touch(time.time())\n    assert path", 0)])
def test_the_search_for_assertions_on_the_clock(source, count):
    assert len(wall_clock_assertions(source)) == count


def test_no_assertion_on_the_clock():
    """A machine with other work fails such tests; tests/waiting.py waits, time.process_time() measures."""
    found = {str(path.relative_to(REPO)): wall_clock_assertions(path.read_text(encoding="utf-8"))
             for path in sources("tests/**/*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


def context_writes(source: str) -> list[int]:
    """Lines where a function changes an attribute or an item of its parameter `ctx`, or asks what it has; functions
    within it, which run later, may."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and "ctx" in {a.arg for a in function.args.args}:
            later = {node for inner in ast.walk(function) if isinstance(inner, ast.FunctionDef | ast.Lambda)
                     and inner is not function for node in ast.walk(inner)}
            for node in set(ast.walk(function)) - later:
                written = isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
                asked = isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr")
                if (written and ast.unparse(node).startswith("ctx")) or (asked and ast.unparse(node.args[0]) == "ctx"):
                    found.append(node.lineno)
    return sorted(set(found))


@pytest.mark.parametrize("source, count", [
    ("def f(step, ctx):\n    ctx.add = step", 1), ("def f(ctx):\n    ctx.made[1], a = 2, 3\n    del ctx.b", 2),
    ("def f(ctx):\n    for ctx.i in g(): ctx.n += 1\n    return getattr(ctx, 'late', 0)", 2),
    ("def f(ctx):\n    def act():\n        ctx.n += 1\n    a = ctx.made\n    return a[ctx.i], act", 0),
    ("def f(other):\n    other.a = 1", 0)])
def test_the_search_for_writes_to_a_context(source, count):
    assert len(context_writes(source)) == count


def test_binders_change_nothing_of_what_they_are_given():
    """Binders tell each other nothing through their context: groups and calls are data (docs/architecture.md)."""
    found = {str(path.relative_to(REPO)): context_writes(path.read_text(encoding="utf-8"))
             for path in sources("numflow/cpu/**/*.py", "numflow/cuda/**/*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


def questions(source: str) -> list[str]:
    """Openings of docstrings that are a question's: they tell what a thing is about, and not what it is."""
    found, words = [], "What|Who|Whose|Why|How|Which|Where|When"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text, returned = ast.get_docstring(node) or "", getattr(node, "returns", None)
            answer = returned is not None and "bool" in ast.unparse(returned)
            if re.match(rf"(?:{words})\b" if answer else rf"(?:{words}|Whether)\b", text):
                found.append(text.splitlines()[0])
    return found


@pytest.mark.parametrize("source, count", [
    ('"""What it does."""\ndef f() -> bool:\n    """Whether it is so."""', 1),
    ('class A:\n    """Whether it is so."""\n    async def f():\n        """How."""', 2),
    ('def f() -> bool | None:\n    """Whether."""\ndef g() -> int:\n    """Whatever is wanted."""', 0)])
def test_the_search_for_questions(source, count):
    assert len(questions(source)) == count


def test_docstrings_open_with_a_noun_phrase_or_an_imperative():
    found = {str(path.relative_to(REPO)): questions(path.read_text(encoding="utf-8"))
             for path in sources("numflow/**/*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_public_names():
    assert set(numflow.__all__) == {
        "load", "Model", "Generation", "Engine", "AsyncEngine", "Budget", "QueueFullError", "NumflowError", "SpecError",
        "FormatError", "UnsafePickleError", "NetworkError", "TokenizerError", "ModelNotFoundError",
        "DownloadError", "UnreachableError", "RequestError", "DeviceError", "DeviceFaultError", "DeviceLostError",
        "DeviceMemoryError", "NotFiniteError",
        "OutOfMemoryError", "__version__"}
    for name in numflow.__all__:
        assert getattr(numflow, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        numflow.lod  # noqa: B018


def test_every_error_is_public():
    errors = importlib.import_module("numflow.errors")
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes <= set(numflow.__all__)


def test_the_readme_lists_the_commands():
    app = importlib.import_module("numflow.cli.app").app
    commands = {info.name or info.callback.__name__ for info in app.registered_commands}
    groups = {info.name for info in app.registered_groups}
    table = re.findall(r"^\| `numflow ([\w-]+)", (REPO / "README.md").read_text(encoding="utf-8"), re.M)
    assert sorted(table) == sorted(commands | groups)


def test_doctor_knows_the_packages_of_pyproject():
    doctor = importlib.import_module("numflow.cli.doctor")
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def names(requirements):
        return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}

    assert names(project["dependencies"]) <= set(doctor.PACKAGES)
    extras = {extra: names(requirements) - names(project["dependencies"])
              for extra, requirements in project["optional-dependencies"].items()
              if not all(requirement.startswith(f"{project['name']}[") for requirement in requirements)}
    assert extras == {extra: set(packages) for extra, packages in doctor.EXTRAS.items()}


def test_the_changelog_has_a_place_for_what_is_new():
    headings = re.findall(r"^## (.+)$", (REPO / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert headings[0] == "Unreleased"

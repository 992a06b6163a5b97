"""Programs that are made for other services, each in an environment of its own, against a service of real models.

    python -m tests.clients.run [--environments DIR] [--only NAME,NAME] [--out docs/clients.md]

needs a package index that pip can reach and the models of NUMFLOW_MODELS. Each program (a file beside this one) has a
conversation, a stream, a call of a tool whose result goes back, and a structured answer, with SmolLM2, whose template
knows no tools, and with a toy of random weights, whose template does. lm-eval has tasks instead. Exits with 1 if
anything fails or cannot be installed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.clients.checks import KINDS
from tests.conftest import REPO
from tests.server import tiny
from tests.server.processes import ServerProcess

PROGRAMS = {  # program -> (name, packages of its environment)
    "openai_chat": ("OpenAI's client, chat", ("openai>=1.60,<4", "anthropic>=0.60,<3", "ollama>=0.5,<1")),
    "openai_responses": ("OpenAI's client, Responses", ("openai>=1.60,<4", "anthropic>=0.60,<3", "ollama>=0.5,<1")),
    "openai_embeddings": ("OpenAI's client, embeddings", ("openai>=1.60,<4", "anthropic>=0.60,<3", "ollama>=0.5,<1")),
    "anthropic_messages": ("Anthropic's client", ("openai>=1.60,<4", "anthropic>=0.60,<3", "ollama>=0.5,<1")),
    "ollama_chat": ("Ollama's client", ("openai>=1.60,<4", "anthropic>=0.60,<3", "ollama>=0.5,<1")),
    "litellm_chat": ("LiteLLM", ("litellm", "mcp")),
    "langchain_chat": ("LangChain (langchain-openai)", ("langchain-openai>=1,<2",)),
    "instructor_models": ("instructor, TOOLS and JSON_SCHEMA", ("instructor>=1.11,<3",)),
    "pydantic_agent": ("Pydantic AI", ("pydantic-ai-slim[openai]",)),
    "llm_tool": ("llm", ("llm",)),
    "openai_agents": ("OpenAI's Agents SDK", ("openai-agents",)),
    "smolagents_agent": ("smolagents", ("smolagents[openai]",)),
    "lm_eval_scores": ("lm-eval", ("lm-eval[api]>=0.4.13,<1",)),
}
FOLDERS = {"openai_chat": "base", "openai_responses": "base", "openai_embeddings": "base", "anthropic_messages": "base",
           "ollama_chat": "base"}  # of environments that several share
MODELS = ("smollm2", "toy")
OTHER_MODELS = {"openai_embeddings": ("minilm",), "lm_eval_scores": ("smollm2",)}
INSTALL_S, RUN_S = 900, 900
CONFIG = """
[models.smollm2]
path = "{models}/SmolLM2-135M-Instruct.Q4_1.gguf"
[models.toy]
path = "{toy}"
backend = "reference"
preload = true
[models.minilm]
path = "{models}/all-MiniLM-L6-v2"
preload = true
"""


class NotInstalledError(Exception):
    """A program that the package index did not give."""


def environment(root: Path, name: str, packages: tuple[str, ...]) -> Path:
    """The Python of a program's environment, made if it is not there.

    Raises:
        NotInstalledError: it cannot be made.
    """
    place = root / FOLDERS.get(name, name)
    python = place / "bin" / "python"
    if (place / "made").exists():
        return python
    for command in ([sys.executable, "-m", "venv", "--clear", place],
                    [python, "-m", "pip", "install", "-q", *packages]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
        except subprocess.TimeoutExpired:
            raise NotInstalledError(f"not done after {INSTALL_S} s") from None
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            raise NotInstalledError((done.stderr.strip().splitlines() or ["no reason was told"])[-1])
    (place / "made").touch()
    return python


def failed(why: str) -> dict:
    """Outcomes of a program that was not there, or did not come to its checks."""
    return {"version": "?", "found": dict.fromkeys(KINDS, f"no: {why}")}


def outcome(python: Path, name: str, url: str, model: str) -> dict:
    """Outcomes of a program's checks."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "OPENAI_API_KEY")}
    env |= {"CLIENT_URL": url, "CLIENT_MODEL": model, "CLIENT_EMBEDDER": "minilm", "LITELLM_LOCAL_MODEL_COST_MAP": "1"}
    try:
        done = subprocess.run([python, Path(__file__).with_name(f"{name}.py")], env=env, capture_output=True, text=True,
                              timeout=RUN_S, cwd=tempfile.gettempdir())
    except subprocess.TimeoutExpired:
        return failed(f"not done after {RUN_S} s")
    print(done.stderr, file=sys.stderr)
    if done.returncode or not done.stdout.strip():
        return failed(f"{done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def table(found: dict[tuple[str, str], dict]) -> str:
    """The page."""
    lines = ["# Client programs", "", "This page lists the client programs and libraries that were tested against "
             "`numflow serve`. All of them were written for the", "services of OpenAI, Anthropic or Ollama, and were "
             "installed unchanged from the package index. Most ran with two models:", "",
             "- `smollm2`, SmolLM2-135M. Its chat template has no tools, so numflow describes the tools in its generic "
             "format.", "- `toy`, a small model with random weights. Its chat template has tools.", "",
             "OpenAI's embeddings client ran with `minilm`, an encoder.", "",
             "A random model never ends an answer by itself. Where a program needs complete answers, the setting "
             "`regex` limits `toy` to", "a few words. Where a program cannot demand a tool call, `regex` forces the "
             "call.", "", "`python -m tests.clients.run --out docs/clients.md` runs all programs and writes this page. "
             "`make nightly` runs them too,", "and fails where one of them fails.",
             "", f"| Program | version | model | {' | '.join(KINDS)} |", f"|---|---|---|{'---|' * len(KINDS)}"]
    for (name, model), told in found.items():
        cells = " | ".join(told["found"][kind].replace("|", "\\|").replace("\n", " ") for kind in KINDS)
        lines.append(f"| {PROGRAMS[name][0]} | {told['version']} | {model} | {cells} |")
    return "\n".join([*lines, ""])


def main() -> int:
    """Run what was asked for; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    names = asked.only.split(",") if asked.only else list(PROGRAMS)
    models = Path(os.environ.get("NUMFLOW_MODELS") or REPO.parent / "peers" / "models")
    with tempfile.TemporaryDirectory() as scratch:
        tiny.CONTEXT = 8192
        toy = tiny.write_chat_model(Path(scratch) / "toy")
        config = Path(scratch) / "service.toml"
        config.write_text(CONFIG.format(models=models, toy=toy))
        found = {}
        with ServerProcess("-c", str(config), wait=False) as server:
            server.wait_ready(900)
            for name in names:
                for model in OTHER_MODELS.get(name, MODELS):
                    try:
                        python = environment(asked.environments or Path(scratch), name, PROGRAMS[name][1])
                        found[name, model] = outcome(python, name, server.url, model)
                    except NotInstalledError as error:
                        found[name, model] = failed(f"cannot be installed: {error}")
                    print(f"{name} {model}: {found[name, model]}", flush=True)
    page = table(found)
    print(page)
    if asked.out is not None:
        asked.out.write_text(page, encoding="utf-8")
    return exit_code(found.values())


def exit_code(found: Iterable[dict]) -> int:
    """1 if anything failed, or a program could not be installed."""
    return int(any(text.startswith("no") for told in found for text in told["found"].values()))


if __name__ == "__main__":
    sys.exit(main())

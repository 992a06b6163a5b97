"""`serve`, `client` and `bench serve` from the shell."""

import json
import os
import subprocess
import sys

import pytest

from numflow.cli.app import app
from tests.conftest import REPO
from tests.server.processes import ServerProcess


@pytest.fixture
def numflow(capsys, monkeypatch):
    """numflow("client", ...) -> (exit code, standard output, standard error)."""
    monkeypatch.delenv("NUMFLOW_DEBUG", raising=False)

    def run(*words):
        capsys.readouterr()
        try:
            app([str(word) for word in words], prog_name="numflow")
            code = 0
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return run


def test_client(numflow, server, model, monkeypatch):
    text = model.generate([{"role": "user", "content": "hi"}], chat=True, max_tokens=9, temperature=0).text
    options = ("client", "--url", server.url, "-n", 9, "--temperature", 0)
    assert numflow(*options, "hi") == (0, text + "\n", "")
    assert numflow(*options, "--raw", "Once") == (0, model.generate("Once", max_tokens=9).text + "\n", "")
    whole = json.loads(numflow(*options, "hi", "--json", "--system", "Hm.")[1])
    assert whole["usage"]["completion_tokens"] == 9
    monkeypatch.setenv("NUMFLOW_URL", server.url)
    code, out, _ = numflow("client", "--models")
    assert code == 0 and "org/chat" in out


def test_ps(numflow, server):
    code, out, _ = numflow("ps", "--url", server.url)
    assert code == 0 and out.splitlines()[0].split() == ["model", "state", "memory", "context", "running", "waiting"]
    assert any(line.split()[:2] == ["org/chat", "loaded"] for line in out.splitlines())
    assert json.loads(numflow("ps", "--url", server.url, "--json")[1])["models"]


def test_client_says_what_is_wrong(numflow, server):
    code, out, err = numflow("client", "--url", server.url, "-m", "gpt-9", "hi")
    assert (code, out.strip()) == (1, "") and "no model 'gpt-9'" in err and err.count("\n") == 1
    code, _, err = numflow("client", "--url", "http://127.0.0.1:9", "hi")
    assert code == 1 and "numflow serve" in err and err.count("\n") == 1


def test_bench_serve(numflow, server):
    code, out, _ = numflow("bench", "serve", "--url", server.url, "-c", 3, "--requests", 6, "-n", 5,
                           "--prompt-words", 4, "--json")
    found = json.loads(out)
    assert code == 0 and found["requests"] == 6 and found["errors"] == {} and found["new_tokens"] == 30
    assert 0 < found["time_to_first_token_s"]["p50"] <= found["time_to_first_token_s"]["p99"]
    assert set(found["inter_token_s"]) == {"p50", "p95", "p99", "mean"}
    shown = numflow("bench-serve", "--url", server.url, "-c", 1, "--requests", 1, "-n", 2, "--prompt-words", 4)[1]
    assert "new_tok_s" in shown and "p99" in shown
    code, _, err = numflow("bench", "serve", "--url", "http://example.com:80")
    assert code == 1 and "this machine only" in err


def test_serve_fails_in_one_line(numflow, server, tmp_path):
    (tmp_path / "bad.toml").write_text("[service]\nprot = 1\n")
    for words, said in ((("-c", tmp_path / "bad.toml"), "did you mean 'port'?"),
                        (("-c", tmp_path / "none.toml"), "none.toml"),
                        (("-m", "no-such-model", "--port", 0, "--offline"), "no-such-model"),
                        (("-m", "x", "--port", server.port), "in use")):
        code, _, err = numflow("serve", *words)
        lines = [line for line in err.splitlines() if not line.startswith("{")]
        assert code == 1 and len(lines) == 1 and said in lines[0], err


@pytest.mark.skipif(sys.platform != "linux", reason="ulimit -v")
@pytest.mark.parametrize("size", ["20GB", "3.9GB"])
@pytest.mark.merge
def test_memory_that_is_not_there_ends_serve_before_it_serves(model_folders, size):
    command = [sys.executable, "-m", "numflow", "serve", "-m", f"m={model_folders['chat']}", "--device", "reference",
               "--port", "0", "--kv-memory", size]
    done = subprocess.run(["sh", "-c", 'ulimit -v 4000000; exec "$@"', "sh", *command], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(REPO), "NUMFLOW_OFFLINE": "1"}, timeout=120)
    assert done.returncode == 1 and "serves" not in done.stdout
    assert "of keys and values" in done.stderr or "for keys and values" in done.stderr
    assert "kv_memory" in done.stderr and "bug" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.merge
def test_serve_prints_its_memory_plan(model_folders):
    command = [sys.executable, "-m", "numflow", "serve", "-m", f"m={model_folders['chat']}", "--device", "reference",
               "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          env={**os.environ, "PYTHONPATH": str(REPO), "NUMFLOW_OFFLINE": "1"}) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        process.terminate()
    assert lines[0].startswith("numflow loads m, ") and lines[2].startswith("numflow serves m on http")
    assert lines[1].startswith("memory of m: weights ") and "keys and values up to" in lines[1]


@pytest.mark.parametrize(("options", "warns"), [(("--host", "0.0.0.0"), True), ((), False),
                                                (("--host", "0.0.0.0", "--api-key", "sk-1"), False)])
@pytest.mark.merge
def test_an_open_service_is_warned_of(model_folders, options, warns):
    with ServerProcess("-m", str(model_folders["chat"]), "--device", "reference", *options) as process:
        process.process.terminate()
        process.process.wait(60)
        process._reader.join(60)
    assert any("warning: everybody who can reach" in line and "--api-key" in line for line in process.log) is warns

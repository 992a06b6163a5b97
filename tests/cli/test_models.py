"""`pull`, `models`, `inspect`, `spec` and the measuring commands, on a tiny model made by the tests."""

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from numflow import registry
from numflow.cli.tables import print_table
from numflow.network.drafts import new_spec as draft
from tests.engine.tiny import write_checkpoint
from tests.quant.small import write_model

WORDS = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, 50))]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A decoder of two layers with a vocabulary of fifty words."""
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    tokenizer = Tokenizer(WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_pull_prints_where_a_local_model_is(run, tiny):
    assert run("pull", tiny).out == f"{tiny}\n"


def test_pull_offline_says_what_to_do(run):
    done = run("pull", "smollm2", "--offline")
    assert done.code == 1
    assert done.err == ("error: smollm2-135m-instruct is not on this disk and numflow is offline; "
                        "`numflow pull smollm2-135m-instruct` fetches it once\n")


def test_models_lists_what_is_known(run):
    lines = run("models").out.splitlines()
    assert lines[0].split() == ["name", "also", "task", "parameters", "size", "here", "license", "about"]
    smollm = next(line for line in lines if line.startswith("smollm2-135m-instruct "))
    assert "98.4 MB  no" in smollm and smollm.endswith("(default)")
    found = json.loads(run("models", "--json").out)
    assert [m["name"] for m in found["models"] if m["default"]] == ["smollm2-135m-instruct"]
    assert {m["source"] for m in found["models"] if m["path"]} == {"shipped"}


def test_rm_removes_what_was_fetched(run, tiny, tmp_path):
    entry = registry.find("smollm2")
    folder = tmp_path / "home" / "models" / entry.name
    folder.mkdir(parents=True)
    with open(folder / entry.load, "wb") as file:
        file.truncate(entry.bytes)
    assert "yes" in next(line for line in run("list").out.splitlines() if line.startswith(entry.name + " "))
    assert run("rm", "smollm2").out == f"{folder}: 98.4 MB removed\n"
    assert not folder.exists()
    assert run("rm", "smollm2").err == f"error: {entry.name} is not on this disk\n"
    assert "is a file or folder of your own" in run("rm", tiny).err and tiny.exists()


def test_unknown_models(run):
    assert "did you mean 'smollm2'" in run("pull", "smolm2").err
    assert run("inspect", "smolm2").code == run("bench", "-m", "smolm2").code == 1


def test_inspect(run, tiny):
    done = run("inspect", tiny)
    assert (done.code, done.err) == (0, "")
    fields = dict(line.split(maxsplit=1) for line in done.out.split("\n\n")[0].splitlines())
    assert fields["format"] == "safetensors" and fields["layers"] == "2" and fields["vocabulary"] == "50"
    assert fields["weights"] == "0.0 M in 74.9 kB, 32.00 bits each"
    assert fields["memory"] == "78.5 kB of weights on the CPU"  # two tables of 50 rows, in 4 tiles of 16
    assert fields["cache"] == "128 B per token of 16-bit keys and values, 8.2 kB for 64 tokens"
    rows = {line.split()[0]: line for line in done.out.split("\n\n")[2].splitlines()}
    assert "0-1" in rows["blk.*.attention"] and "[T, 32] -> [T, 64]  F32" in rows["blk.*.attn_q+attn_k+attn_v"]


def test_inspect_in_full_and_as_json(run, tiny):
    full = run("inspect", "--full", "--tensors", tiny).out
    assert "blk.0.attention" in full and "blk.1.attention" in full
    row = next(line for line in full.splitlines() if line.startswith("model.layers.1.mlp.down_proj.weight "))
    assert row.split()[1:] == ["F32", "32x48", "6,144"]
    found = json.loads(run("inspect", "--json", "--full", "--tensors", tiny).out)
    assert found["facts"]["width"] == 32 and found["stored_bytes"] == sum(t["bytes"] for t in found["tensors"])
    assert found["memory_bytes"] > found["stored_bytes"]
    assert {"entry", "label", "op", "inputs", "outputs", "weights", "params"} == found["steps"][0].keys()
    grouped = json.loads(run("inspect", "--json", tiny).out)
    assert 10 < len(grouped["steps"]) < len(found["steps"])


def test_inspect_shows_steps_that_are_done_together(run, tiny):
    rows = run("inspect", "--groups", tiny).out.split("\n\n")[2].splitlines()
    assert rows[1].split() == ["cpu", "0-1", "rms_norm+linear", "blk.*.attn_norm", "+", "blk.*.attn_q+attn_k+attn_v",
                               "f32"]
    found = json.loads(run("inspect", "--json", "--groups", tiny).out)["groups"]
    patterns = {device: [row["pattern"] for row in found if row["device"] == device] for device in ("cpu", "cuda")}
    assert patterns["cpu"] == ["rms_norm+linear", "linear+add", "rms_norm+linear", "act_mul+linear+add"]
    assert patterns["cuda"] == ["rope+rope+cache_write", "linear+add", "linear+add"]
    assert all(row["layers"] == "0-1" and row["entry"] == "main" for row in found if row["device"] == "cpu")


def test_inspect_shows_the_file_when_no_spec_fits(run, tiny):
    done = run("inspect", "--spec", "bert", tiny)
    assert done.code == 1 and done.err.startswith("error: ") and done.err.count("\n") == 1
    assert "model.embed_tokens.weight" in done.out and "safetensors" in done.out


def test_spec_list_and_show(run):
    lines = run("spec", "list").out.splitlines()
    assert next(line for line in lines if line.startswith("gemma ")).split()[1:3] == ["decoder", "llama"]
    assert {"name", "type", "extends", "title"} == json.loads(run("spec", "list", "--json").out)[0].keys()
    shown = run("spec", "show", "gemma").out
    assert shown.index("gemma.toml") < shown.index("llama.toml") and 'extends = "llama"' in shown
    assert "did you mean 'gemma'" in run("spec", "show", "gema").err


def test_spec_check(run, tiny, tmp_path):
    assert run("spec", "check", "llama").out.endswith("llama.toml is right\n")
    done = run("spec", "check", "llama", tiny)
    assert done.out.endswith(f"llama.toml is right and fits {tiny}\n") and "blk.*.attention" in done.out
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('extends = "llama"\n[attention]\nhaeds = 4\n')
    done = run("spec", "check", wrong)
    assert done.code == 1 and "wrong.toml" in done.err and "haeds" in done.err and "heads" in done.err


def test_spec_new(run, tiny, tmp_path):
    target = tmp_path / "new.toml"
    assert run("spec", "new", tiny, "-o", target).out == f"wrote {target}\n"
    assert 'extends = "' in target.read_text()
    assert run("spec", "check", target, tiny).code == 0
    again = run("spec", "new", tiny, "-o", target)
    assert (again.code, again.err) == (1, f"error: {target} exists already and is not overwritten\n")


def test_spec_new_prints_a_draft_that_does_not_run_yet_and_fails(run, tiny, monkeypatch):
    found = draft.SpecDraft('extends = "x"\n', "tensor 'y' has no place")
    monkeypatch.setattr(draft, "draft", lambda checkpoint: found)
    done = run("spec", "new", tiny)
    assert (done.code, done.out) == (1, 'extends = "x"\n')
    assert done.err == "error: the draft does not run yet: tensor 'y' has no place\n"


def test_generate_for_real(run, tiny):
    done = run("generate", "-m", tiny, "--device", "reference", "-n", "5", "--json", "w5 w9")
    assert done.code == 0 and len(json.loads(done.out)["ids"]) <= 5
    walk = run("generate", "-m", tiny, "--device", "reference", "--trace", "w5 w9").out
    assert "numflow/reference/attention.py:" in walk and "blk.1.attention" in walk


def test_bench(run, tiny):
    options = ("-m", tiny, "--device", "reference", "--prompt-tokens", "8", "--gen-tokens", "4", "--repeat", "2")
    done = run("bench", *options, "--json")
    found = json.loads(done.out)
    assert found["prefill_tok_s"]["min"] <= found["prefill_tok_s"]["median"] <= found["prefill_tok_s"]["max"]
    assert {"load_s", "first_token_s", "compile_s", "peak_rss_mib", "weights_bytes", "host"} <= found.keys()
    assert done.err == "run 1 of 2\nrun 2 of 2\n"
    table = run("bench", *options).out
    assert "decode_tok_s" in table and "(min " in table


def test_perplexity(run, tiny, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(WORDS[3:] * 3))
    options = ("-m", tiny, "--device", "reference", "--context", "16", "--chunks", "3")
    found = json.loads(run("perplexity", "--text", text, *options, "--json").out)
    assert found["tokens"] == 45 and found["perplexity"] > 1
    done = run("perplexity", "--text", "-", *options, stdin=text.read_text())
    assert f"{found['perplexity']:.4f}" in done.out and done.err.startswith("chunk 1 of 3: ")


def test_warmup(run, tiny):
    done = run("warmup", "-m", tiny, "--device", "reference")
    assert (done.code, done.err) == (0, "")
    assert "all kernels were compiled before" in done.out


def test_doctor(run, tmp_path):
    done = run("doctor")
    assert (done.code, done.err) == (0, "")
    fields = [line.split("  ")[0] for line in done.out.splitlines()]
    assert {"numflow", "python", "numba", "instructions", "threads", "models", "kernels", "prepared weights",
            "free memory", "free disk", "extra cuda"} <= set(fields)
    found = json.loads(run("doctor", "--json").out)
    assert found["gpu"].startswith("none: device 'cuda' needs") or "NVIDIA" in found["gpu"]
    assert found["models"].startswith(str(tmp_path / "home")) and found["models"].endswith("(not made yet)")
    assert found["offline"] == "yes" and found["threads"] >= 1


def test_tables_line_up(capsys):
    print_table(["name", ">n"], [("wide 漢字", 1), ("e\u0301 combined", 1000), ("x", "")])
    assert capsys.readouterr().out == "name           n\nwide 漢字      1\ne\u0301 combined  1000\nx\n"


@pytest.mark.merge
def test_spec_check_of_a_model(run, tiny, tmp_path):
    """A model given instead of a spec is checked with its own spec, also one inside a container file."""
    assert run("spec", "check", tiny).out.endswith(f"llama.toml is right and fits {tiny}\n")
    container = tmp_path / "x.safetensors"
    assert run("quantize", write_model(tmp_path / "model"), container, "--weights", "q8").code == 0
    done = run("spec", "check", container)
    assert done.code == 0
    assert done.out.splitlines()[-1] == f"the specification in {container} is right and fits {container}"
    assert run("spec", "check", tmp_path / "none.safetensors").code == 1

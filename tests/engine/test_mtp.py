"""Multi-token prediction (MTP) blocks as drafters: their values, and unchanged texts."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from numflow.engine.engine import Engine
from numflow.engine.load import load
from numflow.engine.quantise.export import export_gguf
from numflow.errors import RequestError, SpecError
from numflow.formats import open_checkpoint
from numflow.learn.cases.chance import chi_square, limit
from numflow.quant.recipe import Recipe
from tests.engine.published import write_case
from tests.engine.test_export_folders import write_tokenizer
from tests.engine.test_state import facts
from tests.specs.case import relative_error
from tests.specs.weights import values

# Of a family: the layer whose tensors the block has too, names of what stands around it, and what is added to norms.
QWEN = {"layers.{}": "mtp.layers.0", "embd": "mtp.pre_fc_norm_embedding", "hidden": "mtp.pre_fc_norm_hidden",
        "proj": "mtp.fc", "norm": "mtp.norm"}
DEEPSEEK = {"layers.{}": "model.layers.3", "embd": "model.layers.3.enorm", "hidden": "model.layers.3.hnorm",
            "proj": "model.layers.3.eh_proj", "norm": "model.layers.3.shared_head.norm"}
FAMILIES = {"qwen3_5": (QWEN, 1, 1.0, {"layer_types": ["full_attention"]}),
            "qwen3_next": (QWEN, 2, 1.0, {"full_attention_interval": 1, "mlp_only_layers": []}),
            "deepseek_v3": (DEEPSEEK, 2, 0.0, {"first_k_dense_replace": 0}),
            "qwen3_next_experts": (QWEN, 1, 1.0, {"full_attention_interval": 1}),
            "qwen3_5_moe": (QWEN, 1, 1.0, {"layer_types": ["full_attention"]}),
            "glm4_moe": (DEEPSEEK, 2, 0.0, {"first_k_dense_replace": 0}),
            "deepseek_v32": (DEEPSEEK, 2, 0.0, {"first_k_dense_replace": 0}),
            "exaone_moe": (QWEN, 0, 0.0, {"layer_types": ["full_attention"], "mlp_layer_types": ["dense"]}),
            "glm_moe_dsa": (DEEPSEEK, 2, 0.0, {"first_k_dense_replace": 0, "indexer_types": ["full"]})}
IDS = [7, 3, 11, 100, 5, 3, 11, 42, 9, 60, 3, 11]
GREEDY = {"max_tokens": 24, "ignore_eos": True, "logprobs": 0}


def with_block(name, folder, drop=()):
    """A family's tiny model with such a block; its tensors."""
    names, layer, _, _ = FAMILIES[name]
    folder.mkdir(exist_ok=True)
    write_case(name, folder)
    tensors = load_file(folder / "model.safetensors")
    width = tensors["model.norm.weight"].size
    for old in [key for key in tensors if f".layers.{layer}." in key]:
        new = names["layers.{}"] + old.split(f"model.layers.{layer}")[1]
        tensors[new] = values(new, tensors[old].shape).astype(np.float32)
    for part, shape in (("embd", (width,)), ("hidden", (width,)), ("proj", (width, 2 * width)), ("norm", (width,))):
        key = names[part] + ".weight"
        tensors[key] = values(key, shape).astype(np.float32)
    save_file({key: value for key, value in tensors.items() if key not in drop}, folder / "model.safetensors")
    return tensors


def expected(name, folder, tensors, model, tmp_path):
    """Logits of the block [n - 1, V]: the formula around its layer by hand, the layer as the only one of a model whose
    table of words are the layer's inputs."""
    names, _, add, config = FAMILIES[name]
    known = json.loads((folder / "config.json").read_text())

    def rms(x, part):
        weight = tensors[names[part] + ".weight"] + np.float32(add)
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + known["rms_norm_eps"]) * weight

    tokens = rms(tensors["model.embed_tokens.weight"][IDS[1:]], "embd")
    both = np.concatenate([tokens, rms(model.hidden(IDS)[:-1], "hidden")], axis=1)
    prefix = re.escape(names["layers.{}"] + ".")
    alone = {re.sub(prefix, "model.layers.0.", key): value for key, value in tensors.items()
             if re.match(prefix + "(self_attn|mlp|.*layernorm)", key)}
    alone |= {"model.embed_tokens.weight": both @ tensors[names["proj"] + ".weight"].T,
              "model.norm.weight": tensors[names["norm"] + ".weight"], "lm_head.weight": tensors["lm_head.weight"]}
    other = tmp_path / "alone"
    other.mkdir()
    save_file({key: np.ascontiguousarray(value) for key, value in alone.items()}, other / "model.safetensors")
    (other / "config.json").write_text(json.dumps(known | config | {"num_hidden_layers": 1}))
    with load(other, backend="reference") as block:
        return block.logits(range(len(IDS) - 1))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["qwen3_5", "deepseek_v3", "glm_moe_dsa", "exaone_moe", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_next", "qwen3_5_moe", "glm4_moe", "deepseek_v32"))])
@pytest.mark.thin(3)
def test_the_numbers_of_the_block(tmp_path, name, backend):
    folder = tmp_path / "model"
    tensors = with_block(name, folder)
    with load(folder, backend=backend, activations="f32", draft="mtp") as model:
        wanted = expected(name, folder, tensors, model, tmp_path)
        assert not np.isnan(wanted).any()
        request, streams = model.request(IDS, {"max_tokens": 1}), model.hidden(IDS)
        np.testing.assert_array_equal(model.program.result("streams"), streams)
        for chunk in (512, 4):
            model.core.drafters.runner.chunk = chunk
            for count in (2, 7, len(IDS)):
                drafter = model.core.drafters.make(request, request.sampler())
                for at in range(0, len(IDS), chunk):
                    drafter.observe(at, IDS[:min(at + chunk, count)], streams[at:at + chunk])
                found = drafter._run_text(np.array(IDS[:count], np.int32))
                assert relative_error(found, wanted[count - 2]) < 1e-4
                drafter.close()


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe", "glm_moe_dsa", "exaone_moe", *(
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("deepseek_v3", "deepseek_v32", "qwen3_next_experts", "qwen3_5_moe"))])
@pytest.mark.thin(3)
def test_a_gguf_file_has_the_block_too(tmp_path, name):
    """Under the names of llama.cpp's converter, counted as one more layer; it drafts from there as from its source."""
    folder, target = tmp_path / "model", tmp_path / "model.gguf"
    tensors = with_block(name, folder)
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    write_tokenizer(folder, len(tensors["model.embed_tokens.weight"]))
    export_gguf(open_checkpoint(folder), target, Recipe("Q8_0", "Q8_0"))
    quantised = open_checkpoint(target)
    start = f"blk.{layers}.nextn."
    assert {name.removeprefix(start) for name in quantised.tensors if name.startswith(start)} == {
        "enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head_norm.weight"}
    assert quantised.tensors[f"{start}eh_proj.weight"].type.name == "Q8_0"
    known = {key.partition(".")[2]: value for key, value in quantised.config.items()}
    assert known["block_count"] == layers + 1 and known["nextn_predict_layers"] == 1
    assert name != "qwen3_5" or known["attention.recurrent_layers"] == [True, False, True, False]
    assert name != "glm_moe_dsa" or known["attention.indexer.types"] == [True, False, True]  # of the layers alone
    export_gguf(open_checkpoint(folder), target, Recipe("F32", "F32"), replace=True)
    rows = []
    for path in (folder, target):
        with load(path, backend="reference", draft="mtp") as model:
            request = model.request(IDS, {"max_tokens": 1})
            drafter = model.core.drafters.make(request, request.sampler())
            drafter.observe(0, IDS, model.hidden(IDS))
            rows.append(drafter._run_text(np.array(IDS, np.int32)).copy())
            drafter.close()
    assert relative_error(rows[1], rows[0]) < 5e-5


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
@pytest.mark.merge
def test_drafts_change_no_bit(tmp_path, name):
    """Alone, beside others, in pieces, from the prefix cache, after making place; drafts run and some are right."""
    prompts = [IDS, IDS[3:], IDS * 3, IDS[::-1]]
    with_block(name, tmp_path)
    with load(tmp_path, activations="f32") as model:
        alone = [facts(model.generate(prompt, **GREEDY)) for prompt in prompts]
        sampled = model.generate(IDS, max_tokens=10, temperature=1.0, seed=1, speculate="off").ids
    with load(tmp_path, activations="f32", draft="mtp", chunk=5) as model:
        for options in ({"kv_memory": 40 * model.runner.unit}, {"max_step_tokens": 9}):
            with Engine(model, **options) as engine:
                for _ in range(2):
                    handles = [engine.submit(prompt, draft_tokens=3, **GREEDY) for prompt in prompts]
                    assert [facts(handle.result()) for handle in handles] == alone
                assert engine.stats["drafts"] > 20
        assert [facts(model.generate(prompt, **GREEDY)) for prompt in prompts] == alone
        assert model.generate(IDS, max_tokens=10, temperature=1.0, seed=1, speculate="off").ids == sampled
        assert model.core.drafters.runner.pools[0].allocator.used == 0
        block = model.core.drafters.runner.program
        shared = [name for name in block._weights.matrices if name.endswith(("token_embd.weight", "output.weight"))]
        everything = sum(matrix.nbytes for matrix in block._weights.matrices.values())
        words = sum(block._weights.matrices[name].nbytes for name in shared[:2])
        assert len(shared) >= 2 and block.weights_bytes < everything - words / 2


def table_of_next_words(folder):
    """A model whose next word depends on its last one alone, and whose block knows the same rule: every layer adds
    nothing, and the block's projection hands the word's row through."""
    tensors = with_block("qwen3_5", folder)
    for key, value in tensors.items():
        if key.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            value[:] = 0
        elif key.endswith("norm.weight") or "norm_" in key:
            value[:] = 0  # 1 is added
    width = len(tensors["model.norm.weight"])
    tensors["mtp.fc.weight"][:] = np.eye(width, 2 * width)
    save_file(tensors, folder / "model.safetensors")


def test_a_block_that_knows_the_rule_is_always_right(tmp_path):
    table_of_next_words(tmp_path)
    with load(tmp_path, activations="f32", draft="mtp") as model:
        plain = model.generate(IDS, speculate="off", **GREEDY)
        steps = model.core.counts["steps"]
        found = model.generate(IDS, draft_tokens=5, **GREEDY)
        assert found.ids == plain.ids and found.stats["acceptance_rate"] == 1.0
        assert model.core.counts["steps"] - steps <= 6


@pytest.mark.slow
def test_drafts_change_no_distribution(tmp_path):
    """Counts of the third token of many texts, against those without drafts: a chi-square test of two samples."""
    with_block("qwen3_5", tmp_path)
    settings = {"max_tokens": 5, "temperature": 1.0, "top_k": 6, "ignore_eos": True, "n": 20}
    with load(tmp_path, activations="f32", draft="mtp") as model:
        def third(**more):
            found = [one.ids[2] for seed in range(20) for one in model.generate(IDS, seed=seed, **settings,
                                                                               **more).choices]
            return np.bincount(found, minlength=model.vocabulary)

        plain, drafted = third(speculate="off"), third(draft_tokens=2)
        assert 0 < model.core.counts["accepted_drafts"] < model.core.counts["drafts"]
    both = plain + drafted
    often = both >= 20
    merged = [np.append(counts[often], counts[~often].sum()) for counts in (plain, drafted)]
    counts = np.concatenate(merged)
    statistic, _ = chi_square(counts, np.tile(sum(merged), 2) / (2 * counts.sum()))
    assert statistic < limit(len(merged[0]) - 1)


def test_what_has_no_block_is_told(tmp_path):
    with_block("qwen3_5", tmp_path, drop=["mtp.fc.weight"])
    with pytest.raises(SpecError, match=r"missing tensor mtp_proj.weight, looked for .*mtp.fc.weight"):
        load(tmp_path, draft="mtp")
    write_case("llama_biased", tmp_path)
    with pytest.raises(SpecError, match=r"spec 'llama' names no block that predicts further tokens \(mtp_proj\)"):
        load(tmp_path, draft="mtp")
    with pytest.raises(RequestError, match="drafts from the model's hidden states, on one device: leave out devices"):
        load(tmp_path, draft="mtp", devices="0;1")

"""Drafts of specs: keys of config.json that change the arithmetic are mapped, or keep the draft from running."""

import json
import re
import tomllib
from dataclasses import replace

import numpy as np
import pytest

from numflow import network
from numflow.errors import SpecError
from numflow.formats import open_checkpoint
from numflow.network import WeightSource
from numflow.network.drafts.new_spec import draft
from numflow.reference.program import Program
from numflow.spec import load_spec
from tests.conftest import SHARED, shared
from tests.specs.case import load_case, memory_checkpoint, relative_error, run

IDS = list(range(3, 15))


def new_model(**keys):
    """A llama of an unknown architecture, with keys added to its config.json."""
    case = load_case("llama_biased")
    known = {key: value for key, value in case.configs[0].items() if key not in ("architectures", "model_type")}
    return memory_checkpoint({**known, "architectures": ["NewForCausalLM"], "model_type": "new", **keys}, case.tensors)


def logits(checkpoint, spec):
    built = network.build(load_spec(spec), checkpoint)
    return run(Program(built, WeightSource(built, checkpoint)), IDS)


def written(drafted, tmp_path, text=None):
    path = tmp_path / "draft.toml"
    path.write_text(drafted.text if text is None else text)
    return path


@pytest.mark.parametrize(("keys", "option", "value"), [
    ({"final_logit_softcapping": 2.0}, ("head", "softcap"), 2.0),
    ({"attn_logit_softcapping": 1.5}, ("attention", "softcap"), 1.5),
    ({"query_pre_attn_scalar": 4}, ("attention", "scale"), 0.5),
    ({"partial_rotary_factor": 0.5}, ("rope", "dims"), None),
    ({"residual_multiplier": 0.25}, ("block", "residual_scale"), 0.25),
    ({"logits_scaling": 8.0}, ("head", "scale"), 0.125),
    ({"logit_scale": 0.5}, ("head", "scale"), 0.5),
    ({"embedding_multiplier": 12.0}, ("embedding", "scale"), 12.0),
    ({"clip_qkv": 0.3}, ("attention", "clip"), 0.3),
    ({"final_logit_softcapping": 2.0, "attention_multiplier": 0.1}, ("attention", "scale"), 0.1),
])
@pytest.mark.thin(4)
def test_keys_that_shipped_families_read_are_mapped(tmp_path, keys, option, value):
    checkpoint = new_model(**keys)
    drafted = draft(checkpoint)
    assert not drafted.problem
    path = written(drafted, tmp_path)
    resolved, _ = network.resolve(load_spec(path), checkpoint)
    found = resolved.option(*option, 0)
    assert found == (resolved.option("attention", "head_dim", 0) // 2 if value is None else pytest.approx(value))
    assert not np.array_equal(logits(checkpoint, path), logits(new_model(), "llama"))


@pytest.mark.parametrize(("keys", "named"), [
    ({"softmax_temperature": 3.0}, ["softmax_temperature"]),
    ({"use_rope": False}, ["use_rope"]),
    ({"mup": {"input": 2.0, "output": 0.5}}, ["mup.input", "mup.output"]),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "twist": 3}}, ["rope_scaling.twist"]),
    ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, ["rope_scaling.type"]),
    ({"layer_types": ["other_attention"] * 2 + ["full_attention"]}, ["layer_types"]),
    ({"attention_multiplier": 0.1, "query_pre_attn_scalar": 4}, None),
])
@pytest.mark.thin(4)
def test_a_draft_with_other_keys_left_does_not_run(tmp_path, keys, named):
    checkpoint = new_model(**keys)
    drafted = draft(checkpoint)
    left = tomllib.loads(drafted.text)["unconfirmed"]["keys"]
    assert left == named or (named is None and len(left) == 1)
    assert all(key in drafted.problem for key in left)
    path = written(drafted, tmp_path)
    for do in (network.build, network.resolve):
        with pytest.raises(SpecError, match=r"draft.toml: keys .* does not read.*\[unconfirmed\] keys") as error:
            do(load_spec(path), checkpoint)
        assert left[0] in str(error.value) and "\n" not in str(error.value)
    (tmp_path / "child.toml").write_text('extends = "draft"\n')
    with pytest.raises(SpecError, match="unconfirmed"):
        network.build(load_spec(tmp_path / "child.toml"), checkpoint)
    confirmed = drafted.text.partition("# Keys of the configuration")[0]
    network.build(load_spec(written(drafted, tmp_path, confirmed)), checkpoint)


@pytest.mark.parametrize("keys", [
    {}, {"torch_dtype": "bfloat16", "bos_token_id": 1, "attention_dropout": 0.1, "initializer_range": 0.02},
    {"attention_bias": True, "use_cache": True, "id2label": {"0": "a"}, "transformers_version": "4.57"},
    {"pad_token_id": [1, 2], "summary_type": "cls", "_name_or_path": "x", "final_logit_softcapping": None},
    {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}},
])
@pytest.mark.merge
def test_keys_without_a_say_in_the_arithmetic_need_no_word(tmp_path, keys):
    checkpoint = new_model(**keys)
    drafted = draft(checkpoint)
    assert not drafted.problem and "unconfirmed" not in drafted.text
    network.build(load_spec(written(drafted, tmp_path)), checkpoint)


@pytest.mark.parametrize(("keys", "named"), [
    ({"num_experts_per_tok": 2}, []),  # without experts
    ({"linear_conv_kernel_dim": 4}, []),  # without convolutions
    ({"per_layer_intermediate_size": [24, 24]}, ["per_layer_intermediate_size"]),
    ({"query_pre_attn_scalar": 4, "attention_multiplier": 0.5}, None),
])
@pytest.mark.merge
def test_keys_of_parts_that_a_model_does_not_have_need_no_word(tmp_path, keys, named):
    """Keys without effect need no confirmation, whichever shipped family defines them."""
    drafted = draft(new_model(**keys))
    left = tomllib.loads(drafted.text).get("unconfirmed", {}).get("keys", [])
    assert left == named or (named is None and left)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "granite"])
@pytest.mark.merge
def test_families_under_a_new_name_are_drafted_right_or_not_run(tmp_path, name):
    """The draft of a family under an unknown architecture computes what the family computes, or does not run."""
    case = load_case(name)
    checkpoint = memory_checkpoint({**case.configs[0], "architectures": ["New"], "model_type": "new"}, case.tensors)
    drafted = draft(checkpoint)
    if drafted.problem:
        return
    known = memory_checkpoint(case.configs[0], case.tensors)
    spec = network.choose_spec(known)
    np.testing.assert_allclose(logits(checkpoint, written(drafted, tmp_path)), logits(known, spec.path), atol=1e-4)


@pytest.mark.parametrize("name", ["olmo2", "olmo3", "exaone4", "arcee", "jais2", "nemotron", "gemma"])
@pytest.mark.thin(7)
def test_of_several_families_that_fit_the_one_that_explains_most(tmp_path, name):
    """Tensors and keys also fit families with other arithmetic; the one that maps most keys is chosen."""
    case = load_case(name)
    checkpoint = memory_checkpoint({**case.configs[0], "architectures": ["New"], "model_type": "new"}, case.tensors)
    drafted = draft(checkpoint)
    assert not drafted.problem
    spec = network.choose_spec(memory_checkpoint(case.configs[0], case.tensors))
    assert tomllib.loads(drafted.text)["extends"] == spec.name
    np.testing.assert_array_equal(logits(checkpoint, written(drafted, tmp_path)), logits(checkpoint, spec.path))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in SHARED.glob("fixtures_2026/*") if path.is_dir()))
def test_families_of_2025_26_take_at_most_five_lines_of_hand_work(tmp_path, name):
    """Unknown architectures: each key to confirm counts as a line, as does another family to extend."""
    folder = shared("fixtures_2026", name)
    stored = open_checkpoint(folder)
    case = json.loads((folder / "case.json").read_text())
    checkpoint = replace(stored, config={**stored.config, "architectures": ["NewForCausalLM"], "model_type": "new"})
    drafted = draft(checkpoint)
    table = tomllib.loads(drafted.text)
    lines = len(table.get("unconfirmed", {}).get("keys", []))
    others = re.findall(r"The tensors alone also fit (.*):", drafted.text)
    families = [table["extends"], *(others[0].split(", ") if others else [])]
    output = "logits" if case["kind"] == "causal" else "hidden"
    with np.load(folder / "expected.npz") as expected:
        wanted = expected[f"{output}_0"]
    for family in families:
        text = re.sub(r"\[unconfirmed\]\nkeys = .*\n", "", drafted.text).replace(f'"{families[0]}"', f'"{family}"', 1)
        spec = load_spec(written(drafted, tmp_path, re.sub(r"(?m)^#.*\n", "", text)))
        built = network.build(spec, checkpoint)
        found = run(Program(built, WeightSource(built, checkpoint)), case["prompts"][0], output)
        if relative_error(found, wanted) < 1e-4:
            break
    assert relative_error(found, wanted) < 1e-4
    assert lines + (family != families[0]) <= 5

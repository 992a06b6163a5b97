"""Mixes of K types: the type of each tensor, worked out by hand from llama.cpp's rules."""

import pytest

from numflow.formats.gguf_mixes import MIXES, SHORT_ROWS, types_of
from numflow.formats.gguf_writer import WRITTEN
from numflow.formats.types import TYPES


def model(layers=16, output=True, architecture="some", width=512, **facts):
    names = ["token_embd.weight", *(["output.weight"] if output else [])]
    for layer in range(layers):
        names += [f"blk.{layer}.{part}.weight" for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate",
                                                            "ffn_up", "ffn_down")]
    config = {"general.architecture": architecture, f"{architecture}.block_count": layers,
              **{f"{architecture}.{key}": value for key, value in facts.items()}}
    return dict.fromkeys(names, width), config


def layers_with(found, part, kind):
    return [int(name.split(".")[1]) for name, type_ in found.items() if f".{part}." in name and type_ == kind]


def test_q4_k_m():
    found = types_of("Q4_K_M", *model())
    assert found["output.weight"] == "Q6_K" and found["token_embd.weight"] == "Q4_K"
    more = [0, 1, 4, 7, 10, 13, 14, 15]  # an eighth at both ends and every third between
    for part in ("attn_v", "ffn_down"):
        assert layers_with(found, part, "Q6_K") == more
        assert len(layers_with(found, part, "Q4_K")) == 16 - len(more)
    for part in ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"):
        assert len(layers_with(found, part, "Q4_K")) == 16


@pytest.mark.parametrize("mix, values, down, outputs", [
    ("Q3_K_S", {"Q3_K": 16}, {"Q3_K": 16}, "Q3_K"),
    ("Q3_K_M", {"Q5_K": 2, "Q4_K": 14}, {"Q5_K": 1, "Q4_K": 15}, "Q4_K"),
    ("Q3_K_L", {"Q5_K": 16}, {"Q5_K": 16}, "Q5_K"),
    ("Q4_K_S", {"Q5_K": 4, "Q4_K": 12}, {"Q5_K": 2, "Q4_K": 14}, "Q4_K"),
    ("Q5_K_S", {"Q5_K": 16}, {"Q5_K": 16}, "Q5_K"), ("Q5_K_M", {"Q6_K": 8, "Q5_K": 8}, {"Q6_K": 8, "Q5_K": 8}, "Q5_K"),
    ("Q2_K_S", {"Q2_K": 16}, {"Q4_K": 2, "Q2_K": 14}, "Q2_K")])
def test_other_mixes(mix, values, down, outputs):
    found = types_of(mix, *model())
    for part, expected in (("attn_v", values), ("ffn_down", down), ("attn_output", {outputs: 16})):
        assert {kind: len(layers_with(found, part, kind)) for kind in expected} == expected
    assert found["output.weight"] == "Q6_K"


def test_a_tied_table_is_the_output_matrix():
    assert types_of("Q4_K_M", *model(output=False))["token_embd.weight"] == "Q6_K"


def test_what_a_model_is_counts():
    eight = types_of("Q4_K_M", *model(expert_count=8))
    assert len(layers_with(eight, "attn_v", "Q8_0")) == len(layers_with(eight, "attn_k", "Q8_0")) == 16
    assert len(layers_with(eight, "attn_output", "Q5_K")) == 16
    heads = {"attention.head_count": 32, "attention.head_count_kv": [8] * 80}
    assert len(layers_with(types_of("Q4_K_S", *model(80, **heads)), "attn_v", "Q5_K")) == 80
    assert len(layers_with(types_of("Q2_K_S", *model(**heads)), "attn_v", "Q4_K")) == 16
    falcon = types_of("Q4_K_M", *model(architecture="falcon"))
    assert falcon["output.weight"] == "Q8_0" and len(layers_with(falcon, "ffn_down", "Q5_K")) == 7


def test_rows_that_256_does_not_divide_get_types_of_smaller_blocks():
    found = types_of("Q4_K_M", *model(width=576))
    assert set(found.values()) == {"Q8_0", "Q5_0"} and found["output.weight"] == "Q8_0"
    assert set(types_of("Q6_K", *model(width=96)).values()) == {"Q8_0"}
    assert set(types_of("Q4_K", *model()).values()) == {"Q4_K"}
    assert set(types_of("Q3_K_S", *model(width=576)).values()) == {"Q8_0", "Q4_0"}


def test_matrices_of_latent_attention_are_no_keys_or_values():
    columns = {f"blk.{layer}.{part}.weight": 512 for layer in range(2)
               for part in ("attn_k_b", "attn_v_b", "attn_kv_a_mqa", "attn_kv_b", "ffn_down_exps")}
    found = types_of("Q4_K_M", columns, {"general.architecture": "some", "some.block_count": 2, "some.expert_count": 8})
    assert found["blk.0.attn_kv_b.weight"] == "Q8_0"
    assert {found[f"blk.0.{part}.weight"] for part in ("attn_k_b", "attn_v_b", "attn_kv_a_mqa")} == {"Q4_K"}


def test_layers_without_a_feed_forward_part_do_not_count():
    """Without experts, rules count earlier matrices of this kind; with experts, they use the layer's index."""
    columns, config = model()
    columns = {name: width for name, width in columns.items()
               if ".ffn_" not in name or int(name.split(".")[1]) % 4 == 3}
    assert layers_with(types_of("Q4_K_M", columns, config), "ffn_down", "Q6_K") == [3, 7]
    config["some.expert_count"] = 4
    assert layers_with(types_of("Q4_K_M", columns, config), "ffn_down", "Q6_K") == [7, 15]


def test_an_encoder_comes_behind_its_decoder():
    """Names without a leading layer are sorted; cross-attention values follow the rule for values."""
    columns = {f"{part}.weight": 512 for part in ("enc.blk.0.attn_v", "dec.blk.0.attn_v", "dec.blk.0.cross_attn_v")}
    found = types_of("Q3_K_M", columns, {"general.architecture": "some", "some.block_count": 1})
    assert list(found.values()) == ["Q4_K", "Q5_K", "Q5_K"]


def test_every_type_of_a_mix_can_be_written():
    assert {*MIXES.values(), *SHORT_ROWS, *SHORT_ROWS.values()} <= set(WRITTEN.values()) <= set(TYPES)

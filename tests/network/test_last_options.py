"""Refused combinations of differential attention, experts in attention, and grouped scans."""

import pytest

from numflow import network
from numflow.errors import SpecError
from tests.specs.case import load_case, memory_checkpoint


def build(name: str, shapes: dict[str, tuple[int, ...]], **keys):
    """The network of a case with changed configuration keys, and with the shapes of tensors with these name suffixes
    changed."""
    case = load_case(name)
    tensors = {tensor: next((shape for end, shape in shapes.items() if tensor.endswith(end)), was)
               for tensor, was in case.tensors.items()}
    checkpoint = memory_checkpoint(case.configs[0] | keys, tensors)
    return network.build(network.choose_spec(checkpoint), checkpoint)


def test_halves_of_heads_are_of_an_even_number():
    with pytest.raises(SpecError, match="attention.differential: expected an even number of key/value heads and values "
                                        "twice as wide as keys, found 1 heads of 32 and 16 columns"):
        build("diffllama", {"k_proj.weight": (16, 64), "v_proj.weight": (16, 64)}, num_key_value_heads=1)


def test_a_token_chooses_no_more_experts_than_there_are():
    with pytest.raises(SpecError, match="mixer.kind: 'experts' expects .* 1 to moe.experts 5 choices, found 8 and 8 "
                                        "columns, 6 choices"):
        build("jetmoe", {}, num_experts_per_tok=6)


def test_groups_of_channels_divide_them():
    with pytest.raises(SpecError, match="recurrent.groups: expected a divisor of recurrent.heads 64, found 3"):
        build("zamba", {}, n_mamba_heads=3)


def test_experts_that_several_tokens_choose_together_are_refused():
    with pytest.raises(SpecError, match="is_moe of config.json is True; expected false"):
        build("doge", {}, is_moe=True)


def test_what_a_key_has_beside_it_is_stored_with_it():
    found = build("doge", {})
    cache = found.caches["blk.0.self"]
    assert (cache.k_dim, cache.v_dim) == (16 + 8, 16)

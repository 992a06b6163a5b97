"""Embeddings of hashed n-grams: numbers of the hashes, tables in one tensor or several, stored numbers."""

import numpy as np
import pytest

from numflow import network
from numflow.errors import SpecError
from numflow.formats.checkpoint import Tensor
from numflow.formats.types import TYPES
from numflow.network import WeightSource
from numflow.network.blocks.ngrams import multipliers, primes
from numflow.reference.program import Program
from tests.specs.case import load_case, memory_checkpoint, relative_error, run
from tests.specs.weights import values

PLACE = "model.layers.1.ple.ple_embedding."
MULTIPLIERS = [23703573157769, 20109073645365, 8052911324071]


def test_numbers_of_the_makers_code():
    assert multipliers(248320, 3, 1234) == MULTIPLIERS
    assert multipliers(203, 3, 99 + 10007) == [1971197585266499, 38516519770306539, 44457181304313759]
    assert primes(50, 9) == [53, 59, 61, 67, 71, 73, 79, 83, 89]
    assert primes(20000000, 17)[-1] == 20000213
    assert primes(1, 3) == [2, 3, 5]


def results(case, tensors=None, integers=None, make=values, **keys):
    """Logits of the second prompt, with other tensors, further tensors of integers and changed keys."""
    checkpoint = memory_checkpoint(case.configs[0] | keys, tensors or case.tensors, make=make)
    for name, numbers in (integers or {}).items():
        stored = np.array(numbers, np.int64).view(np.uint8)[None]
        checkpoint.tensors[PLACE + name] = Tensor(PLACE + name, (len(numbers),), TYPES["I64"], lambda s=stored: s)
    built = network.build(network.choose_spec(checkpoint), checkpoint)
    return run(Program(built, WeightSource(built, checkpoint)), case.inputs[1]["ids"])[case.rows[1]["rows"]]


def test_a_text_ends_at_the_separator():
    """With another separator, n-grams reach beyond the one in the prompt; the first of several counts."""
    case = load_case("qwen4_exp")
    expected = case.expected["logits_1"]
    assert relative_error(results(case, eos_token_id=[188, 3]), expected) < 1e-4
    assert relative_error(results(case, eos_token_id=189), expected) > 1e-3


def test_stored_numbers_of_the_hashes_count():
    case, layer = load_case("qwen4_exp"), {}
    own = multipliers(203, 3, 99), primes(50, 6)
    for name, numbers in zip(("layer_multipliers", "ngram_heads_vocab_sizes"), own, strict=True):
        layer[name] = numbers
    layer["ngram_heads_offsets"] = np.cumsum([0, *own[1][:-1]]).tolist()
    expected = case.expected["logits_1"]
    assert relative_error(results(case, integers=layer), expected) < 1e-4
    assert relative_error(results(case, integers=layer | {"layer_multipliers": MULTIPLIERS}), expected) > 1e-3


@pytest.mark.parametrize(("numbers", "message"), [
    ({"layer_multipliers": [1, 2]}, "layer_multipliers' is .2. of I64, expected 3 numbers"),
    ({"layer_multipliers": [1, -2, 3]}, "expected positive multipliers"),
    ({"layer_multipliers": [1, 1 << 60, 3]}, "expected positive multipliers"),
    ({"ngram_heads_vocab_sizes": [0, 1, 1, 1, 1, 1]}, "expected positive multipliers .* and parts"),
    ({"ngram_heads_vocab_sizes": [10 ** 9] * 6}, "and parts of fewer than 2.31 rows"),
    ({"ngram_heads_vocab_sizes": [70] * 6}, "ngram_embedding.* is .* expects .>= 420 in all, 6."),
    ({"ngram_heads_offsets": [0, 53, 112, 173, 240, 312]}, "ngram_offsets: expected parts of the table that follow")])
def test_wrong_stored_numbers_are_refused(numbers, message):
    with pytest.raises(SpecError, match=message):
        results(load_case("qwen4_exp"), integers=numbers)


@pytest.mark.parametrize(("keys", "message"), [
    ({"ple_embed_dim": 40}, "ngrams.width: expected a multiple of the 6 parts .* found 40"),
    ({"vocab_size": 1 << 25}, "ngrams.vocabulary: expected up to 16777216 token ids"),
    ({"eos_token_id": 203}, "with the separator 203 among them, found 203"),
    ({"indexer_kv_heads": 2}, "indexer_kv_heads of .* is 2; expected one of 1"),
    ({"ngram_size": 1}, "ngram_size of .* is 1; expected a whole number of 2 or more")])
def test_wrong_values_are_refused(keys, message):
    with pytest.raises(SpecError, match=message):
        results(load_case("qwen4_exp"), **keys)


def test_a_table_in_one_tensor():
    case = load_case("qwen4_exp")
    parts = [name for name in case.tensors if name.startswith(PLACE) and "shard" in name]
    whole = f"{PLACE}ngram_embedding.weight"
    rest = {name: shape for name, shape in case.tensors.items() if name not in parts}

    def made(name, shape):
        if name != whole:
            return values(name, shape).astype(np.float32)
        return np.concatenate([values(part, case.tensors[part]) for part in parts]).astype(np.float32)

    found = results(case, rest | {whole: (sum(case.tensors[name][0] for name in parts), 6)}, make=made)
    assert relative_error(found, case.expected["logits_1"]) < 1e-4
    with pytest.raises(SpecError, match="expects .>= 384 in all, 6."):
        results(case, rest | {parts[0]: case.tensors[parts[0]], parts[2]: case.tensors[parts[2]]})

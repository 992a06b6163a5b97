"""Real vocabularies. The expected ids are llama.cpp's (llama-tokenize), which are the original tokenizers' here."""

import hashlib

import pytest

from numflow.formats import gguf as gguf_format
from numflow.tokenizer import load_tokenizer
from tests.conftest import real_model
from tests.tokenizer.conftest import NASTY, checkpoint, gguf, stream


def load_gguf(name):
    return load_tokenizer(gguf(gguf_format.read(real_model(name))[1]))


@pytest.fixture(scope="module")
def smollm2():
    return load_gguf("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="module")
def gemma3():
    return load_gguf("gemma-3-270m-q4_k_m.gguf")


def digest(tokenizer):
    """Of the ids of every nasty text, with special tokens recognised and not."""
    sums = hashlib.sha256()
    for parse_special in (True, False):
        for text in NASTY.values():
            sums.update(repr(tokenizer.encode(text, parse_special=parse_special)).encode())
    return sums.hexdigest()


@pytest.mark.parametrize(("text", "ids"), [
    ("Hello, world! It's 2024.", [19556, 28, 905, 17, 657, 506, 216, 34, 32, 34, 36, 30]),
    ("<|im_start|>user\n你好 👩‍👧<|im_end|>",
     [1, 4093, 198, 18645, 250, 48392, 138, 15107, 235, 119, 321, 231, 10813, 235, 117, 2]),
    ("<start_of_turn>  \n\n\ttabs</table>",
     [44, 3738, 79, 1714, 79, 20589, 46, 256, 1116, 197, 100, 7366, 9617, 6413, 46]),
])
def test_smollm2_ids(smollm2, text, ids):
    assert smollm2.encode(text) == ids
    assert smollm2.decode(ids, skip_special=False) == "".join(stream(smollm2, ids, skip_special=False)) == text


def test_smollm2(smollm2):
    assert digest(smollm2) == "d2bf6c112fa12c147440aa0c91872e40ab4d2df2d99c03d171ce2690e6d913ae"
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.pad_id, smollm2.unk_id) == (49152, 1, 2, 0)
    assert smollm2.eos_ids == {0, 2} and not smollm2.add_bos
    text = smollm2.apply_chat([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert smollm2.encode(text).count(1) == 3


@pytest.mark.parametrize(("text", "ids"), [
    ("Hello, world! It's 2024.", [2, 9259, 236764, 1902, 236888, 1030, 236789, 236751, 236743, 236778, 236771, 236778,
                                  236812, 236761]),
    ("<|im_start|>user\n你好 👩‍👧<|im_end|>",
     [2, 236820, 236909, 548, 236779, 3041, 111038, 2364, 107, 144626, 236743, 243767, 237243, 244814, 236820, 236909,
      548, 236779, 643, 111038]),
    ("<start_of_turn>  \n\n\ttabs</table>", [2, 105, 138, 108, 255968, 39218, 176]),
])
def test_gemma3_ids(gemma3, text, ids):
    assert gemma3.encode(text) == ids
    decoded = gemma3.decode(ids[1:], skip_special=False)
    assert decoded == "".join(stream(gemma3, ids[1:], skip_special=False)) == text


def test_gemma3(gemma3):
    # One text differs from llama-tokenize --no-parse-special: there "</s>", a user-defined token, is not matched.
    assert digest(gemma3) == "3e56d1b4d5c9b69ace7fc6cc5603ec4dc91bc2d32d240166671ee7ffba6fbe64"
    assert (gemma3.vocab_size, gemma3.bos_id, gemma3.pad_id, gemma3.unk_id) == (262144, 2, 0, 3)
    assert gemma3.eos_ids == {1, 106} and gemma3.add_bos
    assert gemma3.encode("<bos>x") == gemma3.encode("x")


@pytest.mark.parametrize("role", ["tokenizer.json", "vocab.txt"])
def test_minilm_ids_are_the_library_s(role):
    from tokenizers import Tokenizer

    folder = real_model("all-MiniLM-L6-v2")
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    files = {role: folder / role, "tokenizer_config": folder / "tokenizer_config.json"}
    tokenizer = load_tokenizer(checkpoint(files, path=folder))
    for text in NASTY.values():
        pair = library.encode(text, "Hello there")
        assert tokenizer.encode_pair(text, "Hello there") == (pair.ids, pair.type_ids)
        ids = library.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == "".join(stream(tokenizer, ids)) == library.decode(ids)
    assert (tokenizer.pad_id, tokenizer.mask_id, tokenizer.vocab_size) == (0, 103, 30522)

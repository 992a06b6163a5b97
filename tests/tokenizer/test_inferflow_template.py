"""Inferflow's prompt templates, piece by piece."""

import json

import pytest

from numflow.errors import TokenizerError
from numflow.tokenizer import load_tokenizer
from numflow.tokenizer.inferflow_template import encode_template
from tests.tokenizer.conftest import checkpoint


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, byte_level_library):
    from tokenizers import Tokenizer

    folder = tmp_path_factory.mktemp("template")
    library = Tokenizer.from_str(byte_level_library.to_str())
    library.add_special_tokens(["<|im_start|>", "[CLS]", "__zh__"])
    library.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>"},
              "generation_config": {"user_token_id": 100, "assistant_token_id": 101}}
    files = {"tokenizer.json": folder / "tokenizer.json"}
    for role, content in config.items():
        files[role] = folder / f"{role}.json"
        files[role].write_text(json.dumps(content))
    return load_tokenizer(checkpoint(files))


def plain(tokenizer, *texts):
    return [id for text in texts for id in tokenizer.encode(text, add_special=False, parse_special=False)]


def test_pieces(tokenizer):
    def ids(template, **parts):
        return encode_template(template, tokenizer, "the cat", **parts)

    start, cls, zh = (tokenizer.id_of(text) for text in ("<|im_start|>", "[CLS]", "__zh__"))
    newline, query = tokenizer.id_of("Ċ"), plain(tokenizer, "the cat")
    assert ids("{query}") == ids("{question}") == query
    assert ids("{_query}") == ids("{_question}") == plain(tokenizer, " the cat")
    assert ids("{bos}{query}{eos}") == [0, *query, 1]
    assert ids("{user_token}{query}{assistant_token}") == [100, *query, 101]
    assert ids(r"{<|im_start|>}user{\n}{query}") == [start, *plain(tokenizer, "user"), newline, *query]
    assert ids("{[CLS]}{__zh__}{ }{#7}") == [cls, zh, tokenizer.id_of("Ġ"), 7]
    assert ids("{<s>}<s>") == [0, *plain(tokenizer, "<s>")]
    assert ids("问：{query}答：") == [*plain(tokenizer, "问："), *query, *plain(tokenizer, "答：")]
    assert ids("[{system_prompt}]", system_prompt="Be brief.") == plain(tokenizer, "[", "Be brief.", "]")
    assert ids("[{system_prompt}]") == plain(tokenizer, "[", "]")


def test_the_answer_starts_at_res_prefix(tokenizer):
    query, prefix = plain(tokenizer, "the"), plain(tokenizer, "Sure:")
    for template in ("{query}{res_prefix}ignored{no such token}", "{query}{answer}", "{query}"):
        assert encode_template(template, tokenizer, "the", res_prefix="Sure:") == [*query, *prefix]


def test_the_query_is_not_a_template(tokenizer):
    text = "{bos} {#3} <s> {"
    assert encode_template("{query}", tokenizer, text) == plain(tokenizer, text)
    assert encode_template("a { b } c", tokenizer, "x") if tokenizer.id_of(" b ") else True
    assert encode_template("open { brace", tokenizer, "x") == plain(tokenizer, "open { brace")


@pytest.mark.parametrize(("template", "message"), [
    ("{nothing of the kind}", r"\{nothing of the kind\} is no token of this vocabulary"),
    ("{pad}", "this model has no pad token"),
    ("{#999999}", "no token 999999"),
])
def test_a_piece_that_is_no_token(tokenizer, template, message):
    with pytest.raises(TokenizerError, match=message):
        encode_template(template, tokenizer, "x")

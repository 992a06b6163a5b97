"""Choice of the tokenizer file, and errors if there is none."""

import pytest

from numflow.errors import FormatError, TokenizerError
from numflow.tokenizer import load_tokenizer
from tests.tokenizer.conftest import checkpoint, gguf, gguf_of_byte_level, gguf_of_sentencepiece, write_scored


@pytest.fixture
def folder(tmp_path, byte_level_library, bpe_model):
    byte_level_library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.model").write_bytes(bpe_model)
    write_scored(tmp_path / "tokenizer.bin", bpe_model)
    return tmp_path


def files_in(folder):
    return {path.name: path for path in folder.iterdir()}


def test_tokenizer_json_comes_before_the_others(folder):
    assert load_tokenizer(checkpoint(files_in(folder), path=folder)).id_of("Ġthe") is not None


@pytest.mark.parametrize("options", [{"kind": "sentencepiece"}, {"file": "tokenizer.model"},
                                     {"file": "tokenizer.model", "kind": "sentencepiece"}])
def test_options_choose_another(folder, options):
    assert load_tokenizer(checkpoint(files_in(folder), path=folder), options).id_of("▁the") is not None


def test_options_left_at_their_defaults_are_found_out(folder):
    unset = {"kind": "auto", "file": "", "add_bos": None, "bos": "", "chat_template": "", "pre": ""}
    tokenizer = load_tokenizer(checkpoint(files_in(folder), path=folder), unset)
    assert tokenizer.id_of("Ġthe") is not None and tokenizer.chat_template is None


def test_a_file_beside_a_single_file_checkpoint(folder):
    model = folder / "model.bin"
    model.touch()
    tokenizer = load_tokenizer(checkpoint({}, path=model), {"file": "tokenizer.bin"})
    assert tokenizer.token_text(3) == "<0x00>"


def test_metadata_of_a_gguf_file_comes_first_but_a_file_may_stand_in(folder, byte_level_library, bpe_model):
    with_metadata = gguf(gguf_of_sentencepiece(bpe_model))
    with_metadata.files, with_metadata.path = files_in(folder), folder
    assert load_tokenizer(with_metadata).id_of("▁the") is not None
    assert load_tokenizer(with_metadata, {"file": "tokenizer.json"}).id_of("Ġthe") is not None
    without = gguf({})
    without.files = files_in(folder)
    assert load_tokenizer(without).id_of("Ġthe") is not None
    assert load_tokenizer(gguf(gguf_of_byte_level(byte_level_library)), {"kind": "gguf"}).vocab_size == 401


def test_no_tokenizer_names_what_was_looked_for(tmp_path):
    with pytest.raises(TokenizerError) as error:
        load_tokenizer(checkpoint({"vocab.json": tmp_path / "vocab.json"}, path=tmp_path))
    message = str(error.value)
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json with merges.txt", "vocab.txt", "tokenizer.bin"):
        assert name in message
    assert str(tmp_path) in message and "\n" not in message


@pytest.mark.parametrize(("options", "message"), [
    ({"kinds": "bpe"}, "kinds: no such option; did you mean 'kind'"),
    ({"kind": "bpq"}, "kind: 'bpq' is unknown; did you mean 'bpe'"),
    ({"add_bos": "yes"}, "add_bos: should be of type bool, is 'yes'"),
    ({"file": "nothing.json"}, "file: no file .*nothing.json"),
    ({"file": "notes.md"}, "cannot tell what 'notes.md' is"),
    ({"kind": "wordpiece"}, r"looked for vocab\.txt;"),
    ({"kind": "gguf"}, "has no tokenizer"),
])
def test_options_that_do_not_fit(folder, options, message):
    (folder / "notes.md").touch()
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(checkpoint(files_in(folder), path=folder), options)


@pytest.mark.parametrize("role", ["tokenizer_config", "special_tokens_map", "generation_config"])
@pytest.mark.parametrize("content", ["[1]", "{", "\xff"])
def test_a_broken_side_file_is_named(folder, role, content):
    path = folder / f"{role}.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(FormatError, match=rf"{role}\.json: "):
        load_tokenizer(checkpoint({**files_in(folder), role: path}, path=folder))


def test_a_file_that_is_gone(folder):
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer.bin"):
        with pytest.raises(FormatError, match="gone"):
            load_tokenizer(checkpoint({name: folder / "gone"}))


def test_side_files_are_not_needed_to_import_the_package():
    import subprocess
    import sys

    code = ("import sys, numflow.tokenizer; "
            "print({'tokenizers', 'sentencepiece', 'jinja2', 'numpy', 'gguf'} & set(sys.modules))")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"

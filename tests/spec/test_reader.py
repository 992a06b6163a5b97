import pytest

from numflow import ops
from numflow.errors import ModelNotFoundError, SpecError
from numflow.spec import list_specs, load_spec, schema
from numflow.spec.paths import specs_dir
from numflow.spec.reader import detect_tables, own_tables
from numflow.spec.reference import markdown


def write(folder, text, name="my.toml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[atention]\nheads = 4", ["unknown key 'atention'", "'attention'"]),
        ("[attention]\nhedas = 4", ["attention.hedas", "'heads'"]),
        ("[attention]\nheads = 4.5", ["attention.heads", "an integer", "4.5"]),
        ("[attention]\nheads = true", ["attention.heads", "an integer"]),
        ("[attention]\nheads = '4 +'", ["attention.heads", "an integer or an expression"]),
        ("[rope]\npairing = 'halves'", ["rope.pairing", "half, adjacent", "'half'"]),
        ("[rope]\npairing = '= half if'", ["rope.pairing", "a word or an expression"]),
        ("[hf]\nwithin = [3]", ["hf.within", "text or a list of texts", "[3]"]),
        ("[hf]\ndefaults = 3", ["hf.defaults", "a table"]),
        ("[hf.defaults]\nllama = 3", ["hf.defaults.llama", "keys that config.json may leave out"]),
        ("extends_part = 3", ["extends_part", "text or a list of texts"]),
        ("extends_part = 'text_config'\nextends = 'llama'", ["extends or extends_part"]),
        ("[ffn]\nactivation = 'sillu'", ["ffn.activation", "'silu'"]),
        ("[model]\ntype = 'decoder-only'", ["model.type", "decoder, encoder"]),
        ("[parameters]\nx = { confg = 'a' }", ["parameters.x.confg", "'config'"]),
        ("[parameters]\nx = { config = 3 }", ["parameters.x.config", "text"]),
        ("[parameters]\nx = { config = 'x', null = [1] }", ["parameters.x.null", "a value", "[1]"]),
        ("[parameters]\n'a b' = 3", ["a b", "word"]),
        ("[hf.tensors]\nattn_query = 'q'", ["hf.tensors.attn_query"]),
        ("[hf.tensors]\nattn_q = 3", ["hf.tensors.attn_q", "text"]),
        ("[gguf.rope]\npairing = 1", ["gguf.rope.pairing"]),
        ("[encoder.ropes]\nbase = 1", ["encoder.ropes", "'rope'"]),
        ("extends = 'no_such_family'", ["extends", "no_such_family"]),
        ("extends = 'my'", ["circle"]),
        ("a = ", ["not TOML"]),
        ("[detect]\nwhen = 'import os'", ["detect.when"]),
        ("transposed = ['nope']", ["nope"]),
        ("[gguf.metadata]\nx = 'import os'", ["gguf.metadata.x", "a number or an expression"]),
        ("[gguf.metadata]\nx = { all = 'layer' }", ["gguf.metadata.x.all", "each"]),
        ("[gguf.written]\nattn_query = '1'", ["gguf.written.attn_query"]),
        ("[gguf.written]\nattn_q = 'blk.{layer}'", ["gguf.written.attn_q", "expression"]),
    ],
)
def test_error_names_file_key_and_expectation(tmp_path, text, words):
    path = write(tmp_path, text)
    with pytest.raises(SpecError) as error:
        load_spec(path)
    message = str(error.value)
    assert all(word in message for word in ["my.toml", *words]), message
    assert "\n" not in message


def test_extends_merges_key_by_key(tmp_path):
    write(
        tmp_path,
        "ignore = ['a']\n[parameters]\nheads = { config = 'n', default = 2 }\n[rope]\nbase = 5\ndims = 8\n",
        "parent.toml",
    )
    path = write(
        tmp_path, "extends = 'parent'\nignore = ['b']\n[parameters]\nheads = { default = 3 }\n[rope]\nbase = 6\n"
    )
    spec = load_spec(path)
    assert spec.section("parameters")["heads"] == {"config": "n", "default": 3}
    assert spec.section("rope") == {"base": 6, "dims": 8}
    assert spec.section("ignore") == ["a", "b"]
    assert [p.name for p in spec.chain] == ["my.toml", "parent.toml"]


def test_what_holds_of_a_file_s_own_architecture_is_not_inherited(tmp_path):
    write(tmp_path, "[detect]\ngguf = ['p']\n[gguf.written]\nrope_freqs = \"'rope_freqs'\"\n[gguf.rope]\nbase = 3\n",
          "parent.toml")
    spec = load_spec(write(tmp_path, "extends = 'parent'\n"))
    assert spec.section("gguf") == {"rope": {"base": 3}, "written": {}}
    assert spec.section("detect") == {}
    assert load_spec(tmp_path / "parent.toml").section("gguf")["written"] == {"rope_freqs": "'rope_freqs'"}


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ModelNotFoundError, match="did you mean 'llama'"):
        load_spec("lama")


def test_shipped_specs_load_and_have_titles():
    specs = list_specs()
    assert len(specs) >= 10
    assert all(spec.section("model").get("title") for spec in specs)


def test_every_family_is_named_by_one_spec_or_told_apart_by_a_condition():
    named: dict[str, list] = {}
    for spec in list_specs():
        table = spec.section("detect")
        for key in ("architectures", "gguf"):
            for word in table.get(key, []):
                named.setdefault(f"{key} {word}", []).append(spec)
    for word, specs in named.items():
        assert len(specs) == 1 or all("when" in s.section("detect") for s in specs), (word, [s.name for s in specs])


def test_the_page_of_all_keys_is_current():
    assert (specs_dir() / "README.md").read_text(encoding="utf-8") == markdown()


def test_the_language_has_the_activations_of_the_op_table():
    assert schema.ACTIVATIONS == ops.ACTIVATIONS


def test_names_of_a_model_are_read_without_the_rest_of_a_file():
    found = detect_tables()
    whole = {path.stem: own_tables(path).get("detect") for path in specs_dir().glob("*.toml")}
    assert found == {name: table for name, table in whole.items() if table}
    assert len(found) > 100

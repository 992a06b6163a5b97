import pytest

from numflow.errors import SpecError
from numflow.spec import Resolved, load_spec


def resolved(tmp_path, text, config, naming="hf"):
    path = tmp_path / "my.toml"
    path.write_text(text, encoding="utf-8")
    return Resolved(load_spec(path), config, naming)


def test_sources_in_order_nested_keys_null_and_defaults(tmp_path):
    text = """
    [parameters]
    heads = { config = ["n_head", "num_heads"], gguf = "attention.head_count" }
    factor = { config = "rope_scaling.factor", default = 1.5 }
    kv = { config = "kv", default = "heads // 2" }
    """
    r = resolved(tmp_path, text, {"num_heads": 8, "rope_scaling": None, "kv": None})
    assert (r.parameter("heads"), r.parameter("factor"), r.parameter("kv")) == (8, 1.5, 4)
    assert resolved(tmp_path, text, {"n_head": 4, "rope_scaling": {"factor": 2}}).parameter("factor") == 2
    gguf = {"general.architecture": "x", "x.attention.head_count": 6}
    assert resolved(tmp_path, text, gguf, "gguf").parameter("heads") == 6


def test_words_are_the_only_ones_of_a_value_or_a_list(tmp_path):
    text = """
    [parameters]
    kinds = { config = "kinds", words = ["wide", "narrow", true], default = "none" }
    """
    assert resolved(tmp_path, text, {"kinds": ["wide", "narrow"]}).parameter("kinds") == ["wide", "narrow"]
    assert resolved(tmp_path, text, {"kinds": "wide"}).parameter("kinds") == "wide"
    assert resolved(tmp_path, text, {"kinds": None}).parameter("kinds") is None
    for kinds, place in ((["wide", "odd"], r"kinds\[1\]"), ("odd", "kinds"), ([{"a": 1}], r"kinds\[0\]")):
        with pytest.raises(SpecError, match=f"parameters.kinds: {place} of .* is .*; expected one of wide, narrow$"):
            resolved(tmp_path, text, {"kinds": kinds}).parameter("kinds")
    with pytest.raises(SpecError, match=r"parameters.kinds.words: expected a list of words, found 'wide'"):
        resolved(tmp_path, text.replace('["wide", "narrow", true]', '"wide"'), {})


def test_limits_of_values_and_lists_hold_also_where_nothing_asks(tmp_path):
    text = """
    [parameters]
    layers = { config = "layers", least = 1 }
    kinds = { config = "kinds", items = [0, "layers"], default = "none" }
    marked = { config = "marked", least = 1, most = "layers", default = "none" }
    """
    resolved(tmp_path, text, {"layers": 3, "kinds": ["a"] * 3, "marked": [1, 3]}).check_limits()
    resolved(tmp_path, text, {"layers": 3, "kinds": [], "marked": 2}).check_limits()
    for key, value, message in (
            ("kinds", ["a"] * 2, "kinds of .* has 2; expected a list of 0 or 3 items, one for each layer"),
            ("kinds", 7, "kinds of .* is 7; expected a list of 0 or 3 items"),
            ("marked", [1, 4], r"marked\[1\] of .* is 4; expected a whole number from 1 to 3"),
            ("marked", [1.5], r"marked\[0\] of .* is 1.5; expected a whole number"),
            ("marked", True, "marked of .* is True; expected a whole number"),
            ("layers", 0, "layers of .* is 0; expected a whole number of 1 or more"),
            ("layers", [4], "parameters.marked.most: expected a whole number, found .4.")):
        with pytest.raises(SpecError, match=message):
            resolved(tmp_path, text, {"layers": 3, "marked": 1, key: value}).check_limits()
    with pytest.raises(SpecError, match=r"parameters.layers.least: expected an integer, found"):
        resolved(tmp_path, text.replace("least = 1 }", "least = [1] }"), {})


def test_true_is_no_number(tmp_path):
    text = "[norm]\neps = { config = 'eps' }\n[attention]\nheads = { config = 'heads' }\n"
    text += "[rope]\nshort_factor = { config = 'f' }"
    r = resolved(tmp_path, text, {"eps": True, "heads": True, "f": [1.0, True]})
    for section, key, expected in (("norm", "eps", "a finite number above 0"), ("attention", "heads", "a whole number"),
                                   ("rope", "short_factor", "a list of numbers")):
        with pytest.raises(SpecError, match=f"expected {expected}.*, found True"):
            r.option(section, key, 0)


def test_null_may_be_a_value_of_its_own(tmp_path):
    text = """
    [parameters]
    cap = { config = ["cap", "old_cap"], null = 0.0, default = 15.0 }
    [hf]
    within = "text"
    """
    found = [resolved(tmp_path, text, config).parameter("cap") for config in (
        {}, {"cap": None}, {"cap": 3}, {"text": {"cap": None}}, {"text": {"cap": None}, "cap": 4}, {"old_cap": None},
        {"text": None, "old_cap": 5})]
    assert found == [15, 0, 3, 0, 4, 0, 5]


def test_options_by_layer_stack_and_naming(tmp_path):
    text = """
    [parameters]
    windows = [1, 2, 3]
    [attention]
    heads = 4
    window = "windows"
    [rope]
    base = "1e4 if layer % 2 else 1e6"
    [encoder.attention]
    heads = 2
    [gguf.attention]
    heads = 3
    """
    r = resolved(tmp_path, text, {})
    assert [r.option("attention", "window", layer) for layer in range(3)] == [1, 2, 3]
    assert [r.option("rope", "base", layer) for layer in range(2)] == [1e6, 1e4]
    assert r.option("attention", "heads", 0, "encoder") == 2
    assert r.option("attention", "heads", 0, "decoder") == 4
    assert resolved(tmp_path, text, {}, "gguf").option("attention", "heads", 0) == 3


def test_options_may_be_named_in_expressions(tmp_path):
    r = resolved(tmp_path, "[attention]\nhead_dim = 16\n", {})
    assert r.option("attention", "scale") == 0.25
    assert r.option("rope", "dims") == 16


def test_words_are_mapped_and_activations_have_aliases(tmp_path):
    text = (
        '[ffn]\nactivation = { config = "act" }\n[block]\n'
        'post_norm = { config = "pre", map = { true = "none", false = "residual" } }'
    )
    r = resolved(tmp_path, text, {"act": "gelu_new", "pre": False})
    assert r.option("ffn", "activation") == "gelu_tanh"
    assert r.option("block", "post_norm") == "residual"


@pytest.mark.parametrize(
    ("text", "config", "words"),
    [
        (
            "[parameters]\nheads = { config = ['n_head', 'h'] }\n[attention]\nheads = 'heads'",
            {},
            ["my.toml", "parameters.heads", "config.json has no 'n_head' or 'h'"],
        ),
        ("[parameters]\na = 'b'\nb = 'a'\n[attention]\nheads = 'a'", {}, ["depends on itself"]),
        ("[parameters]\nheads = 4\n[attention]\nheads = 'haeds'", {}, ["attention.heads", "'haeds'", "'heads'"]),
        ("[attention]\nheads = { config = 'n' }", {"n": "many"},
         ["attention.heads", "a whole number of 1 or more", "'many'", "from n of config.json"]),
        ("[attention]\nheads = { config = 'n' }", {"n": 2.5}, ["attention.heads", "a whole number", "2.5"]),
        ("[attention]\nheads = '1 / 0'", {}, ["attention.heads", "division"]),
        ("[attention]\nheads = 'layer'", {}, ["'layer' has no value here"]),
    ],
)
def test_error_names_file_and_key(tmp_path, text, config, words):
    with pytest.raises(SpecError) as error:
        resolved(tmp_path, text, config).option("attention", "heads")
    assert all(word in str(error.value) for word in words), error.value


def test_a_list_too_short_for_the_layers(tmp_path):
    with pytest.raises(SpecError, match="list of 2 values, but there is a layer 2"):
        resolved(tmp_path, "[parameters]\nw = [1, 2]\n[attention]\nwindow = 'w'", {}).option("attention", "window", 2)


def test_a_word_may_be_computed_and_a_number_translated(tmp_path):
    text = """
    [parameters]
    grouped = { config = "grouped", default = false }
    [attention]
    qkv = "= 'groups' if grouped else 'concat'"
    [moe]
    score = { config = "rule", map = { 1 = "softmax", 2 = "sigmoid" } }
    [generation]
    template = "= {query}"
    """
    assert resolved(tmp_path, text, {"grouped": True}).option("attention", "qkv") == "groups"
    r = resolved(tmp_path, text, {"rule": 2})
    assert (r.option("attention", "qkv"), r.option("moe", "score")) == ("concat", "sigmoid")
    assert r.option("generation", "template") == "= {query}"
    with pytest.raises(SpecError, match="moe.score: rule of config.json is 3"):
        resolved(tmp_path, text, {"rule": 3}).option("moe", "score")
    with pytest.raises(SpecError, match="expected one of separate, concat, gate_concat, groups, quarters, found 4"):
        resolved(tmp_path, "[attention]\nqkv = '= 2 + 2'", {}).option("attention", "qkv")


def test_values_within_an_object_of_the_configuration(tmp_path):
    text = """
    [parameters]
    heads = { config = "heads" }
    base = { config = "rope.base" }
    [hf]
    within = "text"
    """
    r = resolved(tmp_path, text, {"heads": 3, "rope": {"base": 5}, "text": {"heads": 8, "rope": None}})
    assert (r.parameter("heads"), r.parameter("base")) == (8, 5)
    assert resolved(tmp_path, text, {"heads": 3}).parameter("heads") == 3

"""The configuration file: every option is read; for an unknown option the nearest name is suggested."""

import re

import pytest

from numflow.errors import RequestError
from numflow.server.app import ENDPOINTS
from numflow.server.config.config import make_config, read_config
from numflow.server.config.options import MODEL, SERVICE
from numflow.server.messages.settings import with_defaults
from numflow.server.messages.tool_formats import ALIASES, FORMATS
from numflow.server.openapi import routes_table
from tests.conftest import REPO

MODELS = {"a": {"path": "x"}}


def test_names_of_both_kinds_mean_the_same():
    ours = make_config({"models": {"a": {"path": "x", "weights": "q4", "context": 99, "max_batch": 3,
                                         "kv": "q8", "threads": 2, "decoding_strategy": "greedy"}}})
    theirs = make_config({"models": {"a": {"model_dir": "x", "device_weight_data_type": "q4", "max_context_len": 99,
                                           "max_concurrent_queries": 3, "device_kv_cache_data_type": "q8",
                                           "cpu_threads": 2, "decoding": "greedy"}}})
    assert ours == theirs
    model = ours.models[0]
    assert dict(model.load) == {"weights": "q4", "context": 99, "kv": "q8", "threads": 2}
    assert dict(model.engine) == {"max_batch": 3} and dict(model.prompt) == {"decoding_strategy": "greedy"}
    assert model.preload


def test_the_engine_table_is_for_all_models_and_options_override():
    config = make_config({"service": {"http_port": 1}, "engine": {"threads": 1, "context": 64},
                          "models": {"a": {"path": "x"}, "b": {"path": "y", "threads": 4}}},
                         service={"port": 2}, every_model={"context": 32})
    assert config.port == 2 and config.host == "127.0.0.1"
    assert [dict(model.load) for model in config.models] == [{"threads": 1, "context": 32},
                                                             {"threads": 4, "context": 32}]
    assert [model.preload for model in config.models] == [True, False]


def test_templates_by_name():
    config = make_config({"models": {"a": {"path": "x", "prompt_template": "q", "encoder_template": "{query}"}},
                          "prompt_templates": {"q": ["{bos}{query}", "A:"]}})
    assert config.models[0].prompt["prompt_template"] == "{bos}{query}\nA:"


@pytest.mark.parametrize("tables, said", [
    ({"models": MODELS, "servce": {}}, "no table [servce]; did you mean 'service'?"),
    ({"models": MODELS, "service": {"max_quue": 1}},
     "[service] there is no option 'max_quue'; did you mean 'max_queue'?"),
    ({"models": MODELS, "service": {"port": "x"}}, "[service] port should be 0 .. 65535, is 'x'"),
    ({"models": MODELS, "service": {"port": True}}, "port should be"),
    ({"models": MODELS, "service": {"max_body": "big"}}, 'text such as "8 GB"'),
    ({"models": MODELS, "service": {"http_port": 1, "port": 1}}, "the same option"),
    ({"models": MODELS, "engine": {"path": "x"}}, "no option 'path'"),
    ({"models": {"a": {}}}, "[models.a] has no path"),
    ({"models": {"a": {"path": "x", "weihgts": "q4"}}},
     "[models.a] there is no option 'weihgts'; did you mean 'weights'?"),
    ({"models": {"a": {"path": "x", "prompt_template": "q"}}, "prompt_templates": {"qq": "{query}"}},
     "no prompt template 'q'"),
    ({"models": MODELS, "prompt_templates": {"q": "hello"}}, "has no {query}"),
    ({"models": {"a": {"path": "x", "aliases": ["b"]}, "b": {"path": "y"}}}, "two models have the name 'b'"),
    ({"models": {"a": {"path": "x", "decoding_strategy": "sample.top_q"}}}, "[models.a] there is no decoding_alg"),
    ({"models": {"a": {"path": "x", "decoding_strategy": "greedy", "temperature": 0.5}}}, "has no effect"),
    ({}, "no model"), ({"models": 5}, "should be a table"), ({"models": {"a": 5}}, "should be a table"),
])
def test_what_is_refused(tables, said):
    with pytest.raises(RequestError) as caught:
        make_config(tables, "service.toml")
    assert said in str(caught.value)


def test_the_documentation_has_every_option():
    text = (REPO / "docs/server.md").read_text(encoding="utf-8")
    for name, option in {**SERVICE, **MODEL}.items():
        names = f"`{name}`" + (f" ({', '.join(f'`{alias}`' for alias in option.aliases)})" if option.aliases else "")
        assert f"| {names} | " in text and option.help in text, name


def test_the_documentation_has_every_tool_format():
    text = (REPO / "docs/server.md").read_text(encoding="utf-8")
    for name in FORMATS:
        assert f"| `{name}` |" in text, name
    for alias in ALIASES:
        assert re.search(rf"\| [^|]*\b{alias}\b[^|]* \|", text), alias
    for name in (*FORMATS, *ALIASES):
        config = make_config({"models": {"a": {"path": "x", "tool_format": name}}})
        assert config.models[0].prompt["tool_format"] == name
    with pytest.raises(RequestError, match="there is no tool format 'hermess'; did you mean 'hermes'.*formats: "
                       "tag_parameters, tag_json.*other names: hermes"):
        make_config({"models": {"a": {"path": "x", "tool_format": "hermess"}}})


def test_the_documentation_has_every_route():
    """The table is written by `numflow.server.openapi.routes_table`: where this test fails, paste its output."""
    assert routes_table(ENDPOINTS) in (REPO / "docs/server.md").read_text(encoding="utf-8")
    assert all(endpoint.about for endpoint in ENDPOINTS)


def test_every_option_has_its_place():
    goes = {name: option.goes for name, option in MODEL.items()}
    assert set(goes.values()) == {"model", "load", "engine", "prompt"}
    assert all(option.help and option.goes == "service" for option in SERVICE.values())


TOP_P = {"decoding_strategy": "sample.top_p"}


@pytest.mark.parametrize("given, defaults, found", [
    ({}, {}, {"temperature": 1.0}), ({"top_k": 5}, {}, {"temperature": 1.0, "top_k": 5}),
    ({}, {"temperature": 0.3}, {"temperature": 0.3}),
    ({"temperature": 0.9}, {"temperature": 0.3}, {"temperature": 0.9}),
    ({"num_beams": 2}, {"temperature": 0.3}, {"num_beams": 2}),
    ({}, TOP_P, {"decoding_alg": "sample.top_p"}),
    ({"temperature": 0.5}, TOP_P, {"decoding_alg": "sample.top_p", "temperature": 0.5}),
    ({}, {**TOP_P, "temperature": 0.3}, {"decoding_alg": "sample.top_p", "temperature": 0.3}),
    ({"temperature": 0}, TOP_P, {"temperature": 0}), ({"min_p": 0.1}, TOP_P, {"temperature": 1.0, "min_p": 0.1}),
    ({"temperature": 0.5}, {"decoding_strategy": "greedy"}, {"temperature": 0.5}),
    ({"decoding_alg": "greedy"}, {**TOP_P, "temperature": 0.3}, {"decoding_alg": "greedy"})])
def test_defaults_of_a_model(given, defaults, found):
    assert with_defaults(given, defaults, talks=False) == found
    if found.get("temperature") == 1.0 and "temperature" not in given:  # the default of a conversation is the model's
        found = {name: value for name, value in found.items() if name != "temperature"}
    assert with_defaults(given, defaults, talks=True) == found


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(RequestError, match="No such file"):
        read_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[service\n")
    with pytest.raises(RequestError, match="bad.toml"):
        read_config(tmp_path / "bad.toml")

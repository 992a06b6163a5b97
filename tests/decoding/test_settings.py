"""Settings of strategies: values out of range, contradictions, and settings without effect."""

import dataclasses

import pytest

from numflow.decoding.chain import STAGES
from numflow.decoding.names import ALGORITHMS, inferflow
from numflow.decoding.settings import DEFAULTS, FILTERS, Sampling
from numflow.engine.request.settings import Settings
from numflow.errors import RequestError


def test_the_tables_agree():
    assert set(STAGES) == set(FILTERS) <= {field.name for field in dataclasses.fields(Sampling)}
    assert {name: value for name, value in FILTERS.items() if name != "temperature"} == {
        name: DEFAULTS[name] for name in FILTERS if name != "temperature"}
    assert vars(Sampling()) == DEFAULTS


@pytest.mark.parametrize(("name", "values"), [
    ("temperature", [-0.1, float("nan"), float("inf"), "hot", True]), ("top_k", [-1, 2.5, "4"]), ("top_p", [0, 1.1]),
    ("min_p", [1.0, -0.1]), ("tfs_z", [0, 1.5]), ("typical_p", [0, -1]), ("mirostat", [3, -1, 1.5]),
    ("mirostat_tau", [0, -2]), ("mirostat_eta", [0]), ("fsd", ["yes", 1, None]), ("fsd_k", [0]), ("fsd_n", [0]),
    ("fsd_alpha", [1.5]), ("fsd_beta", [-0.5]), ("fsd_random", [-1]), ("repetition_penalty", [0, -1, "x"]),
    ("presence_penalty", ["x", None]), ("frequency_penalty", [float("inf")]), ("repeat_last_n", [-2, 1.5]),
    ("dry_multiplier", [-1]), ("dry_base", [0.5]), ("dry_allowed_length", [0]), ("dry_breakers", [[1], frozenset("a")]),
    ("logit_bias", [{"a": 1}, {-1: 1}, {1: "x"}, {1: float("inf")}, [1]]), ("samplers", ["top_k", [1], ("top",)]),
    ("pool_size", [-1]), ("eos_bypassing_max", [-1, 1.5]), ("seed", [-1, "x"]), ("logprobs", [-1, True])])
def test_out_of_range(name, values):
    for value in values:
        with pytest.raises(RequestError, match=name):
            Sampling(**{"temperature": 1.0, name: value})


@pytest.mark.parametrize(("settings", "message"), [
    ({"top_k": 40}, "top_k=40 has no effect at temperature 0"), ({"top_p": 0.9}, "top_p=0.9 has no effect"),
    ({"min_p": 0.1}, "min_p"), ({"tfs_z": 0.9}, "tfs_z"), ({"typical_p": 0.9}, "typical_p"),
    ({"mirostat": 2}, "mirostat"),
    ({"pool_size": 50}, "pool_size=50 has no effect at temperature 0"),
    ({"temperature": 1, "mirostat": 2, "top_k": 5}, "top_k=5 has no effect beside mirostat=2"),
    ({"temperature": 1, "mirostat_tau": 3.0}, "mirostat_tau=3.0 has no effect without mirostat"),
    ({"fsd": True, "top_p": 0.9}, "top_p=0.9 has no effect beside fsd=True"),
    ({"fsd": True, "mirostat": 1}, "mirostat=1 contradicts"),
    ({"fsd": "random", "temperature": 1, "mirostat": 1}, "contradicts fsd='random'"),
    ({"fsd": "random"}, "draws tokens: give a temperature"), ({"fsd_k": 3}, "fsd_k=3 has no effect without fsd"),
    ({"fsd": True, "fsd_random": 3}, "fsd_random=3 has no effect"),
    ({"repeat_last_n": 64}, "repeat_last_n=64 has no effect without"),
    ({"dry_base": 2.0}, "dry_base=2.0 has no effect without dry_multiplier"),
    ({"temperature": 1, "top_k": 4, "samplers": ("temperature",)}, "top_k=4 has no effect: samplers leaves it out"),
    ({"temperature": 1, "samplers": ("top_k", "top_k")}, "names one twice"),
    ({"temperature": 1, "samplers": ("topk",)}, "samplers has 'topk', which is none; did you mean 'top_k'")])
def test_contradictions(settings, message):
    with pytest.raises(RequestError, match=message):
        Sampling(**settings)


@pytest.mark.parametrize("settings", [
    {"top_k": 1}, {"temperature": 1, "samplers": ("top_p", "temperature"), "top_p": 0.9},
    {"temperature": 0.5, "mirostat": 1},
    {"fsd": True, "temperature": 0.7, "pool_size": 50}, {"fsd": "random", "temperature": 1, "top_p": 0.9},
    {"temperature": 1, "dry_multiplier": 1, "dry_base": 2, "repeat_last_n": 5},
    {"temperature": 2, "samplers": ("temperature",)}])
def test_what_goes_together(settings):
    Sampling(**settings)


@pytest.mark.parametrize(("algorithm", "expected"), [
    ("greedy", {"temperature": 0.0}), ("sample.greedy", {"temperature": 0.0}),
    ("", {"temperature": 1.0, "pool_size": 50, "top_p": 0.9, "top_k": 8,
          "samplers": ("temperature", "top_p", "top_k")}),
    ("sample.top_k", {"temperature": 1.0, "pool_size": 50, "top_k": 8}),
    ("tfs", {"temperature": 1.0, "pool_size": 50, "tfs_z": 0.95}),
    ("sample.typical", {"temperature": 1.0, "pool_size": 50, "typical_p": 0.95}),
    ({"name": "sample.top_k", "max_k": 3, "pool_size": 0}, {"temperature": 1.0, "pool_size": 0, "top_k": 3}),
    ('{"name":"sample.top_p","top_p":0.7,"max_k":9,"min_k":1,"eos_bypassing_max":2}',
     {"temperature": 1.0, "pool_size": 50, "top_p": 0.7, "top_k": 9, "samplers": ("temperature", "top_p", "top_k"),
      "eos_bypassing_max": 2})])
def test_names_of_inferflow(algorithm, expected):
    assert inferflow(algorithm) == expected


@pytest.mark.parametrize("name", [*ALGORITHMS, "auto", *(f"sample.{name}" for name in ALGORITHMS)])
def test_every_name_makes_settings(name):
    settings = Settings.of({"decoding_alg": name})
    assert settings.greedy is ("greedy" in name)
    assert Settings.of({"decoding_alg": {"name": name}, "max_tokens": 5}).max_tokens == 5
    assert settings.sampling() == Sampling(**inferflow(name))


@pytest.mark.parametrize(("given", "message"), [
    ({"decoding_alg": "sample.topp"}, "no decoding_alg 'sample.topp'; did you mean 'top_p'"),
    ({"decoding_alg": {"name": "greedy", "top_p": 0.5}}, "has no parameter 'top_p'"),
    ({"decoding_alg": '{"name": "top_p", "min_k": 3}'}, "min_k has no effect"),
    ({"decoding_alg": '{"name"'}, "no JSON object"),
    ({"decoding_alg": 5}, "a name or a JSON object"), ({"decoding_alg": {"name": 5}}, "name should be text"),
    ({"decoding_alg": {"name": "greedy", "pool_size": "x"}}, "pool_size should be"),
    ({"decoding_alg": "random_fsd", "temperature": 0}, "draws tokens: give a temperature above 0"),
    ({"top_k": -2}, "top_k should be"), ({"top_p": 1.5}, "top_p should be"), ({"samplers": ["topk"]}, "did you mean"),
    ({"top_pp": 0.5}, "no setting 'top_pp' for generating; did you mean 'top_p'"),
    ({"dry_breakers": {1}}, "no setting 'dry_breakers'")])
def test_wrong_settings(given, message):
    with pytest.raises(RequestError, match=message):
        Settings.of(given)


def test_what_json_can_say():
    settings = Settings.of({"logit_bias": {"5": -100, 6: 1}, "samplers": ["top_k", "temperature"], "temperature": 0.5})
    assert (settings.logit_bias, settings.samplers) == ({5: -100, 6: 1}, ("top_k", "temperature"))
    assert Settings.of({"samplers": "top_k;temperature"}).samplers == ("top_k", "temperature")
    assert Settings.of({"logit_bias": None, "temperature": None}) == Settings()
    assert Settings.of({"decoding_alg": "sample.top_p", "temperature": None, "top_p": 0.5}).top_p == 0.5
    assert Settings.of({"decoding_alg": "greedy", "temperature": 1.0}).greedy


@pytest.mark.parametrize(("given", "ignored", "kept"), [
    ({"top_p": 0.9}, ["top_p"], {}), ({"temperature": 0, "top_k": 40, "min_p": 0.1, "top_p": 0.5},
                                      ["min_p", "top_k", "top_p"], {}),
    ({"temperature": 0, "top_k": 1, "top_p": 1.0, "min_p": 0}, [], {"top_k": 1}),
    ({"mirostat": 2, "mirostat_tau": 3.0}, ["mirostat", "mirostat_tau"], {}),
    ({"temperature": 0.8, "mirostat": 2, "top_k": 40, "top_p": 0.9}, ["top_k", "top_p"],
     {"temperature": 0.8, "mirostat": 2}),
    ({"temperature": 1, "mirostat_tau": 3.0, "repeat_last_n": 64, "dry_base": 2.0, "fsd_k": 3},
     ["dry_base", "fsd_k", "mirostat_tau", "repeat_last_n"], {"temperature": 1}),
    ({"fsd": True, "top_p": 0.9}, ["top_p"], {"fsd": True}),
    ({"temperature": 0.5, "top_k": 4, "samplers": ["top_p"], "top_p": 0.5}, ["temperature", "top_k"],
     {"temperature": 1.0, "samplers": ("top_p",), "top_p": 0.5}),
    ({"num_beams": 2, "top_p": 0.5, "length_penalty": 2.0}, ["top_p"], {"num_beams": 2, "length_penalty": 2.0}),
    ({"length_penalty": 2.0, "early_stopping": True, "dry_sequence_breakers": ["x"]},
     ["dry_sequence_breakers", "early_stopping", "length_penalty"], {}),
    ({"decoding_alg": "greedy", "temperature": 0.7}, ["temperature"], {"temperature": 0.0}),
    ({"decoding_alg": "top_p", "temperature": 0.0, "min_p": 0.1}, ["decoding_alg", "min_p"], {}),
    ({"decoding_alg": "mirostat", "top_k": 5}, ["top_k"], {"temperature": 1.0, "mirostat": 2, "pool_size": 50}),
    ({"decoding_alg": "fsd", "temperature": 0}, ["temperature"], {"temperature": 1.0, "fsd": True, "pool_size": 50}),
    ({"top_k": -1, "seed": -1}, [], {})])
def test_what_has_no_effect_is_left_out_and_told(given, ignored, kept):
    settings = Settings.of(given)
    assert sorted(settings.ignored) == ignored and all(settings.ignored.values())
    assert settings == Settings(**kept)

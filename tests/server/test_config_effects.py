"""Options of the configuration have their effects."""

import pytest

from numflow.errors import RequestError
from numflow.server.config.config import make_config
from numflow.server.models.served import Served


def served(folder, **options):
    config = make_config({"models": {"m": {"path": str(folder), "backend": "reference", **options}}})
    return Served(config.models[0], 5)


def test_load_and_engine(model_folders):
    one = served(model_folders["chat"], context=100, max_batch=3, kv_memory="1MB", max_step_tokens=17,
                 prefix_cache=False, preemption="recompute")
    try:
        limits = one.model.core.scheduler.limits
        assert (one.model.context, limits.sequences, limits.preemption) == (100, 3, "recompute")
        assert one.engine.stats["kv_blocks_limit"] * one.engine.stats["kv_block_tokens"] > 0
        assert one.model.core.scheduler.prefix is None and one.engine.max_queue == 5
    finally:
        one.close()


def test_a_chat_template_of_ones_own(model_folders, tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ tools }}")
    one = served(model_folders["chat"], chat_template=str(tmp_path / "t.jinja"), system_prompt="Hm.",
                 tool_format="tag_json")
    try:
        assert one.text_of([{"role": "user", "content": "hi"}], {}) == "[system]Hm.[user]hiNone"
        assert one.tool_format.begin == "<tool_call>"
    finally:
        one.close()


def test_fingerprints_change_with_what_answers_depend_on(model_folders):
    found = set()
    for options in ({}, {}, {"context": 64}, {"activations": "f32"}):
        one = served(model_folders["chat"], **options)
        found.add(one.fingerprint)
        one.close()
    assert len(found) == 3


@pytest.mark.parametrize("options, said", [
    ({"host_kv_cache_percent": 50}, "host_kv_percent"), ({"kv": "q99"}, "kv"), ({"spec": "nothing"}, "nothing"),
    ({"chat_template": "/nowhere.jinja"}, "nowhere.jinja"), ({"tool_format": "smoke"}, "no tool format 'smoke'"),
    ({"preemption": "hope"}, "preemption"), ({"weights": "q77"}, "q77")])
def test_options_that_cannot_be_had_are_errors(model_folders, options, said):
    with pytest.raises(Exception) as caught:
        served(model_folders["chat"], **options)
    assert said in str(caught.value) and type(caught.value).__module__ == "numflow.errors"


def test_an_encoder_takes_no_options_of_writing(model_folders):
    with pytest.raises(RequestError, match="max_batch has no effect"):
        served(model_folders["encoder"], max_batch=3)

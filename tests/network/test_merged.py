"""Options of attention over two caches, and of windows with two different sides: refused where others exclude them."""

from dataclasses import replace

import pytest

from numflow import network
from numflow.errors import NetworkError, SpecError
from numflow.network import check_step
from numflow.spec import load_spec
from tests.specs.case import load_case, memory_checkpoint

CASE = load_case("t5gemma2")


def built(tmp_path=None, options="", config=None):
    checkpoint = memory_checkpoint(config or CASE.configs[0], CASE.tensors)
    if not options:
        return network.build(network.choose_spec(checkpoint), checkpoint)
    path = tmp_path / "changed.toml"
    path.write_text(f'extends = "t5gemma2"\n{options}\n')
    return network.build(load_spec(path), checkpoint)


@pytest.mark.parametrize(("options", "message"), [
    ("[encoder.attention]\nsoftcap = 2.0", "attention.ahead: expected a window that is not causal, without a softcap"),
    ("[encoder.attention]\ncausal = true", "attention.ahead: expected a window that is not causal"),
    ("[encoder.attention]\nwindow = 0\nahead = 3", "attention.ahead: expected a window"),
    ("[encoder.attention]\nwindow = 9\nahead = 2000000", "up to 1048576 keys on each side, found 9 and 2000000"),
    ("[decoder.attention]\nkey_scale = 2.0", "attention.merged: expected one matrix each for keys and values"),
    ("[decoder.attention]\nv_norm = 'head'", "attention.merged: expected one matrix each"),
    ("[decoder.attention]\nshared_from = 2", "attention.merged: expected one matrix each")])
def test_what_excludes_them_is_refused(tmp_path, options, message):
    with pytest.raises(SpecError, match=message):
        built(tmp_path, options)


def test_a_huge_window_is_named_with_its_key():
    encoder = CASE.configs[0]["encoder"]
    text = encoder["text_config"] | {"sliding_window": 10**9}
    with pytest.raises(SpecError, match="attention.ahead.*encoder.text_config.sliding_window of config.json"):
        built(config=CASE.configs[0] | {"encoder": encoder | {"text_config": text}})


def test_the_steps_of_a_decoder_read_two_caches():
    found = built()
    steps = [step for step in found.entries["main"] if step.op == "attention"]
    assert [(step.params["cache"], step.params["cross"], step.params["window"]) for step in steps] == [
        (f"dec.blk.{layer}.self", f"dec.blk.{layer}.cross", window) for layer, window in enumerate((4, 0, 4))]
    for change, message in (({"kind": "self"}, "kinds of both caches"), ({"kv_heads": 1}, "heads and columns")):
        caches = {**found.caches, "dec.blk.0.cross": replace(found.caches["dec.blk.0.cross"], **change)}
        with pytest.raises(NetworkError, match=message):
            check_step(steps[0], replace(found, caches=caches))


def test_a_window_of_two_equal_sides_needs_no_further_scores(tmp_path):
    """7 keys, 3 on each side; of 6 keys 2 are before the query and 3 after it."""
    even, odd = (built(tmp_path, f"[parameters]\nencoder_window = {size}") for size in (6, 7))
    for made, inputs in ((even, 2), (odd, 1)):
        step = next(step for step in made.entries["encode"] if step.op == "attention")
        assert (len(step.inputs), step.params["window"], step.params["causal"]) == (inputs, 4, False)

"""The models that come with numflow write their golden texts, whoever runs them."""

import json

import pytest

import numflow
from numflow import registry
from tests.golden.own_models import FILE, MODELS, margin

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))
WAYS = {"reference": {"backend": "reference"}, "cpu": {"threads": 1}, "cpu, two threads": {"threads": 2},
        "by layer": {"backend": "reference", "devices": "0;1"}, "by tensor": {"backend": "reference", "devices": "0&1"},
        "both": {"backend": "reference", "devices": "0&1;2&3"}}


def check(model, name: str, tokens: int | None = None, texts: int | None = None) -> None:
    """So many golden texts of a model, as far as so many tokens; names the first other one and both logits."""
    for one in GOLDEN[name][:texts]:
        result = model.generate(one["prompt"], max_tokens=tokens or 24, chat=True, temperature=0)
        wanted = one["ids"] if tokens is None else one["ids"][:tokens]
        if list(result.ids) == wanted:
            continue
        at = next(i for i, (a, b) in enumerate(zip([*result.ids, None], [*wanted, None])) if a != b)
        ids = [*model.request(one["prompt"], {"max_tokens": 1, "chat": True}).prefix, *wanted[:at]]
        logits = model.logits(ids)[-1]
        other = result.ids[at] if at < len(result.ids) else None
        pytest.fail(f"{name}, {one['prompt']!r}: token {at} is {other}, should be {wanted[at:at + 1]}; logits "
                    f"{[float(logits[id]) for id in (other, *wanted[at:at + 1]) if id is not None]}")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thin(4)
def test_golden_texts(name, way):
    if name == "tiny-hybrid" and way in ("by tensor", "both"):
        pytest.skip("a recurrent layer's heads are shared in tests/partition")
    assert len(GOLDEN[name]) >= 2
    with numflow.load(name, **WAYS[way]) as model:
        check(model, name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tokens"), [("tiny", 3), ("tiny-draft", 8), ("tiny-moe", 3), ("tiny-hybrid", 3)])
def test_golden_texts_on_the_simulated_gpu(name, tokens, monkeypatch):
    """The beginning of one text: each token runs every thread of every kernel in Python."""
    monkeypatch.setenv("NUMFLOW_CUDA", "simulator")
    with numflow.load(name, backend="cuda") as model:
        check(model, name, tokens, texts=1)


def test_golden_texts_are_far_from_ties():
    with numflow.load("tiny", backend="reference") as model:
        for one in GOLDEN["tiny"]:
            ids = list(model.request(one["prompt"], {"max_tokens": 1, "chat": True}).prefix)
            assert margin(model, ids, one["ids"]) > 0.05


def test_a_draft_changes_nothing():
    with numflow.load("tiny", backend="reference", draft="tiny-draft") as model:
        check(model, "tiny")


@pytest.mark.parametrize("way", WAYS)
def test_translations(way):
    wanted = GOLDEN["tiny-translator"]
    with numflow.load("tiny-translator", **WAYS[way]) as model:
        results = model.translate([one["prompt"] for one in wanted])
    assert [result.text for result in results] == [one["text"] for one in wanted]
    assert wanted[0]["text"] == "Der alte Mann kauft eine rote Lampe."


@pytest.mark.parametrize("way", WAYS)
def test_gaps_are_filled(way):
    assert len(GOLDEN["tiny-encoder"]) >= 2
    with numflow.load("tiny-encoder", **WAYS[way]) as model:
        filled(model, GOLDEN["tiny-encoder"])


def filled(model, wanted) -> None:
    """The token and its probability for the gap of each text."""
    for one in wanted:
        ((best,),) = model.fill_mask(one["prompt"], 1)
        assert best.token == one["token"] and best.probability == pytest.approx(one["probability"], rel=1e-3)


@pytest.mark.slow
def test_translations_and_gaps_on_the_simulated_gpu(monkeypatch):
    monkeypatch.setenv("NUMFLOW_CUDA", "simulator")
    one = GOLDEN["tiny-translator"][2]
    with numflow.load("tiny-translator", backend="cuda") as model:
        (result,) = model.translate([one["prompt"]], max_tokens=3)
    assert list(result.ids) == one["ids"][:3]
    with numflow.load("tiny-encoder", backend="cuda") as model:
        filled(model, GOLDEN["tiny-encoder"][:1])


def test_they_are_small_and_complete():
    from safetensors.numpy import load_file

    shipped = [entry for entry in registry.known().values() if entry.source == "shipped"]
    assert len(shipped) == 7
    total = 0
    for entry in shipped:
        folder = registry.resolve(entry.name)
        size = sum(path.stat().st_size for path in folder.iterdir())
        facts = json.loads((folder / "training.json").read_text())
        assert size < 1 << 20 and facts["model"] == entry.name and facts["loss"] > 0
        assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"
        types = {name: tensor.dtype for name, tensor in load_file(folder / "model.safetensors").items()}
        assert {str(found) for name, found in types.items() if name not in ("d2t", "t2d")} == {"float16"}
        total += size
    assert total < 4 << 20

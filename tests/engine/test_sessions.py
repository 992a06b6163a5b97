"""Sessions: texts of one process continue in another; invalid files are refused."""

from dataclasses import replace

import numpy as np
import pytest

import numflow
from numflow.engine.sessions import disk, session_file
from numflow.engine.sessions.session_file import SessionFile
from numflow.errors import OutOfMemoryError, RequestError
from tests.engine.test_state import write_recurrent
from tests.engine.tiny import write_checkpoint

TEXT = [4 + (7 * i * i + i) % 41 for i in range(120)]
ANSWER = {"max_tokens": 9, "ignore_eos": True, "temperature": 0.0, "logprobs": 0}
KINDS = {"attention": {"max_position_embeddings": 512},
         "window": {"max_position_embeddings": 512, "model_type": "mistral", "sliding_window": 24,
                    "architectures": ["MistralForCausalLM"]}}


@pytest.fixture(scope="module", params=["attention", "window", "recurrent"])
def folder(request, tmp_path_factory):
    place = tmp_path_factory.mktemp(request.param) / "model"
    return write_recurrent(place) if request.param == "recurrent" else write_checkpoint(place, **KINDS[request.param])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("plain") / "model", **KINDS["attention"])


def same(one, other):
    """The same tokens, with the same probabilities but for the rounding of sums, which NumPy does not promise."""
    pairs = [np.array([token.logprob for token in found.logprobs]) for found in (one, other)]
    return one.ids == other.ids and np.allclose(*pairs, atol=1e-5)


def test_a_text_goes_on_in_another_process_with_the_same_numbers(folder, tmp_path):
    path = tmp_path / "talk.session"
    with numflow.load(folder, backend="reference") as model, numflow.Engine(model) as engine:
        begun = model.generate(TEXT, **ANSWER)
        saved = engine.save_session(path, note={"turns": ["one"]})
        longer = [*TEXT, *begun.ids, 9, 8, 7]
        wanted = model.generate(longer, **ANSWER)
    assert saved.tokens == len(TEXT) + 9 and 96 <= saved.cached <= saved.tokens
    with numflow.load(folder, backend="reference") as model, numflow.Engine(model) as engine:
        assert replace(engine.restore_session(path, 3), nbytes=0) == replace(saved, nbytes=0)
        found = model.generate(longer, **ANSWER)
        assert same(found, wanted) and found.stats["cached_tokens"] == saved.cached
        again = tmp_path / "again.session"
        assert engine.save_session(again, 3).cached >= saved.cached
        assert engine.erase_session(3) == len(longer) + 9 and engine.stats["kv_blocks_cached"] == 0
        with pytest.raises(RequestError, match="slot 3 has no text"):
            engine.save_session(again, 3)


def test_places(plain, tmp_path):
    with numflow.load(plain, backend="reference") as model, numflow.Engine(model, max_batch=2) as engine:
        for ids, place in ((TEXT[:40], None), (TEXT[5:60], None), (TEXT[:50], None), (TEXT[3:9], 1)):
            engine.submit(ids, max_tokens=1, id_slot=place).result(60)
        engine.submit(TEXT[:40], max_tokens=1, id_slot=-1).result(60)
        lengths = [engine.save_session(tmp_path / "x", place).tokens for place in (0, 1)]
        assert lengths == [41, 7]  # the second text of slot 0 is not the beginning of what is asked for last
        with pytest.raises(RequestError, match=r"no slot 2: they are 0 \.\. 1"):
            engine.submit(TEXT, id_slot=2)
        with pytest.raises(RequestError, match="id_slot should be a whole number"):
            engine.submit(TEXT, id_slot="a")
        with pytest.raises(RequestError, match="no slot -1"):
            engine.restore_session(tmp_path / "x", -1)
    with (numflow.load(plain, backend="reference") as model, numflow.Engine(model, prefix_cache=False) as engine,
          pytest.raises(RequestError, match="need the prefix cache")):
        engine.save_session(tmp_path / "x")


@pytest.fixture(scope="module")
def saved(plain, tmp_path_factory):
    """A session file, and an engine of its model."""
    path = tmp_path_factory.mktemp("session") / "good"
    with numflow.load(plain, backend="reference") as model, numflow.Engine(model, kv_memory="1MB") as engine:
        model.generate(TEXT, **ANSWER)
        engine.save_session(path)
        engine.erase_session()
        yield path, engine


def test_a_damaged_file_is_refused_wherever_it_is_damaged(saved, tmp_path):
    path, engine = saved
    content, bad = path.read_bytes(), tmp_path / "bad"
    spaces = content.rfind(b"}", 0, len(content)) + 1  # what fills the last tensor up may be anything that JSON skips
    for at in [*range(0, spaces, 211), *range(64), *range(spaces - 40, spaces)]:
        bad.write_bytes(content[:at] + bytes([content[at] ^ 0x15]) + content[at + 1:])
        with pytest.raises(RequestError, match=r"^\S*bad: .+") as told:
            engine.restore_session(bad)
        assert "\n" not in str(told.value) and len(str(told.value)) < 400
    for size in (0, 7, 100, 1000, len(content) - 1):
        bad.write_bytes(content[:size])
        with pytest.raises(RequestError, match="bad: "):
            engine.restore_session(bad)
    assert engine.stats["kv_blocks_used"] == engine.stats["kv_blocks_cached"] == 0
    with pytest.raises(RequestError, match="missing"):
        engine.restore_session(tmp_path / "missing")


def rewritten(path, target, **changes):
    """The same file with changes of its header, and a right checksum."""
    found = SessionFile(path)
    tree, count = found.tree, [len(rows) for rows in found.tree.rows]
    sizes = [found._tensors[f"data.{pool}.0"].shape[1] for pool in range(len(count))]
    tree = replace(tree, **{name: value for name, value in changes.items() if name != "model"})
    session_file.save(target, {**found.model, **changes.get("model", {})}, tree, sizes,
                      lambda pool, begin, end: found.block_data(pool, sizes[pool], begin, end))
    return target


@pytest.mark.parametrize(("changes", "complaint"), [
    ({"model": {"name": "other"}}, "another model: its model is other, here it is llama"),
    ({"model": {"bytes": {"0": 9}}}, "types of keys and values"), ({"model": {"probe": 1}}, "computes other numbers"),
    ({"parents": np.full(8, 7, np.int32)}, "damaged"), ({"parents": np.full(8, -2, np.int32)}, "damaged"),
    ({"ids": np.full((8, 16), 50, np.int32)}, "do not fit this model"), ({"roots": [[0, {}]]}, "damaged"),
    ({"ids": np.zeros((8, 15), np.int32)}, "do not fit this model"), ({"roots": [0, 0]}, "not saved by requests"),
    ({"rows": [np.array([0, 0, 1, 2, 3, 4, 5, 6], np.int32)]}, "damaged"),
    ({"text": np.zeros(4000, np.int32)}, "do not fit this model")])
def test_what_a_file_says_is_held_against_the_model(saved, tmp_path, changes, complaint):
    path, engine = saved
    with pytest.raises(RequestError, match=complaint):
        engine.restore_session(rewritten(path, tmp_path / "changed", **changes))


def test_another_model_and_no_room_are_told(saved, plain, tmp_path):
    path, _ = saved
    other = write_checkpoint(tmp_path / "other", **KINDS["attention"], rope_theta=300.0)
    with (numflow.load(other, backend="reference") as model, numflow.Engine(model) as own,
          pytest.raises(RequestError, match="computes other numbers")):
        own.restore_session(path)
    with (numflow.load(plain, backend="reference") as model,
          numflow.Engine(model, kv_memory=7 * model.program.block_bytes) as own):
        with pytest.raises(OutOfMemoryError, match="its 128 tokens"):
            own.restore_session(path)
        assert own.stats["kv_blocks_used"] == 0


@pytest.mark.merge
def test_the_prefix_cache_survives_a_restart_within_its_budget(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMFLOW_CACHE", str(tmp_path))
    texts = [[*TEXT[at:], *TEXT[:at]] for at in (0, 30, 60)]

    def run(size, prompts, **salt):
        with numflow.load(folder, backend="reference") as model, numflow.Engine(model, prefix_disk=size) as engine:
            return [engine.submit(prompt, **ANSWER, **salt).result(60) for prompt in prompts]

    def cached(results):
        return [one.stats["cached_tokens"] for one in results]

    begun = run(None, texts)
    longer = [[*text, *one.ids, 9, 8, 7] for text, one in zip(texts, begun)]
    wanted = run(None, longer)
    run("1GB", texts, cache_salt="a")
    assert cached(run("1GB", longer[:1])) == [0]  # another salt
    found = run("40kB", longer, cache_salt="a")
    assert all(map(same, found, wanted)) and min(cached(found)) >= 96
    file, = (tmp_path / disk.KIND).iterdir()
    assert file.stat().st_size < 48_000
    last, first = cached(run("1GB", [longer[2], longer[0]], cache_salt="a"))
    assert first < 96 <= last or folder.parent.name.startswith("window")  # of a window little is kept of any text
    file.write_bytes(b"not a session")
    with pytest.warns(UserWarning, match="kept texts are left out: .*header length"):
        assert cached(run("1GB", longer[2:], cache_salt="a")) == [0]


def test_what_the_disk_keeps_needs_a_prefix_cache(plain):
    with numflow.load(plain, backend="reference") as model:
        with pytest.raises(RequestError, match="prefix_disk has no effect"):
            numflow.Engine(model, prefix_disk="1GB", prefix_cache=False)
        numflow.Engine(model).close()

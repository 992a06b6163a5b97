"""Adapters chosen by requests: the same bits in any batch, loaded and unloaded while requests run."""

import numpy as np
import pytest

import numflow
from numflow.errors import FormatError, RequestError
from tests.engine.published import write_case
from tests.formats.peft import PREFIX, pair, write_adapter
from tests.server.tiny import write_chat_model
from tests.specs.case import load_case

IDS = [20, 31, 45, 60, 33, 9, 77, 120]
LAYER = "model.layers.{}."
Q, V = LAYER + "self_attn.q_proj", LAYER + "self_attn.v_proj"
SHAPES = {Q: (32, 32), V: (16, 32), LAYER + "self_attn.o_proj": (32, 32), LAYER + "mlp.up_proj": (48, 32),
          LAYER + "mlp.down_proj": (32, 48)}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Four adapters of different matrices and ranks, two of them with a table, a head and a bias."""
    place, found = tmp_path_factory.mktemp("adapters"), {}
    for number, name in enumerate(("one", "two", "three", "four")):
        rank = (3, 8, 16, 1)[number]
        tensors = {}
        for module, shape in list(SHAPES.items())[number % 2:]:
            for layer in range(number // 3, 2):
                tensors |= pair(module.format(layer), shape, rank, number)
        if number % 2:
            tensors |= pair("lm_head", (264, 32), rank, number)
            tensors |= pair("model.embed_tokens", (32, 264), rank, number, "lora_embedding_{}")
            bias = np.linspace(-1, 1, 32, dtype=np.float32)
            tensors |= {f"{PREFIX}{LAYER.format(1)}self_attn.o_proj.lora_B.bias": bias}
        found[name] = write_adapter(place / name, tensors, r=rank)
    return found


@pytest.fixture(scope="module")
def models(base, adapters):
    """By threads."""
    made = {threads: numflow.load(base, activations="f32", threads=threads, adapters=adapters) for threads in (1, 2)}
    yield made
    for model in made.values():
        model.close()


NAMES = ["one", "two", "three", "four", None]


def test_each_is_what_it_is_when_merged(base, adapters, models):
    for name, folder in adapters.items():
        for backend in ("reference", "cpu"):
            with numflow.load(base, backend, activations="f32", adapters={name: folder}, merge=name) as merged:
                expected = merged.logits(IDS)
            assert np.abs(models[1].logits(IDS, adapter=name) - expected).max() < 1e-4 * expected.std()
    with numflow.load(base, activations="f32") as plain:
        assert np.array_equal(models[1].logits(IDS), plain.logits(IDS))


def test_no_bit_depends_on_company_chunks_or_threads(base, adapters, models):
    alone = {name: models[1].logits(IDS, adapter=name) for name in NAMES}
    assert len({logits.tobytes() for logits in alone.values()}) == len(NAMES)
    orders = [NAMES, NAMES[::-1], ["two"] * 3 + [None, "four"], [None, "one"] * 4]
    for threads in (1, 2):
        for order in orders:
            for name, rows in zip(order, models[threads].logits_batch([IDS] * len(order), adapters=order), strict=True):
                assert np.array_equal(rows, alone[name]), (threads, order, name)
    for chunk in (1, 3):
        with numflow.load(base, activations="f32", threads=2, chunk=chunk, adapters=adapters) as model:
            for name in NAMES:
                number = -1 if name is None else model.adapters[name].number
                with model.runner.open(len(IDS), adapter=number) as sequence:
                    rows = np.concatenate([some for _, some in sequence.rows(np.array(IDS, np.int32))])
                assert np.array_equal(rows, alone[name]), (chunk, name)


@pytest.mark.parametrize("devices, transport", [("0;1", "threads"), ("0&1", "threads"), ("0&1;2", "processes")])
@pytest.mark.merge
def test_several_devices(base, adapters, models, devices, transport):
    with numflow.load(base, activations="f32", devices=devices, transport=transport, adapters={}) as model:
        size = model.program.weights_bytes
        for name, folder in adapters.items():
            model.adapters.load(name, folder)
        assert model.program.weights_bytes > size
        texts = [IDS[:3], IDS * 20, *[IDS] * (len(NAMES) - 2)]
        for name, ids, rows in zip(NAMES, texts, model.logits_batch(texts, adapters=NAMES), strict=True):
            expected = models[1].logits(ids, adapter=name)
            assert np.abs(rows - expected).max() < 1e-4 * expected.std()
        with numflow.Engine(model) as engine:
            handles = [engine.submit(IDS, 8, ignore_eos=True, adapter=name) for name in NAMES]
            for name, handle in zip(NAMES, handles, strict=True):
                alone = models[1].generate(IDS, max_tokens=8, ignore_eos=True, adapter=name)
                assert handle.result(timeout=120).ids == alone.ids


@pytest.mark.merge
def test_an_engine_mixes_them_and_no_text_changes(base, adapters, models):
    prompts = [IDS[:count] for count in (1, 3, 8)] + [IDS * 12]
    wanted = [(name, ids) for name in NAMES for ids in prompts]
    settings = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.9, "seed": 3, "logprobs": 2}
    alone = [models[1].generate(ids, adapter=name, **settings) for name, ids in wanted]
    little = {"kv_memory": 6 * models[1].program.block_bytes}
    for more in ({}, {"prefix_cache": False, "max_step_tokens": 16}, little, little | {"preemption": "recompute"}):
        with (numflow.load(base, activations="f32", threads=2, adapters=adapters) as model,
              numflow.Engine(model, max_batch=20, **more) as engine):
            for again in range(2):  # what the first have left in the prefix cache is another adapter's
                handles = [engine.submit(ids, adapter=name, **settings) for name, ids in wanted]
                for handle, expected in zip(handles, alone, strict=True):
                    found = handle.result(timeout=120)
                    assert (found.ids, found.logprobs) == (expected.ids, expected.logprobs), (more, again)
            assert (engine.stats["preemptions"] > 0) == (little.items() <= more.items())
            assert engine.stats["prefix_hit_rate"] > 0 or "prefix_cache" in more or little.items() <= more.items()


def test_several_samples_beams_and_prompt_logprobs(models):
    model = models[1]
    for settings in ({"n": 3, "temperature": 1.0, "seed": 2}, {"num_beams": 3}, {"prompt_logprobs": 1}):
        one, two, bare = (model.generate(IDS, max_tokens=6, adapter=name, **settings) for name in ("one", "two", None))
        again = model.generate(IDS, max_tokens=6, adapter="one", **settings)
        assert [c.ids for c in one.choices] == [c.ids for c in again.choices]
        assert one.prompt_logprobs == again.prompt_logprobs
        assert len({str((g.ids, g.prompt_logprobs, g.score)) for g in (one, two, bare)}) == 3


def test_loaded_and_unloaded_while_others_run(base, adapters):
    with numflow.load(base, activations="f32", adapters={}) as model:
        bare = model.logits(IDS)
        expected = {}
        for name, folder in adapters.items():
            model.adapters.load(name, folder)
            expected[name] = model.logits(IDS, adapter=name)
        for number in range(8):  # more than there is room for at first
            model.adapters.load(f"more {number}", (adapters["three"], number / 4))
        assert np.array_equal(model.logits(IDS, adapter="more 4"), expected["three"])
        assert np.array_equal(model.logits(IDS, adapter="more 0"), bare)
        with numflow.Engine(model) as engine:
            handle = engine.submit(IDS, 60, ignore_eos=True, adapter="two")
            alone = model.generate(IDS, 60, ignore_eos=True, adapter="two").ids
            model.adapters.unload("two")
            model.adapters.load("two", adapters["one"])
            assert np.array_equal(model.logits(IDS, adapter="two"), expected["one"])
            assert handle.result(timeout=60).ids == alone
            # a text that another adapter of the same name has left in the prefix cache is not taken for its own
            long = IDS * 20
            before = engine.submit(long, 4, ignore_eos=True, adapter="one", logprobs=0).result(60)
            model.adapters.unload("one")
            model.adapters.load("one", adapters["three"])
            after = engine.submit(long, 4, ignore_eos=True, adapter="one", logprobs=0).result(60)
            assert before.logprobs != after.logprobs
        size = model.program.weights_bytes
        for name in list(model.adapters):
            model.adapters.unload(name)
        assert model.program.weights_bytes < size and not model.adapters
        assert np.array_equal(model.logits(IDS), bare)


def test_what_is_refused(base, adapters, models, tmp_path):
    model = models[1]
    with pytest.raises(RequestError, match="no adapter 'tow'; did you mean 'two'"):
        model.generate(IDS, adapter="tow")
    with pytest.raises(RequestError, match="no adapter 3"):
        model.logits(IDS, adapter=3)
    with pytest.raises(RequestError, match="already"):
        model.adapters.load("one", adapters["two"])
    with pytest.raises(RequestError, match="no adapter 'five'"):
        model.adapters.unload("five")
    with pytest.raises(RequestError, match="2 texts need as many adapters"):
        model.logits_batch([IDS, IDS], adapters=["one"])
    saved = {f"{PREFIX}model.norm.weight": np.zeros(32, np.float32)}
    with pytest.raises(RequestError, match="model.norm.weight.*replaces a tensor.*merge"):
        model.adapters.load("five", write_adapter(tmp_path, saved))
    with pytest.raises(FormatError, match="another model"):
        model.adapters.load("five", write_adapter(tmp_path, pair(Q.format(0), (16, 32))))
    assert "five" not in model.adapters
    with numflow.load(base, "reference") as plain, pytest.raises(RequestError, match="loaded without adapters"):
        plain.generate(IDS, adapter="one")
    with pytest.raises(RequestError, match="Ray cluster.*merge='one'"):
        numflow.load(base, adapters=adapters, devices="0;1", transport="ray")
    with pytest.raises(FormatError, match="another model"):
        numflow.load(base, "reference", adapters={"a": tmp_path})


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.filterwarnings("error")
def test_numbers_that_become_too_large_are_told_in_one_line(tmp_path, base, backend):
    """Each is finite; their sums in the network are not."""
    huge = {name: np.full_like(values, 1e19) for name, values in pair(Q.format(0), (32, 32)).items()}
    with numflow.load(base, backend, adapters={"huge": write_adapter(tmp_path, huge)}) as model, pytest.raises(
            RequestError, match="^the model's logits are not finite numbers"):
        model.generate(IDS, max_tokens=2, adapter="huge")


@pytest.mark.parametrize("name, table", [("blenderbot_small", "model.shared"), ("seamless_m4t", "shared"),
                                         ("mvp", "model.shared")])
@pytest.mark.merge
def test_tables_and_output_matrices_of_encoder_decoders(name, table, tmp_path):
    """Encoder and decoder read one table, at different scales in BlenderBot (small); the output matrix too."""
    case, ids = load_case(name), load_case(name).inputs[0]
    shape = case.tensors[f"{table}.weight"]
    tensors = pair(table, shape[::-1], kind="lora_embedding_{}") | pair("lm_head", shape)
    adapter = write_adapter(tmp_path / "adapter", tensors)
    base = write_case(name, tmp_path)
    with numflow.load(base, "reference", adapters={"a": adapter}, merge="a") as model:
        expected = model.logits(ids["decoder_ids"], encoder_ids=ids["ids"])
    for backend in ("reference", "cpu"):
        with numflow.load(base, backend, activations="f32", adapters={"a": adapter}) as model:
            found, bare = (model.logits(ids["decoder_ids"], encoder_ids=ids["ids"], adapter=chosen)
                           for chosen in ("a", None))
        assert np.abs(found - expected).max() < 1e-4 * expected.std() < np.abs(bare - expected).max()

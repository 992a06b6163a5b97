"""Adapters over HTTP: chosen by the model's name or by a field, loaded and unloaded at run time."""

import pytest

import numflow
from tests.formats.peft import pair, write_adapter
from tests.server.processes import ServerProcess
from tests.server.tiny import write_chat_model

httpx = pytest.importorskip("httpx")
ASKED = {"prompt": [20, 31, 45, 60], "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("adapters")
    found = {"base": write_chat_model(place / "base")}
    for number, name in enumerate(("one", "two", "three")):
        modules = {f"model.layers.{layer}.self_attn.q_proj": (32, 32) for layer in range(2)} | {"lm_head": (264, 32)}
        tensors = {}
        for module, shape in modules.items():
            tensors |= pair(module, shape, seed=number)
        found[name] = write_adapter(place / name, tensors, lora_alpha=16)
    return found


@pytest.fixture(scope="module")
def expected(folders):
    """Texts of the base model, with the third adapter merged into its weights, and of the other adapters on it."""
    adapters = {name: folders[name] for name in ("one", "two", "three")}
    with numflow.load(folders["base"], "reference", adapters=adapters, merge="three") as model:
        return {name: model.generate(ASKED["prompt"], 12, 0, ignore_eos=True, adapter=name).text
                for name in (None, "one", "two")}


CONFIG = """
[service]
load_adapters = {load}
[engine]
backend = "reference"
[models.base]
path = "{base}"
aliases = ["org/base"]
adapters = {{one = "{one}", three = ["{three}", 1.0]}}
merge = ["three"]
[models.bare]
path = "{base}"
"""


@pytest.fixture(scope="module")
def http(folders, tmp_path_factory):
    path = tmp_path_factory.mktemp("service") / "service.toml"
    path.write_text(CONFIG.format(load="true", **folders))
    with ServerProcess("-c", str(path)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def asked(http, status=200, **more):
    reply = http.post("/v1/completions", json=ASKED | more)
    assert reply.status_code == status, reply.text
    return reply.json()["choices"][0]["text"] if status == 200 else reply.json()["error"]


def test_chosen_by_name_or_field(http, expected):
    assert len(set(expected.values())) == 3
    assert asked(http) == asked(http, model="base") == expected[None]
    assert asked(http, model="base:one") == asked(http, model="org/base:one") == expected["one"]
    assert asked(http, adapter="one") == expected["one"]
    message = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
    texts = [http.post("/v1/chat/completions", json=message | {"model": model}).json()["choices"][0]["message"]
             for model in ("base", "base:one")]
    assert texts[0] != texts[1]
    listed = {entry["id"]: entry for entry in http.get("/v1/models").json()["data"]}
    assert [*listed] == ["base", "base:one", "bare"] and listed["base:one"]["parent"] == "base"
    assert http.get("/v1/models/base:one").json()["id"] == "base:one"


def test_only_texts_are_written_with_an_adapter(http):
    for route, body in (("/v1/embeddings", {"input": "hi"}), ("/api/embed", {"input": "hi"})):
        told = http.post(route, json=body | {"model": "base:one"})
        assert told.status_code == 400 and "the adapter 'one' is only for generating text" in told.text, told.text
    assert http.post("/tokenize", json={"content": "hi", "model": "base:one"}).status_code == 200


def test_names_that_are_unknown(http):
    assert asked(http, 404, model="base:none")["code"] == "model_not_found"
    assert "adapters: one" in asked(http, 404, model="base:three")["message"]
    assert asked(http, 400, adapter="none")["code"] == "adapter_not_found"


def test_loaded_and_unloaded(http, folders, expected):
    def post(route, **body):
        reply = http.post(f"/v1/{route}_lora_adapter", json=body)
        return reply.status_code, reply.text if reply.status_code == 200 else reply.json()["error"]

    assert post("load", lora_name="two", lora_path=str(folders["two"]))[0] == 200
    assert asked(http, model="base:two") == expected["two"]
    assert post("load", lora_name="two", lora_path=str(folders["one"]))[1]["code"] == "adapter_exists"
    assert post("load", lora_name="two", lora_path=str(folders["two"]), scale=0, load_inplace=True)[0] == 200
    assert asked(http, model="base:two") == expected[None]
    assert post("load", lora_name="two", lora_path=str(folders["one"]), load_inplace=True)[0] == 200
    assert asked(http, model="base:two") == expected["one"]
    assert post("load", lora_name="two", lora_path="/nowhere", load_inplace=True)[0] == 400
    assert asked(http, model="base:two") == expected["one"]  # the loaded adapter stays
    assert post("unload", lora_name="two")[0] == 200
    assert asked(http, 404, model="base:two")["code"] == "model_not_found"
    assert post("unload", lora_name="two")[0] == 404
    status, error = post("load", lora_name="x", lora_path="/nowhere")
    assert status == 400 and "/nowhere" in error["message"]
    assert post("load", lora_name="", lora_path="x")[0] == 400 and post("load", lora_name="x")[0] == 400
    assert post("load", lora_name="own", lora_path=str(folders["one"]), model="bare")[0] == 200
    assert asked(http, model="bare:own") != asked(http, model="bare")


@pytest.mark.merge
def test_not_loaded_where_that_is_not_allowed(folders, tmp_path):
    path = tmp_path / "service.toml"
    path.write_text(CONFIG.format(load="false", **folders))
    with ServerProcess("-c", str(path)) as server:
        for route in ("load", "unload"):
            reply = httpx.post(f"{server.url}/v1/{route}_lora_adapter", json={"lora_name": "x", "lora_path": "y"})
            assert reply.status_code == 403 and "load_adapters" in reply.json()["error"]["message"]

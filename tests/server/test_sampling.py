"""Sampling defaults over HTTP: conversations take the model's defaults, text completions temperature 1."""

import json
import shutil

import httpx
import pytest

from numflow.server.app import make_app
from numflow.server.config.config import make_config
from numflow.server.service.service import Service

HI = [{"role": "user", "content": "hi"}]
OWN = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def asked(model_folders, tmp_path, monkeypatch):
    """asked(path, body, generation=..., **options) -> (settings of the request that ran, the entry of /v1/models)."""
    async def ask(path, body, generation=None, **options):
        folder = tmp_path / "model"
        if not folder.exists():
            shutil.copytree(model_folders["chat"], folder)
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        service = Service(make_config({"models": {"m": {"path": str(folder), "backend": "reference", **options}}}))
        transport = httpx.ASGITransport(make_app(service))
        seen = []
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
                await service.pool.preload()
                served, = service.pool.loaded()
                start = served.engine.start
                monkeypatch.setattr(served.engine, "start",
                                    lambda request, *rest: (seen.append(request.sampling), start(request, *rest))[1])
                assert (await http.post(path, json=body)).status_code == 200
                entry = (await http.get("/v1/models/m")).json()
        finally:
            await service.pool.close()
        return seen[0], entry["sampling"]
    return ask


CHAT, TEXT = ("/v1/chat/completions", {"messages": HI, "max_tokens": 1}), ("/v1/completions", {"prompt": "a"})
NATIVE = ("/", {"text": "a", "max_output_len": 1, "is_streaming_mode": False})


@pytest.mark.anyio
@pytest.mark.parametrize(("route", "more", "generation", "options", "drawn"), [
    (CHAT, {}, None, {}, (0.7, 1.0, 0, 0.05)), (NATIVE, {}, None, {}, (0.7, 1.0, 0, 0.05)),
    (TEXT, {}, None, {}, (1.0, 1.0, 0, 0.0)), (CHAT, {}, OWN, {}, (0.6, 0.95, 20, 0.0)),
    (NATIVE, {}, OWN, {}, (0.6, 0.95, 20, 0.0)), (TEXT, {}, OWN, {}, (1.0, 1.0, 0, 0.0)),
    (CHAT, {"temperature": 0.9}, OWN, {}, (0.9, 0.95, 20, 0.0)), (CHAT, {"temperature": 0}, OWN, {}, (0, 1.0, 0, 0.0)),
    (CHAT, {"top_p": 0.5}, OWN, {}, (0.6, 0.5, 20, 0.0)), (CHAT, {}, OWN, {"temperature": 0.3}, (0.3, 0.95, 20, 0.0)),
    (CHAT, {}, OWN, {"decoding_strategy": "min_p"}, (1.0, 1.0, 0, 0.05)),
    (CHAT, {}, {"do_sample": False}, {}, (0.0, 1.0, 0, 0.0))])
@pytest.mark.thin(2)
async def test_who_has_the_say(asked, route, more, generation, options, drawn):
    path, body = route
    sampling, shown = await asked(path, body | more, generation, **options)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == drawn
    if path != TEXT[0] and not more:
        assert {name: getattr(sampling, name) for name in shown} == shown and shown["temperature"] == drawn[0]

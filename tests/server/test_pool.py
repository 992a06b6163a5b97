"""Models by name: loaded on request, unloaded to make room for others, kept while in use."""

import asyncio
import threading
import time

import pytest

from numflow.errors import DeviceFaultError, FormatError
from numflow.server.config.config import make_config
from numflow.server.http.errors import ApiError
from numflow.server.models.pool import ModelPool

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Loaded:
    """Replaces a served model; 10 bytes large."""

    def __init__(self, name, log):
        self.name, self.nbytes, self.log, self.failure = name, 10, log, ""
        log.append(f"+{name}")

    def close(self):
        self.log.append(f"-{self.name}")


def pool(tmp_path, memory=None, fails=(), **service):
    """(pool, log of loading and unloading) of the models a, b, c with 10 bytes each."""
    log = []
    for name in "abc":
        (tmp_path / name).write_bytes(b"x" * 10)

    def load(config, queue):
        time.sleep(0.01)
        if config.name in fails:
            raise FormatError(f"{config.name} is broken")
        return Loaded(config.name, log)

    models = {name: {"path": str(tmp_path / name), "aliases": [name.upper()]} for name in "abc"}
    config = make_config({"models": models, "service": {**service, **({"memory": memory} if memory else {})}})
    return ModelPool(config, load), log


async def test_the_first_is_loaded_at_once_and_others_on_demand(tmp_path):
    models, log = pool(tmp_path)
    assert not models.ready
    await models.preload()
    assert models.ready and log == ["+a"]
    with await models.acquire("B") as served:
        assert served.name == "b"
    with await models.acquire(None) as served:
        assert served.name == "a"
    await models.close()
    assert sorted(log) == ["+a", "+b", "-a", "-b"]


async def test_many_ask_for_one_and_it_is_loaded_once(tmp_path):
    models, log = pool(tmp_path)
    leases = await asyncio.gather(*(models.acquire("a") for _ in range(9)))
    assert log == ["+a"] and {lease.served.name for lease in leases} == {"a"}


async def test_the_least_recently_used_makes_room(tmp_path):
    models, log = pool(tmp_path, memory=25)
    for name in "aba":
        (await models.acquire(name)).release()
    (await models.acquire("c")).release()
    assert log == ["+a", "+b", "-b", "+c"]
    assert [served.name for served in models.loaded()] == ["a", "c"]


async def test_what_is_in_use_stays(tmp_path):
    models, log = pool(tmp_path, memory=20)
    lease = await models.acquire("a")
    second = await models.acquire("b")
    with pytest.raises(ApiError) as caught:
        await models.acquire("c")
    assert caught.value.status == 503 and caught.value.headers["Retry-After"]
    second.release()
    second.release()  # may be called twice
    (await models.acquire("c")).release()
    assert log == ["+a", "+b", "-b", "+c"]
    lease.release()


async def test_what_never_fits_is_the_clients_mistake(tmp_path):
    models, _ = pool(tmp_path, memory=5)
    with pytest.raises(ApiError) as caught:
        await models.acquire("a")
    assert (caught.value.status, caught.value.code) == (400, "model_too_large")


async def test_a_client_that_goes_away_while_a_model_loads(tmp_path):
    models, log = pool(tmp_path)
    waiting = asyncio.ensure_future(models.acquire("a"))
    await asyncio.sleep(0.002)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    (await models.acquire("a")).release()
    assert log == ["+a"]  # loading continued, and the model is kept
    await models.close()
    assert log == ["+a", "-a"]


async def test_a_model_that_does_not_load(tmp_path):
    models, _ = pool(tmp_path, fails=("b",))
    with pytest.raises(ApiError) as caught:
        await models.acquire("b")
    assert caught.value.status == 500 and "b is broken" in caught.value.message
    assert [str(error) for _, _, error in models.listing()] == ["None", "b is broken", "None"]
    broken, _ = pool(tmp_path, fails=("a",))
    with pytest.raises(ApiError) as caught:
        await broken.preload()
    assert isinstance(caught.value.__cause__, FormatError) and not broken.ready


async def test_names(tmp_path):
    models, _ = pool(tmp_path)
    assert models.find("C") == "c" and models.find(None) == "a" == models.default
    with pytest.raises(ApiError, match="no model 'd'; models: a, b, c"):
        models.find("d")
    lax, _ = pool(tmp_path, unknown_model="default")
    assert lax.find("gpt-4") == "a"


async def test_loading_does_not_stop_the_loop(tmp_path):
    models, _ = pool(tmp_path)
    seen = []
    models._load = lambda config, queue: (seen.append(threading.current_thread()), Loaded(config.name, []))[1]
    (await models.acquire("a")).release()
    assert seen[0] is not threading.main_thread()


async def _soon(found, what):
    for _ in range(500):
        if found():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"no {what}")


@pytest.fixture
def quick(monkeypatch):
    """The pool's background task runs all the time."""
    monkeypatch.setattr("numflow.server.models.pool.WATCH_S", 0.01)


async def test_a_lost_model_is_loaded_again(tmp_path, quick):
    models, log = pool(tmp_path)
    await models.preload()
    watching = asyncio.create_task(models.watch())
    models.loaded()[0].failure = "its device has died"
    assert models.failing() == {"a": "its device has died"}
    await _soon(lambda: log == ["+a", "-a", "+a"], "new model")
    await _soon(lambda: not models.failing(), "health")
    watching.cancel()
    await models.close()


async def test_whoever_asks_for_a_lost_model_gets_the_new_one(tmp_path):
    models, log = pool(tmp_path)
    with await models.acquire("a") as served:
        served.failure = "its device has died"
    with await models.acquire("a") as served:
        assert served.failure == "" and log == ["+a", "-a", "+a"]
    await models.close()


async def test_a_model_that_is_lost_again_and_again_is_left_alone_for_a_while(tmp_path):
    models, log = pool(tmp_path)
    with pytest.raises(ApiError, match="a has failed and is loaded again in 2 s: its device has died") as found:
        for _ in range(5):
            with await models.acquire("a") as served:
                served.failure = "its device has died"
    assert found.value.status == 503 and int(found.value.headers["Retry-After"]) >= 1
    assert log == ["+a", "-a", "+a"] and models.failing() == {"a": "its device has died"}
    await models.close()


async def test_a_lost_model_ends_the_service_where_that_is_wanted(tmp_path, quick):
    models, _ = pool(tmp_path, on_failure="exit")
    await models.preload()
    watching = asyncio.create_task(models.watch())
    models.loaded()[0].failure = "its device has died"
    with pytest.raises(DeviceFaultError, match="model a: its device has died"):
        await watching
    assert models.failing() == {"a": "its device has died"}

"""Saved slots over HTTP: saved, restored after a restart, erased; in one folder, and separate for each API key."""

import pytest

from tests.server.processes import ServerProcess

httpx = pytest.importorskip("httpx")
PROMPT = "Once upon a time there was a very long text. " * 6


@pytest.fixture
def started(model_folders, tmp_path):
    """A function that starts the service."""
    path = tmp_path / "service.toml"
    path.write_text(f'[service]\napi_keys = ["alice", "bob"]\nslot_save_path = "{tmp_path / "slots"}"\n'
                    f'[models.m]\npath = "{model_folders["chat"]}"\nbackend = "reference"\nmax_batch = 2\n')
    return lambda: ServerProcess("-c", str(path))


def client(server, key):
    return httpx.Client(base_url=server.url, timeout=60, headers={"Authorization": f"Bearer {key}"})


def cached(http, **more):
    reply = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2, **more})
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.merge
def test_slots_are_saved_restored_and_erased(started, tmp_path):
    with started() as server, client(server, "alice") as alice, client(server, "bob") as bob:
        assert cached(alice, id_slot=1) == 0
        saved = alice.post("/slots/1?action=save", json={"filename": "talk.bin"}).json()
        assert saved["id_slot"] == 1 and saved["filename"] == "talk.bin" and saved["n_saved"] > saved["n_cached"] > 200
        found = [path for path in (tmp_path / "slots").rglob("*") if path.is_file()]
        assert [(path.name, path.stat().st_size) for path in found] == [("talk.bin", saved["n_written"])]
        for http, action, name, status in ((bob, "save", "x", 400), (bob, "restore", "talk.bin", 404),
                                           (alice, "restore", "../talk.bin", 400), (alice, "save", "/tmp/x", 400),
                                           (alice, "save", ".x", 400), (alice, "save", "", 400),
                                           (alice, "look", "x", 400), (alice, "save", None, 400)):
            reply = http.post(f"/slots/1?action={action}", json={} if name is None else {"filename": name})
            assert reply.status_code == status and str(tmp_path) not in reply.text, reply.text
        for place in ("7", "-1", "x"):
            assert alice.post(f"/slots/{place}?action=erase").status_code in (400, 404)
        assert alice.post("/slots/1?action=erase").json() == {"id_slot": 1, "n_erased": saved["n_saved"]}
        assert cached(alice) == 0
    with started() as server, client(server, "alice") as alice, client(server, "bob") as bob:
        restored = alice.post("/slots/0?action=restore", json={"filename": "talk.bin"}).json()
        assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
        assert cached(bob) == 0 and cached(alice) == restored["n_cached"]
        path = found[0]
        path.write_bytes(path.read_bytes()[:-1])
        reply = alice.post("/slots/0?action=restore", json={"filename": "talk.bin"})
        assert reply.status_code == 400 and reply.json()["error"]["message"].startswith("talk.bin: ")


def test_nothing_is_saved_without_a_folder(http):
    reply = http.post("/slots/0?action=save", json={"filename": "x"})
    assert reply.status_code == 403 and "slot_folder" in reply.json()["error"]["message"]

"""Views of the engine's state: the JSON of a running service, and its page in a browser (slow)."""

import threading
from itertools import pairwise

import httpx
import numpy as np
import pytest

from numflow.engine.schedule.blocks import BlockAllocator
from numflow.engine.schedule.prefix import PrefixCache
from numflow.engine.schedule.scheduler import Scheduler, StepLimits
from numflow.engine.schedule.sequence import SequenceGroup
from numflow.engine.schedule.snapshot import KEPT, snapshot
from numflow.quant import decode, encode, find
from tests.server.browsing import DESKTOP, PHONE, Looks, chromium, set_size
from tests.server.processes import ServerProcess
from tests.waiting import until


def get(http, route, **query):
    reply = http.get(f"/explore/{route}", params=query, timeout=300)  # kernels of schemes may have to be compiled
    return reply.json() if reply.status_code == 200 else (reply.status_code, reply.json()["error"]["message"])


def run_step(scheduler):
    for chunk in (plan := scheduler.plan()).chunks:
        scheduler.ran(chunk)
    return plan


def test_a_snapshot_tells_who_holds_a_block():
    blocks = BlockAllocator(8, 8)
    scheduler = Scheduler(blocks, BlockAllocator(), 4, StepLimits(4, 64, 64), PrefixCache(blocks, 4))
    first = SequenceGroup(list(range(9)), 12)
    scheduler.add(first)
    run_step(scheduler)
    second = SequenceGroup([*range(8), 99], 12)
    scheduler.add(second)
    run_step(scheduler)
    found = snapshot(scheduler)
    (pool,) = found["pools"]
    assert sorted(pool["blocks"]) == [0, 0, 0, 0, 1, 1, 2, 2] and pool["used"] == 4
    one, other = (request["sequences"][0]["blocks"] for request in found["requests"])
    assert one[:2] == other[:2] and one[2] != other[2] and found["requests"][1]["reused"] == 8
    assert [(node["before"], node["held"]) for node in found["tree"]] == [(0, 2), (1, 2)]
    scheduler.remove(first)
    scheduler.remove(second)
    assert sorted(snapshot(scheduler)["pools"][0]["blocks"]) == [KEPT, KEPT, 0, 0, 0, 0, 0, 0]
    third = SequenceGroup(list(range(100, 130)), 32)  # takes all eight blocks
    scheduler.add(third)
    run_step(scheduler)
    found = snapshot(scheduler)
    assert found["evicted"] == 2 and {node["node"] for node in found["tree"]}.isdisjoint({1, 2})


def test_blocks_and_requests_of_the_service(http):
    http.post("/v1/completions", json={"prompt": "explore " * 30, "max_tokens": 2})
    found = get(http, "kv")
    assert found["requests"] == [] and found["pools"][0]["kept"] > 0 and found["tree_in_all"] == len(found["tree"]) > 0
    assert set(found["tree"][0]) == {"node", "before", "block", "held"}  # no texts
    assert get(http, "kv", model="encoder")[0] == 400 and get(http, "kv", model="nobody")[0] == 404


def test_a_request_that_runs_is_seen(http, server):
    body = {"prompt": "seen " * 30, "max_tokens": 300, "n": 2, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        for _ in range(6):
            next(lines)
        found = get(http, "kv")
    (request,) = found["requests"]
    assert request["running"] and request["prompt"] == 150 and len(request["sequences"]) == 2
    one, other = (set(sequence["blocks"]) for sequence in request["sequences"])
    assert one & other and one != other  # blocks of the prompt are shared, later blocks are not
    (pool,) = found["pools"]
    assert all(pool["blocks"][block] == 2 for block in one & other) and pool["used"] == len(one | other)
    server.wait_idle()


def test_a_tensor_under_a_scheme(http, model_folders):
    from numflow import formats

    choice = get(http, "quantisation")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert {"name": name, "shape": [32, 32], "type": "F32"} in choice["tensors"]
    assert next(one for one in choice["schemes"] if one["name"] == "q3h")["levels"] == 11
    found = get(http, "quantisation", tensor=name, scheme="q3h", row=2)
    x = formats.open_checkpoint(model_folders["chat"]).tensors[name].f32()[2:]
    y = decode(encode(x, find("q3h")), find("q3h"), 32)
    assert found["rms_error"] == pytest.approx(np.sqrt(np.mean((y - x) ** 2)), rel=1e-5)
    assert found["rows"] == [2, 32] and sum(found["values"]["counts"]) == sum(found["errors"]["counts"]) == x.size
    block = found["block"]
    values = block["scale"] * (np.array(block["codes"]) - block["zero"])
    np.testing.assert_allclose(values, block["decoded"], rtol=1e-5)
    assert [int(pair["bits"], 2) for pair in block["pairs"]] == [
        first + 11 * second for first, second in zip(block["codes"][::2], block["codes"][1::2])]
    assert "pairs" not in get(http, "quantisation", tensor=name, scheme="q4")["block"]
    assert "codes" not in get(http, "quantisation", tensor=name, scheme="q3h_b64t1")[1]


@pytest.mark.parametrize("query, text", [
    ({"tensor": "nothing"}, "no tensor 'nothing'"), ({"tensor": "model.norm.weight"}, "no rows of whole blocks"),
    ({"tensor": "lm_head.weight", "scheme": "q9"}, "no quantisation scheme named 'q9'"),
    ({"tensor": "lm_head.weight", "row": "9999"}, "row should be 0"), ({"row": "-1"}, "row should be a whole number")])
def test_what_cannot_be_quantised_is_told(http, query, text):
    code, message = get(http, "quantisation", **query)
    assert code == 400 and text in message


def test_a_timeline_of_devices(http):
    clusters = get(http, "timeline")["clusters"]
    assert all(len(one["ways"]) > 3 for one in clusters)
    name, ways = clusters[0]["name"], clusters[0]["ways"]
    one = get(http, "timeline", cluster=name, devices=clusters[0]["devices"][0])
    assert {span[3] for span in one["intervals"]} == {"work"} and one["shares"]["work"] == pytest.approx(1)
    hybrid = next(way for way in ways if "&" in way)
    found = get(http, "timeline", cluster=name, devices=hybrid, batch=4, tokens=8, context=100)
    assert {span[3] for span in found["intervals"]} >= {"work", "exchange"}
    for device in found["devices"]:  # spans of a device do not overlap
        spans = sorted(span[1:3] for span in found["intervals"] if span[0] == device)
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(spans))
    assert found["tokens_per_second"] == pytest.approx(2 * 4 * 8 / found["seconds"])


@pytest.mark.parametrize("query, text", [
    ({"cluster": "/etc/passwd"}, "cluster should be one of"), ({"batch": "0"}, "batch should be 1"),
    ({"devices": "0;77"}, "devices should be at most 8 of"), ({"devices": "0;;"}, "device"),
    ({"context": "9999999"}, "context should be 0"), ({"tokens": "1e3"}, "tokens should be a whole number")])
def test_timelines_that_cannot_be_are_told(http, query, text):
    code, message = get(http, "timeline", **{"cluster": "h200x8", **query})
    assert code == 400 and text in message


def test_a_roofline_needs_a_profile(http):
    assert get(http, "roofline") == (400, "this backend has no profile: use the cpu")


@pytest.mark.slow
def test_ops_of_the_last_request(model_folders, monkeypatch):
    import numflow
    from numflow.cpu.measure.roofline import Roofline
    from numflow.server.explore import roofline as module

    class Served:
        name, last_request, limits = "tiny", (5, 7), None

    monkeypatch.setattr(module, "machine_limits", lambda program: Roofline(1, 10.0, 100.0, 50.0, 100.0))
    with numflow.load(model_folders["chat"], backend="cpu", threads=1) as Served.model:
        found = module.roofline(Served)
    assert found["token"]["context"] == 12 and found["prompt"]["tokens"] == 5
    assert found["limits"]["read_gb_s"] == 10 and found["last_request"] == {"prompt": 5, "new": 7}
    assert any(row["gop_s"] > 0 for row in found["token"]["ops"])
    assert sum(row["share"] for row in found["prompt"]["ops"]) == pytest.approx(1)


@pytest.mark.slow
def test_ops_and_a_request_on_the_page(model_folders):
    with ServerProcess("-m", str(model_folders["chat"]), "--threads", "1") as server, chromium() as driver:
        set_size(driver, DESKTOP)
        with httpx.Client(base_url=server.url, timeout=600) as http:
            http.post("/v1/completions", json={"prompt": "a b c", "max_tokens": 2})
            driver.get(f"{server.url}/explore#roofline")
            look = Looks(driver)
            look.one("#measure").click()
            until(lambda: look.all("#roofline-plot circle"), "ops below their roofs", 300)
            assert "had 5 tokens and wrote 2" in look.one("#roofline-facts").text
            assert len(look.all("#roofline-table table")) == 2 and len(look.all("#roofline-plot polyline")) == 2
            body, seen = {"prompt": "seen " * 30, "max_tokens": 300, "ignore_eos": True}, threading.Event()

            def ask():  # repeat until one has been seen
                while not seen.is_set():
                    http.post("/v1/completions", json=body)

            asking = threading.Thread(target=ask)
            asking.start()
            try:
                look.one("#tab-kv").click()
                look.wait(lambda: "runs" in look.one("#kv-requests").text)
            finally:
                seen.set()
                asking.join()
        assert driver.get_log("browser") == []


@pytest.mark.slow
def test_the_page(server, http):
    with chromium() as driver:
        set_size(driver, DESKTOP)
        http.post("/v1/completions", json={"prompt": "explore " * 30, "max_tokens": 2})
        driver.get(f"{server.url}/explore")
        look = Looks(driver)
        look.wait(lambda: "blocks of" in look.one("#kv-facts").text and look.all("#kv-tree circle"))
        assert look.all("#kv-pools i.kept") and "No request runs" in look.one("#kv-requests").text
        look.one("#tab-kv").send_keys("\ue014")
        look.wait(lambda: "bits per weight" in look.one("#quantisation-facts").text)
        assert len(look.all("#values rect")) == 61 and len(look.all("#block circle")) == 32
        assert len(look.all("#pairs .bits")) == 16 and look.one("#tab-quantisation").get_attribute("aria-selected")
        before = look.one("#quantisation-facts").text
        driver.execute_script("scheme.value = 'q8'; scheme.dispatchEvent(new Event('change', { bubbles: true }))")
        look.wait(lambda: look.one("#quantisation-facts").text != before and not look.all("#pairs .bits"))
        look.one("#tab-timeline").click()
        look.wait(lambda: look.all("#timeline-plot rect.exchange"))
        rate = look.one("#timeline-facts").text
        driver.execute_script("batch.value = 5; batch.dispatchEvent(new Event('change', { bubbles: true }))")
        look.wait(lambda: look.one("#timeline-facts").text != rate)
        driver.execute_script("devices.value = '77'; devices.dispatchEvent(new Event('change', { bubbles: true }))")
        look.wait(lambda: "devices should be" in look.one("#wrong").text)
        look.one("#tab-roofline").click()
        look.one("#measure").click()
        look.wait(lambda: "no profile" in look.one("#wrong").text)
        set_size(driver, PHONE, dark=True)
        for tab in ("kv", "quantisation", "timeline"):
            look.one(f"#tab-{tab}").click()
            look.wait(lambda tab=tab: look.one(f"#{tab}").is_displayed())
            assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        refused = [entry for entry in driver.get_log("browser") if "400" not in entry["message"]]
        assert refused == []  # the two answers above that are refusals

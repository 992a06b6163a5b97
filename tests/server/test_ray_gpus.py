"""Serving on a Ray cluster with (simulated) GPUs: groups and replicas ask Ray for theirs."""

import time

import pytest

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")
ray = pytest.importorskip("ray")
pytest.importorskip("ray.serve")
pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")

from tests.partition.rays import ray_cluster  # noqa: E402
from tests.server.processes import ServerProcess  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ASKED = {"prompt": "hello", "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster({"num_cpus": 2, "num_gpus": 0}, {"num_cpus": 2, "num_gpus": 2}) as cluster:
        yield cluster


def serving(cluster, model_folders, *options):
    return ServerProcess("-m", f"tiny={model_folders['chat']}", "--device", "cuda", "--activations", "f32", *options,
                         RAY_ADDRESS=cluster.address, NUMFLOW_CUDA="simulator")


def answer(server):
    return httpx.post(f"{server.url}/v1/completions", json=ASKED, timeout=120).json()["choices"][0]["text"]


def free_gpus(wanted):
    """Free GPUs of the cluster; waits for the wanted number, since Ray reports late."""
    for _ in range(100):
        found = ray.available_resources().get("GPU", 0)
        if found == wanted:
            break
        time.sleep(0.1)
    return found


def test_groups_and_replicas_have_gpus(cluster, model_folders):
    with serving(cluster, model_folders, "--devices", "0;1", "--ray") as server:
        assert free_gpus(0) == 0, "one for each device"
        expected = answer(server)
    assert free_gpus(2) == 2
    with serving(cluster, model_folders, "--replicas", "1") as server:
        assert free_gpus(1) == 1, "the replica's"
        assert answer(server) == expected

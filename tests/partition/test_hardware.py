"""Cluster descriptions: valid files, and errors for broken ones."""

import pytest

from numflow.errors import FormatError, ModelNotFoundError
from numflow.partition.price.hardware import Link, known_clusters, read_cluster

GOOD = """
title = "two and a host"
[device.gpu]
count = 2
memory = "16GB"
bandwidth = 500
operations = 20
step = 4
host = [0, 1]
[device.cpu]
memory = "1TiB"
bandwidth = 50
operations = 1
[link]
bandwidth = 10
latency = 20
[[links]]
between = [0, 1]
bandwidth = 100
latency = 2
"""


@pytest.fixture
def written(tmp_path):
    def write(text: str):
        path = tmp_path / "c.toml"
        path.write_text(text)
        return path
    return write


@pytest.mark.parametrize("name", known_clusters())
def test_what_comes_with_numflow_can_be_read(name):
    cluster = read_cluster(name)
    assert cluster.title and cluster.devices


def test_units_and_links(written):
    cluster = read_cluster(written(GOOD))
    assert list(cluster.devices) == ["0", "1", "cpu"]
    gpu, cpu = cluster.devices["1"], cluster.devices["cpu"]
    assert (gpu.memory, gpu.bandwidth, gpu.operations, gpu.step, gpu.host) == (16e9, 5e11, 2e13, 4e-6, 1)
    assert (cpu.memory, cpu.step, cpu.host) == (2**40, 0, 0)
    assert cluster.between("1", "0") == Link(1e11, 2e-6)
    assert cluster.between("0", "cpu").latency == pytest.approx(2e-5)
    assert cluster.between("0", "cpu").seconds(1e10) == pytest.approx(1 + 2e-5)


@pytest.mark.parametrize(("change", "said"), [
    (("step = 4", "steps = 4"), r"c\.toml: unknown key 'device\.gpu\.steps'; did you mean 'step'"),
    (('memory = "16GB"', ""), r"'device\.gpu\.memory' is missing"),
    (('memory = "16GB"', 'memory = "lots"'), r'device\.gpu\.memory should be a size such as "24GB"'),
    (("bandwidth = 500", "bandwidth = -1"), r"device\.gpu\.bandwidth should be a number above 0, is -1"),
    (("count = 2", "count = 0"), r"device\.gpu\.count should be a whole number 1 \.\. 1024"),
    (("host = [0, 1]", "host = [0]"), r"device\.gpu\.host should be 2 whole numbers"),
    (("between = [0, 1]", "between = [0, 7]"), r"links\[0\]\.between should be two or more of 0, 1, cpu, each once"),
    (("between = [0, 1]", "between = [0, 0]"), r"links\[0\]\.between should be two or more of 0, 1, cpu, each once"),
    (("between = [0, 1]", "between = 0"), r"links\[0\]\.between should be a list, is 0"),
    (("[[links]]", "[links]"), r"links should be a list"),
    (("bandwidth = 500", "bandwidth = inf"), r"device\.gpu\.bandwidth should be a number above 0, is inf"),
    (("latency = 2\n", "latency = nan\n"), r"links\[0\]\.latency should be a number from 0, is nan"),
    (("bandwidth = 10\n", "bandwidth = 0\n"), r"link\.bandwidth should be a number above 0, is 0"),
    (('memory = "1TiB"', "count = 2\nmemory = 1e12"), r"device\.cpu\.count should be 1, is 2"),
    (("host = [0, 1]", "host = true"), r"device\.gpu\.host should be 2 whole numbers"),
    (('memory = "16GB"', "memory = inf"), r"device\.gpu\.memory should be a size"),
    (("[link]\nbandwidth = 10", "[link]"), r"'link\.bandwidth' is missing"),
    (("count = 2", "count ="), r"c\.toml: "),
])
def test_what_is_said_about_mistakes(written, change, said):
    with pytest.raises(FormatError, match=said):
        read_cluster(written(GOOD.replace(*change)))


def test_unknown_names():
    with pytest.raises(ModelNotFoundError, match="no cluster file nothing; numflow has .*v100x4-pcie"):
        read_cluster("nothing")
    with pytest.raises(ModelNotFoundError):
        read_cluster("nothing.toml")

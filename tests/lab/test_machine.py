"""Figures of this machine: derived from measured times, and stored."""

import json

import pytest

from numflow.lab import machine


def test_a_turn_worked_out_by_hand():
    """Steps of 1 us: 10 a layer, 4 outside layers, 2 cores; exchanges of 3 and 5 us; 50 us a batch, 20 us a device."""
    def seconds(devices, layers):
        exchange = {1: 0, 2: 3, 4: 5}[devices]
        layer = 10 / min(devices, 2) + 2 * exchange
        return (layers * layer + 4 + 2 * exchange + 50 + 20 * (devices - 1)) * 1e-6

    sizes = (machine._FEW, machine._MANY)
    found = machine._turn({(n, layers): seconds(n, layers) for n in (1, 2, 4) for layers in sizes}, [1, 2, 4],
                          {layers: 10 * layers + 4 for layers in sizes}, cores=2)
    expected = {"step": 1e-6, "latency": 3e-6, "crowded": 5e-6, "start": 50e-6, "start_each": 20e-6}
    assert found == {key: pytest.approx(value) for key, value in expected.items()}


def test_figures_are_measured_once_and_kept(tmp_path, monkeypatch):
    figures = {"memory": 8e9, "bandwidth": 1e10, "host_bandwidth": 1.5e10, "operations": 1e11, "float_operations": 1e10,
               "cores": 2.0, "step": 1e-6, "latency": 2e-6, "crowded": 4e-6, "start": 1e-5, "start_each": 3e-6}
    asked = []
    monkeypatch.setattr(machine, "measure", lambda devices: asked.append(devices) or figures)
    monkeypatch.setattr(machine.places, "home", lambda: tmp_path / "home")
    for _ in range(2):
        cluster = machine.this_machine(["0", "1"])
    assert asked == [2] and cluster.host_bandwidth == 1.5e10 and cluster.gap(3) == pytest.approx(1.6e-5)
    machine.this_machine(["0", "1"], again=True)
    machine.this_machine(["0"])
    assert asked == [2, 2, 1] and len(json.loads((tmp_path / "home" / "machine.json").read_text())) == 2
    (tmp_path / "home" / "machine.json").write_text("[broken")
    machine.this_machine(["0"])
    assert asked == [2, 2, 1, 1]


@pytest.mark.merge
def test_what_is_measured_makes_sense():
    """On any machine: times are positive, and a batch takes less than a second on one device."""
    found = machine._together(2, 1, 2.0)
    assert set(found) == {"step", "latency", "crowded", "start", "start_each"}
    assert found["crowded"] == found["latency"] > 0 and 0 < found["step"] < 1e-3 and 0 <= found["start"] < 1

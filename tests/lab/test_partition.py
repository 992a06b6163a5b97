"""The experiment `partition`: some parts can be measured again; the rest of the report is kept."""

import json
import sys

import pytest

from numflow.errors import RequestError
from numflow.lab.harness import _load
from tests.conftest import REPO


@pytest.fixture(scope="module")
def experiment():
    return sys.modules[_load(REPO / "experiments" / "partition" / "run.py").__name__ + ".virtual"]


class _Lab:
    quick = False

    def __init__(self, folder, **options):
        self.folder, self.options, self.results, self.body = folder, options, {}, []

    def before(self):
        path = self.folder / "results.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def __getattr__(self, name):
        return lambda *given: self.body.append((name, *given))


def _row(devices, queries, measured, **more):
    spread = dict.fromkeys(("least", "most", "predicted", "predicted_least", "predicted_most"), measured)
    return {"strategy": devices, "devices": devices, "queries": queries, "measured": measured, "off": 0.0,
            "off_least": 0.0, "off_most": 0.0, **spread, **more}


def test_rows_that_are_not_measured_stay(experiment, tmp_path, monkeypatch):
    figures = dict.fromkeys(("bandwidth", "operations", "host_bandwidth", "cores", "step", "latency", "crowded",
                             "start_each"), 1.0)
    asked = []

    def measure(lab, plans):
        asked.append(list(plans.values()))
        rows = [_row(text, queries, 10.0 * len(asked)) for text in plans.values() for queries in (1, 8)]
        return {"model": "m", "rows": rows, "figures": figures, "rounds": 2}

    monkeypatch.setattr(experiment, "measure", measure)
    monkeypatch.setattr(experiment.show, "virtual", lambda lab, rows: None)
    strategies = {"by layer": "0;1;2;3"}
    for option, expected in (("all", [10, 10, 10, 10]), ("0&1, 0;1;2;3", [10, 10, 20, 20]), ("none", [10, 10, 20, 20])):
        lab = _Lab(tmp_path, virtual=option)
        experiment.virtual(lab, strategies)
        assert [row["measured"] for row in lab.results["virtual"] if row["queries"] == 1] == expected
        (tmp_path / "results.json").write_text(json.dumps({"results": lab.results}))
    assert asked == [["0", "0;1", "0&1", "0;1;2;3"], ["0&1", "0;1;2;3"]]
    assert [row["devices"] for row in lab.results["virtual"]][::2] == ["0", "0;1", "0&1", "0;1;2;3"]


def test_a_plan_that_is_not_there(experiment, tmp_path):
    with pytest.raises(RequestError, match="expected all, none or some of 0, 0;1, 0&1, found '0;9'"):
        experiment.virtual(_Lab(tmp_path, virtual="0;9"), {})

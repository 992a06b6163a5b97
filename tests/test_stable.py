"""What the last release promised is still there (docs/stability.md)."""

import json

import pytest

from tests import stable
from tests.conftest import REPO

PROMISED = json.loads((REPO / "tests/golden/stable.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", PROMISED)
def test_nothing_that_was_promised_is_gone(kind):
    gone = sorted(set(PROMISED[kind]) - set(stable.promises()[kind]))
    assert not gone, f"{gone}: a break needs a new minor version, a line in CHANGELOG.md and python -m tests.stable"


def test_what_a_promise_looks_like():
    now = stable.promises()
    assert {"load", "load(threads)", "Model.generate", "Model.logits(ids)"} <= set(now["python"])
    assert {"numflow generate", "numflow generate --top-p", "numflow spec new"} <= set(now["commands"])
    assert "POST /v1/chat/completions" in now["routes"] and "moe.top_k" in now["spec"]

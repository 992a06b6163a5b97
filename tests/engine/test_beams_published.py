"""Beam search on tiny checkpoints against what transformers generates with them (see make_beams.py)."""

import json
from pathlib import Path

import pytest

from numflow.engine.load import load
from tests.engine.fake import used_blocks
from tests.engine.published import write_case
from tests.specs.case import load_case

CASES = json.loads((Path(__file__).parent / "expected" / "beams.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
@pytest.mark.thin(4)
def test_beams_are_those_of_transformers(case, tmp_path):
    prompts = [given["ids"] for given in load_case(case["case"]).inputs]
    with load(write_case(case["case"], tmp_path, **case["config"]), backend="reference", block_size=4) as model:
        for run in case["runs"]:
            result = model.generate(prompts[run["prompt"]], **{"max_tokens": 12, **run["settings"]})
            assert result.ids == run["ids"], run
            assert result.score == pytest.approx(run["score"], abs=2e-5), run
            if "forced_eos_token_id" not in case["config"]:
                assert result.finish_reason == ("stop" if run["ended"] else "length")
        assert used_blocks(model) == 0

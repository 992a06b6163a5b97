"""`classify` and `rerank` with a tiny model, from the command line to the kernels and back."""

import json

from numflow.engine.load import load
from tests.engine.classifiers import classifier


def test_commands(run, tmp_path):
    folder, _ = classifier(tmp_path, 2, id2label={"0": "bad", "1": "good"})
    common = ("-m", folder, "--device", "reference")
    done = json.loads(run("classify", *common, "Paris is large", "paris", "--top-k", "2", "--json").out)
    with load(folder, backend="reference") as model:
        shares = model.scores(["Paris is large", "paris"], probabilities=True)
        ranked = model.rerank("paris", ["large", "is"])
    assert [{one["label"]: round(one["probability"], 5) for one in text} for text in done] == [
        {"bad": round(float(a), 5), "good": round(float(b), 5)} for a, b in shares]
    assert run("classify", *common, "paris").out.splitlines()[0].split() == ["label", "probability", "score", "text"]
    found = json.loads(run("rerank", *common, "paris", "large", "is", "--json").out)
    assert [(one["index"], one["text"]) for one in found] == [(one.index, one.text) for one in ranked]
    table = run("rerank", *common, "paris", "large", "is", "--top-n", "1").out.splitlines()
    assert len(table) == 2 and table[1].split()[-1] == ranked[0].text
    assert "--top-k should be 1 or more" in run("classify", *common, "x", "--top-k", "0").err

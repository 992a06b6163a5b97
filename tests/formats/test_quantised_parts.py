"""Reading some rows of a quantised matrix decodes only their scales and zero points."""

import json

import numpy as np
import pytest

from numflow.formats import open_checkpoint
from numflow.formats.quantised import coded, gptq, hqq, parts
from tests.formats.quantised_files import made, save
from tests.formats.test_quantised import MODULE, close, folder_of


@pytest.mark.parametrize("name", ["gptq-4", "gptq-3-act", "gptq-128", "awq-64", "awq-gemv", "hqq-4"])
def test_each_scale_is_converted_once(tmp_path, name, monkeypatch):
    converted = []

    def counted(raw, kind):
        found = to_f32(raw, kind)
        converted.append(found.size)
        return found

    to_f32 = parts.to_f32
    for module in (parts, hqq):
        monkeypatch.setattr(module, "to_f32", counted)
    monkeypatch.setattr(coded, "_AT_ONCE", 1)  # 64 rows at a time
    tensors, weights, config = made(name, 320, 256)
    close(open_checkpoint(folder_of(tmp_path, tensors, config)).tensors[f"{MODULE}.weight"].f32(), weights)
    most = sum(np.size(array) for part, (_, array) in tensors.items() if part in ("scales", "scale", "zero"))
    assert 0 < sum(converted) <= most


@pytest.mark.parametrize("name", ["gptq-4", "gptq-3", "awq-64", "awq-gemv"])
def test_a_part_may_begin_and_end_anywhere(tmp_path, name, monkeypatch):
    """Also within a word that holds zero points of several rows."""
    made_of = []
    monkeypatch.setattr(gptq, "CodedMatrix", lambda *given, **more: made_of.append(coded.CodedMatrix(*given, **more))
                        or made_of[-1])
    tensors, weights, config = made(name, 64, 256)
    open_checkpoint(folder_of(tmp_path, tensors, config))
    for begin, end in ((0, 64), (3, 5), (31, 33), (57, 64)):
        close(coded.floats(made_of[0], made_of[0].rows(begin, end)), weights[begin:end])


@pytest.mark.parametrize("name", ["gptq-4", "gptq-3", "gptq-act", "gptq-v2"])
def test_a_table_of_embeddings(tmp_path, name):
    """Tokens are the inputs, so that the table's rows are the columns of a matrix with the same tensors."""
    tensors, weights, config = made(name, 64, 192)
    save(tmp_path / "model.safetensors", {f"model.embed_tokens.{part}": value for part, value in tensors.items()})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    table = open_checkpoint(tmp_path).tensors["model.embed_tokens.weight"]
    assert not table.turned
    close(table.f32(), np.ascontiguousarray(weights.T))
    close(table.f32([70, 5]), weights.T[[70, 5]])

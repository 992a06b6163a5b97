"""PEFT's methods beside LoRA: sums and products computed here, and refused files."""

import numpy as np
import pytest

from numflow.errors import FormatError
from numflow.formats.adapter import Multiplied, open_adapter
from tests.formats.peft import PREFIX, write_adapter

NAME = "model.layers.1.self_attn.q_proj"
WEIGHT = f"{NAME}.weight"


def numbers(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {f"{PREFIX}{NAME}.{name.replace('__', '.')}": rng.standard_normal(shape).astype(np.float32)
            for name, shape in shapes.items()}


LOHA = {"hada_w1_a": (6, 2), "hada_w1_b": (2, 5), "hada_w2_a": (6, 2), "hada_w2_b": (2, 5)}
LOKR = {"lokr_w1": (2, 3), "lokr_w2_a": (4, 2), "lokr_w2_b": (2, 5)}
ADALORA = {"lora_A": (3, 5), "lora_B": (6, 3), "lora_E": (3, 1)}
VERA = {"vera_lambda_b": (6,), "vera_lambda_d": (2,)}
SHARED = {"base_model.vera_A": np.ones((2, 9), np.float32), "base_model.vera_B": np.ones((8, 2), np.float32)}


def own(made: dict[str, np.ndarray], name: str) -> np.ndarray:
    return made[f"{PREFIX}{NAME}.{name}"].astype(np.float64)


def added(folder, tensors, **config) -> np.ndarray:
    change = open_adapter(write_adapter(folder, tensors, **config)).added[WEIGHT]
    a, b = change.matrices()
    assert change.shape == (b.shape[0], a.shape[1]) and change.rank == a.shape[0]
    return change.factor * b @ a


def test_products_of_low_rank(tmp_path):
    made = numbers(**LOHA)
    expected = 2 * (own(made, "hada_w1_a") @ own(made, "hada_w1_b")) * (own(made, "hada_w2_a") @ own(made, "hada_w2_b"))
    assert np.allclose(added(tmp_path, made, peft_type="LOHA", alpha=4, r=2), expected, atol=1e-5)
    made = numbers(**LOKR)
    expected = 3 * np.kron(own(made, "lokr_w1"), own(made, "lokr_w2_a") @ own(made, "lokr_w2_b"))
    assert np.allclose(added(tmp_path, made, peft_type="LOKR", alpha=6, r=2), expected, atol=1e-5)
    made = numbers(**ADALORA)
    expected = 8 / (4 + 1e-5) * own(made, "lora_B") @ (own(made, "lora_A") * own(made, "lora_E"))
    found = added(tmp_path, made, peft_type="ADALORA", init_r=4, lora_alpha=8)  # one rank has been taken away
    assert np.allclose(found, expected, atol=1e-5)


def test_a_module_without_ranks_is_left_alone(tmp_path):
    one = numbers(**ADALORA)
    none = {name.replace("q_proj", "k_proj"): x[:, :0] if name.endswith("lora_B") else x[:0] for name, x in one.items()}
    config = {"peft_type": "ADALORA", "init_r": 4, "lora_alpha": 8}
    assert open_adapter(write_adapter(tmp_path, one | none, **config)).added.keys() == {WEIGHT}


def test_factors(tmp_path):
    def of(made, **config) -> Multiplied:
        return open_adapter(write_adapter(tmp_path, made, **config)).multiplied[WEIGHT]

    base = np.random.default_rng(1).standard_normal((6, 8)).astype(np.float32)
    made = numbers(ia3_l=(6, 1))
    rows = of(made, peft_type="IA3")
    assert rows.bias and rows.fits(6, 8) and not rows.fits(7, 8)
    assert np.allclose(rows.of(base), own(made, "ia3_l") * base)
    made = numbers(ia3_l=(1, 8))
    assert np.allclose(of(made, peft_type="IA3").of(base), own(made, "ia3_l") * base)
    made = numbers(oft_R__weight=(2, 6))
    turned = of(made, peft_type="OFT", use_cayley_neumann=False)
    found = turned.of(base)
    assert turned.fits(3, 8) and not turned.fits(3, 12)
    assert np.allclose(np.linalg.norm(found[:, :4], axis=1), np.linalg.norm(base[:, :4], axis=1), atol=1e-5)
    assert np.abs(found - base).max() > 0.1
    made = numbers(boft_R=(1, 4, 2, 2), boft_s=(6, 1))
    found = of(made, peft_type="BOFT").of(base)
    assert np.allclose(np.linalg.norm(found, axis=1), np.abs(own(made, "boft_s")[:, 0]) * np.linalg.norm(base, axis=1),
                       atol=1e-5)


def without(made: dict, name: str) -> dict:
    return {key: value for key, value in made.items() if not key.endswith(name)}


@pytest.mark.parametrize("made, config, words", [
    (without(numbers(**LOHA), "hada_w2_b"), {"peft_type": "LOHA", "alpha": 4, "r": 2}, "A of the pair"),
    (numbers(**LOHA | {"hada_w2_a": (6, 3), "hada_w2_b": (3, 5)}), {"peft_type": "LOHA", "alpha": 4}, "hada_w2_a"),
    (numbers(**LOHA), {"peft_type": "LOHA", "r": 2}, "alpha: expected a number"),
    (numbers(**LOHA), {"peft_type": "LOHA", "r": 0, "alpha": 1}, "r: expected a number from 1 on"),
    (numbers(**LOHA | {"hada_t1": (2, 2, 3, 3)}), {"peft_type": "LOHA", "alpha": 4, "r": 2}, "hada_t1"),
    (without(numbers(**LOKR), "lokr_w1"), {"peft_type": "LOKR", "alpha": 4, "r": 2}, "lokr_w1 is missing"),
    (numbers(**ADALORA | {"lora_E": (2, 1)}), {"peft_type": "ADALORA", "init_r": 3}, r"lora_E \[2, 1\]"),
    (without(numbers(**ADALORA), "lora_E"), {"peft_type": "ADALORA", "init_r": 3}, "lora_E is missing"),
    (numbers(**ADALORA), {"peft_type": "ADALORA"}, "init_r"),
    (numbers(**VERA), {"peft_type": "VERA", "save_projection": False}, "save_projection"),
    (numbers(**VERA | {"vera_lambda_b": (9,)}) | SHARED, {"peft_type": "VERA"}, "at most 8 rows"),
    (numbers(ia3_l=(2, 3)), {"peft_type": "IA3"}, "ia3_l"), (numbers(ia3_l=(6, 1)), {}, "which has no ia3_l"),
    (numbers(oft_R__weight=(2, 5)), {"peft_type": "OFT"}, "above its diagonal"),
    (numbers(oft_R__weight=(2, 6)), {"peft_type": "OFT", "coft": True, "eps": "x"}, "eps"),
    (numbers(oft_R__weight=(2, 6)), {"peft_type": "OFT", "block_share": 3}, "block_share: expected true or false"),
    (numbers(boft_R=(2, 4, 2, 2), boft_s=(6, 1)), {"peft_type": "BOFT"}, "boft_n_butterfly_factor"),
    (numbers(boft_R=(1, 4, 2, 2)), {"peft_type": "BOFT"}, "boft_s is missing"),
    (numbers(ia3_l=(6, 1)), {"peft_type": "IA3", "bias": "lora_only"}, "bias: expected 'none', 'all' or 'ia3_only'"),
    (numbers(prompt_embeddings=(6, 1)), {"peft_type": "PROMPT_TUNING"}, "PROMPT_TUNING")])
def test_what_is_refused(tmp_path, made, config, words):
    with pytest.raises(FormatError, match=words) as error:
        open_adapter(write_adapter(tmp_path, made, **config))
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)

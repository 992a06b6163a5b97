import pytest
from hypothesis import given
from hypothesis import strategies as st

from numflow.spec.expression import ExpressionError, evaluate

VALUES = {"hidden": 64, "heads": 4, "layer": 5, "kinds": ["a", "b", "a", "b", "a", "b"], "base": 1e4,
          "by_layer": {"5": {"size": 7}, "6": {}}, "padded": {"05": {"size": 8}, "x": {}}, "absent": None}


@pytest.mark.parametrize(("text", "value"), [
    ("hidden // heads", 16), ("1 / sqrt(hidden)", 0.125), ("hidden if layer % 2 else 0", 64),
    ("(layer + 1) % 6 == 0", True), ("kinds[layer] == 'b'", True), ("not none", True), ("none or 3", 3),
    ("2 <= layer < 6 and heads > 0", True), ("layer in [1, 5]", True), ("-heads", -4), ("max(1, heads, 2)", 4),
    ("true", True), ("heads ** 2", 16), ("get(get(by_layer, layer), 'size', 3)", 7),
    ("get(get(by_layer, layer + 1), 'size', 3)", 3), ("get(get(by_layer, 9), 'size')", None), ("get(absent, 1, 2)", 2),
    ("place([3, 5, 4, 5], 5)", 1), ("get(get(padded, layer), 'size')", 8), ("get(padded, 6)", None),
    ("[1, 2] * 2 + [hidden]", [1, 2, 1, 2, 64]), ("[layer] * heads", [5, 5, 5, 5]),
])
def test_value(text, value):
    assert evaluate(text, VALUES.__getitem__) == value


@pytest.mark.parametrize("text", [
    "__import__('os')", "hidden.real", "(lambda: 1)()", "[x for x in kinds]", "f'{hidden}'", "a := 1", "open('f')",
    "max(1, key=2)", "1 +", "", "hidden; heads", "9 ** 9 ** 9", "1 / 0", "kinds[99]", "x" * 501, "'a' + 1", "b'x'",
    "place(heads, 1)", "place([3], 4)", "get(heads, 1)", "get(by_layer, kinds)", "kinds * 2", "hidden * kinds",
])
def test_refused(text):
    with pytest.raises(ExpressionError):
        evaluate(text, lambda name: VALUES.get(name, 1))


@given(st.text(max_size=40))
def test_any_text_gives_a_value_or_the_one_error(text):
    try:
        evaluate(text, lambda name: 2)
    except ExpressionError:
        pass
    except KeyError:
        pytest.fail("a name was looked up outside `name`")

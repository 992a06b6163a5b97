"""Kinds of options in a specification file, and their allowed values."""

import math
from dataclasses import dataclass
from typing import Any

# The activations of the op table. This package does not import the table; a test compares the two lists.
ACTIVATIONS = ("relu", "relu2", "gelu", "gelu_tanh", "gelu_quick", "silu", "sigmoid", "tanh", "exp",
               "swiglu_clamp", "silu_clamp", "xielu")
# Other names of activations in files. "gelu" is the exact (erf) form, as in the published implementations.
ACTIVATION_ALIASES = {"swish": "silu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh",
                      "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "gelu_quick", "relu_squared": "relu2",
                      "gelu_python": "gelu", "gelu_python_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class SpecOption:
    """One key of a section.

    kind: "int", "float", "bool", "choice", "text" or "list". choices: the allowed words.
    least, most: inclusive limits of a number, or of each number in a list. above: exclusive lower limit.
    """

    kind: str
    default: Any
    description: str
    choices: tuple[str, ...] = ()
    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf

    def holds(self, value: float) -> bool:
        """Whether a number is finite and within the range."""
        return self.least <= value <= self.most and value > self.above and (isinstance(value, int)
                                                                            or math.isfinite(value))

    @property
    def range(self) -> str:
        """Description of the allowed numbers for messages: "a whole number of 1 or more"."""
        kind = "a whole number" if self.kind == "int" else "a finite number"
        parts = [f"of {self.least:.15g} or more"] if self.least > -math.inf else []
        parts += [f"above {self.above:.15g}"] if self.above > -math.inf else []
        parts += [f"up to {self.most:.15g}"] if self.most < math.inf else []
        return " ".join([kind, *parts])


def integer(default, description, least=1, most=2**31 - 1):
    return SpecOption("int", default, description, (), least, most)


def number(default, description, least=-1e6, most=1e6, above=-math.inf):
    """Option for a number. The default limits suit factors and addends: products with float32 values stay finite."""
    if above > -math.inf:
        least = -math.inf
    return SpecOption("float", default, description, (), least, most, above)


def boolean(default, description):
    return SpecOption("bool", default, description)


def choice(choices, default, description):
    return SpecOption("choice", default, description, tuple(choices))


def text(default, description):
    return SpecOption("text", default, description)


def number_list(default, description, above=-math.inf):
    """Option for a list of numbers."""
    return SpecOption("list", default, description, (), above=above)

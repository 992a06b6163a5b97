"""specs/README.md from the schema: every key of the specification language, its kind, default and meaning."""

from numflow.spec.expression import FUNCTIONS
from numflow.spec.modules import MODULES
from numflow.spec.schema import SECTIONS

_INTRO = """# Specification files

A model is a TOML file here; nothing in `numflow/` knows a family by name. A file says what a model is made of,
where its hyper-parameters are found and what its tensors are called. `numflow spec check FILE [CHECKPOINT]` checks
one, `numflow spec new CHECKPOINT` drafts one, `docs/new-model.md` walks through writing one.
(This page is written by `python -m numflow.spec.reference > specs/README.md`.)

## Layout of a file
| table | what it holds |
|---|---|
| `extends = "NAME"` | another spec (a file or a shipped one) whose tables this one adds to or replaces, key by \
key |
| `extends_part = ["NAME"]` | the same, of the spec that knows the `model_type` of an object of config.json, the first \
of these that is there; that object alone is read, and names of tensors have a `prefix` of both, one behind the other |
| `[model]` | `title`, `type` (`decoder`, `encoder`, `encoder-decoder`, `draft`: it \
drafts for another model), `source`, `license`, `notes` |
| `[detect]` | which checkpoints it describes: `architectures`, `model_type` (config.json), `gguf` \
(general.architecture), `llama2c`, and a condition `when`. Not inherited |
| `[parameters]` | named values: a literal, an expression, or a source table |
| `[unconfirmed]` | `keys` of a draft: what it does not read of the model's configuration; a spec with some left does \
not run |
| the sections below | the building blocks |
| `[encoder.SECTION]`, `[decoder.SECTION]` | the same, for one stack of an encoder-decoder |
| `[draft.SECTION]` | the same, for the block behind the last layer that predicts a further token (`mtp_proj`); its \
layer is number `layers` |
| `[hf]`, `[gguf]`, `[llama2c]` | what differs by where the tensors come from: `prefix`, `ignore`, `transposed`, \
`within` (the object of config.json that holds this model's values, if not all of it, or a list of such names, of \
which the first that is there counts), `defaults` (a table for each `model_type` of that object or of the whole: what \
holds where it leaves a key out), `draft_layer` (what \
stands for `layers.{layer}` in names of the block that predicts a further \
token), `tensors` and any section |
| `[hf.tensors]` ... | module = name in the file, or a list of names to try; `{layer}` and `{expert}` are \
numbers, `{owner}` and `{use}` those of [side], other braces hold an expression: `{layer // 2}` \
(in `ignore`, `{layers}` is how many layers there are, `{beyond}` that or any above it); `.weight` and `.bias` are \
added; `enc.` / `dec.` before the module for one stack |
| `[gguf.metadata]` | what `numflow quantize` writes to GGUF files beside or in place of what sources tell: key = \
literal, expression, or `{ each = "..." }` for a value per layer (with `further = false` none for the block behind the \
last); none leaves the key out |
| `[gguf.written]` | the name to write, an expression, of a module that files may call by several; of `rope_freqs`, \
`rope_factors_long` and `rope_factors_short` only where it stands here, as readers of most architectures pass over \
these tensors; where `output` stands here, it is written also if it is the embedding table. Not inherited |

## Values
- A literal: `pairing = "half"`.
- For numbers and switches an **expression** over parameters, `layer`, and options by their long name \
(`attention_head_dim`): `scale = "1 / sqrt(query_scale)"`, `window = "window_size if (layer + 1) % 6 else 0"`. \
Functions: FUNCTIONS (`get(object, key, otherwise)` looks into an object of the \
configuration, `place(list, item)` is an item's place in a list, from 0), and \
`has('attn_q.bias')`: whether the file has that tensor. Words: true, false, none, pi.
- One of several words: the word, or an expression after `=`: `q_norm = "= 'head' if has('attn_q_norm.weight') \
else 'none'"`.
- A **source table** reads the checkpoint: `{ config = ["n_head", "num_heads"], gguf = "attention.head_count", \
default = 12 }`. Keys are tried in order; `a.b` is key b of object a; GGUF keys get the architecture in front; \
null counts as absent, but where `null` \
is the value for it; `map` translates words. `words` are the only ones that a value, or an \
item of a list, may be; `least` and `most` (numbers or expressions) are its limits; `items` is how many items a list \
must have, or a list of such numbers. Anything else in a file is refused, also where no layer asks for it.
- A list of one value per layer is read layer by layer.
"""


def markdown() -> str:
    """The whole page."""
    functions = ", ".join(f"`{name}`" for name in sorted(FUNCTIONS))
    lines = [_INTRO.replace("FUNCTIONS", functions)]
    for section, options in SECTIONS.items():
        lines += [f"## [{section}]", "| key | value | default | meaning |", "|---|---|---|---|"]
        for key, option in options.items():
            kind = " \\| ".join(option.choices) if option.choices else option.kind
            default = "" if option.default is None else f"`{_literal(option.default)}`"
            lines.append(f"| `{key}` | {kind} | {default} | {option.what} |")
        lines.append("")
    lines += ["## Modules", "| module | what |", "|---|---|"]
    lines += [f"| `{name}` | {what} |" for name, what in MODULES.items()]
    return "\n".join(lines) + "\n"


def _literal(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) if value != "" else '""'


if __name__ == "__main__":
    print(markdown(), end="")

"""specs/README.md from the schema: every key of the specification language, its kind, default and description."""

from numflow.spec.expression import FUNCTIONS
from numflow.spec.modules import MODULES
from numflow.spec.schema import SECTIONS

_INTRO = """# Specification files

A model is a TOML file in this folder; no model family is named in `numflow/`. A file says which building blocks a model
has, where its hyper-parameters are found and what its tensors are called. `numflow spec check FILE [CHECKPOINT]` checks
one, `numflow spec new CHECKPOINT` drafts one, `docs/new-model.md` walks through writing one.
(This page is written by `python -m numflow.spec.reference > specs/README.md`.)

## Layout of a file
| table | content |
|---|---|
| `extends = "NAME"` | another spec (a file or a shipped one). Its tables are inherited; keys of this file replace or \
add to them |
| `extends_part = ["NAME"]` | for a model with a language model inside: names of objects of config.json, of which the \
first that exists counts. The spec that knows this object's `model_type` is extended, and only this object is read. \
Tensor names begin with the `prefix` of this spec, then with that of the extended one |
| `[model]` | `title`, `type` (`decoder`, `encoder`, `encoder-decoder`, or `draft`: drafts tokens for another model), \
`source`, `license`, `notes` |
| `[detect]` | the checkpoints that this spec describes: `architectures` and `model_type` of config.json, `gguf` \
(general.architecture), `llama2c`, and a condition `when`. Not inherited |
| `[parameters]` | named values: a literal, an expression, or a source table |
| `[unconfirmed]` | only in drafts: `keys` of config.json that the draft does not read. A spec does not run while a \
key is listed here |
| the sections below | options of the building blocks |
| `[encoder.SECTION]`, `[decoder.SECTION]` | the same options for one stack of an encoder-decoder |
| `[draft.SECTION]` | the same options for the block that predicts a further token (MTP, `mtp_proj`). Its layer index \
is `layers` |
| `[hf]`, `[gguf]`, `[llama2c]` | settings for one file format: any section, and the keys below, of which `tensors`, \
`prefix`, `ignore` and `transposed` may also stand at the top of the file, for every format |
| &nbsp;&nbsp;`tensors` | tensor names, see `[hf.tensors]` |
| &nbsp;&nbsp;`prefix` | text, or list of texts, that tensor names may begin with |
| &nbsp;&nbsp;`ignore` | patterns (`*`, `?`) of tensors that may be left unused |
| &nbsp;&nbsp;`transposed` | modules whose matrices are stored [inputs, outputs] |
| &nbsp;&nbsp;`within` | the object of config.json that holds the values of this model, or a list of names, of which \
the first that exists counts; by default all of config.json |
| &nbsp;&nbsp;`defaults` | values of keys that config.json leaves out: a table for each `model_type`, of the object \
`within` or of the whole file |
| &nbsp;&nbsp;`draft_layer` | text that replaces `layers.{layer}` in tensor names of the block that predicts a \
further token |
| `[hf.tensors]` ... | module = tensor name, or a list of names that are tried in order. `.weight` and `.bias` are \
added. `{layer}` and `{expert}` are replaced by indices, `{owner}` and `{use}` by the values of [side], other braces \
by the value of an expression: `{layer // 2}`. In `ignore`, `{layers}` is the number of layers, `{beyond}` any layer \
index from there on. A module may begin with `enc.` or `dec.`: the name for one stack |
| `[gguf.metadata]` | metadata that `numflow quantize` writes to GGUF files, beside or in place of the values it \
derives: key = literal, expression, or `{ each = "..." }` for a list with one value per layer (`further = false`: \
none for the MTP block). The value none leaves the key out |
| `[gguf.written]` | module = an expression for the tensor name to write, where several names are known. \
`rope_freqs`, `rope_factors_long` and `rope_factors_short` are written only if they stand here, because readers of \
most architectures ignore these tensors. If `output` stands here, it is written even with tied embeddings. Not \
inherited |

## Values
- A literal: `pairing = "half"`.
- Numbers and switches may be an **expression** over parameters, `layer`, and other options by their long name \
(`attention_head_dim`): `scale = "1 / sqrt(query_scale)"`, `window = "window_size if (layer + 1) % 6 else 0"`. \
Functions: FUNCTIONS. `get(object, key, otherwise)` is a value of an object of the configuration, `place(list, item)` \
the index of an item in a list, from 0, `has('attn_q.bias')` whether the checkpoint has that tensor. Constants: true, \
false, none, pi.
- A key with a list of words takes one of the words, or an expression after `=`: `q_norm = "= 'head' if \
has('attn_q_norm.weight') else 'none'"`.
- A **source table** reads a value from the checkpoint: `{ config = ["n_head", "num_heads"], gguf = \
"attention.head_count", default = 12 }`. Keys are tried in order. `a.b` is key b of object a. GGUF keys get the \
architecture as a prefix. JSON null counts as absent, unless `null` gives the value for it. `map` translates words. \
`words` lists the allowed values (or list items), `least` and `most` (numbers or expressions) limit them, `items` is \
the length that a list must have, or a list of allowed lengths. Any other value in a checkpoint is an error, even if \
no layer uses it.
- A list with one value per layer: each layer takes its own value.
"""


def markdown() -> str:
    """The whole page."""
    functions = ", ".join(f"`{name}`" for name in sorted(FUNCTIONS))
    lines = [_INTRO.replace("FUNCTIONS", functions)]
    for section, options in SECTIONS.items():
        lines += [f"## [{section}]", "| key | value | default | description |", "|---|---|---|---|"]
        for key, option in options.items():
            kind = " \\| ".join(option.choices) if option.choices else option.kind
            default = "" if option.default is None else f"`{_literal(option.default)}`"
            lines.append(f"| `{key}` | {kind} | {default} | {option.description} |")
        lines.append("")
    lines += ["## Modules", "| module | tensor |", "|---|---|"]
    lines += [f"| `{name}` | {description} |" for name, description in MODULES.items()]
    return "\n".join(lines) + "\n"


def _literal(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) if value != "" else '""'


if __name__ == "__main__":
    print(markdown(), end="")

"""Generate specs/README.md from the schema: all keys of the specification language with type, default, description."""

from numflow.spec.expression import FUNCTIONS
from numflow.spec.modules import MODULES
from numflow.spec.schema import SECTIONS

_INTRO = """# Specification files

A specification file describes a model family to numflow, in TOML. It selects the building blocks of the network, says
where a checkpoint stores the hyper-parameters, and maps the checkpoint's tensor names to numflow's modules. This folder
has the shipped files; `numflow/` itself contains no code for a particular family.

This page is the reference. [docs/new-model.md](../docs/new-model.md) is a tutorial. `numflow spec new CHECKPOINT`
drafts a file for a model, and `numflow spec check FILE [CHECKPOINT]` checks a file.
(This page is written by `python -m numflow.spec.reference > specs/README.md`.)

## Layout of a file
| table | content |
|---|---|
| `extends = "NAME"` | another spec (a path, or the name of a shipped one). Its tables are inherited; keys of this \
file replace or add to them |
| `extends_part = ["NAME"]` | for a model that contains a language model (and others): names of objects in \
config.json. The first that exists is used: the spec that detects its `model_type` is extended, and only this \
object is read. Tensor names begin with the `prefix` of this spec, followed by the `prefix` of the extended spec |
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
`prefix`, `ignore` and `transposed` may also be at the top level of the file, for every format |
| &nbsp;&nbsp;`tensors` | tensor names, see `[hf.tensors]` |
| &nbsp;&nbsp;`prefix` | text, or list of texts, that tensor names may begin with |
| &nbsp;&nbsp;`ignore` | patterns (`*`, `?`) of tensors that may be left unused |
| &nbsp;&nbsp;`transposed` | modules whose matrices are stored [inputs, outputs] |
| &nbsp;&nbsp;`within` | the object of config.json that holds the values of this model, or a list of names, of which \
the first that exists is used; default: all of config.json |
| &nbsp;&nbsp;`defaults` | values of keys that config.json leaves out: a table for each `model_type`, of the object \
`within` or of the whole file |
| &nbsp;&nbsp;`draft_layer` | text that replaces `layers.{layer}` in tensor names of the block that predicts a \
further token |
| `[hf.tensors]` ... | module = tensor name, or a list of names that are tried in order. `.weight` and `.bias` are \
added. `{layer}` and `{expert}` are replaced by indices, `{owner}` and `{use}` by the values of [side], other braces \
by the value of an expression: `{layer // 2}`. In `ignore`, `{layers}` is the number of layers, and `{beyond}` any \
layer index >= this number. A module name may begin with `enc.` or `dec.`, for one stack of an encoder-decoder |
| `[gguf.metadata]` | metadata that `numflow quantize` writes to GGUF files, in addition to, or instead of, the \
values that it derives: key = literal, expression, or `{ each = "..." }` for a list with one value per layer \
(`further = false`: no value for the MTP block). The value none omits the key |
| `[gguf.written]` | module = an expression for the tensor name to write, where several names can be read. \
`rope_freqs`, `rope_factors_long` and `rope_factors_short` are written only if they are listed here, because other \
programs ignore these tensors for most architectures. If `output` is listed, it is written even with tied embeddings. \
Not inherited |

## Values
- A literal: `pairing = "half"`.
- A number or a boolean may be an **expression** over parameters, `layer`, and other options by their long name \
(`attention_head_dim`): `scale = "1 / sqrt(query_scale)"`, `window = "window_size if (layer + 1) % 6 else 0"`. \
Functions: FUNCTIONS. `get(object, key, otherwise)` returns a value of an object of the configuration, or `otherwise` \
if the key is missing. `place(list, item)` returns the index of an item in a list, from 0. `has('attn_q.bias')` is \
true if the checkpoint has that tensor. Constants: true, false, none, pi.
- A key with a list of words takes one of the words, or an expression after `=`: `q_norm = "= 'head' if \
has('attn_q_norm.weight') else 'none'"`.
- A **source table** reads a value from the checkpoint: `{ config = ["n_head", "num_heads"], gguf = \
"attention.head_count", default = 12 }`. Keys are tried in order. `a.b` is key b of object a, and `a.0` the first item \
of list a. GGUF keys get the architecture as a prefix. JSON null counts as absent, unless `null` gives the value for \
it. `map` translates words. `words` lists the allowed values (or list items), `least` and `most` (numbers or \
expressions) limit them, `items` is the length that a list must have, or a list of allowed lengths. Any other value in \
a checkpoint is an error, even if no layer uses it.
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

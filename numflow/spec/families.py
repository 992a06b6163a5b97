"""Generate docs/models.md from the shipped specifications: model families, and the names that detect them."""

from numflow.spec.reader import Spec, list_specs

_INTRO = """# Supported models

numflow runs the model families in the tables below. A specification file in [specs/](../specs/) describes each family.

numflow detects the family of a checkpoint by the names in the last two columns: the class (`architectures`) or, for
some families, the `model_type` in config.json, and `general.architecture` in a GGUF file. A family without such names
is chosen with `--spec NAME`. A classifier or reranker of the class `XForSequenceClassification` is detected like
`XForCausalLM`.

To run a model that is not in the tables, a new specification file may be enough: [new-model.md](new-model.md). The
[README](../README.md#what-runs) lists the file formats.
(This page is written by `python -m numflow.spec.families > docs/models.md`.)
"""
_KINDS = {"decoder": "Decoders: text generation", "encoder": "Encoders: embeddings, fill-mask, scores",
          "encoder-decoder": "Encoder-decoders: translation, summaries",
          "draft": "Drafts: draft tokens for another model (speculative decoding)"}


def markdown() -> str:
    """The whole page."""
    lines = [_INTRO]
    for kind, heading in _KINDS.items():
        specs = [spec for spec in list_specs() if spec.type == kind]
        lines += [f"## {heading}", "", "| family | specification | config.json | GGUF |", "|---|---|---|---|"]
        lines += [_row(spec) for spec in sorted(specs, key=lambda spec: spec.title.casefold())]
        lines.append("")
    noted = {spec.title: spec.section("model")["notes"] for spec in list_specs()
             if spec.section("detect") and spec.section("model").get("notes")}
    lines += ["## Notes", "", *(f"- {title}: {note}" for title, note in sorted(noted.items()))]
    return "\n".join(lines).rstrip() + "\n"


def _row(spec: Spec) -> str:
    detect = spec.section("detect")
    names = ["<br>".join(detect.get(key, ()) or (detect.get("model_type", ()) if key == "architectures" else ()))
             for key in ("architectures", "gguf")]
    return f"| {spec.title} | [{spec.name}](../specs/{spec.name}.toml) | {names[0]} | {names[1]} |"


if __name__ == "__main__":
    print(markdown(), end="")

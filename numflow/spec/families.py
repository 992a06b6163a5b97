"""docs/models.md from the shipped specifications: what runs, by which words it is recognised."""

from numflow.spec.reader import Spec, list_specs

_INTRO = """# Models

What is listed here runs from a specification file of [specs/](../specs/) alone. A checkpoint is recognised by words in
its `config.json` (`architectures`) or in its GGUF header (`general.architecture`); a row without such words is chosen
by `--spec NAME`. A classifier or reranker, `NAMEForSequenceClassification`, is read as `NAMEForCausalLM`. A model that
is not listed may need no more than a file of its own: [new-model.md](new-model.md).
File formats are in the [README](../README.md#what-runs).
(This page is written by `python -m numflow.spec.families > docs/models.md`.)
"""
_KINDS = {"decoder": "Decoders: text is continued", "encoder": "Encoders: embeddings, gaps, scores",
          "encoder-decoder": "Encoder-decoders: translation, summaries",
          "draft": "Drafts: what guesses tokens for another model"}


def markdown() -> str:
    """The whole page."""
    lines = [_INTRO]
    for kind, heading in _KINDS.items():
        found = [spec for spec in list_specs() if spec.type == kind]
        lines += [f"## {heading}", "", "| family | specification | config.json | GGUF |", "|---|---|---|---|"]
        lines += [_row(spec) for spec in sorted(found, key=lambda spec: spec.title.casefold())]
        lines.append("")
    noted = {spec.title: spec.section("model")["notes"] for spec in list_specs()
             if spec.section("detect") and "notes" in spec.section("model")}
    lines += ["## Notes", "", *(f"- {title}: {note}" for title, note in sorted(noted.items()))]
    return "\n".join(lines).rstrip() + "\n"


def _row(spec: Spec) -> str:
    detect = spec.section("detect")
    words = ["<br>".join(detect.get(key, ()) or (detect.get("model_type", ()) if key == "architectures" else ()))
             for key in ("architectures", "gguf")]
    return f"| {spec.title} | [{spec.name}](../specs/{spec.name}.toml) | {words[0]} | {words[1]} |"


if __name__ == "__main__":
    print(markdown(), end="")

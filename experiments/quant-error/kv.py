"""Types of cached keys and values, and the divergence that they cause."""

from pathlib import Path

from numflow.errors import NumflowError

PAIRS = (("f16", "f16"), ("q8", "q8"), ("q6", "q6"), ("q5", "q5"), ("q4", "q4"), ("q3h", "q3h"), ("q3", "q3"),
         ("q2", "q2"), ("q8", "q4"), ("q4", "q8"))


def kv_types(lab, places):
    """KL of each language model with its own weights and other types of keys and values."""
    names = [name for name in places["language_models"].split(",") if name]
    lab.heading("Keys and values")
    if not names or not places["text"]:
        lab.text("Left out: no language model was named, or no text was available (options `language_models`, `text`).")
        return
    lab.text("The model runs with its own weights in float32 arithmetic. The divergence is that of keys and values of "
             "the given types from float32 ones. Bytes per token include headers.")
    text = Path(places["text"]).read_text(encoding="utf-8")
    for name in names:
        try:
            rows = _rows(lab, name, text)
        except NumflowError as error:
            lab.text(f"`{Path(name).name}` is left out: {error}".replace(name, Path(name).name))
            continue
        lab.results.setdefault("kv", {})[Path(name).name] = rows
        one = rows[0]
        lab.text(f"{Path(name).name}, on {one['tokens']} tokens in {one['chunks']} windows of {one['context']}, one of "
                 f"{lab.options['every']} scored; errors are over {'windows' if one['chunks'] > 1 else 'tokens'}:")
        lab.table(["keys", "values", "KB per token", "KL", "±", "same top"],
                  [[r["k"], r["v"], r["bytes"] / 1e3, f"{r['kl']['mean']:.6f}", f"{r['kl']['stderr']:.6f}",
                    f"{100 * r['same_top']:.2f} %"] for r in rows])


def _rows(lab, name, text) -> list[dict]:
    import numflow
    from numflow.engine.measure.divergence import divergences
    from numflow.registry import resolve

    source, rows = resolve(name), []
    with numflow.load(source, activations="f32", kv="f32", progress=False) as base:
        models = {pair: numflow.load(source, activations="f32", kv_k=pair[0], kv_v=pair[1], progress=False)
                  for pair in PAIRS}
        found = divergences(models, base, text, min(512, base.context), max(1, lab.options["chunks"] // 4),
                            every=lab.options["every"])
        for (k, v), model in models.items():
            size = model.program.block_bytes / model.program.block_size
            rows.append({"k": k, "v": v, "bytes": size, **found[k, v]})
            lab.say(f"{name}: keys {k}, values {v}: KL {found[k, v]['kl']['mean']:.6f}")
            model.close()
    return rows

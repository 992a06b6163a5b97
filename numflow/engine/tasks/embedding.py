"""Embeddings of texts: hidden states, pooled as the model's files specify."""

from collections.abc import Sequence

import numpy as np

from numflow.decoding.settings import is_count
from numflow.engine.request.prompt import SHRINKS, check_size
from numflow.engine.run.forward import Text, outputs
from numflow.engine.runner.suspects import finite
from numflow.engine.tasks.embedding_recipe import POOLINGS, Dense, EmbeddingRecipe
from numflow.errors import RequestError, did_you_mean, option, quoted

_INSTRUCT = "Instruct: "  # start of prompts with an instruction, which is the rest of the line

Texts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


def embed(model, recipe: EmbeddingRecipe, texts: Texts, normalize: bool | None, pooling: str | None, truncate: bool,
          prompt: str | None, dimensions: int | None, instruction: str | None) -> np.ndarray:
    """See Model.embed."""
    single = isinstance(texts, str) or (len(texts) > 0 and all(map(is_count, texts)))
    several: Sequence = [texts] if single else texts
    if not (all(isinstance(text, str) for text in several) or all(map(_is_ids, several))):
        raise RequestError(f"embed needs a text or a list of texts, or ids or a list of such, has {quoted(texts)}")
    modes = poolings(model.network.name, recipe, pooling)
    layers = _layers(recipe, normalize)
    output = "encoder_hidden" if model.runner.has_encoder else "hidden"
    width = _checked_width(model, recipe, len(modes) * model.network.outputs[output].width, dimensions)
    before = _prompt(model, recipe, prompt, instruction) if isinstance(next(iter(several), ""), str) else _no_prompt(
        prompt, instruction)
    skipped = 0 if recipe.pool_prompt or not before else _prompt_tokens(model, recipe, before)
    ids = _ids(model, recipe, several, before, truncate)
    vectors = []
    for hidden in outputs(model.core, map(Text, ids), output):
        vector = np.concatenate([pool(hidden, mode, skipped) for mode in modes])
        for layer in layers:
            vector = layer(vector)
        if width < len(vector):
            vector = unit(vector[:width]) if layers[-1:] == [unit] else vector[:width]
        vectors.append(finite(model, vector.astype(np.float32), "hidden states"))
    return vectors[0] if single else np.array(vectors, np.float32).reshape(len(vectors), width)


def _checked_width(model, recipe: EmbeddingRecipe, pooled: int, dimensions: int | None) -> int:
    """Dimensions of an embedding: all, or the first `dimensions`.

    Raises:
        RequestError: the model has no embeddings of this size.
    """
    width = next((len(layer.weight) for layer in reversed(recipe.layers) if isinstance(layer, Dense)), pooled)
    if dimensions is None:
        return width
    if not (type(dimensions) is int and 1 <= dimensions <= width):
        raise RequestError(f"{option('dimensions')} should be a number from 1 to {width}, as many as embeddings of "
                           f"{model.network.name} have, is {quoted(dimensions)}", None, "dimensions")
    if recipe.dimensions and dimensions not in (*recipe.dimensions, width):
        raise RequestError(f"{option('dimensions')}: embeddings of {model.network.name} may have "
                           f"{', '.join(map(str, recipe.dimensions))} numbers, not {dimensions}", None, "dimensions")
    return dimensions


def pool(hidden: np.ndarray, mode: str, skipped: int = 0) -> np.ndarray:
    """Pool hidden states [n, D] to one vector float64 [D]; the first `skipped` tokens are ignored, except for "cls"."""
    if mode == "cls":
        return hidden[0].astype(np.float64)
    states = hidden[min(skipped, len(hidden) - 1):].astype(np.float64)
    if mode == "last":
        return states[-1]
    if mode == "max":
        return states.max(0)
    if mode == "weighted_mean":
        weights = np.arange(len(hidden) - len(states) + 1, len(hidden) + 1)
        return weights @ states / weights.sum()
    return states.sum(0) / (len(states) if mode == "mean" else len(states) ** 0.5)


def unit(vector: np.ndarray) -> np.ndarray:
    """Vector normalised to length 1."""
    return vector / max(float(np.linalg.norm(vector)), 1e-12)


def poolings(name: str, recipe: EmbeddingRecipe, pooling: str | None) -> tuple[str, ...]:
    """Pooling modes: the given one, or those of the model's files.

    Raises:
        RequestError: no pooling is given, it is unknown, or it does not fit the layers after it.
    """
    if pooling is None:
        if not recipe.pooling:
            raise RequestError(f"{name} does not say how embeddings are pooled (it has no modules.json, "
                               f"and its specification no pooling): name a pooling, one of {', '.join(POOLINGS)}")
        return recipe.pooling
    if pooling not in POOLINGS:
        raise RequestError(f"no pooling {quoted(pooling)}{did_you_mean(pooling, POOLINGS)}")
    first = next((layer.weight.shape[1] for layer in recipe.layers if isinstance(layer, Dense)), None)
    if first is not None and len(recipe.pooling) != 1:
        raise RequestError(f"{name} has a layer after its pooling that needs {first} columns: pooling "
                           f"{quoted(pooling)} alone does not make them")
    return (pooling,)


def _layers(recipe, normalize) -> list:
    """Layers after the pooling. normalize: None: as in the files; True: to length 1; False: not normalised."""
    layers = [unit if layer == "normalize" else layer for layer in recipe.layers
              if layer != "normalize" or normalize is not False]
    return [*layers, unit] if normalize and layers[-1:] != [unit] else layers


def _prompt(model, recipe, prompt, instruction) -> str:
    """Text to prepend."""
    if prompt is not None and prompt not in recipe.prompts:
        raise RequestError(f"{model.network.name} has no prompt {quoted(prompt)}{did_you_mean(prompt, recipe.prompts)}")
    if instruction is not None:
        return _instructed(model.network.name, recipe, prompt, instruction)
    name = recipe.prompt if prompt is None else prompt
    return "" if name is None else recipe.prompts[name]


def _instructed(name: str, recipe, prompt: str | None, instruction: str) -> str:
    """A prompt with its instruction replaced: the named prompt, else the first one with an instruction."""
    wanted = recipe.prompts if prompt is None else [prompt]
    for text in (recipe.prompts[key] for key in wanted):
        start, line, rest = text.partition("\n")
        if start.startswith(_INSTRUCT) and line:
            return f"{_INSTRUCT}{instruction}\n{rest}"
    which = f"prompt {quoted(prompt)} of {name} does not begin" if prompt else f"{name} has no prompt that begins"
    raise RequestError(f"{option('instruction')}: {which} with {_INSTRUCT.strip()!r}", None, "instruction")


def _no_prompt(prompt, instruction) -> str:
    """Refuse prompts and instructions for ids, which run unchanged."""
    for name, value in (("prompt", prompt), ("instruction", instruction)):
        if value is not None:
            raise RequestError(f"{name} {quoted(value)} is for texts: ids run as they are")
    return ""


def _is_ids(value) -> bool:
    return not isinstance(value, str) and isinstance(value, (Sequence, np.ndarray)) and all(map(is_count, value))


def _clean(recipe, text) -> str:
    text = text.strip() if recipe.strip else text
    return text.lower() if recipe.lower else text


def _prompt_tokens(model, recipe, before) -> int:
    """Number of tokens of a prompt, including special tokens before it."""
    tokenizer = model.tokenizer
    return len(tokenizer.wrapping.prefix) + len(tokenizer.encode(_clean(recipe, before), add_special=False))


def _within(tokenizer, text: str, limit: int, truncate: bool, index: int) -> str:
    """A text, cut to the longest prefix that may have `limit` tokens if `truncate`."""
    if truncate and len(text) > SHRINKS * limit:
        return text[:SHRINKS * limit * tokenizer.longest]
    check_size(tokenizer, text, limit, f"text {index}")
    return text


def _ids(model, recipe, texts, before, truncate) -> list[np.ndarray]:
    """Checked ids of each text, at most the model's limit."""
    found: list[np.ndarray] = []
    limit = min(recipe.max_tokens or model.context, model.context)
    if all(not isinstance(text, str) for text in texts):
        tokenizer, around = None, 0  # ids alone need none
    else:
        tokenizer = model.tokenizer
        around = len(tokenizer.wrapping.apply([])[0])
    for index, text in enumerate(texts, 1):
        whole = not isinstance(text, str)
        ids = text if whole else tokenizer.encode(_within(tokenizer, _clean(recipe, before + text), limit, truncate,
                                                          index), add_special=False)
        added = 0 if whole else around
        if len(ids) + added > limit and not truncate:
            source = f" in {recipe.limit_from}" if limit == recipe.max_tokens else ""
            raise RequestError(f"text {index} has {len(ids) + added} tokens; the model's limit{source} is {limit}. "
                               "Shorten it, or let it be truncated (truncate)")
        ids = ids[:max(0, limit - added)]
        ids = ids if whole else tokenizer.wrapping.apply(ids)[0]
        found.append(model.facts.check(ids, f"text {index}"))
    return found

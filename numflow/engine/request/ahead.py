"""Checks before weights are read and kernels are compiled: of headers, settings and small files alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numflow import formats, network, registry
from numflow.decoding.structured import KINDS, check_grammar
from numflow.engine.request.facts import ModelFacts
from numflow.engine.request.sampling import CHAT, with_model_defaults
from numflow.engine.request.settings import Settings
from numflow.errors import RequestError, option


def check_settings(settings: Mapping[str, Any], has_draft: bool) -> None:
    """Refuse settings of a generation that no model accepts.

    Raises:
        RequestError: a name, a value or a grammar is wrong, or there is no draft model for speculate="draft".
        DeviceError: a package is missing.
    """
    checked = Settings.of(with_model_defaults(settings, CHAT))  # a placeholder for the model's temperature
    if checked.speculate == "draft" and not has_draft:
        raise RequestError(f"{option('speculate', 'draft')} needs a draft model: name one with {option('draft')}")
    for kind in KINDS:
        if getattr(checked, kind) is not None:
            check_grammar(kind, getattr(checked, kind))


def check_writes(model: ModelFacts) -> None:
    """Refuse a model that cannot generate text.

    Raises:
        RequestError: the model is an encoder, or has no output head.
    """
    if not model.causal:
        raise RequestError(f"{model.name} is an encoder: it cannot generate text; it is for {_purpose(model)}")
    if "logits" not in model.outputs:
        raise RequestError(f"{model.name} computes no logits: it has no output head")


def check_masked(model: ModelFacts) -> None:
    """Refuse a model that cannot fill masks.

    Raises:
        RequestError: the model is no masked language model, or has no output head.
    """
    if model.causal:
        raise RequestError(f"{model.name} is no masked language model: it cannot fill gaps; it is for "
                           f"{_purpose(model)}, {_suggestion('fill-mask')}")
    if "logits" not in model.outputs:
        raise RequestError(f"{model.name} computes no logits, which gaps are filled by: it has no output head; it "
                           f"is for {_purpose(model)}, {_suggestion('fill-mask')}")


def check_scores(model: ModelFacts) -> None:
    """Refuse a model that is neither a classifier nor a reranker.

    Raises:
        RequestError: the model has no score head.
    """
    if not model.labels:
        raise RequestError(f"{model.name} has no score head: it is neither a classifier nor a reranker; it is for "
                           f"{_purpose(model)}")


def check_translates(model: ModelFacts) -> None:
    """Refuse a model that cannot translate.

    Raises:
        RequestError: the model is no encoder-decoder.
    """
    if not model.encoder:
        raise RequestError(f"{model.name} has no encoder: it cannot translate; it is for {_purpose(model)}, "
                           f"{_suggestion('translate')}")


def _purpose(model: ModelFacts) -> str:
    """Purpose of a model, with the command for it."""
    if model.labels:
        return "scores of texts (numflow classify, numflow rerank)"
    if model.encoder:
        return "turning one text into another (numflow translate)"
    if model.causal:
        return "writing text (numflow generate, numflow chat)"
    return "filling gaps (numflow fill-mask)" if "logits" in model.outputs else "embeddings (numflow embed)"


def _suggestion(purpose: str) -> str:
    """Suggestion of a model for a purpose."""
    return f"{registry.default_model(purpose)} is a model for {purpose}"


def check_draft(model: ModelFacts, draft: str | Path, offline: bool, progress: bool) -> None:
    """Refuse a draft model with another vocabulary, if possible before its weights are fetched.

    Raises:
        RequestError: the draft model does not fit this model. As numflow.load: it cannot be found or read.
    """
    if model.encoder:
        raise RequestError(f"{model.name} is an encoder-decoder: a draft model cannot guess for it")
    token_ids = registry.token_ids(draft, offline)
    if token_ids is not None:
        _same_vocabulary(model, str(draft), token_ids)
    checkpoint = formats.open_checkpoint(registry.resolve(draft, offline=offline, progress=progress))
    found = ModelFacts.of(network.build(network.choose_spec(checkpoint, None), checkpoint))
    if not found.decoder or "logits" not in found.outputs:
        raise RequestError(f"{found.name} cannot guess tokens: a draft model is a decoder with an output head")
    _same_vocabulary(model, str(draft), found.vocabulary)


def _same_vocabulary(model: ModelFacts, draft: str, token_ids: int) -> None:
    if token_ids != model.vocabulary:
        raise RequestError(f"the draft model {draft} has {token_ids} token ids, {model.name} "
                           f"{model.vocabulary}: they need one vocabulary")

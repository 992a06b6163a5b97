"""Scores of texts, or of pairs of texts: classifiers and rerankers.

    head(hidden states of the whole text) -> one score for each label

The model's specification defines the head ([head] scores, modules score_dense, score_norm and score_output). The head
is small; it is computed here in NumPy on one pooled row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from numflow import network
from numflow.decoding.settings import checked_count, is_count
from numflow.engine.request.ahead import check_scores
from numflow.engine.request.facts import ModelFacts
from numflow.engine.request.prompt import SHRINKS, check_size
from numflow.engine.run.forward import Text, outputs
from numflow.engine.runner.suspects import finite
from numflow.engine.tasks.embedding import pool
from numflow.errors import FormatError, RequestError, SpecError, quoted
from numflow.ops import Network

ScoredText = str | tuple[str, str] | Sequence[int]


@dataclass(frozen=True)
class Ranked:
    """A document: its index in the input, its relevance 0 .. 1, its text."""

    index: int
    score: float
    text: str


@dataclass(frozen=True)
class ScoreHead:
    """scores = output norm(activation(dense x)), x [D] the pooled hidden states; parts that are None are left out.

    dense, output: (weight f32 [N, K], bias f32 [N] or None). norm: (kind, weight, bias, epsilon) of "rms" or "layer".
    labels: names of the scores. several: whether a text may have several labels (multi-label classification).
    tensors: names of the tensors of the head in the checkpoint.
    """

    pooling: str
    output: tuple[np.ndarray, np.ndarray | None]
    labels: tuple[str, ...]
    dense: tuple[np.ndarray, np.ndarray | None] | None = None
    activation: str = "tanh"
    norm: tuple[str, np.ndarray | None, np.ndarray | None, float] | None = None
    several: bool = False
    tensors: tuple[str, ...] = ()

    def __call__(self, hidden: np.ndarray) -> np.ndarray:
        """Scores float32 [labels] of hidden states [n, D]."""
        from numflow.reference.act import act
        from numflow.reference.linear import linear
        from numflow.reference.norm import layer_norm, rms_norm

        x = pool(hidden, self.pooling).astype(np.float32)[None]
        if self.dense is not None:
            x = act(linear(x, *self.dense), kind=self.activation)
        if self.norm is not None:
            kind, weight, bias, eps = self.norm
            x = (rms_norm(x, weight, eps=eps, groups=1) if kind == "rms"
                 else layer_norm(x, weight, bias, eps=eps, groups=1))
        return linear(x, *self.output)[0].astype(np.float32)

    def probabilities(self, scores: np.ndarray) -> np.ndarray:
        """Probabilities of scores float32 [..., labels]: by sigmoid for one or several labels, else by softmax."""
        if self.several or len(self.labels) == 1:
            from numflow.reference.act import sigmoid

            return sigmoid(scores)
        from numflow.reference.moe import softmax

        return softmax(scores)


def read_score_head(checkpoint, spec) -> ScoreHead | None:
    """Read the score head of a checkpoint; None if it has none.

    Raises:
        SpecError: a part of the head is missing, or has a shape that does not fit the others.
        FormatError: the label names of the configuration are invalid.
    """
    resolved, names = network.resolve(spec, checkpoint)
    if not resolved.option("head", "scores"):
        return None

    read = []

    def vector(module: str, role: str) -> np.ndarray | None:
        found = names.find(module, role)
        if found is None:
            return None
        read.append(found.name)
        return found.f32().reshape(-1)

    def affine(module: str, columns: int) -> tuple[np.ndarray, np.ndarray | None]:
        tensor = names.need(module)
        read.append(tensor.name)
        weight, bias = tensor.f32().reshape(tensor.rows, tensor.columns), vector(module, "bias")
        if weight.shape[1] != columns or (bias is not None and len(bias) != len(weight)):
            raise SpecError(f"{checkpoint.path}: tensor {tensor.name!r} is {list(weight.shape)}, but spec "
                            f"{spec.name!r} expects {columns} columns, and as many biases as rows")
        return weight, bias

    width = resolved.option("stack", "width")
    dense = affine("score_dense", width) if names.has("score_dense.weight") else None
    width, norm = width if dense is None else len(dense[0]), None
    if names.has("score_norm.weight"):
        norm = (resolved.option("norm", "kind"), vector("score_norm", "weight"), vector("score_norm", "bias"),
                resolved.option("norm", "eps"))
    output = affine("score_output", width)
    return ScoreHead(resolved.option("head", "score_pooling"), output, _labels(checkpoint, len(output[0])), dense,
                     resolved.option("head", "score_activation"), norm,
                     checkpoint.config.get("problem_type") == "multi_label_classification", tuple(read))


def _labels(checkpoint, count: int) -> tuple[str, ...]:
    """Label names of the configuration; "LABEL_i" without them."""
    where = checkpoint.files.get("config", checkpoint.path)
    named: Any = checkpoint.config.get("id2label")
    if checkpoint.naming == "gguf":
        architecture = checkpoint.config.get("general.architecture")
        named = dict(enumerate(checkpoint.config.get(f"{architecture}.classifier.output_labels") or ())) or None
    if named is None:
        return tuple(f"LABEL_{i}" for i in range(count))
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named.values()):
        raise FormatError(f"{where}: id2label: expected an object of numbers and names, found {quoted(named)}")
    by_index = {str(index): name for index, name in named.items()}
    return tuple(by_index.get(str(i), f"LABEL_{i}") for i in range(count))


def scores(model, texts: ScoredText | Sequence[ScoredText], truncate: bool, probabilities: bool) -> np.ndarray:
    """See Model.scores."""
    head = model.score_head
    single = _is_one(texts)
    if not single and not isinstance(texts, (Sequence, np.ndarray)):
        raise RequestError(f"scores needs a text, a pair of texts (a tuple), token ids, or a list of such, has "
                           f"{quoted(texts)}")
    several: Sequence = [texts] if single else texts
    found = [head(hidden) for hidden in outputs(model.core, [_text(model, text, index, truncate)
                                                             for index, text in enumerate(several, 1)], "hidden")]
    result = np.array(found, np.float32).reshape(len(several), len(head.labels))
    finite(model, result, "scores")
    result = head.probabilities(result) if probabilities else result
    return result[0] if single else result


def rerank(model, query: str, documents: Sequence[str], top_n: int | None, truncate: bool) -> list[Ranked]:
    """See Model.rerank."""
    if not isinstance(query, str) or isinstance(documents, str) or not all(isinstance(d, str) for d in documents):
        raise RequestError("rerank needs a query, a text, and documents, a list of texts")
    labels = len(model.score_head.labels)
    if labels > 2:
        raise RequestError(f"{model.network.name} has {labels} labels: a reranker has one, or two of which the second "
                           "stands for relevant; see Model.scores")
    if top_n is not None:
        top_n = checked_count("top_n", top_n, 1)
    if not documents:
        return []
    found = scores(model, [(query, document) for document in documents], truncate, True)[:, -1]
    order = np.argsort(-found, kind="stable")[:top_n]
    return [Ranked(int(i), float(found[i]), documents[i]) for i in order]


def _is_one(texts: Any) -> bool:
    """Whether `texts` is one text: a text, a pair of texts (a tuple), or token ids."""
    if isinstance(texts, str):
        return True
    if isinstance(texts, tuple) and len(texts) == 2 and all(isinstance(text, str) for text in texts):
        return True
    return _is_ids(texts) and len(texts) > 0


def _is_ids(value: Any) -> bool:
    return isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str) and all(map(is_count, value))


def _text(model, text: Any, index: int, truncate: bool) -> Text:
    """Checked ids of a text or pair, with special tokens."""
    name, limit = f"text {index}", model.context
    if _is_ids(text):
        return Text(model.facts.check(text, name))
    if not _is_one(text):
        raise RequestError(f"{name}: expected a text, a pair of texts (a tuple) or token ids, found {quoted(text)}")
    tokenizer, parts = model.tokenizer, (text,) if isinstance(text, str) else text
    if truncate:
        parts = tuple(part[:SHRINKS * limit * tokenizer.longest] for part in parts)
    for part in parts:
        check_size(tokenizer, part, limit, name)
    ids, types = _around(tokenizer, parts, limit if truncate else None)
    if len(ids) > limit:
        raise RequestError(f"{name} has {len(ids)} tokens; the model's limit is {limit}. Shorten it, or let it "
                           "be truncated (truncate)")
    has_types = any(step.op == "embed_type" for step in model.network.entries["main"])
    return Text(model.facts.check(ids, name), np.array(types, np.int32) if has_types and any(types) else None)


def _around(tokenizer, parts: tuple[str, ...], limit: int | None) -> tuple[list[int], list[int]]:
    """Ids and types of one text or a pair, with special tokens; the longer text is truncated to the limit."""
    encoded = [tokenizer.encode(part, add_special=False) for part in parts]
    ids, types = tokenizer.wrapping.apply(*encoded)
    while limit is not None and len(ids) > limit and any(encoded):
        longest = max(range(len(encoded)), key=lambda i: len(encoded[i]))
        other = max((len(e) for i, e in enumerate(encoded) if i != longest), default=0)
        cut = min(len(ids) - limit, max(1, len(encoded[longest]) - other))
        encoded[longest] = encoded[longest][:-cut]
        ids, types = tokenizer.wrapping.apply(*encoded)
    return ids, types


class Scored:
    """Methods of a Model for classifiers and rerankers."""

    facts: ModelFacts
    network: Network
    _scored_by: ScoreHead | None

    @property
    def score_head(self) -> ScoreHead:
        """The score head: labels, and functions from hidden states to scores and probabilities.

        Raises:
            RequestError: the model is neither a classifier nor a reranker.
        """
        check_scores(self.facts)
        if self._scored_by is None:
            raise RequestError(f"{self.network.name} was made without its score head")
        return self._scored_by

    def scores(self, texts: ScoredText | Sequence[ScoredText], *, truncate: bool = False,
               probabilities: bool = False) -> np.ndarray:
        """Scores of a text by a classifier or reranker: float32 [labels], [n, labels] of a list.

        A text may be a pair (a tuple: a query and a document), or token ids, which run unchanged.

        truncate:      truncate texts longer than the model's context, the longer text of a pair first; else an error.
        probabilities: return probabilities 0 .. 1: by softmax if labels exclude each other, else by sigmoid.

        Raises:
            RequestError: the model has no score head, or a text is too long or has no tokens.
            TokenizerError: the model has no tokenizer.
        """
        return scores(self, texts, truncate, probabilities)

    def rerank(self, query: str, documents: Sequence[str], top_n: int | None = None, *,
               truncate: bool = False) -> list[Ranked]:
        """Documents sorted by relevance to a query, best first.

        The model has one label, or two, of which the second means relevant.

        top_n: number of documents returned; None: all. truncate: as in `scores`.

        Raises:
            RequestError: as `scores` does, or the model has more labels.
            TokenizerError: the model has no tokenizer.
        """
        return rerank(self, query, documents, top_n, truncate)

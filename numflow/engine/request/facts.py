"""Facts of a model that requests are checked against."""

from dataclasses import dataclass

import numpy as np

from numflow.errors import RequestError
from numflow.ops import Network


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model that a request needs.

    name:       name of the network. context: maximum tokens of a text. vocabulary: number of token ids.
    causal:     whether attention is causal; tokens of an encoder attend to the whole text.
    encoder:    whether an encoder reads a text before the decoder generates one.
    outputs:    outputs of the network: "logits", "hidden", ...
    decoder_start, forced_first: first token of an encoder-decoder, and the token forced after it; None if the network
                names none.
    labels:     number of scores of a text, of a classifier or reranker; 0 for other models.
    """

    name: str
    context: int
    vocabulary: int
    causal: bool = True
    encoder: bool = False
    outputs: frozenset[str] = frozenset({"logits", "hidden"})
    decoder_start: int | None = None
    forced_first: int | None = None
    labels: int = 0

    @classmethod
    def of(cls, network: Network) -> "ModelFacts":
        """The facts of a network."""
        facts = network.facts
        return cls(network.name, facts["context"], facts["vocabulary"], facts["type"] != "encoder",
                   "encode" in network.entries, frozenset(network.outputs), facts.get("decoder_start_token"),
                   facts.get("forced_bos_token"), facts.get("labels", 0))

    @property
    def decoder(self) -> bool:
        """Whether the model is a decoder-only model, not an encoder or encoder-decoder."""
        return self.causal and not self.encoder

    def check(self, ids, what: str = "prompt") -> np.ndarray:
        """Ids as i32 [n].

        Raises:
            RequestError: no ids, values that are no ids of the vocabulary, or more ids than the context.
        """
        try:
            array = np.asarray(ids)
        except ValueError as error:  # a ragged list
            raise RequestError(f"{what} should be a list of token ids: {error}") from None
        if array.size == 0:
            raise RequestError(f"{what} is empty: at least one token is needed")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise RequestError(f"{what} should be a list of token ids, is {array.dtype} {list(array.shape)}")
        outside = array[(array < 0) | (array >= self.vocabulary)]
        if len(outside):
            raise RequestError(f"{what} has token id {outside[0]}; the vocabulary is 0 .. {self.vocabulary - 1}")
        if len(array) > self.context:
            raise RequestError(f"{what} has {len(array)} tokens; the model's context is {self.context} tokens")
        return array.astype(np.int32)

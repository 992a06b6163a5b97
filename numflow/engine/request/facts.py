"""The facts of a model that requests are checked against."""

from dataclasses import dataclass

import numpy as np

from numflow.errors import RequestError
from numflow.ops import Network


@dataclass(frozen=True)
class ModelFacts:
    """A model as far as a request has to know it.

    name:       of its network. context: tokens of the longest text. vocabulary: number of token ids.
    causal:     whether a token sees only those before it; an encoder's see all of the text.
    encoder:    whether an encoder reads a text before the decoder writes one.
    outputs:    that the network computes: "logits", "hidden", ...
    decoder_start, forced_first: an encoder-decoder's first token, and the one that is forced after it; None where the
                network names none.
    labels:     scores of a text, by a classifier or reranker; 0 of all others.
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
        """Whether the model says what follows a text; encoders and encoder-decoders do not."""
        return self.causal and not self.encoder

    def check(self, ids, what: str = "prompt") -> np.ndarray:
        """Ids as i32 [n].

        Raises:
            RequestError: no ids, not whole numbers, out of the vocabulary, or more than the context.
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

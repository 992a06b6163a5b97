"""A model ready to run: logits, hidden states and generation."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from numflow.engine.batch import Text, outputs
from numflow.engine.embedding import embed
from numflow.engine.generation import Generation, Piece, Stream, TextStream, Timing
from numflow.engine.masks import Filling, fill_mask
from numflow.engine.prompt import Prompts
from numflow.engine.recipe import Recipe
from numflow.engine.sampling import Sampler, Sampling
from numflow.engine.sequence import Runner
from numflow.errors import RequestError, TokenizerError
from numflow.ops import Network, TraceRow


@dataclass(frozen=True)
class _Request:
    """A checked generation request. prompt: ids the (only or encoder) stack reads first; prefix: the decoder's."""

    prompt: np.ndarray
    prefix: np.ndarray
    max_tokens: int
    ends: frozenset[int]
    stops: tuple[str, ...]
    continues: bool


class Model:
    """A network bound to an executor. May be used by several threads; their batches alternate.

    tokenizer: function that loads it, called when text is first met; without one only ids are understood.
    ends, bos: ids that end a text, and the one that starts it, for use without a tokenizer.
    template, system_prompt: the specification's own prompt template, "" if it has none.
    chunk:     rows of a prompt that run at once.
    recipe:    function that tells how embeddings are made, called when one is first wanted.
    """

    def __init__(self, network: Network, program, tokenizer: Callable[[], Any] | None = None,
                 ends: frozenset[int] = frozenset(), bos: int | None = None, template: str = "",
                 system_prompt: str = "", chunk: int = 512, recipe: Callable[[], Recipe] | None = None):
        self.network = network
        self.program = program
        self.runner = Runner(network, program, chunk)
        self.load_s = 0.0
        self._load_tokenizer = tokenizer
        self._load_recipe = recipe
        self._prompts = Prompts(lambda: self.tokenizer, template, system_prompt)
        self._ends = ends
        self._bos = bos

    @cached_property
    def tokenizer(self):
        """The model's tokenizer.

        Raises:
            TokenizerError: the model came without one.
        """
        if self._load_tokenizer is None:
            raise TokenizerError(f"{self.network.name} has no tokenizer; give token ids instead of text")
        return self._load_tokenizer()

    @property
    def context(self) -> int:
        """Longest text in tokens, prompt and answer together."""
        return self.runner.context

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.runner.vocabulary

    def logits(self, ids: Sequence[int], token_type_ids: Sequence[int] | None = None,
               encoder_ids: Sequence[int] | None = None) -> np.ndarray:
        """Logits at every position, float32 [len(ids), vocabulary]. Encoder-decoders: ids are the decoder's.

        Raises:
            RequestError: bad ids, more than the context, or a model without a head.
        """
        return self._gather("logits", ids, token_type_ids, encoder_ids)

    def hidden(self, ids: Sequence[int], token_type_ids: Sequence[int] | None = None) -> np.ndarray:
        """Hidden states after the last norm, float32 [len(ids), width]; of the encoder, if the model has one.

        Raises:
            RequestError: bad ids, or more than the context.
        """
        if not self.runner.has_encoder:
            return self._gather("hidden", ids, token_type_ids, None)
        if token_type_ids is not None:
            raise RequestError(f"{self.network.name} has no token types")
        return next(outputs(self.runner, [Text(self.runner.check(ids, "encoder_ids"))], "encoder_hidden"))

    def logits_batch(self, texts: Sequence[Sequence[int]],
                     encoder_texts: Sequence[Sequence[int]] | None = None) -> list[np.ndarray]:
        """`logits` of several texts that run side by side: float32 [len(ids), vocabulary] of each.

        encoder_texts: encoder-decoders: what the encoder reads for each.

        Raises:
            RequestError: as `logits` does, or there are not as many encoder_texts.
        """
        self._check_output("logits")
        sources = [None] * len(texts) if encoder_texts is None else encoder_texts
        if len(sources) != len(texts):
            raise RequestError(f"{len(texts)} texts need as many encoder_texts, there are {len(sources)}")
        pairs = [Text(self.runner.check(ids, "ids"), None, self._check_encoder(source))
                 for ids, source in zip(texts, sources)]
        return list(outputs(self.runner, pairs, "logits"))

    def embed(self, texts: str | Sequence[str], normalize: bool | None = True, pooling: str | None = None, *,
              truncate: bool = False, prompt: str | None = None) -> np.ndarray:
        """Embeddings of texts: float32 [width] of one text, [n, width] of a list.

        How hidden states become an embedding is read from the files beside the weights (modules.json and what it
        names), else from the specification's [generation] pooling.

        normalize: make every embedding as long as 1; None: only if the model's files say so.
        pooling:   instead of the model's own: cls, max, mean, mean_sqrt_len, weighted_mean or last.
        truncate:  cut texts that are longer than the model's limit; else they are an error.
        prompt:    name of one of the model's prompts, put in front of every text; None: the model's default, if any.

        Raises:
            RequestError: no pooling is known, a text is too long or has no tokens, or there is no such prompt.
            TokenizerError: the model has no tokenizer.
            FormatError: one of the files is broken.
        """
        return embed(self, self._recipe, texts, normalize, pooling, truncate, prompt)

    @cached_property
    def _recipe(self) -> Recipe:
        return self._load_recipe() if self._load_recipe is not None else Recipe()

    def fill_mask(self, text: str, top_k: int = 5) -> list[list[Filling]]:
        """For every mask token of a text ("[MASK]", "<mask>"), the top_k most probable tokens, best first.

        Raises:
            RequestError: not a masked language model, a model without output head, or a text without mask tokens.
            TokenizerError: the model has no tokenizer.
        """
        return fill_mask(self, text, top_k)

    def iter_logits(self, ids: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """As `logits`, in pieces of bounded size: yields (start, float32 [n, vocabulary])."""
        checked = self.runner.check(ids, "ids")
        self._check_output("logits")
        with self.runner.open(len(checked)) as sequence:
            yield from sequence.rows(checked)

    def _gather(self, output, ids, token_type_ids, encoder_ids) -> np.ndarray:
        ids, encoder_ids = self.runner.check(ids, "ids"), self._check_encoder(encoder_ids)
        self._check_output(output)
        return next(outputs(self.runner, [Text(ids, self._check_types(ids, token_type_ids), encoder_ids)], output))

    def _check_output(self, output) -> None:
        if output not in self.network.outputs:
            raise RequestError(f"{self.network.name} computes no {output}: it has no output head")

    def _check_encoder(self, encoder_ids):
        if self.runner.has_encoder != (encoder_ids is not None):
            needed = "needs encoder_ids" if self.runner.has_encoder else "has no encoder: it takes no encoder_ids"
            raise RequestError(f"{self.network.name} {needed}")
        return None if encoder_ids is None else self.runner.check(encoder_ids, "encoder_ids")

    def _check_types(self, ids, token_type_ids):
        if token_type_ids is None:
            return None
        tables = [step.weights["table"] for step in self.network.entries["main"] if step.op == "embed_type"]
        if not tables:
            raise RequestError(f"{self.network.name} has no token types")
        types, count = np.asarray(token_type_ids), self.network.weights[tables[0]].shape[0]
        if types.shape != ids.shape or types.dtype.kind not in "iu" or np.any((types < 0) | (types >= count)):
            raise RequestError(f"token_type_ids should be {len(ids)} whole numbers 0 .. {count - 1}")
        return types.astype(np.int32)

    def generate(self, prompt: str | Sequence[int] | Sequence[Mapping], max_tokens: int | None = 64,
                 temperature: float = 0.0, ignore_eos: bool = False, stream: bool = False, *, seed: int | None = None,
                 top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, stop: str | Sequence[str] = (),
                 chat: bool = False, decoder_ids: Sequence[int] | None = None) -> Generation | Stream:
        """Continue a prompt.

        prompt:      text, token ids, or chat messages ({"role", "content"}). Encoder-decoders: what the encoder reads.
        max_tokens:  new tokens at most; None: as many as the context holds.
        stream:      return a Stream that iterates the text's pieces as they come.
        stop:        text (or texts) that end the generation; not part of the result.
        chat:        put the prompt into the model's chat template.
        decoder_ids: encoder-decoders: the decoder's first tokens, instead of the model's own.

        Raises:
            RequestError: settings or ids out of range, or a prompt longer than the context.
            TokenizerError: text or stop strings, and no tokenizer; chat, and no template.
        """
        sampler = Sampler(Sampling(temperature, top_k, top_p, min_p, seed))
        request = self._request(prompt, max_tokens, ignore_eos, stop, chat, decoder_ids)
        result = Generation()
        run = Stream(self._generate(request, sampler, result), result)
        if stream:
            return run
        for _ in run:
            pass
        return result

    def _request(self, prompt, max_tokens, ignore_eos, stop, chat, decoder_ids) -> _Request:
        if not self.runner.causal:
            raise RequestError(f"{self.network.name} is an encoder: it cannot generate text")
        if max_tokens is None:
            max_tokens = self.context
        if not isinstance(max_tokens, (int, np.integer)) or isinstance(max_tokens, bool) or max_tokens < 0:
            raise RequestError(f"max_tokens should be a whole number from 0, is {max_tokens!r}")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(text, str) and text for text in stops):
            raise RequestError(f"stop should be texts that are not empty, is {stop!r}")
        if stops:
            self.tokenizer  # noqa: B018  stop strings need one: say so before anything runs
        self._check_output("logits")
        ids = self._prompts.ids(prompt, chat)
        bos = self._bos_id() if len(ids) == 0 else None
        prompt = self.runner.check(ids if bos is None else [bos])
        prefix, continues = prompt, not chat
        if self.runner.has_encoder:
            prefix, continues = self.runner.check(self._prefix(decoder_ids), "decoder_ids"), False
        elif decoder_ids is not None:
            raise RequestError(f"{self.network.name} has no encoder: it takes no decoder_ids")
        ends = frozenset() if ignore_eos else self._end_ids()
        return _Request(prompt, prefix, int(max_tokens), ends, stops, continues)

    def _prefix(self, decoder_ids) -> Sequence[int]:
        """The decoder's first tokens: those given, else its start token and the one that is forced after it."""
        if decoder_ids is not None:
            return decoder_ids
        start, forced = (self.network.facts.get(key) for key in ("decoder_start_token", "forced_bos_token"))
        if start is None:
            raise RequestError(f"{self.network.name} names no decoder start token; give decoder_ids")
        return [start] if forced is None else [start, forced]

    @cached_property
    def _tokenizer_if_any(self):
        """The tokenizer, or None: ids alone can do without one."""
        try:
            return self.tokenizer
        except TokenizerError:
            return None

    def _bos_id(self) -> int | None:
        return self._tokenizer_if_any.bos_id if self._tokenizer_if_any else self._bos

    def _end_ids(self) -> frozenset[int]:
        return self._ends | self._tokenizer_if_any.eos_ids if self._tokenizer_if_any else self._ends

    def _generate(self, request: _Request, sampler: Sampler, result: Generation) -> Generator[Piece, None, None]:
        """Fill `result` token by token; yields the text that became certain with each."""
        timing = Timing(len(request.prompt))
        encoder_ids = request.prompt if self.runner.has_encoder else None
        text = TextStream(self._decoder(request), request.stops)
        if request.max_tokens > 0:
            limit = min(self.context, len(request.prefix) + request.max_tokens)
            with self.runner.open(limit, encoder_ids) as sequence:
                for id in self._tokens(sequence, request, sampler, result, timing):
                    yield result.add(Piece(text.push(id), id))
                    if text.stopped:
                        break
        last = Piece(text.flush())
        if text.stopped:
            result.finish_reason = "stop_string"
        result.finish_reason = result.finish_reason or "length"
        result.stats = timing.stats(result)
        yield result.add(last)

    def _tokens(self, sequence, request, sampler, result, timing) -> Iterator[int]:
        """New token ids until an end token, max_tokens or the end of the context."""
        ids = request.prefix
        while True:
            id = sampler.pick(sequence.last(ids))
            timing.token()
            if id in request.ends:
                result.finish_reason = "stop"
                return
            result.ids.append(id)
            yield id
            if len(result.ids) == request.max_tokens or sequence.length == self.context:
                return
            ids = np.array([id], np.int32)

    def _decoder(self, request: _Request):
        """Text decoder of the new tokens. It keeps a leading space where the text goes on after a prompt."""
        if not self._tokenizer_if_any:
            return None
        goes_on = request.continues and any(int(id) not in self.tokenizer.special_ids for id in request.prompt)
        return self.tokenizer.stream(continues=goes_on)

    def trace(self, prompt: str | Sequence[int] = ()) -> list[TraceRow]:
        """One decoding step after a prompt, a row per step of the network.

        Raises:
            RequestError, TokenizerError: as `generate` does.
        """
        request = self._request(prompt, 1, True, (), False, None)
        encoder_ids = request.prompt if self.runner.has_encoder else None
        with self.runner.open(len(request.prefix), encoder_ids) as sequence:
            if len(request.prefix) > 1:
                sequence.last(request.prefix[:-1])
            return self.runner.trace(sequence, request.prefix[-1:])

    def close(self) -> None:
        """Free the executor's memory and threads."""
        self.program.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

"""A model ready to run: logits, hidden states and generation."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from numflow.engine.adapters.loaded import Adapters
from numflow.engine.request.adapter import without_adapters
from numflow.engine.request.ahead import check_translates
from numflow.engine.request.budget import Budget
from numflow.engine.request.defaults import Defaults
from numflow.engine.request.prompt import Prompts, is_conversation
from numflow.engine.request.request import Request, Requests, Settings
from numflow.engine.request.sampling import Source, model_sampling, with_model_defaults
from numflow.engine.run.core import Core
from numflow.engine.run.forward import Text, outputs
from numflow.engine.run.generation import Generation
from numflow.engine.run.streaming import Stream, together
from numflow.engine.run.walk import Walk, trace, walk
from numflow.engine.runner.runner import Runner
from numflow.engine.runner.scoring import Likelihood, loglikelihoods, prompt_logprobs
from numflow.engine.runner.texts import types_of
from numflow.engine.speculate.drafters import check_draft
from numflow.engine.tasks.embedding import Texts, embed
from numflow.engine.tasks.embedding_recipe import EmbeddingRecipe
from numflow.engine.tasks.fill_mask import Filling, fill_mask
from numflow.engine.tasks.scores import Scored, ScoreHead
from numflow.engine.tasks.translation import Languages, languages, translations
from numflow.errors import RequestError, TokenizerError
from numflow.executor.contract import TraceRow
from numflow.ops import Network


class Model(Scored):
    """A network bound to an executor. Several threads may use it; their batches alternate.

    tokenizer: function that loads the tokenizer, called at the first text; without a tokenizer, prompts are ids.
    ends, bos: end token ids and the start token id, for use without a tokenizer.
    template, system_prompt: the specification's prompt template, "" without one.
    chunk:     rows of a prompt in one run.
    recipe:    function that reads the embedding recipe, called at the first embedding.
    defaults:  function that reads the generation defaults of the model's files, called at the first generation.
    listed:    function that returns the sampling settings in the list of models.
    scored_by: score head of a classifier or reranker.
    """

    def __init__(self, network: Network, program, tokenizer: Callable[[], Any] | None = None,
                 ends: frozenset[int] = frozenset(), bos: int | None = None, template: str = "",
                 system_prompt: str = "", chunk: int = 512, recipe: Callable[[], EmbeddingRecipe] = EmbeddingRecipe,
                 defaults: Callable[[], Defaults] = Defaults, listed: Callable[[], Mapping[str, Any]] = dict,
                 scored_by: ScoreHead | None = None):
        self.network, self.program = network, program
        self.runner = Runner(network, program, chunk)
        self.facts = self.runner.facts
        self.core = Core(self.runner)
        self.load_s, self.bits_per_weight = 0.0, 0.0  # bits_per_weight: stored bits of matrices, headers included
        self._load_tokenizer = tokenizer
        self._load_recipe = recipe
        self._listed, self._scored_by = listed, scored_by
        self.owns_draft = False  # whether the draft model is closed with this one
        self.prompts = Prompts(lambda: self.tokenizer, template, system_prompt, self.facts.context)
        self._requests = Requests(self.facts, self.prompts, lambda: self.tokenizer, ends, bos, defaults,
                                  self.runner.longest)
        self._draft: Model | None = None
        self.adapters: Adapters | None = None  # adapters that requests choose by name; None: loaded without adapters
        self._requests.adapter = lambda name: (without_adapters if self.adapters is None else self.adapters.find)(name)

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
    def has_template(self) -> bool:
        """Whether the model or its specification has a prompt template, which `chat` needs.

        Raises:
            TokenizerError: the model has no tokenizer.
        """
        return self.prompts.has_template

    @property
    def context(self) -> int:
        """Maximum tokens of a text, prompt and generated tokens together."""
        return self.facts.context

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.facts.vocabulary

    @property
    def is_decoder(self) -> bool:
        """Whether the model is a decoder-only model, not an encoder or encoder-decoder."""
        return self.facts.decoder

    def logits(self, ids: Sequence[int], token_type_ids: Sequence[int] | None = None,
               encoder_ids: Sequence[int] | None = None, adapter: str | None = None) -> np.ndarray:
        """Logits at every position, float32 [len(ids), vocabulary]. Encoder-decoders: ids are the decoder's.

        adapter: name of one of `adapters`; None: the base model alone.

        Raises:
            RequestError: invalid ids, more ids than the context, a model without output head, or an unknown adapter.
        """
        return self._gather("logits", ids, token_type_ids, encoder_ids, adapter)

    def hidden(self, ids: Sequence[int], token_type_ids: Sequence[int] | None = None,
               encoder_ids: Sequence[int] | None = None, adapter: str | None = None) -> np.ndarray:
        """Hidden states after the last norm, float32 [len(ids), width].

        encoder_ids: encoder-decoders: ids of the encoder, `ids` are the decoder's; None: `ids` are the encoder's.

        Raises:
            RequestError: invalid ids, more ids than the context, or an unknown adapter.
        """
        if not self.facts.encoder or encoder_ids is not None:
            return self._gather("hidden", ids, token_type_ids, encoder_ids, adapter)
        if token_type_ids is not None:
            raise RequestError(f"{self.network.name} has no token types")
        text = Text(self.facts.check(ids, "encoder_ids"), adapter=self._requests.find_adapter(adapter))
        return next(outputs(self.core, [text], "encoder_hidden"))

    def logits_batch(self, texts: Sequence[Sequence[int]], encoder_texts: Sequence[Sequence[int]] | None = None,
                     adapters: Sequence[str | None] | None = None) -> list[np.ndarray]:
        """`logits` of several texts in the same batches: float32 [len(ids), vocabulary] of each.

        encoder_texts: encoder-decoders: ids of the encoder for each text. adapters: adapter of each text.

        Raises:
            RequestError: as `logits`, or the number of encoder_texts or adapters differs from the number of texts.
        """
        self._check_output("logits")
        sources = [None] * len(texts) if encoder_texts is None else encoder_texts
        names = [None] * len(texts) if adapters is None else adapters
        for name, count in (("encoder_texts", len(sources)), ("adapters", len(names))):
            if count != len(texts):
                raise RequestError(f"{len(texts)} texts need as many {name}, there are {count}")
        pairs = [Text(self.facts.check(ids, "ids"), None, self._check_encoder(source),
                      self._requests.find_adapter(name))
                 for ids, source, name in zip(texts, sources, names)]
        return list(outputs(self.core, pairs, "logits"))

    def embed(self, texts: Texts, normalize: bool | None = True, pooling: str | None = None, *,
              truncate: bool = False, prompt: str | None = None, dimensions: int | None = None,
              instruction: str | None = None) -> np.ndarray:
        """Embeddings of texts: float32 [width] of one text, [n, width] of a list.

        A text may be given as token ids, which run unchanged, without special tokens added.

        The steps from hidden states to an embedding are read from the model's files (modules.json and the files that it
        names), else from the specification's [generation] pooling.

        normalize: normalise every embedding to length 1; None: only if the model's files specify it.
        pooling:   pooling instead of the model's: cls, max, mean, mean_sqrt_len, weighted_mean or last.
        truncate:  truncate texts longer than the model's limit; else such texts are an error.
        prompt:    name of one of the model's prompts, prepended to every text; None: the model's default, if any.
        dimensions: return only the first values, normalised again if embeddings are normalised (Matryoshka). If the
                   model's config.json lists `matryoshka_dimensions`, one of these.
        instruction: replaces the instruction in the model's prompt ("Instruct: ...").

        Raises:
            RequestError: no pooling is known, a text is too long or has no tokens, or an unknown prompt.
            TokenizerError: the model has no tokenizer.
            FormatError: one of the files is damaged.
        """
        return embed(self, self._recipe, texts, normalize, pooling, truncate, prompt, dimensions, instruction)

    @cached_property
    def _recipe(self) -> EmbeddingRecipe:
        return self._load_recipe()

    def fill_mask(self, text: str, top_k: int = 5) -> list[list[Filling]]:
        """The top_k most probable tokens for every mask token of a text ("[MASK]", "<mask>"), best first.

        Raises:
            RequestError: not a masked language model, a model without output head, or a text without mask tokens.
            TokenizerError: the model has no tokenizer.
        """
        return fill_mask(self, text, top_k)

    def iter_logits(self, ids: Sequence[int], every: int = 1) -> Iterator[tuple[int, np.ndarray]]:
        """As `logits`, in pieces of bounded size: yields (start, float32 [n, vocabulary]), the logits of positions
        start, start + every, ... Not for encoder-decoders."""
        checked = self.facts.check(ids, "ids")
        self._check_encoder(None)
        self._check_output("logits")
        with self.runner.open(len(checked)) as sequence:
            yield from sequence.rows(checked, every=every)

    def _gather(self, output, ids, token_type_ids, encoder_ids, adapter) -> np.ndarray:
        ids, read = self.facts.check(ids, "ids"), self._check_encoder(encoder_ids)
        self._check_output(output)
        text = Text(ids, types_of(self.network, ids, token_type_ids), read, self._requests.find_adapter(adapter))
        return next(outputs(self.core, [text], output))

    def _check_output(self, output) -> None:
        if output not in self.network.outputs:
            raise RequestError(f"{self.network.name} computes no {output}: it has no output head")

    def _check_encoder(self, encoder_ids):
        if self.facts.encoder != (encoder_ids is not None):
            needed = "needs encoder_ids" if self.facts.encoder else "has no encoder: it takes no encoder_ids"
            raise RequestError(f"{self.network.name} {needed}")
        return None if encoder_ids is None else self.facts.check(encoder_ids, "encoder_ids")

    def generate(self, prompt: str | Sequence[int] | Sequence[Mapping], max_tokens: int | None = 64,
                 temperature: float | None = None, ignore_eos: bool = False, stream: bool = False,
                 **settings: Any) -> Generation | Stream:
        """Continue a prompt.

        prompt:     text, token ids, or chat messages ({"role", "content"}). Encoder-decoders: text of the encoder.
        stream:     return a Stream: an iterator over pieces of text, of all n samples.
        max_tokens, temperature, ignore_eos, settings: see Settings (seed, top_k, top_p, min_p, stop, chat, num_beams,
                    n, logprobs, json_schema, speculate, ...), and docs/decoding.md. temperature None: 0, or the value
                    of decoding_alg; for a conversation (chat, messages) the value of `sampling`.

        Raises:
            RequestError: settings or ids out of range, settings that contradict each other, or a prompt longer than
                the context.
            TokenizerError: text or stop strings, and no tokenizer; chat, and no template.
        """
        named = {"max_tokens": max_tokens, "temperature": temperature, "ignore_eos": ignore_eos}
        request = self.request(prompt, named | settings)
        if request.beams is not None:
            if stream:
                raise RequestError("a beam search knows its text only at the end: leave out stream or num_beams")
            return together(self.core, [request], self.text_decoder)[0]
        if stream and request.samples > request.n:
            raise RequestError("best_of chooses at the end: leave out stream or best_of")
        if request.samples > request.n:
            return together(self.core, [request], self.text_decoder)[0]
        run = Stream(self.core, request, self.text_decoder)
        if stream:
            return run
        for _ in run:
            pass
        return run.result

    def generate_batch(self, prompts: Sequence[str | Sequence[int] | Sequence[Mapping]],
                       **settings: Any) -> list[Generation]:
        """Continue several prompts in the same batches; each result is the same as with `generate`.

        settings: see Settings.

        Raises:
            RequestError, TokenizerError: as `generate` does.
        """
        return together(self.core, [self.request(prompt, settings) for prompt in prompts], self.text_decoder)

    def loglikelihood(self, context: Sequence[int], continuation: Sequence[int]) -> Likelihood:
        """Log-likelihood of a continuation, and whether greedy decoding gives it; see `loglikelihoods`."""
        return self.loglikelihoods([(context, continuation)])[0]

    def loglikelihoods(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Likelihood]:
        """Log-likelihoods of continuations of contexts, for evaluation harnesses.

        pairs: token ids of a context and of its continuation. An empty context stands for the start token. A repeated
               context runs once; other pairs run in the same batches.

        Raises:
            RequestError: invalid ids, more ids than the context, no output head, or an encoder-decoder.
        """
        self._check_output("logits")
        if not self.is_decoder:
            raise RequestError(f"{self.network.name} is no decoder: it continues no context")
        return loglikelihoods(self.runner, pairs, self._requests.bos_id)

    @property
    def draft(self) -> "Model | None":
        """Draft model for speculative decoding; set it, or load with draft=.

        Raises:
            RequestError: the draft model has another vocabulary, or is no decoder.
        """
        return self._draft

    @draft.setter
    def draft(self, draft: "Model | None") -> None:
        if draft is not None:
            check_draft(self, draft)
        self._draft, self._requests.has_draft = draft, draft is not None
        self.core.drafters.use(None if draft is None else draft.runner)

    def drafts_with(self, network: Network, program) -> None:
        """Set a draft block, which reads this model's streams (network/build/draft.py). It is closed with the model."""
        self._requests.has_draft = True
        self.core.drafters.use(Runner(network, program, self.runner.chunk), True)

    @cached_property
    def languages(self) -> Languages:
        """Languages with a token in the vocabulary.

        Raises:
            TokenizerError: the model has no tokenizer.
        """
        return languages(self.tokenizer)

    def translate(self, texts: str | Sequence[str], source: str | None = None, target: str | None = None,
                  **settings: Any) -> Generation | list[Generation]:
        """Translate a text, or several texts in the same batches.

        source, target: languages as named in the model's vocabulary (`languages`), such as "en", "eng_Latn" or "en_XX".
                  A model with one source language takes no source; a model for a single pair takes neither.
        settings: see Settings. Defaults of max_tokens and num_beams are those of the model's files; one beam if
                  temperature or stop is given.

        Raises:
            RequestError: not an encoder-decoder, a language is missing or unknown, a text is too long, or as
                `generate` does.
            TokenizerError: the model has no tokenizer.
        """
        requests = self.translation_requests(texts, source, target, **settings)
        results = together(self.core, requests, self.text_decoder)
        return results[0] if isinstance(texts, str) else results

    def translation_requests(self, texts: str | Sequence[str], source: str | None = None, target: str | None = None,
                             budget: Budget | None = None, **settings: Any) -> list[Request]:
        """Checked requests of a translation, for an engine. budget: limits on each request; None: no limits.

        Raises:
            RequestError, TokenizerError: as `translate` does.
        """
        check_translates(self.facts)
        return translations(self.tokenizer, self.languages, self._requests, texts, source, target, settings, budget)

    def request(self, prompt: str | Sequence[int] | Sequence[Mapping], settings: Mapping[str, Any] | Settings,
                budget: Budget | None = None) -> Request:
        """A checked request, for an engine. The settings of a conversation are completed by `sampling`.

        settings: see Settings; a Settings object is used unchanged. budget: limits on the request; None: no limits.

        Raises:
            RequestError, TokenizerError: as `generate` does.
        """
        if not isinstance(settings, Settings):
            if settings.get("chat") or is_conversation(prompt):
                settings = with_model_defaults(settings, self.sampling.values)
            settings = Settings.of(settings)
        request = self._requests.make(prompt, settings, budget=budget)
        if request.scored is None:
            return request
        return replace(request, prompt_logprobs=prompt_logprobs(self.runner, request))

    @cached_property
    def sampling(self) -> Source:
        """Default sampling settings of a conversation, and their source (sampling.py).

        Raises:
            FormatError: one of the model's files is damaged.
        """
        return model_sampling(self._requests.defaults.sampling, self._listed(), self.is_decoder)

    def text_decoder(self, request: Request):
        """Incremental detokenizer of a request's new tokens, None without a tokenizer.

        It keeps a leading space if the text continues a prompt.
        """
        if not self._requests.tokenizer:
            return None
        if request.grammar is not None:
            return self.tokenizer.stream(continues=True)  # exactly the text that the grammar saw
        continues = request.continues and any(int(id) not in self.tokenizer.special_ids for id in request.prompt)
        return self.tokenizer.stream(continues=continues)

    def trace(self, prompt: str | Sequence[int] | Sequence[Mapping] = (), chat: bool = False,
              repeat: int = 5) -> list[TraceRow]:
        """One decoding step after a prompt, a row per step of the network; prompt, chat and errors as of `generate`.

        Times are medians of `repeat` consecutive runs; a first warm-up run does not count.
        """
        return trace(self, prompt, chat, repeat)

    def walk(self, prompt: str | Sequence[int] | Sequence[Mapping], chat: bool = False, lens: bool = False) -> Walk:
        """As `trace`, with ids, values of each step and the most probable next tokens; lens: also after each layer."""
        return walk(self, prompt, chat, lens)

    def close(self) -> None:
        """Free memory and threads of the executor, and of a draft model that was loaded with the model."""
        self.program.close()
        self.core.drafters.close()
        if self.owns_draft and self.draft is not None:
            self.draft.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

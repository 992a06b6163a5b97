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
from numflow.engine.request.sampling import Source, chosen, filled
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
    """A network bound to an executor. May be used by several threads; their batches alternate.

    tokenizer: function that loads it, called when text is first met; without one only ids are understood.
    ends, bos: ids that end a text, and the one that starts it, for use without a tokenizer.
    template, system_prompt: the specification's own prompt template, "" if it has none.
    chunk:     rows of a prompt that run at once.
    recipe:    function that tells how embeddings are made, called when one is first wanted.
    defaults:  function that tells what the model's own files say about generating, called when a text is.
    listed:    function that tells what the list of models says of sampling.
    scored_by: what makes scores of hidden states, of a classifier or reranker.
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
        self.load_s, self.bits_per_weight = 0.0, 0.0  # of its matrices as they are stored, every byte counted
        self._load_tokenizer = tokenizer
        self._load_recipe = recipe
        self._listed, self._scored_by = listed, scored_by
        self.owns_draft = False  # whether the draft model is closed with this one
        self.prompts = Prompts(lambda: self.tokenizer, template, system_prompt, self.facts.context)
        self._requests = Requests(self.facts, self.prompts, lambda: self.tokenizer, ends, bos, defaults,
                                  self.runner.longest)
        self._draft: Model | None = None
        self.adapters: Adapters | None = None  # that requests choose by name; None: loaded without any
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
        """Whether the model, or its specification, has a prompt template: what `chat` needs.

        Raises:
            TokenizerError: the model has no tokenizer.
        """
        return self.prompts.has_template

    @property
    def context(self) -> int:
        """Longest text in tokens, prompt and answer together."""
        return self.facts.context

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.facts.vocabulary

    @property
    def is_decoder(self) -> bool:
        """Whether it says what follows a text; encoders and encoder-decoders do not."""
        return self.facts.decoder

    def logits(self, ids: Sequence[int], token_type_ids: Sequence[int] | None = None,
               encoder_ids: Sequence[int] | None = None, adapter: str | None = None) -> np.ndarray:
        """Logits at every position, float32 [len(ids), vocabulary]. Encoder-decoders: ids are the decoder's.

        adapter: name of one of `adapters`; None: the base alone.

        Raises:
            RequestError: bad ids, more than the context, a model without a head, or no such adapter.
        """
        return self._gather("logits", ids, token_type_ids, encoder_ids, adapter)

    def hidden(self, ids: Sequence[int], token_type_ids: Sequence[int] | None = None,
               encoder_ids: Sequence[int] | None = None, adapter: str | None = None) -> np.ndarray:
        """Hidden states after the last norm, float32 [len(ids), width].

        encoder_ids: encoder-decoders: what the encoder reads, ids are the decoder's; None: ids are the encoder's.

        Raises:
            RequestError: bad ids, more than the context, or no such adapter.
        """
        if not self.facts.encoder or encoder_ids is not None:
            return self._gather("hidden", ids, token_type_ids, encoder_ids, adapter)
        if token_type_ids is not None:
            raise RequestError(f"{self.network.name} has no token types")
        text = Text(self.facts.check(ids, "encoder_ids"), adapter=self._requests.chosen(adapter))
        return next(outputs(self.core, [text], "encoder_hidden"))

    def logits_batch(self, texts: Sequence[Sequence[int]], encoder_texts: Sequence[Sequence[int]] | None = None,
                     adapters: Sequence[str | None] | None = None) -> list[np.ndarray]:
        """`logits` of several texts that run side by side: float32 [len(ids), vocabulary] of each.

        encoder_texts: encoder-decoders: what the encoder reads for each. adapters: of each, as of `logits`.

        Raises:
            RequestError: as `logits` does, or there are not as many encoder_texts or adapters.
        """
        self._check_output("logits")
        sources = [None] * len(texts) if encoder_texts is None else encoder_texts
        names = [None] * len(texts) if adapters is None else adapters
        for what, count in (("encoder_texts", len(sources)), ("adapters", len(names))):
            if count != len(texts):
                raise RequestError(f"{len(texts)} texts need as many {what}, there are {count}")
        pairs = [Text(self.facts.check(ids, "ids"), None, self._check_encoder(source), self._requests.chosen(name))
                 for ids, source, name in zip(texts, sources, names)]
        return list(outputs(self.core, pairs, "logits"))

    def embed(self, texts: Texts, normalize: bool | None = True, pooling: str | None = None, *,
              truncate: bool = False, prompt: str | None = None, dimensions: int | None = None,
              instruction: str | None = None) -> np.ndarray:
        """Embeddings of texts: float32 [width] of one text, [n, width] of a list.

        A text may be given as its token ids, which run as they are: nothing is put around them.

        How hidden states become an embedding is read from the files beside the weights (modules.json and what it
        names), else from the specification's [generation] pooling.

        normalize: make every embedding as long as 1; None: only if the model's files say so.
        pooling:   instead of the model's own: cls, max, mean, mean_sqrt_len, weighted_mean or last.
        truncate:  cut texts that are longer than the model's limit; else they are an error.
        prompt:    name of one of the model's prompts, put in front of every text; None: the model's default, if any.
        dimensions: the first numbers alone, made as long as 1 again where the whole is: for models whose embeddings may
                   be cut (Matryoshka). Where the model's config.json lists `matryoshka_dimensions`, one of these.
        instruction: in place of the one that the model's prompt has ("Instruct: ...").

        Raises:
            RequestError: no pooling is known, a text is too long or has no tokens, or there is no such prompt.
            TokenizerError: the model has no tokenizer.
            FormatError: one of the files is broken.
        """
        return embed(self, self._recipe, texts, normalize, pooling, truncate, prompt, dimensions, instruction)

    @cached_property
    def _recipe(self) -> EmbeddingRecipe:
        return self._load_recipe()

    def fill_mask(self, text: str, top_k: int = 5) -> list[list[Filling]]:
        """For every mask token of a text ("[MASK]", "<mask>"), the top_k most probable tokens, best first.

        Raises:
            RequestError: not a masked language model, a model without output head, or a text without mask tokens.
            TokenizerError: the model has no tokenizer.
        """
        return fill_mask(self, text, top_k)

    def iter_logits(self, ids: Sequence[int], every: int = 1) -> Iterator[tuple[int, np.ndarray]]:
        """As `logits`, in pieces of bounded size: yields (start, float32 [n, vocabulary]), the logits of positions
        start, start + every, ... Not of encoder-decoders."""
        checked = self.facts.check(ids, "ids")
        self._check_encoder(None)
        self._check_output("logits")
        with self.runner.open(len(checked)) as sequence:
            yield from sequence.rows(checked, every=every)

    def _gather(self, output, ids, token_type_ids, encoder_ids, adapter) -> np.ndarray:
        ids, read = self.facts.check(ids, "ids"), self._check_encoder(encoder_ids)
        self._check_output(output)
        text = Text(ids, types_of(self.network, ids, token_type_ids), read, self._requests.chosen(adapter))
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

        prompt:     text, token ids, or chat messages ({"role", "content"}). Encoder-decoders: what the encoder reads.
        stream:     return a Stream that iterates the text's pieces as they come, of all n samples.
        max_tokens, temperature, ignore_eos, settings: see Settings (seed, top_k, top_p, min_p, stop, chat, num_beams,
                    n, logprobs, json_schema, speculate, ...), and docs/decoding.md. temperature None: 0, unless
                    decoding_alg says otherwise; for a conversation (chat, messages) what `sampling` says.

        Raises:
            RequestError: settings or ids out of range, settings that contradict each other, or a prompt longer than
                the context.
            TokenizerError: text or stop strings, and no tokenizer; chat, and no template.
        """
        common = {"max_tokens": max_tokens, "temperature": temperature, "ignore_eos": ignore_eos}
        request = self.request(prompt, common | settings)
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
        """Continue several prompts side by side, each as `generate` would; none notices the others.

        settings: see Settings.

        Raises:
            RequestError, TokenizerError: as `generate` does.
        """
        return together(self.core, [self.request(prompt, settings) for prompt in prompts], self.text_decoder)

    def loglikelihood(self, context: Sequence[int], continuation: Sequence[int]) -> Likelihood:
        """(sum of log-probabilities, whether greedy decoding gives it) of a continuation; see `loglikelihoods`."""
        return self.loglikelihoods([(context, continuation)])[0]

    def loglikelihoods(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Likelihood]:
        """Log-likelihoods of continuations of contexts, as evaluation harnesses ask for them.

        pairs: token ids of a context and of what follows. An empty context is the token that starts a text. A context
               that comes several times runs once; others run side by side.

        Raises:
            RequestError: bad ids, more than the context, no output head, or an encoder-decoder.
        """
        self._check_output("logits")
        if not self.is_decoder:
            raise RequestError(f"{self.network.name} is no decoder: it continues no context")
        return loglikelihoods(self.runner, pairs, self._requests.bos_id)

    @property
    def draft(self) -> "Model | None":
        """A smaller model that drafts tokens (speculative decoding); set it, or load with draft=.

        Raises:
            RequestError: the model cannot draft for this one, for its vocabulary is another.
        """
        return self._draft

    @draft.setter
    def draft(self, draft: "Model | None") -> None:
        if draft is not None:
            check_draft(self, draft)
        self._draft, self._requests.has_draft = draft, draft is not None
        self.core.drafters.use(None if draft is None else draft.runner)

    def drafts_with(self, network: Network, program) -> None:
        """Let a block that reads this model's streams draft (network/build/draft.py). It is closed with the model."""
        self._requests.has_draft = True
        self.core.drafters.use(Runner(network, program, self.runner.chunk), True)

    @cached_property
    def languages(self) -> Languages:
        """The languages that the vocabulary has tokens for.

        Raises:
            TokenizerError: the model has no tokenizer.
        """
        return languages(self.tokenizer)

    def translate(self, texts: str | Sequence[str], source: str | None = None, target: str | None = None,
                  **settings: Any) -> Generation | list[Generation]:
        """Translate a text, or several side by side.

        source, target: languages as the model's vocabulary names them (`languages`), such as "en", "eng_Latn" or
                  "en_XX". A model that reads one language takes no source, one for a single pair neither.
        settings: see Settings. What is not given of max_tokens and num_beams is as the model's own files say; one beam
                  where temperature or stop is given.

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
        """Checked requests of a translation, for an engine. budget: the most that each may ask for; None: anything.

        Raises:
            RequestError, TokenizerError: as `translate` does.
        """
        check_translates(self.facts)
        return translations(self.tokenizer, self.languages, self._requests, texts, source, target, settings, budget)

    def request(self, prompt: str | Sequence[int] | Sequence[Mapping], settings: Mapping[str, Any] | Settings,
                budget: Budget | None = None) -> Request:
        """A checked request, for an engine. A conversation gets what `sampling` says below its own settings.

        settings: see Settings; an object of that class is complete. budget: the most that it may ask for; None:
        anything.

        Raises:
            RequestError, TokenizerError: as `generate` does.
        """
        if not isinstance(settings, Settings):
            if settings.get("chat") or is_conversation(prompt):
                settings = filled(settings, self.sampling.values)
            settings = Settings.of(settings)
        request = self._requests.make(prompt, settings, budget=budget)
        if request.scored is None:
            return request
        return replace(request, prompt_logprobs=prompt_logprobs(self.runner, request))

    @cached_property
    def sampling(self) -> Source:
        """Sampling settings of a conversation whose request sets none, and their source (sampling.py).

        Raises:
            FormatError: one of the model's files is broken.
        """
        return chosen(self._requests.defaults.sampling, self._listed(), self.is_decoder)

    def text_decoder(self, request: Request):
        """Text decoder of a request's new tokens, None without a tokenizer.

        It keeps a leading space where the text goes on after a prompt.
        """
        if not self._requests.tokenizer:
            return None
        if request.grammar is not None:
            return self.tokenizer.stream(continues=True)  # the text is what the grammar has seen, every space of it
        goes_on = request.continues and any(int(id) not in self.tokenizer.special_ids for id in request.prompt)
        return self.tokenizer.stream(continues=goes_on)

    def trace(self, prompt: str | Sequence[int] | Sequence[Mapping] = (), chat: bool = False,
              repeat: int = 5) -> list[TraceRow]:
        """One decoding step after a prompt, a row per step of the network; prompt, chat and errors as of `generate`.

        Times are medians of `repeat` runs, one after the other; a first one, in which threads wake up and weights come
        from the disk, does not count.
        """
        return trace(self, prompt, chat, repeat)

    def walk(self, prompt: str | Sequence[int] | Sequence[Mapping], chat: bool = False, lens: bool = False) -> Walk:
        """As `trace`, with ids, values of each step and the likeliest next tokens; lens: also after each layer."""
        return walk(self, prompt, chat, lens)

    def close(self) -> None:
        """Free the executor's memory and threads, and those of a draft model that was loaded with it."""
        self.program.close()
        self.core.drafters.close()
        if self.owns_draft and self.draft is not None:
            self.draft.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

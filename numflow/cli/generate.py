"""`numflow generate`: continue or answer a prompt."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from numflow.cli import options
from numflow.cli.groups import Execution, SamplingOptions, grouped
from numflow.cli.inputs import read_prompt
from numflow.cli.running import asked_name, loaded, print_json
from numflow.cli.sessions import session
from numflow.cli.strategies import completed, seeded, streams
from numflow.cli.trace import show_walk
from numflow.errors import RequestError, TokenizerError

MAX_TOKENS = 256


@grouped
def generate(
    prompt: Annotated[str | None, typer.Argument(show_default=False, help="The prompt. The text of -f FILE, or of "
                                                 "standard input, is appended to it.")] = None,
    model: options.Model = None,
    file: options.ReadFile = None,
    system: options.System = None,
    max_tokens: options.MaxTokens = MAX_TOKENS,
    sampling: SamplingOptions = SamplingOptions(),
    stop_: options.Stop = None,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    grammar: options.Grammar = None,
    logprobs: options.Logprobs = None,
    draft: options.Draft = None,
    raw: options.Raw = False,
    context: options.Context = None,
    session_: options.Session = None,
    how: Execution = Execution(),
    stats: options.Stats = False,
    json: options.Json = False,
    trace: Annotated[bool, typer.Option("--trace", help="Instead of generating text, show the computation of one "
                                        "token: every step with its shapes, kernel, time and values, and the likeliest "
                                        "next tokens.")] = False,
    lens: Annotated[bool, typer.Option("--lens", help="With --trace: also the likeliest tokens after every layer "
                                       "(logit lens).")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", show_default=False, help="With --trace: write "
                                              "an HTML page, with the source of every step.")] = None,
) -> None:
    """Generate text from a prompt.

    A model with a chat template answers the prompt as a user message. The option --raw turns this off: the model
    continues the prompt as plain text. A model without a chat template always continues the prompt.
    """
    from numflow.engine.request.ahead import check_settings, check_writes
    from numflow.engine.request.facts import ModelFacts

    settings = sampling.settings(stop=stop_, json_schema=json_schema, regex=regex, grammar=grammar, logprobs=logprobs)
    if (lens or html is not None) and not trace:
        raise RequestError(f"{'--lens' if lens else '--html'} needs --trace")
    if trace:
        _check_trace(settings, max_tokens=max_tokens != MAX_TOKENS, draft=draft, stats=stats, session=session_)
    if raw and system is not None:
        raise RequestError("--system has no effect with --raw: the text is continued as it is")
    check_settings({**settings, "max_tokens": max_tokens}, draft is not None)
    text = read_prompt(prompt, file, "numflow generate")

    def before(built, prompts, _recipe) -> None:
        check_writes(ModelFacts.of(built))
        prompts.check()
        _request_prompt(built.name, text, system, not raw and prompts.has_template)

    name = asked_name(model, how.offline)
    with loaded(name, how, draft=draft, context=context, before=before) as (ready, notice):
        chat = not raw and ready.has_template
        request_prompt = _request_prompt(ready.network.name, text, system, chat)
        if trace:
            walk = ready.walk(request_prompt, chat, lens)
            notice.clear()
            show_walk(walk, name, json, html)
            return
        settings = seeded(completed(ready, settings, raw))
        with session(ready, session_, stats) as kept:
            run = ready.generate(request_prompt, max_tokens, stream=streams(settings), chat=chat, **settings)
            result = run.result if streams(settings) else run
            _show(run if streams(settings) else _texts(result), notice, quiet=json)
            if kept is not None:
                kept.save()
        if json:
            print_json({"model": name, "spec": ready.network.name,
                        **_facts(result, ready.load_s, _tokenizer(ready)), "seed": settings.get("seed")})
        if stats:
            print(stats_line({**result.stats, "load_s": ready.load_s}, result.finish_reason)
                  + _acceptance(result.stats) + _seed(settings), file=sys.stderr)


def _seed(settings: dict) -> str:
    return f", seed {settings['seed']}" if "seed" in settings else ""


def _check_trace(settings: dict, **more: Any) -> None:
    """Refuse settings without effect on a trace, which generates no token."""
    for name in (*settings, *(name for name, given in more.items() if given)):
        raise RequestError(f"--trace generates no token: {name} has no effect, leave it out")


def _request_prompt(name: str, text: str, system: str | None, chat: bool) -> str | list[dict]:
    """The prompt, or messages if there is a system message."""
    if system is None:
        return text
    if not chat:
        raise RequestError(f"{name} has no chat template: leave --system out and put its text into the prompt")
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def _tokenizer(model):
    """The model's tokenizer; None for a model that takes token ids only."""
    try:
        return model.tokenizer
    except TokenizerError:
        return None


def _texts(result) -> list[str]:
    """The texts of a request. Several texts are numbered."""
    if len(result.choices) == 1:
        return [result.text]
    return ["\n\n".join(f"[{number}]\n{one.text}" for number, one in enumerate(result.choices, 1))]


def _facts(result, load_s: float, tokenizer) -> dict:
    """A result as a JSON object; several texts are under "choices"."""
    facts = {"text": result.text, "ids": result.ids, "finish_reason": result.finish_reason,
             "stats": {**result.stats, "load_s": load_s}}
    facts |= {} if result.score is None else {"score": result.score}
    if result.logprobs is not None:
        facts["logprobs"] = [{**_token(tokenizer, one.id, one.logprob), "top": [
            _token(tokenizer, id, logprob) for id, logprob in one.top]} for one in result.logprobs]
    if len(result.choices) > 1:
        facts["choices"] = [_facts(replace(one, choices=[]), load_s, tokenizer) for one in result.choices]
    return facts


def _token(tokenizer, id: int, logprob: float) -> dict:
    from numflow.server.messages.logprobs import finite, token_text

    return {"id": id, "text": token_text(tokenizer, id)[0], "logprob": finite(logprob)}


def _acceptance(stats: dict) -> str:
    """The acceptance rate of draft tokens, as text; "" without speculation."""
    if "drafts" not in stats:
        return ""
    return f", {stats['accepted_drafts']} of {stats['drafts']} drafts accepted ({stats['acceptance_rate']:.0%})"


def _show(run, notice, quiet: bool) -> None:
    """Print pieces of the text as they are generated, and a line end, also after an interruption."""
    try:
        for piece in run:
            notice.clear()
            if piece and not quiet:
                print(piece, end="", flush=True)
    finally:
        if not quiet:
            print(flush=True)


def stats_line(stats: dict, finish_reason: str) -> str:
    """Times of a generation in one line. Prefill ends with the first token, so a single token has no decode speed."""
    speed = f" in {stats['decode_s']:.3f} s ({stats['decode_tok_s']:.1f} tok/s)" if stats["decode_tok_s"] else ""
    return (f"prompt {stats['prompt_tokens']} tokens in {stats['prefill_s']:.3f} s ({stats['prefill_tok_s']:.1f} tok/s)"
            f", {stats['new_tokens']} new{speed}, "
            f"loaded in {stats['load_s']:.2f} s, ended by {finish_reason}")

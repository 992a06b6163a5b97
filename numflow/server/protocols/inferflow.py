"""POST /: Inferflow's interface, with its request fields, replies and chunks."""

import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from numflow.engine.engine import Engine
from numflow.engine.request.prompt import ConversationIds, check_size
from numflow.engine.request.request import Request as Checked
from numflow.server.http.errors import bad_request
from numflow.server.messages.schemas import NativeRequest
from numflow.server.messages.settings import own_settings, stops, with_defaults
from numflow.server.messages.wire import Json, dump
from numflow.server.service.service import Generating, Service
from numflow.server.service.status import status_of
from numflow.tokenizer.inferflow_template import encode_template

MOST_TOKENS = 102_400  # largest number of new tokens, as in Inferflow
DEFAULT_TOKENS = 1024
CHUNK_BYTES = 16  # bytes of text from which on a chunk is sent


async def native(service: Service, request: Request) -> Response:
    """Answer a query of Inferflow's interface."""
    body = await service.read(request, NativeRequest)
    if body.header is not None and body.header.fn == "get_stat":
        return Json({**status_of(service), "ret_code": "succ", "is_end": 1})
    if body.text is None:
        raise bad_request("text is missing", "text", "missing_field")
    running = Generating(service, request, await service.leased(request, body.model))
    try:
        answer = _Answer(service, running, body)
        await running.start(answer.make)
        if body.is_streaming_mode:
            return service.stream(request, answer.stream(), running.close, media_type="application/json")
        await running.finish()
        reply = answer.whole()
    except BaseException:
        running.close()
        raise
    running.close()
    return Json(reply)


class _Answer:
    """The reply to one query."""

    def __init__(self, service: Service, running: Generating, body: NativeRequest):
        self._service, self._running, self._body, self._served = service, running, body, running.served
        self._begin = time.perf_counter()

    def make(self, engine: Engine) -> list[Checked]:
        """The checked request."""
        body, served = self._body, self._served
        if body.max_output_len is not None and body.max_new_tokens is not None:
            raise bad_request("max_output_len and max_new_tokens are the same: give one of them", "max_new_tokens")
        limit = body.max_output_len or body.max_new_tokens or served.defaults.get("max_tokens") or DEFAULT_TOKENS
        given = {"decoding_alg": body.decoding_alg or None, "temperature": body.temperature, "stop": body.stop,
                 "seed": body.random_seed or None}  # 0: a random seed
        given = {key: value for key, value in given.items() if value is not None}
        if "stop" in given:
            given["stop"] = stops(given["stop"], self._running.ignored)
        prompt = self._encoder_prompt() if served.model.runner.has_encoder else self._prompt()
        settings = with_defaults({**own_settings(body, self._running.ignored), **given}, served.defaults,
                                 talks=isinstance(prompt, ConversationIds))
        self._running.check(prompt, "text")
        if served.model.runner.has_encoder and (first := self._decoder_prefix()):
            settings["decoder_ids"] = first
        return [engine.request(prompt, **settings, max_tokens=min(limit, MOST_TOKENS),
                               chat=isinstance(prompt, ConversationIds))]

    def _prompt(self) -> ConversationIds | list[int]:
        """The template filled with the query; without a template, the text itself."""
        body, served = self._body, self._served
        template = body.decoder_input_template or served.defaults.get("prompt_template")
        if body.encoder_input_template:
            raise bad_request(f"{served.name} has no encoder", "encoder_input_template", "unsupported")
        if template is not None:
            return ConversationIds(self._filled(template))
        check_size(served.tokenizer, body.res_prefix or "", served.model.context, "res_prefix")
        prefix = served.tokenizer.encode(body.res_prefix, add_special=False) if body.res_prefix else []
        if not served.model.has_template and "chat_template" not in served.defaults:
            if body.system_prompt:
                raise bad_request(f"{served.name} has no template, so system_prompt cannot be used", "system_prompt",
                                  "unsupported")
            return [*served.prompts.encode(body.text), *prefix]
        messages = [{"role": "system", "content": body.system_prompt}] if body.system_prompt else []
        return ConversationIds([*served.render([*messages, {"role": "user", "content": body.text}], {}), *prefix])

    def _encoder_prompt(self) -> list[int]:
        template = self._body.encoder_input_template or self._served.defaults.get("encoder_template")
        return self._filled(template, "") if template else self._served.prompts.encode(self._body.text)

    def _decoder_prefix(self) -> list[int] | None:
        """The decoder's first tokens from the template; None without a template."""
        template = self._body.decoder_input_template or self._served.defaults.get("prompt_template")
        if template:
            return self._filled(template)
        if self._body.res_prefix:
            raise bad_request("res_prefix needs decoder_input_template for this model", "res_prefix", "unsupported")
        return None

    def _filled(self, template: str, prefix: str | None = None) -> list[int]:
        body = self._body
        system = self._served.defaults.get("system_prompt", "") if body.system_prompt is None else body.system_prompt
        for text in (template, body.text or "", system, body.res_prefix or ""):
            check_size(self._served.tokenizer, text, self._served.model.context)
        return encode_template(template, self._served.tokenizer, body.text or "", system,
                               (body.res_prefix or "") if prefix is None else prefix)

    def whole(self) -> dict[str, Any]:
        """The reply in one piece."""
        return {"text": self._running.runs[0].results[0].text, **self._end()}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The reply in chunks: a JSON object and an empty line each."""
        run, = self._running.runs
        held = ""
        async for pieces in run:
            self._running.came(run, pieces)
            held += "".join(pieces)
            if len(held.encode("utf-8", "replace")) >= CHUNK_BYTES:
                yield dump({"text": held, "ret_code": "succ", "time_cost": self._seconds(), "is_end": 0}) + b"\n\n"
                held = ""
        yield dump({"text": held, **self._end()}) + b"\n\n"

    def _seconds(self) -> float:
        return round(time.perf_counter() - self._begin, 6)

    def _end(self) -> dict[str, Any]:
        result = self._running.runs[0].results[0]
        return {"ret_code": "succ", "time_cost": self._seconds(), "is_end": 1, "model": self._served.name,
                "finish_reason": "length" if result.finish_reason == "length" else "stop", "timings": timings(result)}


def timings(result) -> dict[str, float]:
    """Token counts, milliseconds and tokens per second of a generation."""
    stats = result.stats
    return {"prompt_n": stats["prompt_tokens"], "cache_n": stats.get("cached_tokens", 0),
            "prompt_ms": 1000 * stats["prefill_s"], "prompt_per_second": stats["prefill_tok_s"],
            "predicted_n": stats["new_tokens"], "predicted_ms": 1000 * stats["decode_s"],
            "predicted_per_second": stats["decode_tok_s"]}



"""Errors of requests, and their JSON shapes for each protocol."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from numflow.errors import (
    DeviceError,
    DeviceFaultError,
    DeviceLostError,
    DownloadError,
    ModelNotFoundError,
    NotFiniteError,
    NumflowError,
    RequestError,
    TokenizerError,
    no_memory,
)

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "invalid_request_error",
         429: "rate_limit_error", 503: "unavailable_error"}

# Inferflow's `ret_code` by HTTP status.
NATIVE_CODES = {429: "error.busy", 413: "error.too_long_request", 503: "error.busy"}


# Anthropic's error types by HTTP status.
MESSAGES_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
                  413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}

MOST = 2000  # characters of a message


class ApiError(Exception):
    """An error answer.

    status: the HTTP status; 4xx is the client's fault. Clients retry 408, 409, 429 and 5xx automatically, so these are
            used only where a retry can help.
    param:  the wrong field of the request. code: a short name for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's type of the error."""
        return TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """The JSON object in OpenAI's shape."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def shaped(self, method: str, path: str) -> dict[str, Any]:
        """The JSON object in the shape of a route's protocol."""
        return {"native": self.native_body, "messages": self.messages_body, "ollama": lambda: {"error": self.message},
                "openai": self.body}[shape_of(method, path)]()

    def messages_body(self) -> dict[str, Any]:
        """The JSON object in Anthropic's shape."""
        return {"type": "error", "error": {**self.body()["error"], "type": MESSAGES_TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "api_error")}}

    def native_body(self) -> dict[str, Any]:
        """The JSON object in OpenAI's shape, with Inferflow's fields added."""
        code = "error.too_long_request" if self.code == "context_length_exceeded" else NATIVE_CODES.get(
            self.status, "error.invalid_request_format" if self.status < 500 else "error.processing")
        return {**self.body(), "text": "", "ret_code": code, "error_text": self.message, "is_end": 1}


def shape_of(method: str, path: str) -> str:
    """The protocol of a route's errors: openai, messages (Anthropic), ollama or native (Inferflow)."""
    if path.startswith("/api/"):
        return "ollama"
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return "messages"
    return "native" if (method, path) == ("POST", "/") else "openai"


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Error 400: a fault of the client."""
    return ApiError(400, message, param=param, code=code)


def shutting_down() -> ApiError:
    """Error 503: the service shuts down before the request has ended."""
    return ApiError(503, "the service is shutting down", code="shutting_down", headers={"Retry-After": "5"})


def busy(waiting: int, seconds: int) -> ApiError:
    """Error 429: the queue is full. seconds: time after which a retry may succeed."""
    return ApiError(429, f"the queue is full: {waiting} requests wait; try again in {seconds} s", code="queue_full",
                    headers={"Retry-After": str(seconds)})


def too_slow(seconds: float) -> ApiError:
    """Error 400: a request ran longer than the service allows. It is no 408, since a retry would take as long again."""
    return ApiError(400, f"the request took longer than the {seconds:g} s that this service allows (request_timeout); "
                    "ask for fewer tokens", code="request_timeout")


def of_http(status: int, detail: str, headers: Mapping[str, str] | None) -> ApiError:
    """The error for an HTTPException of the web framework."""
    message = detail if detail and detail != HTTPStatus(status).phrase else HTTPStatus(status).phrase
    return ApiError(status, message, headers=headers)


def of_error(error: Exception) -> ApiError:
    """Any exception as an error answer. Messages of unexpected exceptions are not shown to clients."""
    if isinstance(error, ApiError):
        return error
    if no_memory(error):
        return ApiError(503, "out of memory; try again later, or with a shorter prompt or fewer tokens",
                        code="out_of_memory", headers={"Retry-After": "10"})
    if isinstance(error, NotFiniteError):
        return ApiError(500, one_line(error), code="model_failed")
    if isinstance(error, (RequestError, TokenizerError)):
        return bad_request(one_line(error), getattr(error, "param", None), getattr(error, "code", None))
    if isinstance(error, ModelNotFoundError):
        return ApiError(404, one_line(error), param="model", code="model_not_found")
    if isinstance(error, DownloadError):
        return ApiError(503, one_line(error), code="model_unavailable", headers={"Retry-After": "30"})
    if isinstance(error, DeviceLostError):
        return ApiError(503, one_line(error), code="device_lost", headers={"Retry-After": "5"})
    if isinstance(error, DeviceFaultError):
        return ApiError(503, one_line(error), code="device_failed", headers={"Retry-After": "5"})
    if isinstance(error, DeviceError):
        return ApiError(500, one_line(error), code="device_failed")
    if isinstance(error, NumflowError):
        return ApiError(500, one_line(error), code="model_failed")
    return ApiError(500, "unexpected error; the service's log has the details under this request's id",
                    code="internal_error")


def one_line(error: BaseException) -> str:
    """An exception's message in one line, cut to MOST characters."""
    return " ".join(str(error)[:MOST].split())

"""Fields of a request without effect: ignored and reported in the log and in a header, or refused if strict."""

import re
from collections.abc import Iterable, Mapping

from numflow.errors import did_you_mean, quoted
from numflow.server.http.errors import bad_request

HEADER = "x-numflow-ignored"
MOST, LONGEST = 32, 64  # largest number of names in the header, and of characters of a name
MOST_TOLD = 64  # largest number of names in the log
_ODD = re.compile(r"[^\w.\[\]-]", re.ASCII)


class Ignored:
    """Ignored fields of one request. why: name -> reason. strict: raise an error instead of ignoring."""

    def __init__(self, strict: bool = False):
        self.strict = strict
        self.why: dict[str, str] = {}

    def unknown(self, name: str, known: Iterable[str]) -> None:
        """Ignore a field that no route knows. known: the names of known fields."""
        if len(self.why) < MOST_TOLD:
            self.add(name, f"there is no field {quoted(name)}{did_you_mean(name, known)}", "unknown_field")

    def add(self, name: str, why: str, code: str | None = None) -> None:
        """Ignore a field. Only the first MOST_TOLD are recorded.

        Raises:
            ApiError: the service is strict.
        """
        if self.strict:
            raise bad_request(why, name[:100], code)
        if len(self.why) < MOST_TOLD:
            self.why[name[:100]] = why

    def update(self, why: Mapping[str, str]) -> None:
        """Ignore several fields, as `add` does."""
        for name, reason in why.items():
            self.add(name, reason)

    def header(self) -> str:
        """The names of the ignored fields as the value of the header, with odd characters replaced."""
        names = [_ODD.sub("?", name)[:LONGEST].strip() or "?" for name in self.why]
        return ", ".join(names[:MOST] + ["..."] * (len(names) > MOST))

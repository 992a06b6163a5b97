"""Fields of a request that have no effect: left out and told in the log and in a header, or refused if strict."""

import re
from collections.abc import Iterable, Mapping

from numflow.errors import did_you_mean, quoted
from numflow.server.http.errors import bad_request

HEADER = "x-numflow-ignored"
MOST, LONGEST = 32, 64  # names in the header, characters of a name
MOST_TOLD = 64  # names in the log
_ODD = re.compile(r"[^\w.\[\]-]", re.ASCII)


class Ignored:
    """Fields of one request that are left out, name -> reason.

    strict: the first one is an error instead.
    """

    def __init__(self, strict: bool = False):
        self.strict = strict
        self.why: dict[str, str] = {}

    def unknown(self, name: str, known: Iterable[str]) -> None:
        """Leave out a field that no route knows."""
        if len(self.why) < MOST_TOLD:
            self.add(name, f"there is no field {quoted(name)}{did_you_mean(name, known)}", "unknown_field")

    def add(self, name: str, why: str, code: str | None = None) -> None:
        """Leave a field out. Of very many, only the first are told.

        Raises:
            ApiError: the service is strict.
        """
        if self.strict:
            raise bad_request(why, name[:100], code)
        if len(self.why) < MOST_TOLD:
            self.why[name[:100]] = why

    def update(self, why: Mapping[str, str]) -> None:
        """Leave several out, as `add` does."""
        for name, reason in why.items():
            self.add(name, reason)

    def header(self) -> str:
        """The names, as a header has them: its value does not end with a space."""
        names = [_ODD.sub("?", name)[:LONGEST].strip() or "?" for name in self.why]
        return ", ".join(names[:MOST] + ["..."] * (len(names) > MOST))

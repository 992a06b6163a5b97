"""The service's log: one JSON object per line."""

import json
import logging
import sys
import time
from pathlib import Path

from numflow.errors import RequestError


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = record.msg if isinstance(record.msg, dict) else {"message": record.getMessage()}
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
                "level": record.levelname.lower(), **facts}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def start_logging(file: str, level: str) -> logging.Handler:
    """Send the logs of the service, of its web server and of its traces to a file, or to standard error for "".

    Raises:
        RequestError: the file cannot be written.
    """
    try:
        handler = logging.FileHandler(Path(file), encoding="utf-8") if file else logging.StreamHandler(sys.stderr)
    except OSError as error:
        raise RequestError(f"log_file {file}: {error.strerror}") from None
    handler.setFormatter(_Lines())
    for name, least in (("numflow.server", level.upper()), ("uvicorn.error", "WARNING"),
                        ("opentelemetry", "WARNING")):
        logger = logging.getLogger(name)
        logger.setLevel(least)
        logger.handlers, logger.propagate = [handler], False
    return handler

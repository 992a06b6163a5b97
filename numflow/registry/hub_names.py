"""Names of models on the Hugging Face hub, as people type or paste them.

    ORG/NAME                       the repository; of GGUF models the usual one
    ORG/NAME:Q4_K_M                its model of that quantisation; a file's name or a glob (`*`, `?`) may stand there
    ORG/NAME@REVISION              a branch, tag or commit; behind the quantisation, where there are both
    hf.co/..., huggingface.co/..., hf:...     the same, or with a file behind it: hf:ORG/NAME/FILE
    https://huggingface.co/ORG/NAME           and its pages /tree/REVISION/FOLDER and /blob/REVISION/FILE
"""

import os
import re
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from numflow.errors import ModelNotFoundError

_REPOSITORY = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
_ID = re.compile(rf"({_REPOSITORY})(?::([^@]+))?(?:@(.+))?")
_WITH_FILE = re.compile(rf"({_REPOSITORY})/([^@]+)(?:@(.+))?")
_URL = re.compile(r"https?:/", re.IGNORECASE)  # a path that pathlib has read has lost the second slash
_SITE = re.compile(r"(?:(?:www\.)?huggingface\.co/|hf\.co/|hf:(?://)?)", re.IGNORECASE)
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_OTHERS = ("datasets", "spaces", "buckets", "collections", "papers", "docs", "models", "blog", "api")
_REVISION = re.compile(r"refs/(?:pr|convert|heads|tags)/[^/]+|[^/]+")
_FORM = "ORG/NAME, ORG/NAME:QUANTISATION or an address such as https://huggingface.co/ORG/NAME"


class HubName(NamedTuple):
    """A model of the hub. pattern: which of its weights ("FOLDER/" for those of a folder), "" for the usual ones."""

    repo: str
    pattern: str = ""
    revision: str | None = None


def parse(name: str) -> HubName | None:
    """Parse a name of the hub; None if `name` is none.

    Raises:
        ModelNotFoundError: an address of the hub that leads to no model, or one of another place.
    """
    if _URL.match(name):
        return _of_url(name)
    if site := _SITE.match(name):
        rest = name[site.end():].strip("/")
        if match := _ID.fullmatch(rest):
            return _hub_name(*match.groups())
        return _of_path(name, rest)
    match = _ID.fullmatch(name)
    return _hub_name(*match.groups()) if match else None


def _of_url(name: str) -> HubName:
    url = urlsplit(re.sub(r":/+", "://", name, count=1))
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", ""))
    if url.netloc.lower() not in (*_HOSTS, endpoint.netloc.lower()):
        raise ModelNotFoundError(f"{name}: numflow fetches from the Hugging Face hub only; download this file "
                                 f"(curl -LO {url.geturl()}) and give its path")
    path = unquote(url.path).strip("/")
    if match := _ID.fullmatch(path):
        found = _hub_name(*match.groups())
        shown = parse_qs(url.query).get("show_file_info")  # the page of a GGUF file
        return found._replace(pattern=shown[0]) if shown and not found.pattern else found
    return _of_path(name, path)


def _of_path(name: str, path: str) -> HubName:
    """Parse ORG/NAME followed by more: a page of the site, or a file of the repository."""
    match = _WITH_FILE.fullmatch(path)
    if match is None or match[1].split("/")[0].lower() in _OTHERS:
        raise ModelNotFoundError(f"{name}: no model of the hub is named so; give {_FORM}")
    page, _, rest = match[2].partition("/")
    if page not in ("tree", "blob", "resolve", "raw"):
        if _URL.match(name):
            raise ModelNotFoundError(f"{name}: this page is no model; give {_FORM}")
        return _hub_name(*match.groups())
    revision = _REVISION.match(rest)
    if revision is None:
        raise ModelNotFoundError(f"{name}: a revision should stand behind /{page}/; give {_FORM}")
    inside = rest[revision.end():].strip("/")
    return HubName(match[1], f"{inside}/" if inside and page == "tree" else inside, revision[0])


def _hub_name(repo: str, pattern: str | None, revision: str | None) -> HubName:
    pattern = pattern or ""
    return HubName(repo, "" if pattern.lower() == "latest" else pattern, revision)  # what ollama calls the usual one

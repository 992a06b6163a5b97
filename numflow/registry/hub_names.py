"""Names of models on the Hugging Face hub, as users type or paste them.

    ORG/NAME                       the repository; for GGUF repositories the default quantisation
    ORG/NAME:Q4_K_M                its model of this quantisation; a file name or a glob (`*`, `?`) is possible too
    ORG/NAME@REVISION              a branch, tag or commit; after the quantisation, if both are given
    hf.co/..., huggingface.co/..., hf:...     the same, or followed by a file: hf:ORG/NAME/FILE
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
_URL = re.compile(r"https?:/", re.IGNORECASE)  # pathlib drops the second slash of a path
_SITE = re.compile(r"(?:(?:www\.)?huggingface\.co/|hf\.co/|hf:(?://)?)", re.IGNORECASE)
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_OTHERS = ("datasets", "spaces", "buckets", "collections", "papers", "docs", "models", "blog", "api")
_REVISION = re.compile(r"refs/(?:pr|convert|heads|tags)/[^/]+|[^/]+")
_FORM = "ORG/NAME, ORG/NAME:QUANTISATION or an address such as https://huggingface.co/ORG/NAME"


class HubName(NamedTuple):
    """A model of the hub. pattern: selection of its weights ("FOLDER/": weights of a folder), "": the default."""

    repo: str
    pattern: str = ""
    revision: str | None = None


def parse(name: str) -> HubName | None:
    """Parse a name of the hub; None if `name` is no hub name.

    Raises:
        ModelNotFoundError: an address of the hub without a model, or an address of another site.
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
    """Parse ORG/NAME followed by a page of the site, or by a file of the repository."""
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
    return HubName(repo, "" if pattern.lower() == "latest" else pattern, revision)  # ollama's name of the default

"""HTML pages of the service. Styles and scripts are inlined, so that a page loads no other resource, and its
Content-Security-Policy lists the hashes of the inlined texts."""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import Response

FOLDER = Path(__file__).parents[1] / "page"
_STYLE = re.compile(r'<link rel="stylesheet" href="([\w.]+)">\n?')
_SCRIPTS = re.compile(r'(?:<script src="[\w.]+"></script>\n?)+')


@cache
def page(name: str) -> tuple[bytes, str]:
    """The content of a page, and its Content-Security-Policy.

    name: its file in the folder `server/page`.
    """
    html = (FOLDER / name).read_text(encoding="utf-8")
    styles, scripts = [], []

    def style(found: re.Match[str]) -> str:
        styles.append(_read(found[1]))
        return f"<style>{styles[-1]}</style>\n"

    def script(found: re.Match[str]) -> str:
        scripts.append('"use strict";\n' + "".join(map(_read, re.findall(r'src="([\w.]+)"', found[0]))))
        return f"<script>{scripts[-1]}</script>\n"

    whole = _SCRIPTS.sub(script, _STYLE.sub(style, html))
    policy = (f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; img-src data:; "
              "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
              "require-trusted-types-for 'script'")
    return whole.encode(), policy


def answer(name: str) -> Response:
    """The HTTP response with a page."""
    content, policy = page(name)
    return Response(content, media_type="text/html; charset=utf-8", headers={
        "Content-Security-Policy": policy, "Cache-Control": "no-cache", "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff"})


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _hashes(texts: list[str]) -> str:
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)

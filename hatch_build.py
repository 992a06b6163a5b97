"""The package's page on an index: the README with links that lead to the repository, whose address a build is given.

NUMFLOW_URL names the address (https://github.com/OWNER/NAME); .github/workflows/release.yml sets it. Without it the
README is taken as it is, and the package names no addresses.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)")


def absolute(text: str, url: str, version: str) -> str:
    """A page of the repository's top folder whose links and pictures are those of a released version at an address."""
    def link(match: re.Match[str]) -> str:
        return f"{match[1]}{match[2]}({url}/{'raw' if match[1] else 'blob'}/v{version}/{match[3]})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.S | re.M)
    return "".join(part if at % 2 else _LINK.sub(link, part) for at, part in enumerate(parts))


def addresses(url: str) -> dict[str, str]:
    """What the package's page links to."""
    return {"Source": url, "Documentation": f"{url}/blob/main/docs/README.md", "Issues": f"{url}/issues",
            "Changelog": f"{url}/blob/main/CHANGELOG.md"}


class CustomMetadataHook(MetadataHookInterface):
    """Fills `readme` and `urls` of pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add both to the fields of a package."""
        root, url = Path(self.root), os.environ.get("NUMFLOW_URL", "").rstrip("/")
        text = (root / "README.md").read_text(encoding="utf-8")
        metadata["urls"] = {}
        if url:
            (version,) = re.findall(r'^__version__ = "(.+)"$', (root / "numflow/__init__.py").read_text("utf-8"), re.M)
            text, metadata["urls"] = absolute(text, url, version), addresses(url)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}

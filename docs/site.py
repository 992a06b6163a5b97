"""The pages of docs/ as a site: copied beside each other with what they show, and built by mkdocs without a warning.

    pip install 'numflow-llm[site]' && python docs/site.py        the site is in build/site

Pages stay plain Markdown that reads well where it lies. Links to files that are no pages, such as
sources, become plain words.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/*.md", "docs/*/*.md", "specs/README.md",
         "numflow/learn/models/*.md", "reports/*.md", "reports/*/*.md")
PICTURES = ("docs/*.svg", "docs/*.png", "docs/*/figures/*.svg", "reports/*/*.png", "reports/*/*.svg")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(<?([^)\s>]+)>?\)")


def pages() -> list[Path]:
    """Paths of all pages, relative to the repository."""
    return sorted(path.relative_to(REPO) for pattern in PAGES for path in REPO.glob(pattern))


def pictures() -> list[Path]:
    """Paths of all pictures, relative to the repository."""
    return sorted(path.relative_to(REPO) for pattern in PICTURES for path in REPO.glob(pattern))


def rewritten(text: str, page: Path, known: set[Path]) -> str:
    """A page whose links lead to pages and pictures of the site; other links are their words alone."""
    def link(match: re.Match[str]) -> str:
        target, _, anchor = match[3].partition("#")
        if re.match(r"[a-z]+:", match[3]) or not target:
            return match[0]
        path = _within(page.parent / target)
        if path is not None and path not in known and path / "README.md" in known:
            return f"{match[1]}[{match[2]}]({target.rstrip('/')}/README.md{'#' + anchor if anchor else ''})"
        return match[0] if path in known else match[2]

    parts = re.split(r"(^```.*?^```$)", text, flags=re.S | re.M)
    return "".join(part if at % 2 else _LINK.sub(link, part) for at, part in enumerate(parts))


def _within(path: Path) -> Path | None:
    """A path without "..", None if it leaves the repository."""
    full = (REPO / path).resolve()
    return full.relative_to(REPO) if full.is_relative_to(REPO) else None


def stage(folder: Path) -> list[Path]:
    """Write pages and pictures below a folder, as they lie in the repository."""
    shutil.rmtree(folder, ignore_errors=True)
    known = {*pages(), *pictures()}
    for path in sorted(known):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            target.write_text(rewritten((REPO / path).read_text(encoding="utf-8"), path, known), encoding="utf-8")
        else:
            shutil.copyfile(REPO / path, target)
    return sorted(known)


def main() -> int:
    stage(REPO / "build" / "site-pages")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(REPO / "mkdocs.yml")]
    return subprocess.run(command, cwd=REPO).returncode


if __name__ == "__main__":
    sys.exit(main())

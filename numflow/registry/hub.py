"""Models of the Hugging Face hub on this disk: hub_names.py parses names, hub_files.py chooses files.

huggingface_hub downloads: it resumes, checks and locks, and its cache is shared with other programs.
"""

import glob
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from numflow.errors import DownloadError, ModelNotFoundError, NumflowError
from numflow.registry.hub_files import choose
from numflow.registry.hub_names import HubName, parse

__all__ = ["HubName", "choose", "parse", "snapshot"]


def snapshot(repo: str, pattern: str = "", revision: str | None = None, offline: bool = False,
             progress: bool = True, chooser: Callable[..., list[str]] = choose) -> Path:
    """Folder of a hub model on this disk, or its weight file if `pattern` or GGUF selects one of several; fetched if
    necessary and not `offline`.

    pattern: selection of weight files (`hub_files.choose`); "": safetensors, else a GGUF model, else pickled weights.
    chooser: function that chooses files, with the interface of `hub_files.choose`.

    Raises:
        ModelNotFoundError: unknown repository or revision, no weights in it or several matching models, or the model is
            not on this disk and `offline` is set.
        DownloadError: the download failed.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
    from huggingface_hub.utils.logging import set_verbosity_error

    offline = offline or constants.HF_HUB_OFFLINE
    (enable_progress_bars if progress else disable_progress_bars)()
    set_verbosity_error()  # else the library logs each attempt
    tell = _print if progress else lambda line: None
    if not offline:
        tell(f"looking for {repo} on the hub")
    try:
        folder, files = (_local if offline else _fetched)(repo, pattern, revision, tell, chooser)
    except NumflowError:
        raise
    except GatedRepoError:
        raise DownloadError(f"{repo} asks you to accept its terms on the hub; then `hf auth login` here") from None
    except RepositoryNotFoundError:
        raise ModelNotFoundError(f"no repository {repo!r} on the hub, or it is private (`hf auth login`)") from None
    except RevisionNotFoundError:
        raise ModelNotFoundError(f"{repo} has no revision {revision!r}") from None
    except LocalEntryNotFoundError:
        if offline:
            raise _absent(repo) from None
        raise DownloadError(f"{repo}: the hub cannot be reached") from None
    except Exception as error:  # any error of the HTTP library
        raise DownloadError(f"{repo}: {_reason(error)}") from error
    return _opened(folder, files, pattern)


def remove(repo: str) -> tuple[Path, int]:
    """Remove a repository from this disk; returns its folder and the bytes freed.

    Raises:
        ModelNotFoundError: the repository is not on this disk.
    """
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cached = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        raise ModelNotFoundError(f"{repo} is not on this disk") from None
    found = next((entry for entry in cached.repos if entry.repo_type == "model" and entry.repo_id == repo), None)
    if found is None:
        raise ModelNotFoundError(f"{repo} is not on this disk")
    plan = cached.delete_revisions(*(revision.commit_hash for revision in found.revisions))
    plan.execute()
    return found.repo_path, plan.expected_freed_size


def token_ids(repo: str, revision: str | None, offline: bool) -> int | None:
    """vocab_size in a repository's config.json; None if there is none, or it cannot be fetched."""
    import huggingface_hub

    try:
        file = huggingface_hub.hf_hub_download(repo, "config.json", revision=revision, local_files_only=offline)
        found = json.loads(Path(file).read_text(encoding="utf-8")).get("vocab_size")
    except Exception:  # errors are reported when the model itself is fetched
        return None
    return found if isinstance(found, int) else None


def _fetched(repo: str, pattern: str, revision: str | None, tell, chooser=choose) -> tuple[Path, list[str]]:
    """Folder of a repository and the files of its model, fetched from the hub."""
    import huggingface_hub

    def shards_of(index: str) -> Iterable[str]:
        return _shards(Path(huggingface_hub.hf_hub_download(repo, index, revision=revision)))

    files = chooser(repo, huggingface_hub.list_repo_files(repo, revision=revision), pattern, tell, shards_of)
    exactly = [glob.escape(file) for file in files]  # the library takes them as glob patterns
    return Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=exactly)), files


def _local(repo: str, pattern: str, revision: str | None, tell, chooser=choose) -> tuple[Path, list[str]]:
    """Folder of a repository and the files of its model on this disk; all files must be there."""
    import huggingface_hub

    # Without allow_patterns, snapshot_download refuses a folder that lacks any file of the repository.
    folder = Path(huggingface_hub.snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[]))
    local_files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    try:
        return folder, chooser(repo, local_files, pattern, tell, lambda index: _shards(folder / index))
    except ModelNotFoundError as error:
        raise _absent(repo, f" ({error})" if local_files else "") from None


def _shards(index: Path) -> list[str]:
    """Files named in an index on this disk.

    Raises:
        DownloadError: the file is no index.
    """
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise DownloadError(f"{index}: should be a JSON object with a weight_map of tensor and file names") from None


def _opened(folder: Path, files: list[str], pattern: str) -> Path:
    """Path to open: a file if other files next to it may be other models, else the folder."""
    weights = folder / files[0]
    if weights.suffix.lower() == ".gguf":
        return weights
    siblings = [path for path in map(folder.joinpath, files[1:]) if path.parent == weights.parent]
    alone = all(path.suffix != weights.suffix for path in siblings)
    return weights if pattern and alone else weights.parent


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _reason(error: Exception) -> str:
    """Reason of a failure of the hub, in one line."""
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if any("Connect" in kind or "Timeout" in kind for kind in kinds):
        return "the hub cannot be reached"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _absent(repo: str, why: str = "") -> ModelNotFoundError:
    return ModelNotFoundError(f"{repo} is not on this disk, or not all of it, and numflow is offline; "
                              f"`numflow pull {repo}` fetches it once{why}")

"""Models of the Hugging Face hub: `org/name`, `org/name:Q4_K_M` (which weight file), `org/name@revision`.

huggingface_hub does the work: resuming, checking, locking, and its own cache, shared with other programs.
"""

import fnmatch
import json
import re
import sys
from pathlib import Path

from numflow.errors import DownloadError, ModelNotFoundError, NumflowError

_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([^@]+))?(?:@(.+))?")
_SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
# Folders of the modules that make an embedding of hidden states, such as 1_Pooling and 2_Dense.
_MODULE_FILES = re.compile(r"\d+_\w+/(config\.json|model\.safetensors|pytorch_model\.bin)")
_SPLIT = re.compile(r"-(\d{5})-of-\d{5}(?=\.gguf$)")


def parse(name: str) -> tuple[str, str, str | None] | None:
    """(repository, weight pattern or "", revision or None) of a hub id; None if `name` is not one."""
    match = _ID.fullmatch(name)
    return (match[1], match[2] or "", match[3]) if match else None


def snapshot(repo: str, pattern: str = "", revision: str | None = None, offline: bool = False,
             progress: bool = True) -> Path:
    """The folder of a hub model on this disk, or its GGUF file; fetched if need be and not `offline`.

    pattern: which weight files, as globs or parts of names, separated by commas; "" chooses safetensors, else a
             single GGUF, else pickled weights.

    Raises:
        ModelNotFoundError: no such repository, no weights in it, or it is not on this disk and `offline` is set.
        DownloadError: fetching failed.
    """
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
    from huggingface_hub.utils.logging import set_verbosity_error

    (enable_progress_bars if progress else disable_progress_bars)()
    set_verbosity_error()  # it would tell about each of its attempts
    if progress and not offline:
        print(f"looking for {repo} on the hub", file=sys.stderr, flush=True)
    try:
        if offline:
            folder = Path(huggingface_hub.snapshot_download(repo, revision=revision, local_files_only=True))
            files = choose(repo, [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()], pattern)
            _check_shards(repo, folder)
        else:
            files = choose(repo, huggingface_hub.list_repo_files(repo, revision=revision), pattern)
            folder = Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=files))
    except NumflowError:
        raise
    except GatedRepoError:
        raise DownloadError(f"{repo} asks you to accept its terms on the hub; then `hf auth login` here") from None
    except RepositoryNotFoundError:
        raise ModelNotFoundError(f"no repository {repo!r} on the hub, or it is private (`hf auth login`)") from None
    except LocalEntryNotFoundError:
        if offline:
            raise _absent(repo) from None
        raise DownloadError(f"{repo}: the hub cannot be reached") from None
    except Exception as error:  # whatever its HTTP library of the day raises
        raise DownloadError(f"{repo}: {_reason(error)}") from error
    weights = files[0]
    return folder / weights if weights.endswith(".gguf") else folder


def choose(repo: str, files: list[str], pattern: str = "") -> list[str]:
    """The files of a repository that a model needs, weights first.

    Raises:
        ModelNotFoundError: no weights, none that match, or several GGUF models and no pattern.
    """
    weights = _weights(repo, files, pattern)
    if weights[0].endswith(".gguf"):
        return weights
    side = [f for f in files if f not in weights and "/" not in f
            and any(fnmatch.fnmatchcase(f, glob) for glob in _SIDE_FILES)]
    return weights + sorted(side) + _module_files(files)


def _module_files(files: list[str]) -> list[str]:
    """Files of the embedding's modules; of one that has safetensors not the pickled weights."""
    found = sorted(f for f in files if _MODULE_FILES.fullmatch(f))
    return [f for f in found if not f.endswith(".bin") or f"{f.split('/')[0]}/model.safetensors" not in found]


def _weights(repo: str, files: list[str], pattern: str) -> list[str]:
    if pattern:
        globs = [p if any(c in p for c in "*?[") else f"*{p}*" for p in pattern.split(",")]
        found = [f for f in files if f.endswith((".gguf", ".safetensors", ".bin", ".pt", ".pth"))
                 and any(fnmatch.fnmatch(f.lower(), glob.lower()) for glob in globs)]
        if not found:
            raise ModelNotFoundError(f"{repo}: no weights match {pattern!r}; it has {_listing(files)}")
        return sorted(found)
    top = [f for f in files if "/" not in f]
    safetensors = [f for f in top if f.endswith(".safetensors") and not f.startswith(("consolidated", "adapter"))]
    ggufs = [f for f in top if f.endswith(".gguf") and not f.startswith("mmproj")]
    pickles = [f for f in top if re.fullmatch(r"pytorch_model.*\.bin", f)]
    if ggufs and not safetensors and len({_SPLIT.sub("", f) for f in ggufs}) > 1:
        raise ModelNotFoundError(f"{repo} has several models: {_listing(ggufs)}; choose one, such as {repo}:Q4_K_M")
    found = safetensors or ggufs or pickles
    if not found:
        raise ModelNotFoundError(f"{repo}: no safetensors, GGUF or pickled weights in it")
    return sorted(found)


def _reason(error: Exception) -> str:
    """Why the hub failed, in one line."""
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if any("Connect" in kind or "Timeout" in kind for kind in kinds):
        return "the hub cannot be reached"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _listing(files: list[str]) -> str:
    weights = [f for f in sorted(files) if f.endswith((".gguf", ".safetensors", ".bin"))]
    return ", ".join(weights[:8]) + (", …" if len(weights) > 8 else "") if weights else "none"


def _check_shards(repo: str, folder: Path) -> None:
    """An interrupted download left a folder; what its index names must be there."""
    for index in folder.glob("*.index.json"):
        shards = set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
        if any(not (folder / shard).exists() for shard in shards):
            raise _absent(repo)


def _absent(repo: str) -> ModelNotFoundError:
    return ModelNotFoundError(f"{repo} is not on this disk, or not all of it, and numflow is offline; "
                              f"`numflow pull {repo}` fetches it once")

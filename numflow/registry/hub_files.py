"""Choice of the files of a hub repository that make up one model.

A repository has one model in several quantisations, each in a file or in shards, at the top or in folders, and further
files that are no models: projectors, adapters, draft models, importance matrices. A quantisation is a whole word of a
file's path: F16 does not match BF16, nor Q6_K Q6_K_L.
"""

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from numflow.errors import ModelNotFoundError

_SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
# Files of the modules of embedding models, in folders such as 1_Pooling and 2_Dense.
_MODULE_FILES = re.compile(r"\d+_\w+/(config\.json|model\.safetensors|pytorch_model\.bin)")
_KINDS = (".gguf", ".safetensors", ".bin", ".pt", ".pth")
_SHARD = re.compile(r"-\d{5}-of-(\d{5})(?=\.\w+$)")
_QUANT = r"(?:i?q|tq)\d+(?:_\w+)?|bf16|fp?16|fp?32|mxfp\d+(?:_\w+)?|nvfp\d+"
_IS_QUANT = re.compile(_QUANT)
# "model_q4_0": a quantisation after an underscore; names of quantisations contain underscores too.
_SUFFIXED = re.compile(rf"(\w+)_({_QUANT})")
_NO_MODEL = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|tokenizer|consolidated|adapter).*")
# Words in names of files that are no models themselves, unless all models of the repository have such a word.
_EXTRAS = frozenset(("draft", "mtp", "nextn", "eagle", "eagle3", "lora", "adapter", "projector", "clip", "vocoder",
                     "vocab"))
_VARIANTS = frozenset(("ud", "i1", "imat", "imatrix"))  # words of variants of the same quantisation
# Default quantisations: Q4_K_M, as in other programs, then by distance in size from it.
_DEFAULTS = ("Q4_K_M", "Q4_K_L", "Q4_K_XL", "Q4_K_S", "Q4_K", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "MXFP4", "MXFP4_MOE",
             "Q5_K_M", "Q5_K_L", "Q5_K_XL", "Q5_K_S", "Q5_K", "Q5_1", "Q5_0", "Q6_K", "Q6_K_L", "Q6_K_XL", "Q8_0",
             "Q8_K_XL", "Q3_K_L", "Q3_K_XL", "Q3_K_M", "Q3_K_S", "IQ3_M", "IQ3_S", "IQ3_XS", "IQ3_XXS", "BF16", "F16",
             "F32", "Q2_K", "Q2_K_L", "Q2_K_XL")
_SHOWN = 24  # maximum models in an error message


@dataclass(frozen=True)
class _Model:
    """Weights of one model. name: file name without shard number. shards: number of shards, 0: a single file."""

    name: str
    shards: int
    files: tuple[str, ...]

    @cached_property
    def words(self) -> tuple[str, ...]:
        return _words(self.name.rpartition(".")[0])

    @property
    def kind(self) -> str:
        return self.name[self.name.rindex("."):].lower()


def choose(repo: str, files: Sequence[str], pattern: str = "", tell: Callable[[str], None] = lambda line: None,
           shards_of: Callable[[str], Iterable[str]] | None = None) -> list[str]:
    """Files of a repository that a model needs, weights first, shards in order.

    pattern:   words of the model's name (a quantisation), a file, "FOLDER/", or globs; several separated by commas.
               "": safetensors, else GGUF, else pickled weights.
    tell:      called with a line about a default choice.
    shards_of: function that returns the files named in an index of the repository.

    Raises:
        ModelNotFoundError: no weights, no match, several matching models, or a missing shard.
    """
    weights = _matching(repo, files, pattern) if pattern else _default(repo, files, tell, shards_of)
    if weights[0].lower().endswith(".gguf"):
        return weights
    folder = weights[0].rpartition("/")[0]
    folder = folder if f"{folder}/config.json" in files else ""
    side = [f for f in files if f not in weights and f.rpartition("/")[0] == folder
            and any(fnmatch.fnmatchcase(f, glob) for glob in _SIDE_FILES)]
    return weights + sorted(side) + ([] if folder else _module_files(files))


def choose_adapter(repo: str, files: Sequence[str], pattern: str = "", *_) -> list[str]:
    """Files of a repository that an adapter needs, weights first: PEFT or mlx-lm files at the top, or a GGUF file.

    Raises:
        ModelNotFoundError: no adapter, or several matching GGUF files.
    """
    weights = [name for name in ("adapter_model.safetensors", "adapter_model.bin", "adapters.safetensors")
               if name in files]
    if "adapter_config.json" in files and weights and not pattern:
        return [weights[0], "adapter_config.json"]
    found = [file for file in files if file.lower().endswith(".gguf")]
    found = [file for file in found if not pattern or _fits(_Model(file, 0, (file,)), pattern)]
    if len(found) != 1:
        which = f" that matches {pattern!r}" if pattern else ""
        raise ModelNotFoundError(f"{repo}: no adapter: expected adapter_config.json with adapter_model.safetensors, or "
                                 f"one GGUF file{which}, found {len(found)}")
    return found


def _module_files(files: Sequence[str]) -> list[str]:
    """Files of embedding modules; pickled weights only if a module has no safetensors."""
    found = sorted(f for f in files if _MODULE_FILES.fullmatch(f))
    return [f for f in found if not f.endswith(".bin") or f"{f.split('/')[0]}/model.safetensors" not in found]


def _matching(repo: str, files: Sequence[str], pattern: str) -> list[str]:
    """Weights that match a pattern."""
    everything = _models(files)
    models = _without_others(everything, frozenset(_words(pattern)))
    found = [model for model in models if any(_fits(model, part) for part in pattern.split(",") if part)]
    if not found:
        extras = [model.name for model in everything if any(_fits(model, part) for part in pattern.split(",") if part)]
        why = f" but {', '.join(extras[:3])}, not a complete model" if extras else ""
        raise ModelNotFoundError(f"{repo}: no weights match {pattern!r}{why}; it has {_listing(models)}")
    if any(c in pattern for c in "*?[,") and found[0].kind != ".gguf":
        return sorted(file for model in found for file in model.files)  # a glob stands for all files that it matches
    return _only(repo, found, f" that match {pattern!r}")


def _default(repo: str, files: Sequence[str], tell: Callable[[str], None],
           shards_of: Callable[[str], Iterable[str]] | None) -> list[str]:
    """Default weights of a repository."""
    if found := _plain(repo, files, "model.safetensors", "*.safetensors", shards_of):
        return found
    if models := [model for model in _without_others(_models(files)) if model.kind == ".gguf"]:
        return _default_gguf(repo, models, tell)
    if found := _plain(repo, files, "pytorch_model.bin", "pytorch_model*.bin", shards_of):
        return found
    raise ModelNotFoundError(f"{repo}: no safetensors, GGUF or pickled weights in it")


def _plain(repo: str, files: Sequence[str], single: str, glob: str,
           shards_of: Callable[[str], Iterable[str]] | None) -> list[str]:
    """Weights at the top of a repository, in the order of formats/folder.py: a single file, the files of an index, all
    matching files."""
    found = sorted(f for f in files if "/" not in f and fnmatch.fnmatchcase(f, glob) and not _NO_MODEL.fullmatch(f))
    if single in found:
        return [single]
    indexes = sorted((f for f in files if fnmatch.fnmatchcase(f, f"{glob}.index.json") and "/" not in f),
                     key=lambda f: f != f"{single}.index.json")
    if found and indexes and shards_of is not None:
        index = indexes[0]
        found = sorted(set(shards_of(index)))
        if missing := set(found) - set(files):
            raise ModelNotFoundError(f"{repo}: {index} names {min(missing)}, which is not there")
    return found


def _default_gguf(repo: str, models: list[_Model], tell: Callable[[str], None]) -> list[str]:
    if len(models) == 1:
        return _only(repo, models, "")
    for quant in _DEFAULTS:
        if found := [model for model in models if _fits(model, quant)]:
            files = _only(repo, found, f" in {quant}")
            tell(f"{repo} has {len(models)} GGUF models: taking {files[0]}; {repo}:QUANTISATION takes another")
            return files
    return _only(repo, models, "")


def _models(files: Iterable[str]) -> list[_Model]:
    groups: dict[tuple[str, int], list[str]] = {}
    for file in sorted(files):
        name = file.rpartition("/")[2].lower()
        if name.endswith(_KINDS) and not (_NO_MODEL.fullmatch(name) and not name.endswith(".gguf")):
            shard = _SHARD.search(file)
            groups.setdefault((_SHARD.sub("", file), int(shard[1]) if shard else 0), []).append(file)
    return [_Model(name, shards, tuple(found)) for (name, shards), found in groups.items()]


def _without_others(models: list[_Model], wanted: frozenset[str] = frozenset()) -> list[_Model]:
    """Models among weight files. wanted: words in the user's pattern."""
    models = [m for m in models if "mmproj" not in m.name.lower() and not _is_imatrix(m)]
    extras = _EXTRAS - wanted
    return [m for m in models if extras.isdisjoint(m.words)] or models


def _is_imatrix(model: _Model) -> bool:
    """Whether a file is an importance matrix, not a model quantised with one."""
    named = any(word.startswith(("imatrix", "imat")) for word in _words(model.name.rpartition("/")[2]))
    return named and not any(_IS_QUANT.fullmatch(word) for word in model.words)


def _fits(model: _Model, pattern: str) -> bool:
    lower = pattern.lower()
    if any(c in pattern for c in "*?["):
        return any(fnmatch.fnmatchcase(file.lower(), lower) for file in model.files)
    if pattern.endswith("/"):
        return model.name.lower().startswith(lower)
    if lower.endswith(_KINDS):
        names = (model.name, *model.files)
        return any(lower in (name.lower(), name.lower().rpartition("/")[2]) for name in names)
    words = _words(pattern)
    return any(model.words[i:i + len(words)] == words for i in range(len(model.words))) and bool(words)


def _words(path: str) -> tuple[str, ...]:
    """Words of a path in lower case; a quantisation after an underscore is a separate word."""
    found: list[str] = []
    for word in re.split(r"[^\w]+", path.lower()):
        suffixed = None if _IS_QUANT.fullmatch(word) else _SUFFIXED.fullmatch(word)
        found += suffixed.groups() if suffixed else (word,)
    return tuple(re.sub(r"^fp(16|32)$", r"f\1", word) for word in found if word)


def _only(repo: str, models: list[_Model], which: str) -> list[str]:
    """Files of the one model that is meant, among several matches."""
    kind = min((model.kind for model in models), key=_KINDS.index)
    models = [model for model in models if model.kind == kind]
    remaining = [model for model in models if not any(_comes_before(other, model) for other in models)]
    if len(remaining) > 1:
        raise ModelNotFoundError(f"{repo} has several models{which}: {_listing(remaining)}; choose one, such as "
                                 f"{repo}:{remaining[0].name}")
    if remaining[0].shards not in (0, len(remaining[0].files)):
        raise ModelNotFoundError(f"{repo}: {len(remaining[0].files)} of {remaining[0].shards} shards of "
                                 f"{remaining[0].name} are there")
    return list(remaining[0].files)


def _comes_before(one: _Model, other: _Model) -> bool:
    """Whether `one` is preferred: `other` is a variant of the same model, or the same model in more shards."""
    if one.words == other.words:
        return one.shards < other.shards and one.name == other.name
    mine, more = Counter(one.words), Counter(other.words)
    extra = more - mine
    return not mine - more and all(word in _VARIANTS or _IS_QUANT.fullmatch(word) for word in extra)


def _listing(models: list[_Model]) -> str:
    names = [model.name for model in models]
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "") or "none"

"""The sessions of an engine: texts that have run, in files from which a later process goes on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from numflow.engine.run.core import Core
from numflow.engine.run.places import KeptText
from numflow.engine.runner.kv_memory import CACHE_BYTES, block_bytes
from numflow.engine.schedule.limits import StepLimits
from numflow.engine.sessions.identity import check_same, identity
from numflow.engine.sessions.session_file import SessionFile, save
from numflow.engine.sessions.tree import HeldTree, can_be_saved, held_cache, held_text, put_back
from numflow.errors import OutOfMemoryError, RequestError


@dataclass(frozen=True)
class Session:
    """A text that was saved or restored. tokens: of it; cached: those of them whose keys and values are there, a whole
    number of blocks. nbytes: of the file. note: what was saved with it."""

    tokens: int
    cached: int
    nbytes: int
    note: Any = None


class Sessions:
    """Texts of a core's places, saved and restored. identity: makes facts of the model (identity.py), asked once."""

    def __init__(self, core: Core, identity: Callable[[], Mapping[str, Any]]):
        self._core, self._identity = core, identity
        self._own: Mapping[str, Any] | None = None

    @property
    def identity(self) -> Mapping[str, Any]:
        """Facts of the model."""
        if self._own is None:
            self._own = self._identity()
        return self._own

    def _check(self) -> None:
        if self._core.scheduler.prefix is None:
            raise RequestError("sessions need the prefix cache of a model whose texts can go on: there is none")

    def _text(self, place: int, shared: Any) -> KeptText:
        """The text of a place, if it may be saved. shared: whose it has to be; None: anybody's."""
        found = self._core.places.text(place)
        if found is None or (shared is not None and not belongs(found.root, shared)):
            raise RequestError(f"slot {place} has no text", param="id_slot")
        if not can_be_saved(found.root):
            raise RequestError(f"slot {place} has a text of an adapter, or behind an encoder: these are not saved")
        return found

    def save(self, path: Path | str, place: int = 0, note: Any = None, shared: Any = None) -> Session:
        """Write the text of a place, whole or not at all.

        Raises:
            RequestError: the place has no text that can be saved, or the file cannot be written.
        """
        self._check()
        text = self._text(place, shared)
        with held_text(self._core, text) as held:
            self._write(Path(path), held, note)
            return Session(len(text.ids), held.tree.tokens, Path(path).stat().st_size, note)

    def _write(self, path: Path, held: HeldTree, note: Any = None) -> None:
        sizes = [pool.size for pool in self._core.runner.pools]
        save(path, self.identity, held.tree, sizes, held.read, note)

    def restore(self, path: Path | str, place: int = 0, shared: Any = None) -> Session:
        """Take up a text that was saved: requests that begin like it go on from there. shared: as of `save`.

        Raises:
            RequestError: no session, damaged, of another model, or not of these requests.
            OutOfMemoryError: there is no room for it.
        """
        self._check()
        self._core.places.check(place)
        file = self._opened(path)
        roots = file.tree.roots
        if len(roots) != 1 or not can_be_saved(roots[0]) or (shared is not None and not belongs(roots[0], shared)):
            raise RequestError(f"{path}: this session was not saved by requests like these (another key)")
        if not put_back(self._core, file):
            raise OutOfMemoryError(f"{path}: no memory for the keys and values of its {file.tree.tokens} tokens")
        with self._core.runner.lock:
            self._core.places.put(roots[0], file.tree.text.tolist(), place)
        return Session(len(file.tree.text), file.tree.tokens, file.path.stat().st_size, file.note)

    def _opened(self, path: Path | str) -> SessionFile:
        """A file of this very model, whose ids are in the vocabulary and whose blocks have the right sizes."""
        file = SessionFile(Path(path))
        check_same(path, file.model, self.identity)
        tree, vocabulary = file.tree, self._core.runner.vocabulary
        whole = (len(tree.ids) == 0 or tree.ids.shape[1] == self._core.scheduler.block_size) \
            and len(tree.rows) == len(self._core.runner.pools)
        for ids in (tree.ids, tree.text):
            whole = whole and (not ids.size or (int(ids.min()) >= 0 and int(ids.max()) < vocabulary))
        if not whole or len(tree.text) > self._core.runner.context + 1:
            raise RequestError(f"{path}: damaged: its texts are none of this model")
        return file

    def erase(self, place: int = 0, shared: Any = None) -> int:
        """Forget the text of a place, and what only it has in the prefix cache. Returns its tokens."""
        self._check()
        text = self._text(place, shared)
        with self._core.runner.lock:
            self._core.forget(text)
            self._core.places.forget(place)
        return len(text.ids)

    def keep(self, path: Path, nbytes: int) -> int:
        """Write what the prefix cache has, in so many bytes at most, the latest texts first. Returns its tokens.

        Raises:
            RequestError: it cannot be written.
        """
        with held_cache(self._core, nbytes) as held:
            if len(held.tree.ids):
                self._write(path, held)
            return held.tree.tokens

    def take_up(self, path: Path) -> int:
        """Let the prefix cache have what `keep` wrote. Returns its tokens.

        Raises:
            RequestError: as `restore`.
        """
        file = self._opened(path)
        if not all(map(can_be_saved, file.tree.roots)):
            raise RequestError(f"{path}: damaged: texts of no request")
        return file.tree.tokens if put_back(self._core, file) else 0


class OpenSessions(Sessions):
    """A model that remembers its texts, without an engine: the next one that begins alike runs only what is new. Use it
    in a `with`.

    Raises:
        RequestError: the model has an engine, or requests are running.
    """

    def __init__(self, model):
        super().__init__(model.core, partial(identity, model))
        model.core.open(StepLimits(1, max(StepLimits.tokens, model.runner.chunk)),
                        keep_up_to=max(1, CACHE_BYTES // max(1, block_bytes(model.program))))

    def __enter__(self) -> "OpenSessions":
        return self

    def __exit__(self, *_) -> None:
        self._core.close()


def belongs(root: Any, shared: Any) -> bool:
    """Whether a root is of requests with this `shared`: an owner, and a salt of any kind."""
    base = root[0] if len(root) == 2 else root
    return isinstance(base[1], tuple) and base[1][:1] == (shared,)



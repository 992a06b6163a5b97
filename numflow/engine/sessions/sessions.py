"""Sessions of an engine: texts that have run, saved to files and restored by a later process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from numflow.engine.run.core import Core
from numflow.engine.run.text_slots import SlotText
from numflow.engine.runner.kv_memory import CACHE_BYTES, block_bytes
from numflow.engine.schedule.limits import StepLimits
from numflow.engine.sessions.identity import check_same, identity
from numflow.engine.sessions.session_file import SessionFile, save
from numflow.engine.sessions.tree import HeldTree, can_be_saved, held_cache, held_text, put_back
from numflow.errors import OutOfMemoryError, RequestError


@dataclass(frozen=True)
class Session:
    """A text that was saved or restored. tokens: length of the text. cached: tokens with saved keys and values, full
    blocks only. nbytes: size of the file. note: the note saved with the text."""

    tokens: int
    cached: int
    nbytes: int
    note: Any = None


class Sessions:
    """Saves and restores the texts of a core's slots. identity: function that returns the model's identity
    (identity.py), called once."""

    def __init__(self, core: Core, identity: Callable[[], Mapping[str, Any]]):
        self._core, self._identity = core, identity
        self._model: Mapping[str, Any] | None = None

    @property
    def identity(self) -> Mapping[str, Any]:
        """Identity of the model."""
        if self._model is None:
            self._model = self._identity()
        return self._model

    def _check(self) -> None:
        if self._core.scheduler.prefix is None:
            raise RequestError("sessions need the prefix cache, which is off or impossible for this model")

    def _text(self, slot: int, shared: Any) -> SlotText:
        """Text of a slot, if it may be saved. shared: required owner of the text; None: any owner."""
        found = self._core.slots.text(slot)
        if found is None or (shared is not None and not belongs(found.root, shared)):
            raise RequestError(f"slot {slot} has no text", param="id_slot")
        if not can_be_saved(found.root) or found.start is not None:
            raise RequestError(f"slot {slot} has a text of an adapter, or behind an encoder: these are not saved")
        return found

    def save(self, path: Path | str, slot: int = 0, note: Any = None, shared: Any = None) -> Session:
        """Write the text of a slot to a file, atomically.

        Raises:
            RequestError: the slot has no text that can be saved, or the file cannot be written.
        """
        self._check()
        text = self._text(slot, shared)
        with held_text(self._core, text) as held:
            self._write(Path(path), held, note)
            return Session(len(text.ids), held.tree.tokens, Path(path).stat().st_size, note)

    def _write(self, path: Path, held: HeldTree, note: Any = None) -> None:
        sizes = [pool.size for pool in self._core.runner.pools]
        save(path, self.identity, held.tree, sizes, held.read, note)

    def restore(self, path: Path | str, slot: int = 0, shared: Any = None) -> Session:
        """Restore a saved text to the prefix cache. shared: required owner of the text, as in `save`.

        Raises:
            RequestError: no session, a damaged one, one of another model or of another owner.
            OutOfMemoryError: no memory for its keys and values.
        """
        self._check()
        self._core.slots.check(slot)
        file = self._opened(path)
        roots = file.tree.roots
        if len(roots) != 1 or not can_be_saved(roots[0]) or (shared is not None and not belongs(roots[0], shared)):
            raise RequestError(f"{path}: this session was not saved by requests like these (another key)")
        if not put_back(self._core, file):
            raise OutOfMemoryError(f"{path}: no memory for the keys and values of its {file.tree.tokens} tokens")
        with self._core.runner.lock:
            self._core.slots.put(roots[0], file.tree.text.tolist(), slot)
        return Session(len(file.tree.text), file.tree.tokens, file.path.stat().st_size, file.note)

    def _opened(self, path: Path | str) -> SessionFile:
        """Open a session file; check that its model is this one, its ids, and the sizes of blocks."""
        file = SessionFile(Path(path))
        check_same(path, file.model, self.identity)
        tree, vocabulary = file.tree, self._core.runner.vocabulary
        valid = (len(tree.ids) == 0 or tree.ids.shape[1] == self._core.scheduler.block_size) \
            and len(tree.rows) == len(self._core.runner.pools)
        for ids in (tree.ids, tree.text):
            valid = valid and (not ids.size or (int(ids.min()) >= 0 and int(ids.max()) < vocabulary))
        if not valid or len(tree.text) > self._core.runner.context + 1:
            raise RequestError(f"{path}: damaged: its texts do not fit this model")
        return file

    def erase(self, slot: int = 0, shared: Any = None) -> int:
        """Erase the text of a slot, and its unshared blocks in the prefix cache. Returns the text's length."""
        self._check()
        text = self._text(slot, shared)
        with self._core.runner.lock:
            self._core.forget(text)
            self._core.slots.forget(slot)
        return len(text.ids)

    def save_cache(self, path: Path, nbytes: int) -> int:
        """Write the prefix cache to a file, most recently used texts first, at most `nbytes` bytes. Returns the number
        of tokens.

        Raises:
            RequestError: the file cannot be written.
        """
        with held_cache(self._core, nbytes) as held:
            if len(held.tree.ids):
                self._write(path, held)
            return held.tree.tokens

    def load_cache(self, path: Path) -> int:
        """Restore the prefix cache from a file that `save_cache` wrote. Returns the number of tokens.

        Raises:
            RequestError: as `restore`.
        """
        file = self._opened(path)
        if not all(map(can_be_saved, file.tree.roots)):
            raise RequestError(f"{path}: damaged: texts of no request")
        return file.tree.tokens if put_back(self._core, file) else 0


class OpenSessions(Sessions):
    """Prefix cache and sessions of a model without an engine. Use it in a `with`.

    Raises:
        RequestError: the model has an engine, or requests are running.
    """

    def __init__(self, model):
        super().__init__(model.core, partial(identity, model))
        model.core.open(StepLimits(1, max(StepLimits.tokens, model.runner.chunk)),
                        cache_up_to=max(1, CACHE_BYTES // max(1, block_bytes(model.program))))

    def __enter__(self) -> "OpenSessions":
        return self

    def __exit__(self, *_) -> None:
        self._core.close()


def belongs(root: Any, shared: Any) -> bool:
    """Whether a root belongs to the owner `shared`; the salt may be any."""
    base = root[0] if len(root) == 2 else root
    return isinstance(base[1], tuple) and base[1][:1] == (shared,)



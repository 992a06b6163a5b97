"""The pool of the service's models: loading on demand, unloading of the least recently used, reloading after the death
of a device."""

import asyncio
import logging
import time
from collections.abc import Callable

from numflow.errors import DeviceError, DeviceFaultError, NumflowError
from numflow.server.config.config import Config, ModelConfig
from numflow.server.http.errors import ApiError, of_error, one_line
from numflow.server.models.facts import weight_files
from numflow.server.models.served import Served

log = logging.getLogger("numflow.server")
WATCH_S = 1.0    # seconds between checks of the models
CALM_S = 60.0    # seconds without a failure after which the count of failures starts again
PAUSES = (0.0, 0.0, 2.0, 5.0, 15.0, 30.0)  # seconds before a model is loaded again, by its count of failures


def _pause(losses: int) -> float:
    return PAUSES[min(losses, len(PAUSES) - 1)]


class Lease:
    """A model in use, which stays loaded until the lease is released. adapter: the adapter in the requested name."""

    def __init__(self, slot: "_Slot", served: Served, adapter: str | None = None):
        self._slot: _Slot | None = slot
        self.adapter = adapter
        slot.users += 1
        slot.used = time.monotonic()
        self.served = served

    def release(self) -> None:
        """Release the model; may be called twice."""
        if self._slot is not None:
            self._slot.users -= 1
            self._slot.used = time.monotonic()
            self._slot = None

    def __enter__(self) -> Served:
        return self.served

    def __exit__(self, *_):
        self.release()


class _Slot:
    """State of one configured model.

    failed: error of the last load, or the failure of its device. losses: recent failures. next: time from which on it
    may be loaded again. since: time when it was loaded. used: time of its last use (all time.monotonic).
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        self.served: Served | None = None
        self.gone: Served | None = None  # a failed model, still to be closed
        self.users, self.used, self.size = 0, 0.0, 0
        self.keep: float | None = None  # seconds unused before unloading, from a request; None: option unload_after
        self.failed: Exception | None = None
        self.loading: asyncio.Task | None = None
        self.losses, self.next, self.since, self.is_lost = 0, 0.0, 0.0, False


class ModelPool:
    """All configured models.

    load: makes a Served from a ModelConfig and the queue size; called in a thread.
    """

    def __init__(self, config: Config, load: Callable[[ModelConfig, int], Served] = Served):
        self._config, self._load = config, load
        self._slots = {model.name: _Slot(model) for model in config.models}
        self._names = {name: model.name for model in config.models for name in (model.name, *model.aliases)}
        self._room = asyncio.Lock()  # only one model at a time makes room and is loaded
        self.ready = False

    @property
    def default(self) -> str:
        """Name of the model for requests without a model name."""
        return self._config.models[0].name

    def find(self, name: str | None) -> str:
        """The configured name of the model that a request asks for.

        Raises:
            ApiError: there is no such model.
        """
        if not name:
            return self.default
        if (model := self.named(name)) is not None:
            return model
        if (pair := self.with_adapter(name)) is not None:
            return pair[0]
        rule = self._config.unknown_model
        if rule == "default" or (rule == "auto" and len(self._slots) == 1 and not self._config.strict):
            return self.default  # many programs have a fixed model name; the answer has the name of the model used
        raise ApiError(404, f"there is no model {name!r:.200}; models: {', '.join(self._slots)}", param="model",
                       code="model_not_found")

    def named(self, name: str) -> str | None:
        """The configured name for a name or alias, with or without Ollama's ":latest"; None if there is no model."""
        return self._names.get(name) or self._names.get(name.removesuffix(":latest"))

    def with_adapter(self, name: str | None) -> tuple[str, str] | None:
        """(model, adapter) of a name "MODEL:ADAPTER"; None if it is no such name, or the model has no adapters."""
        text = name or ""
        if self.named(text) is not None:
            return None
        for colon in (index for index, letter in enumerate(text) if letter == ":"):
            model = self._names.get(text[:colon])
            if model is not None and self._slots[model].config.load.get("adapters") is not None:
                return model, text[colon + 1:]
        return None

    async def unload(self, name: str) -> bool:
        """Unload a model, unless it is in use. Return whether it is unloaded."""
        slot = self._slots[name]
        if slot.served is not None and not slot.users:
            await self._unload(slot)
        return slot.served is None

    def loaded(self) -> list[Served]:
        """The loaded models."""
        return [slot.served for slot in self._slots.values() if slot.served is not None]

    def listing(self) -> list[tuple[ModelConfig, Served | None, Exception | None]]:
        """(configuration, loaded model or None, error or None) of every model."""
        return [(slot.config, slot.served, slot.failed) for slot in self._slots.values()]

    async def acquire(self, name: str | None) -> Lease:
        """Load a model, if necessary, and lease it. The caller releases the lease.

        Raises:
            ApiError: there is no such model, it cannot be loaded, or models in use leave no memory for it.
            DeviceFaultError: its device has died, and the service shuts down (on_failure = "exit").
        """
        slot = self._slots[self.find(name)]
        while (served := slot.served) is None or served.failure:  # repeat, if it was unloaded again before its use
            if served is not None:
                self._lose(slot, served.failure)
            await self._filled(slot)
        pair = self.with_adapter(name)
        if pair is not None and pair[1] not in (known := served.model.adapters or {}):
            raise ApiError(404, f"model {pair[0]!r} has no adapter {pair[1]!r:.200}; adapters: "
                           f"{', '.join(known) or 'none'}", param="model", code="model_not_found")
        return Lease(slot, served, pair and pair[1])

    async def preload(self) -> None:
        """Load the models with the option preload.

        Raises:
            NumflowError: a model cannot be loaded.
        """
        for slot in self._slots.values():
            if slot.config.preload and slot.served is None:
                await self._filled(slot)
        self.ready = True

    def failing(self) -> dict[str, str]:
        """Reasons of failure by model. A model whose device has died fails until it is loaded again."""
        found = {}
        for name, slot in self._slots.items():
            why = slot.served.failure if slot.served is not None else str(slot.failed) if slot.is_lost else ""
            if why:
                found[name] = why
        return found

    async def watch(self) -> None:
        """Check the models until the service ends: unload idle models, and reload models whose device has died.

        Raises:
            DeviceFaultError: a device has died and the service is to end (on_failure), or this process cannot use the
            device any more.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            for slot in self._slots.values():
                if slot.served is not None and (why := slot.served.failure):
                    self._lose(slot, why)
                elif self._is_idle(slot):
                    log.info({"model": slot.config.name, "unloaded_after_s": round(time.monotonic() - slot.used, 1)})
                    slot.gone, slot.served = slot.served, None
                    await self._bury(slot)
                if slot.is_lost and slot.loading is None and time.monotonic() >= slot.next:
                    await asyncio.wait([self._begin(slot)])
                    if isinstance(slot.failed, DeviceFaultError) and slot.served is None:
                        raise slot.failed

    def keep(self, name: str, seconds: float | None) -> None:
        """Set the seconds after its last use until a model is unloaded; None: as configured."""
        self._slots[name].keep = seconds

    def _is_idle(self, slot: _Slot) -> bool:
        """Whether a model has been unused for longer than it may stay."""
        after = self._config.unload_after or float("inf") if slot.keep is None else slot.keep
        return slot.served is not None and not slot.users and slot.loading is None \
            and time.monotonic() - slot.used > after

    def _lose(self, slot: _Slot, why: str) -> None:
        """Record the failure of a model. The next request loads it again, or gets an error until it may be loaded."""
        log.error({"model": slot.config.name, "lost": why})
        if self._config.on_failure == "exit":
            raise DeviceFaultError(f"model {slot.config.name}: {why}")
        now = time.monotonic()
        slot.losses = slot.losses + 1 if now - slot.since < CALM_S else 1
        slot.is_lost, slot.failed = True, DeviceError(why)
        slot.next = now + _pause(slot.losses)
        slot.gone, slot.served = slot.served, None

    async def close(self) -> None:
        """Unload all models, after running loads have ended."""
        for slot in self._slots.values():
            if slot.loading is not None:
                await asyncio.wait([slot.loading])
        for slot in self._slots.values():
            if slot.served is not None:
                await self._unload(slot)

    async def _filled(self, slot: _Slot) -> None:
        """Wait until a model is loaded. Loading continues if the caller is cancelled.

        Raises:
            ApiError: it cannot be loaded, or it has failed several times and may only be loaded later.
        """
        if slot.loading is None and slot.is_lost and (left := slot.next - time.monotonic()) > 0:
            raise ApiError(503, f"{slot.config.name} has failed and is loaded again in {left:.0f} s: "
                           f"{one_line(slot.failed or Exception())}", code="model_unavailable",
                           headers={"Retry-After": str(int(left) + 1)})
        await asyncio.shield(self._begin(slot))

    def _begin(self, slot: _Slot) -> asyncio.Task:
        """The task that loads a model, started if there is none."""
        if slot.loading is None:
            slot.loading = asyncio.create_task(self._fill(slot))
            slot.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        return slot.loading

    async def _fill(self, slot: _Slot) -> None:
        try:
            async with self._room:
                await self._bury(slot)
                await self._make_room(slot)
                slot.served = await asyncio.to_thread(self._load, slot.config, self._config.max_queue)
                if slot.is_lost:
                    log.warning({"model": slot.config.name, "loaded_again": True})
                slot.failed, slot.size, slot.is_lost, slot.since = None, slot.served.nbytes, False, time.monotonic()
                slot.used = slot.since
        except Exception as error:
            slot.failed = error
            slot.losses += slot.is_lost
            slot.next = time.monotonic() + _pause(slot.losses)
            raise of_error(error) from error
        finally:
            slot.loading = None

    async def _make_room(self, slot: _Slot) -> None:
        budget = self._config.memory
        if budget is None:
            return
        need = slot.size or sum(file.stat().st_size for file in await asyncio.to_thread(weight_files, slot.config.path))
        if need > budget:
            raise ApiError(400, f"{slot.config.name} needs {need} bytes; the limit for all models is {budget} (memory)",
                           param="model", code="model_too_large")
        used = sum(served.nbytes for served in self.loaded())
        for other in sorted(self._slots.values(), key=lambda slot: slot.used):
            if used + need <= budget:
                return
            if other.served is not None and not other.users:
                used -= other.served.nbytes
                await self._unload(other)
        if used + need > budget:
            raise ApiError(503, f"no memory for {slot.config.name} while other models are in use; try again later",
                           param="model", code="model_unavailable", headers={"Retry-After": "10"})

    async def _bury(self, slot: _Slot) -> None:
        """Close a failed model."""
        gone, slot.gone = slot.gone, None
        if gone is not None:
            try:
                await asyncio.to_thread(gone.close)
            except NumflowError as error:
                log.warning({"model": slot.config.name, "closing": one_line(error)})

    async def _unload(self, slot: _Slot) -> None:
        served, slot.served = slot.served, None
        if served is not None:
            await asyncio.to_thread(served.close)

"""The models of the service by name: loaded when first asked for, unloaded when others need their memory, loaded again
when their device has died."""

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
WATCH_S = 1.0    # how often models are looked after
CALM_S = 60.0    # seconds without a loss after which earlier ones are forgotten
PAUSES = (0.0, 0.0, 2.0, 5.0, 15.0, 30.0)  # seconds before a model is loaded again, by its losses lately; then the last


def _pause(losses: int) -> float:
    return PAUSES[min(losses, len(PAUSES) - 1)]


class Lease:
    """A model in use; it stays loaded until the lease is released. adapter: that its name asks for."""

    def __init__(self, slot: "_Slot", served: Served, adapter: str | None = None):
        self._slot: _Slot | None = slot
        self.adapter = adapter
        slot.users += 1
        slot.used = time.monotonic()
        self.served = served

    def release(self) -> None:
        """The model is not needed any more; may be called twice."""
        if self._slot is not None:
            self._slot.users -= 1
            self._slot.used = time.monotonic()
            self._slot = None

    def __enter__(self) -> Served:
        return self.served

    def __exit__(self, *_):
        self.release()


class _Slot:
    """A name's place. failed: why the last attempt to load it did not succeed, or why it was lost. losses: how often
    that was so lately; next: when it may be loaded again (time.monotonic), since: when it was loaded."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.served: Served | None = None
        self.gone: Served | None = None  # a lost one, still to be closed
        self.users, self.used, self.size = 0, 0.0, 0
        self.keep: float | None = None  # seconds that it stays unused, as a request has said; None: as the option
        self.failed: Exception | None = None
        self.loading: asyncio.Task | None = None
        self.losses, self.next, self.since, self.is_lost = 0, 0.0, 0.0, False


class ModelPool:
    """All models that the configuration names.

    load: makes a Served of a ModelConfig; runs in a thread of its own.
    """

    def __init__(self, config: Config, load: Callable[[ModelConfig, int], Served] = Served):
        self._config, self._load = config, load
        self._slots = {model.name: _Slot(model) for model in config.models}
        self._names = {name: model.name for model in config.models for name in (model.name, *model.aliases)}
        self._room = asyncio.Lock()  # one at a time makes room and loads
        self.ready = False

    @property
    def default(self) -> str:
        """The name that a request without one means."""
        return self._config.models[0].name

    def find(self, name: str | None) -> str:
        """A model's own name.

        Raises:
            ApiError: there is none of that name.
        """
        if not name:
            return self.default
        if (own := self.named(name)) is not None:
            return own
        if (pair := self.with_adapter(name)) is not None:
            return pair[0]
        rule = self._config.unknown_model
        if rule == "default" or (rule == "auto" and len(self._slots) == 1 and not self._config.strict):
            return self.default  # many programs have a name built in; the answer says which model it was
        raise ApiError(404, f"there is no model {name!r:.200}; models: {', '.join(self._slots)}", param="model",
                       code="model_not_found")

    def named(self, name: str) -> str | None:
        """The own name of a model that goes by a name, with or without Ollama's ":latest"; None: there is none."""
        return self._names.get(name) or self._names.get(name.removesuffix(":latest"))

    def with_adapter(self, name: str | None) -> tuple[str, str] | None:
        """A model's own name and an adapter's, of "MODEL:ADAPTER"; None where the model has no adapters to choose."""
        text = name or ""
        if self.named(text) is not None:
            return None
        for at in (at for at, letter in enumerate(text) if letter == ":"):
            own = self._names.get(text[:at])
            if own is not None and self._slots[own].config.load.get("adapters") is not None:
                return own, text[at + 1:]
        return None

    async def unload(self, name: str) -> bool:
        """Whether a model, by its own name, is not in memory any more: one that is in use stays."""
        slot = self._slots[name]
        if slot.served is not None and not slot.users:
            await self._unload(slot)
        return slot.served is None

    def loaded(self) -> list[Served]:
        """The models that are in memory."""
        return [slot.served for slot in self._slots.values() if slot.served is not None]

    def listing(self) -> list[tuple[ModelConfig, Served | None, Exception | None]]:
        """Every model: how it is configured, and what became of it."""
        return [(slot.config, slot.served, slot.failed) for slot in self._slots.values()]

    async def acquire(self, name: str | None) -> Lease:
        """A model, loaded. Who takes the lease releases it.

        Raises:
            ApiError: no such model, it cannot be loaded, or others that are in use leave no memory for it.
            DeviceFaultError: its device has died, and the service ends then.
        """
        slot = self._slots[self.find(name)]
        while (served := slot.served) is None or served.failure:  # again, if others took its memory before its use
            if served is not None:
                self._lose(slot, served.failure)
            await self._filled(slot)
        pair = self.with_adapter(name)
        if pair is not None and pair[1] not in (known := served.model.adapters or {}):
            raise ApiError(404, f"model {pair[0]!r} has no adapter {pair[1]!r:.200}; adapters: "
                           f"{', '.join(known) or 'none'}", param="model", code="model_not_found")
        return Lease(slot, served, pair and pair[1])

    async def preload(self) -> None:
        """Load the models that are wanted from the beginning.

        Raises:
            NumflowError: the first of them cannot be loaded.
        """
        for slot in self._slots.values():
            if slot.config.preload and slot.served is None:
                await self._filled(slot)
        self.ready = True

    def failing(self) -> dict[str, str]:
        """Reasons of failure, by name of the model: a model whose device has died fails until it is loaded again."""
        found = {}
        for name, slot in self._slots.items():
            why = slot.served.failure if slot.served is not None else str(slot.failed) if slot.is_lost else ""
            if why:
                found[name] = why
        return found

    async def watch(self) -> None:
        """Look after the models, for as long as the service runs: one whose device has died is loaded again.

        Raises:
            DeviceFaultError: one was lost, and the service is to end then (on_failure); or this process can use its
            device no more.
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
        """Let a model, by its own name, stay for so long after its last use; None: as the configuration has it."""
        self._slots[name].keep = seconds

    def _is_idle(self, slot: _Slot) -> bool:
        """Whether a model has been of no use for as long as it is to stay."""
        after = self._config.unload_after or float("inf") if slot.keep is None else slot.keep
        return slot.served is not None and not slot.users and slot.loading is None \
            and time.monotonic() - slot.used > after

    def _lose(self, slot: _Slot, why: str) -> None:
        """A model is of no use any more: the next one to ask for it gets a new one, or an error while it cannot be
        had."""
        log.error({"model": slot.config.name, "lost": why})
        if self._config.on_failure == "exit":
            raise DeviceFaultError(f"model {slot.config.name}: {why}")
        now = time.monotonic()
        slot.losses = slot.losses + 1 if now - slot.since < CALM_S else 1
        slot.is_lost, slot.failed = True, DeviceError(why)
        slot.next = now + _pause(slot.losses)
        slot.gone, slot.served = slot.served, None

    async def close(self) -> None:
        """Unload everything, when what is being loaded is there."""
        for slot in self._slots.values():
            if slot.loading is not None:
                await asyncio.wait([slot.loading])
        for slot in self._slots.values():
            if slot.served is not None:
                await self._unload(slot)

    async def _filled(self, slot: _Slot) -> None:
        """Wait until it is loaded. Loading goes on if whoever asked for it goes away.

        Raises:
            ApiError: it cannot be loaded, or it was lost several times lately and is left alone for a while.
        """
        if slot.loading is None and slot.is_lost and (left := slot.next - time.monotonic()) > 0:
            raise ApiError(503, f"{slot.config.name} was lost and is loaded again in {left:.0f} s: "
                           f"{one_line(slot.failed or Exception())}", code="model_unavailable",
                           headers={"Retry-After": str(int(left) + 1)})
        await asyncio.shield(self._begin(slot))

    def _begin(self, slot: _Slot) -> asyncio.Task:
        """The task that loads it."""
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
            raise ApiError(400, f"{slot.config.name} needs {need} bytes, more than all models may have ({budget})",
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
        """Give back what a lost model has."""
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

"""Replicas of the service behind Ray Serve, which balances requests, checks the replicas and replaces dead ones."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from numflow.distribution import install
from numflow.errors import DeviceError
from numflow.partition.cluster.connect import connected, environment, room
from numflow.partition.cluster.resources import Need, bundles, listed, nodes_of
from numflow.partition.cut.devices import CPU, parse_devices
from numflow.server.config.config import Config, ModelConfig
from numflow.server.http.errors import ApiError
from numflow.server.messages.wire import KEEP_ALIVE
from numflow.server.replicas.replica import Head, Replica, ReplicaCall, portable
from numflow.server.service.store import StoredResponse

log = logging.getLogger("numflow.server")
ATTEMPTS = 4        # attempts of a request, whose replicas die; after them the request may be the cause
PLACE_S = 120.0     # seconds to wait for free resources of the cluster
START_S = 900.0     # seconds to wait for models to be loaded
HEALTH_S = 2.0      # seconds between health checks of Ray Serve
_LOOK_S = 0.2       # seconds between looks at the status of the deployment


class Replicas:
    """The replicas of a service, with the interface of a ModelPool."""

    def __init__(self, config: Config, count: int):
        self._config, self.count = config, count
        self.ready, self.name = False, f"numflow-{time.time_ns():x}"
        self._handle: Any = None
        self._gone: tuple[type[BaseException], ...] = ()

    async def preload(self) -> None:
        """Start the replicas, and wait until all of them have loaded their models.

        Raises:
            DeviceError: Ray is not installed, the cluster has no room, or the models cannot be loaded.
        """
        await asyncio.to_thread(self._start)
        self.ready = True

    async def close(self) -> None:
        """Stop the replicas."""
        await asyncio.to_thread(self._end)

    def loaded(self) -> list:
        """The loaded models of this process: none."""
        return []

    def failing(self) -> dict[str, str]:
        """Failing models: none, since Ray Serve replaces a replica whose models fail."""
        return {}

    async def watch(self) -> None:
        """Do nothing: Ray Serve checks the replicas."""

    def listing(self) -> list[tuple[ModelConfig, None, None]]:
        """The configuration of every model."""
        return [(model, None, None) for model in self._config.models]

    async def ask(self, call: ReplicaCall) -> AsyncGenerator[Head | bytes | StoredResponse, None]:
        """Send a request to a replica: yield the head, the parts of the body, and a response to store. If the replica
        dies before the first part of the body, another replica is asked.

        Raises:
            ApiError: a replica died in the middle of the body, or ATTEMPTS replicas died.
        """
        head: Head | None = None
        for attempt in range(1, ATTEMPTS + 1):
            began = False
            try:
                async for part in self._parts(call):
                    if isinstance(part, StoredResponse):
                        yield part
                    elif not isinstance(part, Head):
                        began = began or part != KEEP_ALIVE
                        yield part
                    elif head is None:
                        head = part
                        yield part
                    elif part.status != head.status:  # the head was already yielded with another status
                        raise _lost()
                return
            except self._gone as error:
                log.warning({"request": call.id, "replica_lost": type(error).__name__, "attempt": attempt})
                if began or attempt == ATTEMPTS:
                    raise _lost() from error

    async def all(self, method: str) -> list[Any]:
        """Call a method on all replicas; return the answers without exceptions."""
        found = await self._handle.broadcast(method).results_async(timeout_s=10, return_exceptions=True)
        return [answer for answer in found if not isinstance(answer, Exception)]

    async def _parts(self, call: ReplicaCall) -> AsyncIterator[Head | bytes | StoredResponse]:
        """The answer of one replica. Closing the generator cancels the replica's work."""
        answer, ended = self._handle.options(stream=True).ask.remote(call), False
        try:
            async for part in answer:
                yield part
            ended = True
        finally:
            if not ended:
                answer.cancel()

    def _start(self) -> None:
        ray = connected()
        try:
            from ray import serve
        except ImportError as error:
            raise DeviceError(f"replicas need Ray Serve, which needs {error.name}: {install('ray')}") from None
        # RayTaskError is not among them: it is an exception of the replica's own code.
        self._gone = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.WorkerCrashedError,
                      serve.exceptions.ReplicaUnavailableError)
        bundle = bundles([_need(self._config.models)] * self.count, nodes_of(ray), f"{self.count} replicas")[0]
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING", "enable_access_log": False})
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        made: Any = serve.deployment(Replica)
        deployment = made.options(
            name="service", num_replicas=self.count, max_ongoing_requests=self._config.max_connections,
            ray_actor_options={"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0),
                               "runtime_env": environment()}, health_check_period_s=HEALTH_S,
            graceful_shutdown_timeout_s=self._config.drain_timeout, max_constructor_retry_count=3)
        target = serve.RunTarget(deployment.bind(portable(self._config)), self.name, None)
        try:
            self._handle, = serve.run_many([target], wait_for_applications_running=False)
            self._wait(ray, serve, bundle)
            if failure := self._handle.failure.remote().result():  # of any replica: all load the same models
                raise DeviceError(failure)
        except BaseException:
            self._end()
            raise

    def _wait(self, ray: Any, serve: Any, bundle: dict[str, float]) -> None:
        """Wait until all replicas have loaded their models.

        Raises:
            DeviceError: they cannot be started.
        """
        begin = time.monotonic()
        while (found := serve.status().applications.get(self.name)) is None or found.status != "RUNNING":
            seconds = time.monotonic() - begin
            states = [state.message for state in found.deployments.values()] if found is not None else []
            if found is not None and found.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise DeviceError(f"the replicas cannot be started: {' '.join(found.message.split())[-400:]}")
            if seconds > START_S or (seconds > PLACE_S and any("to be scheduled" in state for state in states)):
                raise DeviceError(f"the Ray cluster has no room for {self.count} replicas of {listed([bundle])} within "
                                  f"{PLACE_S:g} s: {room(ray)}; use fewer replicas, devices or threads")
            time.sleep(_LOOK_S)

    def _end(self) -> None:
        if self._handle is not None:
            from ray import serve

            serve.delete(self.name)
            self._handle = None


def _lost() -> ApiError:
    return ApiError(503, "the replica that generated this answer died and is replaced; try again",
                    code="replica_lost", headers={"Retry-After": "1"})


def _need(models: Sequence[ModelConfig]) -> Need:
    """Resources of a replica: enough for each of the models that run in its process.

    Groups of devices that are Ray actors (transport "ray") request their own resources.
    """
    def needed(model: ModelConfig) -> tuple[int, int]:
        load = model.load
        if load.get("transport") == "ray":
            return 0, 0
        names = [device.name for device in parse_devices(load["devices"])] if load.get("devices") else ["0"]
        gpus = sum(name != CPU for name in names) if load.get("backend") == "cuda" else 0
        on_cpu = len(names) - gpus or int(bool(gpus and load.get("cpu_layers")))
        return gpus + on_cpu * load.get("threads", 1), gpus

    found = list(map(needed, models))
    return Need(max(cpus for cpus, _ in found), max(gpus for _, gpus in found))

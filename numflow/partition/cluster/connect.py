"""Connection to the Ray cluster: the one at RAY_ADDRESS, or a local one."""

import logging
import os
import socket
from pathlib import Path
from typing import Any

from numflow.distribution import install
from numflow.errors import DeviceError

CONNECT_S = 5.0
_TRIES, _LATE = 3, "timed out during startup"
# Read when Ray is imported. Despite its name, 0 also keeps a local Linux cluster from listening on all addresses.
_OF_SEVERAL_MACHINES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def connected() -> Any:
    """Import ray and connect to the cluster.

    Raises:
        DeviceError: ray is not installed, no cluster answers at RAY_ADDRESS, or a local one does not start.
    """
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        os.environ.setdefault(_OF_SEVERAL_MACHINES, "0")
    try:
        import ray
    except ImportError:
        raise DeviceError(f"actors need the package ray: {install('ray')}") from None
    if not ray.is_initialized():
        logging.getLogger("ray").addHandler(logging.NullHandler())  # Ray logs to its own files
        where = {"address": address} if address else {"include_dashboard": False}
        _check(address or "")
        try:
            _start(ray, where)
        except (ConnectionError, ValueError) as error:
            raise DeviceError(f"no Ray cluster at RAY_ADDRESS={address}: {' '.join(str(error).split())}") from None
    return ray


def _start(ray: Any, where: dict[str, Any]) -> None:
    """Start Ray, with retries: its start-up timeout of 30 seconds is fixed, and a busy machine may exceed it.

    Raises:
        DeviceError: all tries timed out.
    """
    for _ in range(_TRIES):
        try:
            ray.init(**where, log_to_driver=False, configure_logging=False)
        except Exception as error:  # Ray raises no specific class
            if _LATE not in str(error):
                raise
            ray.shutdown()
        else:
            return
    raise DeviceError(f"Ray did not start on this machine in {_TRIES} times 30 s: something else takes its processors")


def _check(address: str) -> None:
    """Check that HOST:PORT answers, because Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), CONNECT_S).close()
        except OSError as error:
            raise DeviceError(f"no Ray cluster at RAY_ADDRESS={address}: {error.strerror or error}") from None


def environment() -> dict[str, Any]:
    """`runtime_env` of actors: this numflow package, with the same NUMFLOW_ variables."""
    package = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {name: value for name, value in os.environ.items() if name.startswith("NUMFLOW_")}
    return {"env_vars": {**settings, "PYTHONPATH": path}}


def room(ray: Any) -> str:
    """Text of the cluster's resources, for messages."""
    have, free = ray.cluster_resources(), ray.available_resources()
    kinds = ("CPU", "GPU") if have.get("GPU") else ("CPU",)
    return "it has " + " and ".join(f"{have.get(kind, 0):g} {kind}s, {free.get(kind, 0):g} of them free"
                                    for kind in kinds)

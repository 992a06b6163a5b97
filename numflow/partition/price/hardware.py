"""Performance figures of devices and links, for planner and simulator. Read from TOML or measured."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from numflow.errors import FormatError, ModelNotFoundError, RequestError, did_you_mean
from numflow.partition.cut.devices import CPU
from numflow.sizes import parse_bytes

CLUSTERS = Path(__file__).parent / "clusters"


@dataclass(frozen=True)
class DeviceSpec:
    """Achieved (not nominal) speed and memory of one device.

    memory:     bytes for weights, caches and scratch.
    bandwidth:  bytes/s read from its memory.
    operations: operations/s of matrix products, 2 per multiply-add.
    step:       fixed overhead of a step in seconds (launch, barrier).
    host:       index of its machine; devices that are threads of one host share its cores.
    """

    name: str
    memory: float
    bandwidth: float
    operations: float
    step: float = 0.0
    host: int = 0


@dataclass(frozen=True)
class Link:
    """A link between two devices. latency: seconds until the first byte arrives. bandwidth: bytes/s per direction."""

    bandwidth: float
    latency: float

    def seconds(self, nbytes: float) -> float:
        """Time of one message."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Cluster:
    """Devices by name in device strings ("0", "1", ..., "cpu"), and links.

    links:  by pair of names, in both orders. link: default for other pairs.
    cores:  for devices that are threads of one machine: number that run at full speed at once; None: all.
    host_bandwidth: bytes/s that these devices read in total; None: the sum of their bandwidths.
    crowded: seconds of an exchange if a plan has more devices than cores.
    start, start_each: overhead of a batch on one device, and for each further device, in seconds.
    """

    title: str
    devices: Mapping[str, DeviceSpec]
    link: Link
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    cores: float | None = None
    host_bandwidth: float | None = None
    crowded: float = 0.0
    start: float = 0.0
    start_each: float = 0.0

    def between(self, a: str, b: str) -> Link:
        """The link of two devices."""
        return self.links.get((a, b), self.link)

    def gap(self, devices: int) -> float:
        """Overhead of a batch in seconds."""
        return self.start + self.start_each * (devices - 1)


def known_clusters() -> dict[str, str]:
    """Name -> title of the cluster files shipped with numflow."""
    return {path.stem: tomllib.loads(path.read_text(encoding="utf-8"))["title"]
            for path in sorted(CLUSTERS.glob("*.toml"))}


def read_cluster(path_or_name: str | Path) -> Cluster:
    """Read a cluster from a TOML file, or by the name of a shipped one.

    Raises:
        ModelNotFoundError: no such file or name.
        FormatError: not TOML, an unknown or missing key, or a value out of range; names file and key.
    """
    path = Path(path_or_name)
    if not path.suffix and not path.exists():
        path = CLUSTERS / f"{path_or_name}.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        names = ", ".join(known_clusters())
        raise ModelNotFoundError(f"no cluster file {path_or_name}; numflow has {names}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FormatError(f"{path}: {error}") from None
    return _Reader(path).cluster(table)


class _Reader:
    """Reader of the tables of one file; errors name the key."""

    def __init__(self, path: Path):
        self.path = path

    def cluster(self, table: Mapping[str, Any]) -> Cluster:
        self.keys("", table, {"title", "device", "link", "links"}, {"device", "link"})
        devices: dict[str, DeviceSpec] = {}
        kinds = self.table("device", table["device"])
        for kind, facts in kinds.items():
            self.keys(f"device.{kind}", facts, {"count", "memory", "bandwidth", "operations", "step", "host"},
                      {"memory", "bandwidth", "operations"})
            for device in self.devices(kind, facts):
                name = CPU if kind == CPU else str(sum(other != CPU for other in devices))
                devices[name] = device
        links: dict[tuple[str, str], Link] = {}
        for number, facts in enumerate(self.listed("links", table.get("links", []))):
            where = f"links[{number}]"
            self.keys(where, facts, {"between", "bandwidth", "latency"}, {"between", "bandwidth", "latency"})
            link, between = self.link(where, facts), self.listed(f"{where}.between", facts["between"])
            ends = list(map(str, between))
            if len(set(ends)) < 2 or len(set(ends)) < len(ends) or not set(ends) <= devices.keys():
                raise self.wrong(f"{where}.between", f"two or more of {', '.join(devices)}, each once", between)
            links |= {(a, b): link for a in ends for b in ends if a != b}
        self.keys("link", table["link"], {"bandwidth", "latency"}, {"bandwidth", "latency"})
        return Cluster(str(table.get("title", self.path.stem)), devices, self.link("link", table["link"]), links)

    def devices(self, kind: str, facts) -> list[DeviceSpec]:
        """`count` devices; `host` may be one integer, or one per device."""
        count = facts.get("count", 1)
        most = 1 if kind == CPU else 1024
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= most:
            raise self.wrong(f"device.{kind}.count", f"a whole number 1 .. {most}" if most > 1 else "1", count)
        hosts = facts.get("host", 0)
        hosts = hosts if isinstance(hosts, list) else [hosts] * count
        if len(hosts) != count or not all(isinstance(host, int) and not isinstance(host, bool) for host in hosts):
            raise self.wrong(f"device.{kind}.host", f"{count} whole numbers", facts["host"])
        try:
            memory = parse_bytes(facts["memory"], f"{self.path}: device.{kind}.memory")
        except RequestError as error:
            raise FormatError(str(error)) from None
        bandwidth = self.number(f"device.{kind}.bandwidth", facts["bandwidth"]) * 1e9
        operations = self.number(f"device.{kind}.operations", facts["operations"]) * 1e12
        step = self.number(f"device.{kind}.step", facts.get("step", 0), least=0) * 1e-6
        return [DeviceSpec(kind, memory, bandwidth, operations, step, host) for host in hosts]

    def link(self, where: str, facts) -> Link:
        return Link(self.number(f"{where}.bandwidth", facts["bandwidth"]) * 1e9,
                    self.number(f"{where}.latency", facts["latency"], least=0) * 1e-6)

    def listed(self, where: str, value) -> list:
        if not isinstance(value, list):
            raise self.wrong(where, "a list", value)
        return value

    def table(self, where: str, value) -> Mapping[str, Any]:
        if not isinstance(value, dict) or not value or not all(isinstance(v, dict) for v in value.values()):
            raise self.wrong(where, "tables [device.NAME]", value)
        return value

    def keys(self, where: str, table, known: set[str], needed: set[str]) -> None:
        if not isinstance(table, dict):
            raise self.wrong(where, "a table", table)
        for key in table:
            if key not in known:
                raise FormatError(f"{self.path}: unknown key {self.full(where, key)!r}{did_you_mean(key, known)}")
        for key in sorted(needed - table.keys()):
            raise FormatError(f"{self.path}: {self.full(where, key)!r} is missing")

    def number(self, where: str, value, least: float | None = None) -> float:
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
        if not good or value < (least or 0) or (least is None and value == 0):
            raise self.wrong(where, "a number above 0" if least is None else "a number from 0", value)
        return float(value)

    def wrong(self, where: str, wanted: str, value) -> FormatError:
        return FormatError(f"{self.path}: {where} should be {wanted}, is {value!r}")

    @staticmethod
    def full(where: str, key: str) -> str:
        return f"{where}.{key}" if where else key

"""Device strings: `0;1` cuts a model by layer, `0&1` by tensor, `0&1;2&3` both (hybrid).

    devices = group (";" group)*        groups hold consecutive layers; "," is read as ";"
    group   = device ("&" device)*      devices of a group share every layer; "|" is read as "&"
    device  = ("cpu" | number) ["*" share]

A share, 1 by default, is a device's relative part of the model: `0*2;1` gives two thirds of the layers to device 0,
`0*2&1` two thirds of every matrix. A group's part of the layers is the sum of its devices' shares.
"""

import re
from dataclasses import dataclass

from numflow.errors import DeviceError

CPU = "cpu"  # device name of the CPU
SHARES = 1e-6, 1e6  # smallest and largest share
_TOKEN = re.compile(r"\s*(?:(?P<cpu>cpu)|(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<mark>[;,&|*]))", re.I)


@dataclass(frozen=True)
class PlacedDevice:
    """One device of a placement. name: "0", "1", ... or "cpu". share: of the work, relative to the other devices."""

    name: str
    share: float = 1.0

    def __str__(self) -> str:
        return self.name if self.share == 1 else f"{self.name}*{self.share:.6f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Devices:
    """A parsed device string: groups in layer order, devices of a group in the order of slices."""

    groups: tuple[tuple[PlacedDevice, ...], ...]

    def __str__(self) -> str:
        return ";".join("&".join(map(str, group)) for group in self.groups)

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def __iter__(self):
        return (device for group in self.groups for device in group)

    @property
    def strategy(self) -> str:
        """ "single", "by layer", "by tensor" or "hybrid"."""
        if len(self) == 1:
            return "single"
        if len(self.groups) == 1:
            return "by tensor"
        return "by layer" if len(self) == len(self.groups) else "hybrid"

    @property
    def group_shares(self) -> tuple[float, ...]:
        """Share of the layers of each group: the sum of its devices' shares."""
        return tuple(sum(device.share for device in group) for group in self.groups)


def executors_of(devices: Devices, backend: str) -> dict[str, str]:
    """Executor of each device: the backend; with "cuda", device "cpu" has the CPU executor."""
    return {device.name: CPU if backend == "cuda" and device.name == CPU else backend for device in devices}


def parse_devices(text: str) -> Devices:
    """Parse `0`, `0;1`, `0&1`, `0&1;2&3`, `0*2;1`, `cpu;0`, ...

    Raises:
        DeviceError: names the text, the position (from 1) and the expectation.
    """
    reader = _Reader(text)
    groups = [[reader.device()]]
    while (mark := reader.mark()) is not None:
        if mark == ";":
            groups.append([])
        groups[-1].append(reader.device())
    return Devices(tuple(map(tuple, groups)))


class _Reader:
    """Parser of a device string."""

    def __init__(self, text: str):
        if not isinstance(text, str):
            raise DeviceError(f"devices should be text such as '0&1;2&3', is {text!r}")
        self.text, self.position = text, 0
        self.seen: set[str] = set()

    def device(self) -> PlacedDevice:
        """A device and its share."""
        begin, token = self._next()
        if token is None or token.lastgroup == "mark" or "." in token[0]:
            raise self._error(begin, "a device: a number or 'cpu'")
        name = "cpu" if token.lastgroup == "cpu" else str(int(token["number"]))
        if name in self.seen:
            raise self._error(begin, f"a device that was not named before; {name} is there already")
        self.seen.add(name)
        mark_at, mark = self._next()
        if mark is None or mark[0].strip() != "*":
            self.position = mark_at
            return PlacedDevice(name)
        begin, token = self._next()
        share = float(token["number"]) if token is not None and token.lastgroup == "number" else 0.0
        if not SHARES[0] <= share <= SHARES[1]:
            raise self._error(begin, "a share: a number 0.000001 .. 1000000")
        return PlacedDevice(name, share)

    def mark(self) -> str | None:
        """ ";" or "&", None at the end of the text."""
        begin, token = self._next()
        if token is None and not self.text[begin:].strip():
            return None
        if token is None or token.lastgroup != "mark" or token["mark"] == "*":
            raise self._error(begin, "';', '&' or the end")
        return ";" if token["mark"] in ";," else "&"

    def _next(self) -> tuple[int, re.Match | None]:
        """Begin of the next token, and the token; None if no token fits there."""
        begin = self.position + len(self.text[self.position:]) - len(self.text[self.position:].lstrip())
        token = _TOKEN.match(self.text, begin)
        self.position = token.end() if token else begin
        return begin, token

    def _error(self, at: int, expected: str) -> DeviceError:
        found = repr(self.text[at:at + 8]) if at < len(self.text) else "the end"
        return DeviceError(f"devices {self.text!r}: position {at + 1}: expected {expected}, found {found}")

"""Layers on the CPU beside GPUs: a placement given by the number of CPU layers.

The first layers are the better choice for the CPU: the embedding table, of which only rows are read, is then on the
CPU, and the output matrix, which is read completely for each token, stays on the GPU.
"""

from numflow.errors import DeviceError, option
from numflow.ops import Network
from numflow.partition.cut.devices import CPU, Devices, PlacedDevice, parse_devices
from numflow.partition.cut.plan import layers_by_stack
from numflow.partition.cut.spans import layer_spans


def with_cpu_layers(network: Network, devices: str | None, count: int) -> tuple[Devices, dict[str, tuple[int, ...]]]:
    """The placement with `count` layers on the CPU.

    devices: devices for the other layers; None: GPU 0.
    count:   number of CPU layers of each stack ("enc." and "dec." separately): the first layers; if negative, the last.

    Returns:
        The placement, and the number of layers of each stack for every group (`layers` of partition.cut.partition).

    Raises:
        DeviceError: the CPU is already among the devices, or the model has too few layers.
    """
    given = parse_devices("0" if devices is None else devices)
    sizes = {stack: len(found) for stack, found in layers_by_stack(network).items()}
    if any(device.name == CPU for device in given):
        raise DeviceError(f"{option('cpu_layers', count)} puts the processor among the devices, but {str(given)!r} "
                          "names it already: give only one of the two")
    most = min(sizes.values(), default=0) - len(given.groups)
    if not 1 <= abs(count) <= most:
        have = " and ".join(f"{n} layers{f' in {stack[:-1]}' if stack else ''}" for stack, n in sizes.items())
        range_ = f"1 .. {most}, or -{most} .. -1 for the last ones" if most > 0 else "0"
        raise DeviceError(f"{option('cpu_layers')} should be {range_}, is {count}: {network.name} has "
                          f"{have or 'no layers'}, of which devices {given} take at least {len(given.groups)}; "
                          f"{option('backend', 'cpu')} keeps all of them on the processor")
    cpu, layers = ((PlacedDevice(CPU),),), {}
    for stack, total in sizes.items():
        rest = tuple(end - begin for begin, end in layer_spans(total - abs(count), given.group_shares))
        layers[stack] = (count, *rest) if count > 0 else (*rest, -count)
    return Devices((*cpu, *given.groups) if count > 0 else (*given.groups, *cpu)), layers

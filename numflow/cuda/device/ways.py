"""Ways to launch a kernel that need more than a grid: attributes of cuLaunchKernelEx."""

from types import ModuleType
from typing import Any


def configuration(cu: ModuleType, stream: Any, behind: bool, cluster: int) -> Any:
    """Configuration of launches in a stream, to which grid, threads and shared memory are to be added.

    behind:  another launch, before whose end this one begins (compiler/dependent.py).
    cluster: blocks of a cluster, side by side along x.
    """
    which, attributes = cu.CUlaunchAttributeID, []
    if behind:
        attributes.append(cu.CUlaunchAttribute())
        attributes[-1].id = which.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attributes[-1].value.programmaticStreamSerializationAllowed = 1
    if cluster > 1:
        attributes.append(cu.CUlaunchAttribute())
        attributes[-1].id = which.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        shape = attributes[-1].value.clusterDim
        shape.x, shape.y, shape.z = cluster, 1, 1
    how = cu.CUlaunchConfig()
    how.blockDimY = how.blockDimZ = 1
    how.hStream = stream
    how.attrs, how.numAttrs = attributes, len(attributes)
    return how

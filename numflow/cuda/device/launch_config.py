"""Launch attributes of cuLaunchKernelEx: programmatic dependent launch and thread block clusters."""

from types import ModuleType
from typing import Any


def configuration(cu: ModuleType, stream: Any, behind: bool, cluster: int) -> Any:
    """A CUlaunchConfig for a stream. The caller adds grid, threads and shared memory.

    behind:  the kernel may start before its predecessor in the stream ends (compiler/dependent.py).
    cluster: blocks of a thread block cluster, adjacent in x.
    """
    ids, attributes = cu.CUlaunchAttributeID, []
    if behind:
        attributes.append(cu.CUlaunchAttribute())
        attributes[-1].id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attributes[-1].value.programmaticStreamSerializationAllowed = 1
    if cluster > 1:
        attributes.append(cu.CUlaunchAttribute())
        attributes[-1].id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        shape = attributes[-1].value.clusterDim
        shape.x, shape.y, shape.z = cluster, 1, 1
    config = cu.CUlaunchConfig()
    config.blockDimY = config.blockDimZ = 1
    config.hStream = stream
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config

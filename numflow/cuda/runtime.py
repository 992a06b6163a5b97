"""A GPU as a Device, by cuda-python."""

from numflow.cuda.compat import driver


def open_gpu(index: int = 0):
    """The GPU of this index.

    Raises:
        DeviceError: no driver, or no such GPU.
    """
    driver()

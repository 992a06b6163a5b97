"""Import of matplotlib, an optional dependency."""

from numflow.distribution import install
from numflow.errors import DeviceError


def pyplot():
    """matplotlib.pyplot without a window.

    Raises:
        DeviceError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise DeviceError(f"figures need matplotlib: {install('report')}") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt

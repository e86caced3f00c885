"""JAX on its GPU; on a simulated device also on a machine without a device file.

JAX looks for `/dev/nvidia0` or `/dev/nvidiactl` before it loads the driver, and takes the CPU without a word where neither is
there. A simulated device has no such file. Making one takes root, so the question is answered in JAX's place here; everything
after it is JAX's own. On a GPU nothing is touched.
"""

import ctypes

import jax


def gpu():
    """The first device of JAX, which is a GPU."""
    from jax._src import hardware_utils

    if not hardware_utils.has_visible_nvidia_gpu() and hasattr(ctypes.CDLL("libcuda.so.1"), "gshare_sim_truth"):
        hardware_utils.has_visible_nvidia_gpu = lambda: True
    device = jax.devices()[0]
    assert device.platform == "gpu", f"JAX runs on {device.platform}"
    return device

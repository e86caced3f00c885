"""Cases of JAX."""

import jax
import jax.numpy as jnp
import numpy
import report
from jax_gpu import gpu
from report import case


@case
def jit():
    """A jitted loop of products and element-wise kernels, and a gradient."""
    device = gpu()
    host = numpy.arange(64 * 64, dtype=numpy.float32).reshape(64, 64)
    x = jax.device_put(host, device)
    copied = bool((numpy.asarray(x) == host).all())
    step = jax.jit(lambda m: jnp.tanh(m @ m / 64))
    for _ in range(5):
        x = step(x)
    slope = jax.grad(lambda m: (step(m) ** 2).sum())(x)
    return {"copied": copied, "shapes": [list(x.shape), list(slope.shape)], "values": numpy.asarray(x).tobytes()}


@case
def conv():
    """A convolution, which XLA gives to cuDNN."""
    gpu()
    image, kernel = jnp.ones((2, 3, 32, 32)), jnp.ones((8, 3, 3, 3))
    out = jax.jit(lambda a, b: jax.lax.conv(a, b, (1, 1), "SAME"))(image, kernel).block_until_ready()
    return {"shape": list(out.shape), "values": numpy.asarray(out).tobytes()}


if __name__ == "__main__":
    report.main()

"""A jitted loop of JAX."""

import os
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import jax
import jax.numpy as jnp
import numpy
from report import report

assert jax.devices()[0].platform == "gpu", "JAX found no GPU"
matrix = jax.random.normal(jax.random.PRNGKey(7), (1024, 1024))


@jax.jit
def step(x):
    y = x @ matrix
    return y / jnp.linalg.norm(y)


result = step(matrix).block_until_ready()
start = time.perf_counter()
for _ in range(500):
    result = step(result)
result.block_until_ready()
report(numpy.asarray(result).tobytes(), time.perf_counter() - start)

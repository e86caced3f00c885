"""A fraction of a GPU that is kept. Ray packs actors by `num_gpus`, and gives each its worker; gshare limits the worker.

    from gshare_ray import share

    @ray.remote(**share(0.3, "8GiB"))
    class Model: ...

Each node has the daemon's service and the hook, as the packages install them.
"""

import os

HOOK = os.environ.get("GSHARE_HOOK_LIBRARY", "/usr/lib/gshare/libgshare_hook.so")
SOCKET = os.environ.get("GSHARE_SOCKET", "/run/gshare/gshare.sock")


def share(fraction: float, memory: str) -> dict:
    """Options of `ray.remote` for a fraction below 1 of one GPU. A worker with this environment serves this share alone."""
    variables = {"LD_PRELOAD": HOOK, "GSHARE_SOCKET": SOCKET, "GSHARE_QUOTA": f"{fraction:.2%}", "GSHARE_MEM": memory}
    return {"num_gpus": fraction, "runtime_env": {"env_vars": variables}}

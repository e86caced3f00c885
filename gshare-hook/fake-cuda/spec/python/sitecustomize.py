"""First on PYTHONPATH, this makes PyTorch's operators compute on a simulated GPU: see gshare_sim/__init__.py.

Python imports this file at every start, so it loads gshare_sim only with torch or with Triton's interpreter. An error of gshare_sim then
ends that import. A `sitecustomize` of the program, further back on the path, still runs.
"""

import os
import sys


class _Finder:
    """Finds these modules as the other finders do, and hands each to gshare_sim once it is loaded."""

    gshare_compute = True
    busy = False

    def find_spec(self, name, path=None, target=None):
        # Another finder may ask all others in turn, this one included.
        if name not in ("torch", "triton.runtime.interpreter") or self.busy:
            return None
        self.busy = True
        try:
            others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
            spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        finally:
            self.busy = False
        if spec is not None and spec.loader is not None:
            loader, load = spec.loader, spec.loader.exec_module

            def exec_module(module):
                loader.exec_module = load
                load(module)
                import gshare_sim

                gshare_sim.loaded(module)

            loader.exec_module = exec_module
        return spec


def _run_the_next():
    here = os.path.dirname(os.path.abspath(__file__))
    own = sys.modules.pop("sitecustomize", None)
    before, sys.path[:] = sys.path[:], [entry for entry in sys.path if entry != here]
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if here in before:
            sys.path.insert(min(before.index(here), len(sys.path)), here)
        if own is not None:
            sys.modules.setdefault("sitecustomize", own)


if not any(getattr(finder, "gshare_compute", False) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())
_run_the_next()

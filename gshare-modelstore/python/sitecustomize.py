"""First on PYTHONPATH, this has PyTorch's programs take their weights from the model store: see gshare_store/shim.py.

Python imports it at every start, so it imports nothing itself: gshare_store comes when torch does. A `sitecustomize` that stood
further back on the path is run as it would have been.
"""

import os
import sys


class _Finder:
    """Finds torch as the finders behind this one do, and has its functions replaced once it is loaded."""

    gshare_shim = True

    def find_spec(self, name, path=None, target=None):
        if name not in ("torch", "safetensors.torch"):
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        try:
            loader, load = spec.loader, spec.loader.exec_module

            def exec_module(module):
                # The loader is the module's own, and stays as it was.
                del loader.exec_module
                load(module)
                try:
                    from gshare_store import shim

                    shim.install(module)
                except Exception as error:
                    print(f"gshare: {name} goes without the model store: {error}", file=sys.stderr)

            loader.exec_module = exec_module
        except AttributeError:
            pass
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


if not any(getattr(finder, "gshare_shim", False) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())
_run_the_next()

"""Requirements of rows, by framework: names of packages and beginnings of versions; `a|b` is either of two."""

TORCH = {"torch": "", "numpy": ""}
TRITON = {**TORCH, "triton": ""}
TRANSFORMERS = {**TORCH, "transformers": ""}
NCCL = {**TORCH, "nvidia-nccl-cu13": ""}
NVRTC = {"nvidia-cuda-nvrtc": "", "numpy": ""}
CUDA12 = {"nvidia-cuda-runtime-cu12": "", "nvidia-cuda-nvrtc-cu12": ""}
CUPY = {"cupy-cuda12x|cupy-cuda13x": "", "nvidia-cuda-nvrtc-cu12|nvidia-cuda-nvrtc": "", "numpy": ""}
# The compiler comes with a package of its own, or with an installed toolkit.
NUMBA = {"numba-cuda": "", "numba": "", "nvidia-nvvm|cuda-toolkit": "", "numpy": ""}
JAX = {"jax": "", "jax-cuda12-plugin|jax-cuda13-plugin": ""}
VLLM = {"vllm": "", "torch": ""}

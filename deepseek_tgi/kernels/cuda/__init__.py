"""CUDA C++ at first use: sources, their compiler (NVRTC, which torch's CUDA wheels bring) and their launches.

Knows how a kernel's source becomes something to call; knows no op. Nothing here is imported on a machine without a GPU.
"""

from deepseek_tgi.kernels.cuda.program import Argument, Kernel, KernelSpec, Programs

__all__ = ["Argument", "Kernel", "KernelSpec", "Programs"]

"""Kernels as compiled for a GPU, on a machine without one: what they take and which instructions they came to.

An op says what must hold of its kernels in a file beside this one, named after the op, with two lists (either may be
missing): `CUDA`, of `CudaKernel`, and `TRITON`, of `TritonKernel`. `tests/kernels/test_compiled_kernels.py` finds them.
A pattern is a regular expression over one machine instruction with its suffixes, as nvdisasm writes it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import triton

from deepseek_tgi.kernels.cuda.program import KernelSpec

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
HOPPER, AMPERE, ADA = "sm_90a", "sm_80", "sm_89"
MOST_SHARED = {HOPPER: 232_448, AMPERE: 166_912, ADA: 101_376}
"""Bytes of a block: CUDA programming guide, technical specifications."""

WIDE_LOAD = r"LDG\.E\.(.*\.)?128.*"
WIDE_COPY = r"LDGSTS\.E\.(.*\.)?128.*"
MATRIX_BF16 = r"HMMA\.16816\.F32\.BF16"
WARPGROUP_MATRIX = r"HGMMA\..*"
EARLY = {
    *("int4_stream", "int4_panel", "dense_rows", "moe_gate_up_one", "moe_down_one"),
    *("paged_decode", "latent_decode", "latent_wide", "latent_combine", "rms_norm"),
    *("moe_gate_up_few", "moe_down_few", "expert_choice", "latent_queries", "latent_ready", "latent_values"),
}
"""Kernels that read weights, or a step's lengths, tables and older pages, before the kernel ahead of them has ended: it
writes none of these, so they are read as constants or copied. In all others a read there was moved by the compiler."""
ALONE = {"int4_dequantise"}
"""Kernels that are never launched before the one ahead has ended."""
WAIT_FOR_EARLIER = "ACQBULK"
EARLY_LOAD = r"LDG\.E\.NA\.LTC128B\.128"
"""What `load_early` comes to, and nothing else."""
GLOBAL_READ, CONSTANT_READ = r"(LDG|LDGSTS|LD)\..*", rf"LDG\..*CONSTANT|LDGSTS\..*|{EARLY_LOAD}"
WARPGROUP_WAIT = r"WARPGROUP\.DEPBAR.*"


@dataclass(frozen=True)
class CudaKernel:
    """A spec that ships, its bounds, and what its code must have on each architecture, or `at_most` so often; on Hopper
    `ahead` so many early loads before it waits for the kernel ahead.
    """

    spec: KernelSpec
    max_registers: int
    must: tuple[str, ...] = ()
    archs: tuple[str, ...] = (HOPPER, AMPERE)
    must_not: tuple[str, ...] = ()
    at_most: tuple[tuple[str, int], ...] = ()
    ahead: int = 0

    def __str__(self) -> str:
        macros = "-".join(f"{key.lower()}{value}" for key, value in self.spec.defines)
        return f"{self.spec.name}-{macros}"


@dataclass(frozen=True)
class TritonKernel:
    """A kernel `package.module:function` with types (`*bf16`, `i32`, ...) and constants by name.

    `divisible` names the arguments that are multiples of 16, as pointers and strides usually are.
    """

    function: str
    types: dict[str, str]
    constants: dict[str, Any]
    max_registers: int
    must: tuple[str, ...] = ()
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    archs: tuple[str, ...] = (HOPPER, AMPERE)
    must_not: tuple[str, ...] = field(default=())
    tuned: bool = True
    """False: it is to fit and to multiply as it should, on a GPU that nothing was tuned for."""

    def __str__(self) -> str:
        values = "-".join(f"{key.lower()}{value}" for key, value in self.constants.items())
        return f"{self.function.partition(':')[2]}-{values}"


@dataclass(frozen=True)
class Compiled:
    """What the compiler made: `instructions` counts them by full name; `early` are the reads ahead of the wait for the
    kernel before, None if it does not wait.
    """

    registers: int
    stack_bytes: int
    instructions: Counter[str]
    early: tuple[str, ...] | None = None

    def count(self, pattern: str) -> int:
        """How many instructions have the pattern."""
        return sum(n for name, n in self.instructions.items() if re.fullmatch(pattern, name))


def disassemble(cubin: Path, name: str | None = None) -> Compiled:
    """Read the kernel `name` of a cubin, or the only one it holds."""
    usage = _tool("cuobjdump", "-res-usage", str(cubin))
    found = re.search(rf"Function {name or '.*'}:\s+REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    code = _tool("nvdisasm", "-c", str(cubin))
    if name is not None:  # from its section to the next one
        _, _, code = code.partition(f".section\t.text.{name},")
        code, _, _ = code.partition(".section\t")
    # "        /*0010*/  @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;"
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", code)
    assert names, code[:1000]
    early = None
    if WAIT_FOR_EARLIER in names:
        ahead = names[: names.index(WAIT_FOR_EARLIER)]
        early = tuple(instruction for instruction in ahead if re.fullmatch(GLOBAL_READ, instruction))
    return Compiled(int(found[1]), int(found[2]), Counter(names), early)


def compile_cuda(spec: KernelSpec, arch: str, folder: Path) -> Compiled:
    """Compile a spec with NVRTC."""
    from deepseek_tgi.kernels.cuda.nvrtc import compile_source

    target = folder / f"{spec.name}-{arch}.cubin"
    target.write_bytes(compile_source(spec, arch))
    return disassemble(target, spec.name)


def compile_triton(kernels: list[TritonKernel], folder: Path) -> dict[tuple[str, str], tuple[Path, int]]:
    """Cubins and bytes of shared memory by kernel and architecture; in a process of its own, where Triton compiles
    instead of interpreting.
    """
    if not kernels:
        return {}
    work = [(str(kernel), asdict(kernel), arch) for kernel in kernels for arch in kernel.archs]
    environ = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "triton")}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_triton.py")), str(folder)],
        input=json.dumps(work), env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return {(name, arch): (Path(path), shared) for name, arch, path, shared in json.loads(done.stdout)}


@cache
def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run([str(TOOLS / name), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout

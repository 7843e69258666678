"""Compiles the Triton kernels listed on standard input for GPUs this machine has not; prints where the cubins lie, and
the shared memory of their blocks.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def build(kernel: dict[str, Any], arch: str) -> tuple[bytes, int]:
    """One kernel's cubin, and bytes of shared memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    module, _, name = kernel["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    constants = kernel["constants"]
    signature = {key: "constexpr" if key in constants else kernel["types"][key] for key in function.arg_names}
    places = {key: i for i, key in enumerate(function.arg_names)}
    attrs = {(places[key],): [["tt.divisibility", 16]] for key in kernel["divisible"]}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attrs)
    capability = int("".join(c for c in arch if c.isdigit()))
    options = {"num_warps": kernel["num_warps"], "num_stages": kernel["num_stages"]}
    made = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return made.asm["cubin"], made.metadata.shared


def main() -> None:
    """See the module's docstring."""
    folder = Path(sys.argv[1])
    paths = []
    for i, (name, kernel, arch) in enumerate(json.load(sys.stdin)):
        path = folder / f"triton-{i}-{arch}.cubin"
        code, shared = build(kernel, arch)
        path.write_bytes(code)
        paths.append((name, arch, str(path), shared))
    print(json.dumps(paths))


if __name__ == "__main__":
    main()

"""Who may import whom: read from the sources, so that an upward import fails even if nothing runs it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "deepseek_tgi": ROOT / "deepseek_tgi",
    "deepseek_tgi.adapters": ROOT / "adapters",
    "deepseek_tgi.probes": ROOT / "probes",
}
BASE = {"errors", "core"}

# layer -> layers it may import besides itself. `adapters.base` stands for that one module.
MAY_IMPORT: dict[str, set[str]] = {
    "": {"registry"},  # its door, opened on first use
    "errors": set(),
    "core": {"errors"},
    "pb": set(),
    "options": {"errors"},
    "config": BASE | {"options"},
    "telemetry": BASE,
    "text": BASE,
    "kernels": BASE,
    "kv": BASE | {"kernels"},
    "logits": BASE | {"kernels", "text"},
    "adapters": BASE | {"config", "kernels", "kv", "text"},
    "convert": BASE | {"adapters", "kernels", "text"},
    "engine": BASE | {"adapters.base", "kv", "logits", "telemetry", "text"},
    "probes": BASE | {"telemetry"},
    "registry": BASE | {"adapters.base", "config"},
    "server": BASE
    | {"adapters.base", "adapters.hub", "config", "engine", "kv", "logits", "options", "pb", "probes", "registry"}
    | {"telemetry", "text"},
    "router": BASE | {"config", "options", "pb", "probes", "telemetry", "text"},
}
EVERYTHING = {"cli", "launcher"}

# These start often or must answer at once: torch costs seconds.
TORCH_FREE = {
    "",
    "cli",
    "config",
    "core",
    "errors",
    "launcher",
    "pb",
    "probes",
    "registry",
    "router",
    "telemetry",
    "text",
}
HEAVY = {"torch", "transformers"}


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module

    @property
    def layer(self) -> str:
        """First part below the package, `""` for the package's own door."""
        return layer_of(self.name)


@dataclass(frozen=True)
class Import:
    module: Module
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.module.path.relative_to(ROOT)}:{self.line}: {self.module.name} imports {self.target}"


def layer_of(name: str) -> str:
    return name.partition(".")[2].partition(".")[0]


def find_modules() -> list[Module]:
    found = []
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join([package, *(part for part in parts if part != "__init__")])
            found.append(Module(name, path, ast.parse(path.read_text(encoding="utf-8"), str(path))))
    return found


MODULES = find_modules()
NAMES = {module.name for module in MODULES}


def imports_of(module: Module) -> Iterator[Import]:
    """Every import at any depth; `from package import name` counts as the module `package.name` where that is one."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (Import(module, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(module, full if full in NAMES else base, node.lineno)


IMPORTS = [found for module in MODULES for found in imports_of(module)]


def allowed(source: Module, target: str) -> bool:
    layer = layer_of(target)
    if source.layer in EVERYTHING or layer in ("", source.layer):
        return True
    permitted = MAY_IMPORT[source.layer]
    return layer in permitted or target.removeprefix("deepseek_tgi.") in permitted


def test_every_layer_has_a_rule() -> None:
    assert {module.layer for module in MODULES} <= MAY_IMPORT.keys() | EVERYTHING


def test_no_import_goes_up() -> None:
    ours = [found for found in IMPORTS if found.target.split(".")[0] == "deepseek_tgi"]
    assert ours, "no import of ours was found: the reader is broken"
    assert [str(found) for found in ours if not allowed(found.module, found.target)] == []


def test_rule_table_refuses_an_upward_import() -> None:
    kernel = Module("deepseek_tgi.kernels.rope", ROOT, ast.parse("from deepseek_tgi.engine import engine"))
    engine = Module("deepseek_tgi.engine.step", ROOT, ast.parse(""))
    assert [allowed(kernel, found.target) for found in imports_of(kernel)] == [False]
    assert allowed(engine, "deepseek_tgi.adapters.base")
    assert not allowed(engine, "deepseek_tgi.adapters.quantized")
    assert not allowed(engine, "deepseek_tgi.adapters")


def test_imports_are_absolute_and_by_the_mapped_name() -> None:
    wrong = [str(found) for found in IMPORTS if found.target.split(".")[0] in ("", "adapters", "probes", "tests")]
    assert wrong == []


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120
    )
    return done.stdout


def test_no_light_module_pulls_in_torch() -> None:
    light = [m.name for m in MODULES if m.layer in TORCH_FREE and not m.name.endswith("__main__")]
    code = f"""
import importlib, json, sys
culprits = {{}}
for name in {light!r}:
    importlib.import_module(name)
    for heavy in {sorted(HEAVY)!r}:
        if heavy in sys.modules:
            culprits.setdefault(heavy, name)
print(json.dumps(culprits))
"""
    assert json.loads(run_python(code)) == {}


def test_a_model_config_is_read_without_torch() -> None:
    code = """
import sys
import deepseek_tgi.adapters.cache_layout, deepseek_tgi.adapters.dtypes, deepseek_tgi.adapters.hub
print("torch" in sys.modules)
"""
    assert run_python(code) == "False\n"


def test_command_line_starts_light_and_fast() -> None:
    """CPU time, the best of three: a busy machine must not decide."""
    code = """
import json, sys, time
start = time.process_time()
import deepseek_tgi.cli
seconds = time.process_time() - start
heavy = {"torch", "transformers", "tokenizers", "grpc", "numpy", "huggingface_hub", "httptools", "uvicorn"}
print(json.dumps([seconds, sorted(heavy & sys.modules.keys())]))
"""
    runs = [json.loads(run_python(code)) for _ in range(3)]
    assert runs[0][1] == []
    assert min(seconds for seconds, _ in runs) < 0.5


@pytest.mark.parametrize("name", ["utils", "helpers", "manager", "misc", "common_utils"])
def test_no_folder_or_module_is_named(name: str) -> None:
    assert [m.name for m in MODULES if name in m.name.split(".")] == []

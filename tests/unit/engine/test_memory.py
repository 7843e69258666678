"""The least of the machine's memory and every limit around the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepseek_tgi.engine.memory import LinuxMemory

MIB = 1 << 20


def machine(root: Path, cgroup_line: str, files: dict[str, str]) -> LinuxMemory:
    proc, groups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    groups.mkdir()
    (proc / "meminfo").write_text("MemTotal:  900000 kB\nMemFree: 5 kB\nMemAvailable:  819200 kB\n")
    (proc / "self/status").write_text("VmHWM:\t 2048 kB\nVmRSS:\t 1024 kB\n")
    (proc / "self/cgroup").write_text(cgroup_line)
    for name, content in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(content)
    return LinuxMemory(proc, groups)


def v2(folder: str, limit: str, usage: int, inactive: int = 0) -> dict[str, str]:
    return {
        f"{folder}memory.max": f"{limit}\n",
        f"{folder}memory.current": f"{usage}\n",
        f"{folder}memory.stat": f"anon 5\ninactive_file {inactive}\n",
    }


@pytest.mark.parametrize(
    ("line", "files", "expected"),
    [
        ("", {}, 800 * MIB),
        ("0::/\n", v2("", "max", 5), 800 * MIB),
        ("0::/\n", v2("", str(300 * MIB), 100 * MIB), 200 * MIB),
        ("0::/a/b\n", {**v2("a/b/", "max", 1), **v2("a/", str(300 * MIB), 100 * MIB, 20 * MIB)}, 220 * MIB),
        ("0::/not/mounted/here\n", v2("", str(64 * MIB), 0), 64 * MIB),
        ("0::/\n", v2("", str(64 * MIB), 65 * MIB), 0),
        (
            "5:cpu:/x\n4:memory:/x\n",
            {"memory/x/memory.limit_in_bytes": str(90 * MIB), "memory/x/memory.usage_in_bytes": str(30 * MIB)},
            60 * MIB,
        ),
        (
            "4:memory:/\n",
            {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "5"},
            800 * MIB,
        ),
    ],
    ids=["no groups", "v2 without limit", "v2", "v2 parent", "v2 container", "v2 exceeded", "v1", "v1 without limit"],
)
def test_available_memory(tmp_path: Path, line: str, files: dict[str, str], expected: int) -> None:
    assert machine(tmp_path, line, files).available_bytes() == expected


def test_what_the_process_holds(tmp_path: Path) -> None:
    memory = machine(tmp_path, "", {})
    assert (memory.resident_bytes(), memory.peak_bytes()) == (1 * MIB, 2 * MIB)


def test_the_real_machine_has_some() -> None:
    memory = LinuxMemory()
    assert memory.available_bytes() > 0
    assert 0 < memory.resident_bytes() <= memory.peak_bytes()

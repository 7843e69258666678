"""Which set is chosen, and how the native library comes to be."""

from __future__ import annotations

import logging
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepseek_tgi.errors import ConfigError
from deepseek_tgi.kernels import compiler, library
from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.select import select_kernels

# Stands in for a compiler: knows --version, writes what -o names, and counts itself in $CALLS.
_STAND_IN = """#!/bin/sh
if [ "$1" = --version ]; then echo "stand-in $VERSION"; exit 0; fi
echo "$$" >> "$CALLS"
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done
"""


@pytest.fixture(autouse=True)
def own_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test loads afresh, and leaves torch's thread count as it was."""
    library.load.cache_clear()
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that costs nothing; returns the file that lists its calls."""
    script, calls = tmp_path / "cxx", tmp_path / "calls"
    script.write_text(_STAND_IN)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    calls.touch()
    for name, value in (("CXX", script), ("CALLS", calls), ("VERSION", "1"), ("XDG_CACHE_HOME", tmp_path / "cache")):
        monkeypatch.setenv(name, str(value))
    return calls


def num_calls(calls: Path) -> int:
    return len(calls.read_text().splitlines())


def test_auto_takes_the_native_set_where_a_compiler_is() -> None:
    try:
        compiler.find_compiler()
    except compiler.BuildError as error:
        pytest.skip(str(error))
    kernels = select_kernels(compute_dtype=ComputeDtype.BFLOAT16, num_threads=3)
    assert (kernels.name, kernels.num_threads, kernels.compute_dtype) == ("native", 3, ComputeDtype.BFLOAT16)


def test_a_compiler_that_does_not_run_is_quoted(tmp_path: Path) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'cannot execute cc1plus' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(compiler.BuildError, match=r"/g\+\+ --version failed: cannot execute cc1plus$"):
        compiler.Recipe(str(broken), ()).digest()


def test_a_long_compilation_is_announced_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = tmp_path / "g++"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho stuck >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv("DEEPSEEK_TGI_CACHE", str(tmp_path / "cache"))
    with caplog.at_level(logging.INFO), pytest.raises(compiler.BuildError, match="the compiler refused: stuck"):
        compiler.build()
    assert f"compiling the native kernels with {fake}, once for this machine" in caplog.text


def test_without_a_compiler_auto_runs_on_torch_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        kernels = select_kernels()
    assert kernels.name == "torch"
    assert [r.getMessage() for r in caplog.records] == [
        "kernels: no C++ compiler found (looked for g++, c++, clang++; install g++ or set CXX); "
        "falling back to torch operators, which are several times slower"
    ]
    with pytest.raises(ConfigError, match="native was asked for, but no C"):
        select_kernels(wish="native")


def test_a_compiler_that_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "cxx"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "unknown option" >&2\nexit 1\n')
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="the compiler refused: unknown option"):
        select_kernels(wish="native")
    assert [p.name for p in (tmp_path / "cache" / "deepseek-tgi").iterdir()] == ["native.lock"]


def test_a_library_is_built_once_and_again_when_its_recipe_changes(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiler.build()
    built = num_calls(stand_in)
    assert built > 1
    assert compiler.build() == first
    assert num_calls(stand_in) == built
    assert compiler.build(("-DOTHER",)) != first
    monkeypatch.setenv("VERSION", "2")
    assert compiler.build() != first
    assert num_calls(stand_in) == 3 * built


def test_processes_that_start_together_build_once(stand_in: Path) -> None:
    code = "from deepseek_tgi.kernels.compiler import build; print(build())"
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    paths = {process.communicate(timeout=60)[0] for process in running}
    assert len(paths) == 1
    together = num_calls(stand_in)
    compiler.build(("-DOTHER",))
    assert num_calls(stand_in) == 2 * together


def test_a_cache_that_cannot_be_written_is_replaced_by_a_private_folder(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    library = compiler.build()
    assert library.parent.parent == tmp_path
    assert "cannot be written" in caplog.text
    compiler.discard_private(library)
    assert not library.parent.exists()


def test_the_cache_is_where_its_own_variable_says_and_is_left_there(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DEEPSEEK_TGI_CACHE", str(tmp_path / "own"))
    library = compiler.build()
    compiler.discard_private(library)
    assert library.parent == tmp_path / "own"
    assert library.exists()


def test_an_abandoned_build_is_swept_and_the_compilers_files_are_in_the_build_folder(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    abandoned = tmp_path / "cache" / "deepseek-tgi" / "build-abandoned"
    abandoned.mkdir(parents=True)
    script = tmp_path / "cxx"
    script.write_text(script.read_text() + f'echo "$TMPDIR" >> {tmp_path}/folders\n')
    library = compiler.build()
    folders = {Path(line) for line in (tmp_path / "folders").read_text().split()}
    assert {(folder.parent, folder.name[:6]) for folder in folders} == {(library.parent, "build-")}
    assert sorted(path.name for path in library.parent.iterdir()) == [library.name, "native.lock"]


def test_a_compiler_that_will_not_prepare_headers_reads_them_in_each_file(stand_in: Path) -> None:
    script = stand_in.with_name("cxx")
    script.write_text(script.read_text().replace("echo", 'case "$*" in *c++-header*) exit 1;; esac\necho', 1))
    assert compiler.build().exists()


def test_no_more_compilers_run_than_there_are_processors(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    script = tmp_path / "cxx"
    body = f"mkdir -p {tmp_path}/at; : > {tmp_path}/at/$$; ls {tmp_path}/at | wc -l >> {tmp_path}/counts; sleep 0.1\n"
    script.write_text(script.read_text() + body + f"rm {tmp_path}/at/$$\n")
    compiler.build()
    assert max(map(int, (tmp_path / "counts").read_text().split())) == 3


def test_what_is_built_ahead_is_what_build_finds(stand_in: Path) -> None:
    compiler.build_ahead()
    made = num_calls(stand_in)
    assert made > 1
    compiler.build()
    assert num_calls(stand_in) == made


def test_nothing_is_built_ahead_that_would_not_be_kept(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compiler.build_ahead()
    assert num_calls(stand_in) == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"wish": "fast"}, "expected one of auto, native, cuda, triton"),
        ({"device": "meta"}, "expected cpu or cuda"),
        ({"wish": "cuda"}, "not for a cpu device"),
        ({"wish": "native", "device": "cuda"}, "not for a cuda device"),
        ({"wish": "reference", "device": "cuda"}, "for CPUs"),
    ],
)
def test_wishes_that_cannot_be_had_are_refused(arguments: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        select_kernels(**arguments)  # type: ignore[arg-type]

"""Who serves: TGI's launcher by default, found past ours; the shim never overwrites what it did not write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepseek_tgi import __version__
from deepseek_tgi.errors import ConfigError, ResourceError
from deepseek_tgi.launcher import handover, shim

SERVER = "text-generation-server"
LAUNCHER = "text-generation-launcher"


def command(folder: Path, text: str, name: str = LAUNCHER) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A folder with the console script as an installer writes it."""
    text = f"#!{sys.executable}\nfrom deepseek_tgi.launcher.main import main\nimport sys\nsys.exit(main())\n"
    return command(tmp_path / "ours", text).parent


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder with a launcher of somebody else's, which shows how it was called."""
    return command(tmp_path / "theirs", '#!/bin/sh\nprintf "%s|" "$0" "$@" "$PORT"\nexit 7\n').parent


def run(ours: Path, path: list[Path], *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": os.pathsep.join(map(str, [*path, "/usr/bin", "/bin"])), **environ}
    return subprocess.run([str(ours / LAUNCHER), *argv], env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("argv", "environ", "wanted"),
    [
        ([], {}, "tgi"),
        (["--backend", "x"], {}, "x"),
        (["--port", "1", "--backend=y"], {"DEEPSEEK_TGI_BACKEND": "z"}, "y"),
        ([], {"DEEPSEEK_TGI_BACKEND": "z"}, "z"),
        (["--backend"], {}, "tgi"),
    ],
)
def test_the_backend_asked_for(argv: list[str], environ: dict[str, str], wanted: str) -> None:
    assert handover.wanted_backend(argv, environ) == wanted


@pytest.mark.parametrize("argv", [[], ["--backend", "tgi"], ["--backend=tgi"]])
def test_tgis_launcher_takes_over_untouched(argv: list[str], ours: Path, theirs: Path) -> None:
    done = run(ours, [ours, theirs], "--model-id", "a b", *argv, "-p", "1", PORT="5")
    assert done.returncode == 7
    assert done.stdout.split("|")[1:] == ["--model-id", "a b", "-p", "1", "5", ""]
    assert done.stderr == f"deepseek-tgi: no backend of ours asked for; handing over to {theirs / LAUNCHER}\n"


def test_help_is_tgis_if_tgi_is_there_and_else_ours(ours: Path, theirs: Path) -> None:
    assert "--help" in run(ours, [ours, theirs], "--help").stdout
    alone = run(ours, [ours], "--help")
    assert alone.returncode == 0
    assert "--backend NAME" in alone.stdout
    assert run(ours, [ours], "--version").stdout == f"{LAUNCHER} (deepseek-tgi {__version__})\n"


def test_without_tgi_the_error_names_our_backend(ours: Path) -> None:
    done = run(ours, [ours], "--model-id", "m")
    assert done.returncode == 2
    assert "--backend deepseek-quant" in done.stderr


def test_a_launcher_that_cannot_be_run_is_named(ours: Path, tmp_path: Path) -> None:
    broken = command(tmp_path / "theirs", "no script and no program\n")
    done = run(ours, [broken.parent])
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert f"{broken} cannot be run (Exec format error)" in done.stderr


def test_our_own_scripts_are_passed_over(ours: Path, theirs: Path, tmp_path: Path) -> None:
    (shimmed,) = shim.write(tmp_path / "shim", [LAUNCHER], force=False)
    search = os.pathsep.join(str(p) for p in (ours, shimmed.parent, tmp_path / "absent", theirs))
    assert handover.find_tgi(search) == str(theirs / LAUNCHER)
    assert handover.find_tgi(os.pathsep.join(map(str, (ours, shimmed.parent)))) is None


def test_the_shim_runs_our_server_in_its_own_process(tmp_path: Path) -> None:
    (path,) = shim.write(tmp_path / "it's a folder", [SERVER], force=False)
    done = subprocess.run([str(path), "--version"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == f"{SERVER} (deepseek-tgi {__version__})\n"
    assert "\nexec " in path.read_text()


def test_the_working_folder_shadows_nothing(tmp_path: Path) -> None:
    (path,) = shim.write(tmp_path / "bin", [SERVER], force=False)
    (tmp_path / "deepseek_tgi.py").write_text("raise SystemExit('shadowed')")
    subprocess.run([str(path), "--version"], capture_output=True, check=True, cwd=tmp_path)


def test_a_foreign_file_is_kept_unless_forced(tmp_path: Path) -> None:
    foreign = command(tmp_path, "#!/bin/sh\n", SERVER)
    with pytest.raises(ConfigError, match="was not written by deepseek-tgi shim; --force"):
        shim.write(tmp_path, [LAUNCHER, SERVER], force=False)
    assert foreign.read_text() == "#!/bin/sh\n"
    assert not (tmp_path / LAUNCHER).exists()
    shim.write(tmp_path, [SERVER], force=True)
    shim.write(tmp_path, [SERVER], force=False)  # ours now
    assert sorted(p.name for p in tmp_path.iterdir()) == [SERVER]


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="cannot write"):
        shim.write(tmp_path / "file" / "bin", [SERVER], force=False)

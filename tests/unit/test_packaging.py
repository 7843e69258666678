"""What an install carries: each test guards a packaging mistake that an editable checkout hides."""

from __future__ import annotations

import ast
import configparser
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"deepseek_tgi": "deepseek_tgi", "adapters": "deepseek_tgi/adapters", "probes": "deepseek_tgi/probes"}
NOT_SHIPPED = shutil.ignore_patterns("__pycache__", "*.py[cod]", "*.egg-info", ".*")


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def listed(section: str, option: str) -> list[str]:
    return setup_cfg()[section][option].split()


def requirement_lines(section: str, option: str) -> list[str]:
    return [line for line in setup_cfg()[section][option].splitlines() if line.strip()]


def source_files() -> set[str]:
    """Every file of the three source folders, by its place in a wheel."""
    return {
        f"{target}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".pyo")
    }


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy: a build leaves `build/` and metadata behind, and stale ones would be packed."""
    copy = tmp_path_factory.mktemp("checkout") / "source"
    copy.mkdir()
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=NOT_SHIPPED)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


def build_wheel(source: Path, out: Path) -> Path:
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"),
            *("--disable-pip-version-check", "--wheel-dir", str(out), str(source)),
        ],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=checkout, check=True, capture_output=True)
    (archive,) = out.glob("*.tar.gz")
    return archive


def wheel_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_packages_list_names_every_folder_with_code() -> None:
    found = set()
    for folder, target in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            relative = init.parent.relative_to(ROOT / folder)
            found.add(".".join([target.replace("/", "."), *relative.parts]))
    assert sorted(listed("options", "packages")) == sorted(found)


def test_every_folder_with_code_is_a_package() -> None:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} holds code and no __init__.py"


@pytest.mark.parametrize("name", ["adapters", "probes"])
def test_no_folder_shadows_a_mapped_package(name: str) -> None:
    assert not (ROOT / "deepseek_tgi" / name).exists(), "it would turn the package into a namespace"


def test_tests_are_no_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_mapped_packages_have_one_copy() -> None:
    import deepseek_tgi.adapters.base
    import deepseek_tgi.probes

    assert deepseek_tgi.adapters.base.__file__
    assert "adapters" not in sys.modules
    assert "probes" not in sys.modules


def test_wheel_carries_every_file(wheel: Path) -> None:
    assert wheel_files(wheel) == source_files()


@pytest.mark.parametrize("suffix", [".cpp", ".pyi", "py.typed"])
def test_wheel_carries_data(wheel: Path, suffix: str) -> None:
    assert any(name.endswith(suffix) for name in wheel_files(wheel))


def test_wheel_takes_no_name_but_ours(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"deepseek_tgi"}


def test_wheel_commands_and_backends(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        entries = configparser.ConfigParser()
        entries.read_string(archive.read(name).decode())
    # Never `text-generation-server` or `text-generation-router`: those are TGI's own, and pip would overwrite them.
    assert set(entries["console_scripts"]) == {"deepseek-tgi", "text-generation-launcher"}
    assert dict(entries["deepseek_tgi.backends"]) == {
        "deepseek-quant": "deepseek_tgi.adapters.quantized:QuantizedModelAdapter"
    }


def test_wheel_carries_licence_and_readme(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (about,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        text = archive.read(about).decode()
    assert any(name.endswith("LICENSE") for name in names)
    assert "License: Apache-2.0" in text or "License-Expression: Apache-2.0" in text
    assert "# deepseek-tgi" in text


def test_wheel_imports_by_the_mapped_names(wheel: Path, tmp_path: Path) -> None:
    code = (
        "import deepseek_tgi.adapters.base as a, deepseek_tgi.probes as p, deepseek_tgi.kv.layout as k;"
        "print(a.__file__, p.__file__, k.__file__, sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(wheel), "PATH": "/usr/bin:/bin"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert all(line.startswith(str(wheel)) for line in done.stdout.split())


def test_sdist_carries_all_that_a_wheel_needs(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # from Python 3.11.4 and 3.10.12 on
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(tmp_path / "source")
    (unpacked,) = (tmp_path / "source").iterdir()
    assert wheel_files(build_wheel(unpacked, tmp_path / "wheel")) == source_files()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found: dict[str, str] = {}
    for line in filter(None, (line.split("#")[0].strip() for line in lines)):
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.+!]+)", line)
        assert match, f"constraints.txt: {line!r} is no exact pin"
        assert canonicalize_name(match[1]) not in found, f"constraints.txt: {match[1]} twice"
        found[canonicalize_name(match[1])] = match[2]
    return found


def pulled_in(name: str, extras: set[str], seen: dict[str, set[str]]) -> None:
    """Collect into `seen` every distribution that `name[extras]` needs here, with the extras asked of it."""
    for text in metadata.requires(name) or []:
        need = Requirement(text)
        wanted = need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in {"", *extras})
        key = canonicalize_name(need.name)
        if not wanted or (key in seen and need.extras <= seen[key]):
            continue
        seen[key] = seen.get(key, set()) | need.extras
        pulled_in(key, seen[key], seen)


def test_product_imports_only_what_it_declares() -> None:
    """Test packages bring many libraries along; the product must not lean on one that users will not have."""
    declared = {canonicalize_name(Requirement(line).name) for line in requirement_lines("options", "install_requires")}
    declared |= {
        canonicalize_name(Requirement(line).name)
        for extra in ("otlp", "cuda", "demo-training")
        for line in requirement_lines("options.extras_require", extra)
    }
    owners = metadata.packages_distributions()
    foreign = {}
    for file in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for top in {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"deepseek_tgi"}:
                # What an extra brings need not be installed here; its name is then the distribution's.
                if not {canonicalize_name(owner) for owner in owners.get(top, [top])} & declared:
                    foreign[top] = str(file.relative_to(ROOT))
    assert foreign == {}


def test_everything_that_an_install_pulls_in_is_pinned() -> None:
    seen: dict[str, set[str]] = {}
    pulled_in("deepseek-tgi", {"test"}, seen)
    assert {"torch", "pytest", "typing-extensions"} <= seen.keys(), "the walk is broken"
    assert sorted(seen.keys() - pins().keys() - {"deepseek-tgi"}) == []

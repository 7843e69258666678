"""Backends by name: found without being imported, checked against the ABI, refused with the list of known ones."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepseek_tgi import registry
from deepseek_tgi.adapters.base import ABI_VERSION, ModelAdapter
from deepseek_tgi.errors import ConfigError


@pytest.fixture(autouse=True)
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_in_process", {})


@pytest.fixture
def complete() -> type[ModelAdapter]:
    methods = dict.fromkeys(ModelAdapter.__abstractmethods__, lambda self: None)
    return type("Complete", (ModelAdapter,), methods)


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of somebody else's that offers backends; its name is new for each test."""
    name = f"stranger_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(
        "from deepseek_tgi.adapters.base import ModelAdapter\n"
        "class Good(ModelAdapter): pass\n"
        "Good.__abstractmethods__ = frozenset()\n"
        "class Half(ModelAdapter): pass\n"
        "class NoAdapter: pass\n"
        "class Old(Good): abi_version = 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def offer(folder: Path, package: str, version: str, name: str, target: str) -> None:
    """Metadata of an installed distribution with one backend entry point."""
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[deepseek_tgi.backends]\n{name} = {target}\n")


def test_our_own_backend_comes_in_by_entry_point() -> None:
    own = next(info for info in registry.list_backends() if info.name == "deepseek-quant")
    assert own.target == "deepseek_tgi.adapters.quantized:QuantizedModelAdapter"
    assert own.distribution == "deepseek-tgi"
    assert own.version[0].isdigit()


def test_a_strangers_package_is_listed_and_loaded(stranger: str, tmp_path: Path) -> None:
    offer(tmp_path, "strange-pack", "3.1", "strange", f"{stranger}:Good")
    found = registry.find_backend("strange")
    assert (found.distribution, found.version) == ("strange-pack", "3.1")
    assert registry.load_backend("strange").__name__ == "Good"


def test_listing_imports_nothing(stranger: str, tmp_path: Path) -> None:
    offer(tmp_path, "strange-pack", "3.1", "strange", f"{stranger}:Good")
    registry.list_backends()
    assert stranger not in sys.modules


def test_listing_leaves_torch_alone() -> None:
    code = "import sys, deepseek_tgi; deepseek_tgi.list_backends(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["ab", "my-backend", "a1-b2-c3", "x" * 40])
def test_good_names_are_taken(name: str, complete: type[ModelAdapter]) -> None:
    registry.register_backend(name, complete)
    assert registry.load_backend(name) is complete


@pytest.mark.parametrize(
    "name", ["", "a", "x" * 41, "My", "1st", "a_b", "a--b", "-ab", "ab-", "a b", "tgi", "añ", "a\n", "a:b"]
)
def test_bad_names_are_refused(name: str, complete: type[ModelAdapter]) -> None:
    with pytest.raises(ConfigError, match="backend name"):
        registry.register_backend(name, complete)


def test_a_taken_name_is_refused_with_its_owner(complete: type[ModelAdapter]) -> None:
    with pytest.raises(ConfigError, match=r"taken by deepseek_tgi.adapters.quantized:QuantizedModelAdapter .*known: "):
        registry.register_backend("deepseek-quant", complete)


def test_the_same_class_may_register_again(complete: type[ModelAdapter]) -> None:
    registry.register_backend("twice", complete)
    registry.register_backend("twice", complete)
    assert [info.name for info in registry.list_backends()].count("twice") == 1


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown backend 'nope'; known: .*deepseek-quant"):
        registry.load_backend("nope")


def test_two_packages_with_one_name_are_refused_by_both_names(stranger: str, tmp_path: Path) -> None:
    offer(tmp_path, "one-pack", "1.0", "same", f"{stranger}:Good")
    offer(tmp_path, "two-pack", "2.0", "same", f"{stranger}:Half")
    with pytest.raises(ConfigError, match=r"one-pack 1\.0 .* and two-pack 2\.0"):
        registry.load_backend("same")


@pytest.mark.parametrize(
    ("attribute", "reason"),
    [
        ("NoAdapter", "not a subclass of deepseek_tgi.adapters.base.ModelAdapter"),
        ("Old", f"abi_version 0, this package speaks {ABI_VERSION}"),
        ("Half", "does not implement .*get_model"),
        ("Missing", "has no Missing"),
    ],
)
def test_what_breaks_the_abi_is_refused_by_its_fault(attribute: str, reason: str, stranger: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        registry.load_backend(f"{stranger}:{attribute}")


def test_a_broken_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot import needs_more: .*a_package_that_is_not_there"):
        registry.load_backend("needs_more:Adapter")


@pytest.mark.parametrize("fault", ["raise RuntimeError('no device')", "def (:", "import os; os.no_such", "1 / 0"])
def test_a_module_that_fails_while_it_is_imported_is_named(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "falls_over.py").write_text(fault + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"backend 'falls_over:Adapter': cannot import falls_over: \w+Error: "):
        registry.load_backend("falls_over:Adapter")


def test_an_entry_point_may_name_extras(stranger: str, tmp_path: Path) -> None:
    offer(tmp_path, "with-extras", "1.0", "extra", f"{stranger}:Good [fast]")
    assert registry.find_backend("extra").target == f"{stranger}:Good"
    assert registry.load_backend("extra").__name__ == "Good"


def test_a_target_works_in_the_place_of_a_name(stranger: str) -> None:
    assert registry.load_backend(f"{stranger}:Good").__name__ == "Good"

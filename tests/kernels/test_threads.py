"""How many threads, and that their number and their company change no bit."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from oracles import kernels as oracle

from deepseek_tgi.errors import ConfigError
from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.library import load
from deepseek_tgi.kernels.select import native_kernels
from deepseek_tgi.kernels.threads import cgroup_cpus, torch_threads, usable_threads


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("membership", "files", "granted"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "400000 100000"}, 0.5),
        ("4:memory:/x\n1:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "300000", "cpu/x/cpu.cfs_period_us": "100000"}, 3.0),
        ("3:cpu,cpuacct:/\n", {"cpu,cpuacct/cpu.cfs_quota_us": "-1"}, None),
        ("3:cpu,cpuacct:/\n", {"cpu,cpuacct/cpu.cfs_quota_us": "200000"}, 2.0),
        ("0::/\n", {"cpu.max": "nonsense"}, None),
    ],
)
def test_the_smallest_quota_on_the_way_up_holds(
    tmp_path: Path, membership: str, files: dict[str, str], granted: float | None
) -> None:
    write(tmp_path, {f"cgroup/{name}": text for name, text in files.items()})
    (tmp_path / "self").write_text(membership)
    assert cgroup_cpus(tmp_path / "cgroup", tmp_path / "self") == granted


def test_a_quota_is_rounded_up_and_never_below_one() -> None:
    available = usable_threads(quota=10_000)
    assert available >= 1
    assert usable_threads(quota=0.2) == 1
    assert usable_threads(quota=1.5) == min(2, available)
    assert usable_threads(3) == 3
    with pytest.raises(ConfigError, match="num_threads"):
        usable_threads(-1)


def test_torch_keeps_one_thread_where_its_helpers_would_spin() -> None:
    assert torch_threads(8, native=True, environ={}) == 1
    assert torch_threads(8, native=True, environ={"OMP_WAIT_POLICY": "passive"}) == 8
    assert torch_threads(8, native=False, environ={}) == 8


def test_the_number_of_threads_changes_no_bit() -> None:
    g = torch.Generator().manual_seed(0)
    codes, zeros = (torch.randint(0, 16, s, generator=g, dtype=torch.uint8) for s in ((300, 256), (300, 4)))
    scales, x, dense = torch.rand(300, 4, generator=g).half(), torch.randn(37, 256), torch.randn(300, 256)
    results = []
    for threads in (1, 2, 7):
        kernels = native_kernels(load(), ComputeDtype.BFLOAT16, threads, "test")
        packed = kernels.pack_int4(codes, zeros, scales, 64)
        results.append(
            [
                kernels.int4_linear(x, packed),
                kernels.int4_linear(x[:1], packed),
                kernels.rms_norm(x, dense[0], 1e-5),
                kernels.dense_linear(x, kernels.pack_dense(dense)),
                kernels.silu_mul(x),
            ]
        )
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_calls_from_several_python_threads_do_not_disturb_each_other() -> None:
    kernels = native_kernels(load(), ComputeDtype.FLOAT32, 3, "test")
    weight = torch.randn(200, 128)
    packed = kernels.pack_dense(weight)
    inputs = [torch.randn(40, 128) for _ in range(8)]
    expected = [kernels.dense_linear(x, packed) for x in inputs]
    reference = oracle.linear(inputs[0].numpy(), weight.numpy())
    assert abs(expected[0].numpy() - reference).max() < 1e-4

    def work(i: int) -> bool:
        return all(torch.equal(kernels.dense_linear(inputs[i], packed), expected[i]) for _ in range(50))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))


_FORK = """
import os, torch
from deepseek_tgi.kernels.library import load
from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.select import native_kernels
kernels = native_kernels(load(), ComputeDtype.FLOAT32, 2, "test")
x, packed = torch.ones(40, 64), kernels.pack_dense(torch.ones(300, 64))
kernels.dense_linear(x, packed)
child = os.fork()
good = bool((kernels.dense_linear(x, packed) == 64).all())
if child == 0:
    os._exit(0 if good else 1)
assert good and os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_computes_too() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", _FORK], check=True, timeout=60)

"""From a dense checkpoint to an AWQ one in AutoAWQ's gemm layout, which AutoAWQ, vLLM and TGI read to the same numbers.

Linear layers inside decoder blocks are quantised; embeddings, output head, norms, biases and the routers of experts
stay as they are. A layer whose outputs do not fill packed words stays dense. Routers and such layers are listed in
`modules_to_not_convert`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from deepseek_tgi.adapters.awq.format import GEMM, NIBBLES_PER_WORD
from deepseek_tgi.adapters.awq.unpack import pack_gemm
from deepseek_tgi.adapters.checkpoint import Checkpoint
from deepseek_tgi.adapters.model_config import read_json, read_model_config
from deepseek_tgi.adapters.quantization import FLOAT_DTYPES
from deepseek_tgi.convert.output_folder import new_folder, write_json
from deepseek_tgi.convert.progress import progress_bar
from deepseek_tgi.convert.rtn import quantise_matrix
from deepseek_tgi.convert.safetensors_writer import PlannedTensor, SafetensorsWriter
from deepseek_tgi.errors import CheckpointError, ConfigError

GROUP_SIZES = (128, 64, 32)
"""Tried in this order when none is asked for."""
_ROUTER = ".mlp.gate.weight"
"""Chooses experts: a small matrix whose rounding would change the choice."""
_CORRECTION_BIAS = ".e_score_correction_bias"
"""Is added to scores that lie close together; its family keeps it in float32."""
_BLOCK_WEIGHT = re.compile(r"model\.layers\.\d+\.(.+)\.weight")
_COMPANIONS = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
"""Files that travel along: tokenizer, template, generation settings."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One stored tensor: what becomes of it. `group_size` 0 means copied in `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group_size: int = 0

    def planned(self) -> list[PlannedTensor]:
        """The tensors this one turns into, in the order they are written."""
        if not self.group_size:
            return [PlannedTensor(self.name, self.dtype, self.shape)]
        module, (rows, columns) = self.name.removesuffix(".weight"), self.shape
        return [
            PlannedTensor(f"{module}.{GEMM.weight}", torch.int32, GEMM.weight_shape(rows, columns)),
            PlannedTensor(f"{module}.{GEMM.zeros}", torch.int32, GEMM.zeros_shape(rows, columns, self.group_size)),
            PlannedTensor(f"{module}.{GEMM.scales}", torch.float16, GEMM.scales_shape(rows, columns, self.group_size)),
        ]


def quantize_rtn(src: Path, out: Path, group_size: int | None = None, progress: bool = False) -> None:
    """Write the dense checkpoint `src` as an AWQ checkpoint `out` by rounding to nearest, one tensor at a time.

    `group_size` None takes the largest of 128, 64 and 32 that divides every quantised layer's input side; -1 means one
    group a row.
    Raises: `CheckpointError` for what cannot be read, `ConfigError` for a group size that does not divide (layer
    named) or an `out` that exists, `ResourceError` if the disk is full. On any error nothing is left behind.
    """
    config = read_model_config(src)
    if config.quantization.schemes:
        raise CheckpointError(
            f"{src}: is quantised already ({config.quantization.method}); expected a dense checkpoint"
        )
    checkpoint = Checkpoint(src)
    skipped = {"lm_head.weight"} if config.tie_word_embeddings and "model.embed_tokens.weight" in checkpoint else set()
    jobs = [_plan_copy(checkpoint, name) for name in checkpoint.unused() if name not in skipped]
    size = _choose_group_size(jobs, group_size)
    jobs = [_plan_packing(job, size) for job in jobs]
    raw = read_json(src / "config.json")
    dtype_key = "dtype" if "dtype" in raw else "torch_dtype"
    with new_folder(out) as folder:
        settings = {**raw, dtype_key: _main_dtype(jobs), "quantization_config": _settings(jobs, size)}
        write_json(folder / "config.json", settings)
        _copy_companions(src, folder)
        plan = [tensor for job in jobs for tensor in job.planned()]
        with SafetensorsWriter(folder / "model.safetensors", plan) as writer:
            for job in progress_bar(jobs, "quantising", progress):
                for tensor in _run(checkpoint, job):
                    writer.write(tensor)
                checkpoint.release()


def _plan_copy(checkpoint: Checkpoint, name: str) -> _Job:
    dtype = checkpoint.dtype(name)
    if dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {name} has dtype {dtype}; expected a dense float checkpoint"
        )
    narrowed = dtype == torch.float32 and not name.endswith(_CORRECTION_BIAS)
    return _Job(name, checkpoint.shape(name), torch.float16 if narrowed else dtype)


def _is_quantised(job: _Job) -> bool:
    inside = _BLOCK_WEIGHT.fullmatch(job.name) is not None
    linear = len(job.shape) == 2 and job.shape[0] % NIBBLES_PER_WORD == 0
    return inside and linear and not job.name.endswith(_ROUTER)


def _choose_group_size(jobs: list[_Job], wanted: int | None) -> int:
    """The wanted or the largest usable size; raises naming the layer it does not divide."""
    layers = [job for job in jobs if _is_quantised(job)]
    if not layers:
        raise CheckpointError("no linear layer of a decoder block was found: nothing to quantise")
    if wanted == -1:
        return -1
    if wanted is not None and wanted <= 0:
        raise ConfigError(f"group size is {wanted}; expected -1 or a positive number")
    for size in GROUP_SIZES if wanted is None else (wanted,):
        misfits = [job for job in layers if job.shape[1] % size]
        if not misfits:
            return size
    # The last size is the only or the smallest one, which divides wherever a larger one does.
    where = f"the input side of {misfits[0].name}, {misfits[0].shape[1]}"
    if wanted is not None:
        raise ConfigError(f"group size {wanted} does not divide {where}")
    raise ConfigError(f"no group size of {', '.join(map(str, GROUP_SIZES))} divides {where}; give --group-size")


def _plan_packing(job: _Job, size: int) -> _Job:
    if not _is_quantised(job):
        return job
    return replace(job, group_size=job.shape[1] if size == -1 else size)


def _run(checkpoint: Checkpoint, job: _Job) -> Iterator[torch.Tensor]:
    """The tensors of `job.planned()`."""
    stored = checkpoint.tensor(job.name)
    # A copy is judged as it will be stored: float32 may hold what float16 cannot.
    values = stored if job.group_size else stored.to(job.dtype)
    if not torch.isfinite(values.sum(dtype=torch.float32)):
        kind = str(values.dtype).removeprefix("torch.")
        raise CheckpointError(f"{checkpoint.folder}: tensor {job.name} holds infinities, NaN or values beyond {kind}")
    if job.group_size:
        packed = pack_gemm(quantise_matrix(values, job.group_size))
        yield from (packed[name] for name in (GEMM.weight, GEMM.zeros, GEMM.scales))
    else:
        yield values


def _main_dtype(jobs: list[_Job]) -> str:
    dense = [job.dtype for job in jobs if not job.group_size]
    return "bfloat16" if torch.bfloat16 in dense else "float16"


def _settings(jobs: list[_Job], size: int) -> dict[str, object]:
    """`quantization_config` as AutoAWQ writes it."""
    left = [
        job.name.removesuffix(".weight")
        for job in jobs
        if not job.group_size and len(job.shape) == 2 and _BLOCK_WEIGHT.fullmatch(job.name)
    ]
    return {
        "bits": 4,
        "group_size": size,
        "modules_to_not_convert": left or None,
        "quant_method": "awq",
        "version": GEMM.name,
        "zero_point": True,
    }


def _copy_companions(src: Path, folder: Path) -> None:
    for pattern in _COMPANIONS:
        for path in sorted(src.glob(pattern)):
            if path.is_file() and path.name != "config.json" and not path.name.endswith(".safetensors.index.json"):
                shutil.copyfile(path, folder / path.name)

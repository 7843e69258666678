"""The paged cache's memory: `KVPool` owns every page; kernels see it one layer at a time."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence

import torch

from deepseek_tgi.errors import GenerationError, ResourceError
from deepseek_tgi.kernels.latent_format import dequantise_latent
from deepseek_tgi.kernels.pages import LatentPages, LayerPages, Pages
from deepseek_tgi.kernels.vector_store import read_vectors
from deepseek_tgi.kv.layout import PAGE_ALIGNMENT_BYTES, CacheLayout, LatentLayout, Section

__all__ = ["KVPool", "LatentPages", "LayerByLayer", "LayerPages", "Pages"]


class LayerByLayer:
    """A pool's pages by layer: a step that asks for a layer shows that it got there."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def __getitem__(self, layer: int, /) -> Pages:
        return self._pool.pages(layer)


class KVPool:
    """Owner of `num_blocks` pages of `layout`; the only object that allocates or frees cache memory.

    On a CPU the pages are an anonymous mapping: memory is taken as pages are first written, starts zeroed and lies on
    a 4096-byte boundary; on a GPU they are zeroed memory on such a boundary. Raises `ResourceError` if there is not
    enough.
    """

    def __init__(self, layout: CacheLayout, num_blocks: int, device: str | torch.device = "cpu") -> None:
        if num_blocks < 1:
            raise ResourceError(
                f"KV pool: got {num_blocks} blocks, expected at least 1 ({layout.bytes_per_block} bytes)"
            )
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        self._mapping: mmap.mmap | None = None
        self._num_discarded = 0
        self._storage: torch.Tensor | None = self._allocate()
        self._views = [self._make_view(layer) for layer in range(layout.num_layers)]
        self._on_layer: Callable[[], None] | None = None

    def watch(self, on_layer: Callable[[], None]) -> None:
        """Call `on_layer` whenever a layer's pages are asked for: a step that does so makes progress."""
        self._on_layer = on_layer

    @property
    def num_slots(self) -> int:
        """Token places in the pool."""
        return self.num_blocks * self.layout.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, touched or not."""
        return self.num_blocks * self.layout.bytes_per_block

    @property
    def storage(self) -> torch.Tensor:
        """All pages as `[num_blocks, bytes_per_block] uint8`. Raises `GenerationError` after `close`."""
        if self._storage is None:
            raise GenerationError("KV pool: used after close")
        return self._storage

    def pages(self, layer: int) -> Pages:
        """The part of every page that belongs to `layer`; made once. Raises `GenerationError` after `close`."""
        if not self._views:
            raise GenerationError("KV pool: used after close")
        if self._on_layer is not None:
            self._on_layer()
        return self._views[layer]

    def view(self, layer: int) -> LayerPages:
        """As `pages`, of a cache of keys and values."""
        pages = self.pages(layer)
        assert isinstance(pages, LayerPages), "the layout is one of keys and values"
        return pages

    def latents(self, layer: int) -> LatentPages:
        """As `pages`, of a cache of latents."""
        pages = self.pages(layer)
        assert isinstance(pages, LatentPages), "the layout is one of latents"
        return pages

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is stored at `slots [n] int64`, dequantised: `k [n, G, Dk]`, `v [n, G, Dv]`, both float32.

        Keys are as stored: without their centre where the writer's frame has one.
        """
        pages = self.view(layer)
        page, offset = slots // pages.block_size, slots % pages.block_size
        k, v = pages.k[page, :, offset], pages.v[page, :, offset]
        scales = (None if scale is None else scale[page, :, offset] for scale in (pages.k_scale, pages.v_scale))
        k_scale, v_scale = scales
        return read_vectors(pages.mode, k, k_scale), read_vectors(pages.mode, v, v_scale)

    def read_latents(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is stored at `slots [n] int64`, dequantised: `latent [n, R]`, `rope [n, Dr]`, both float32."""
        pages = self.latents(layer)
        page, offset = slots // pages.block_size, slots % pages.block_size
        latent, rope = pages.latent[page, offset], pages.rope[page, offset].float()
        if pages.scale is None:
            return latent.float(), rope
        return dequantise_latent(latent, pages.scale[page, offset], pages.mode), rope

    def check_integrity(self) -> None:
        """Raise `GenerationError` if the pages no longer lie where the layout says; reads no page."""
        storage = self.storage
        expected = (self.num_blocks, self.layout.bytes_per_block)
        if tuple(storage.shape) != expected or storage.data_ptr() % PAGE_ALIGNMENT_BYTES:
            raise GenerationError(
                f"KV pool: storage is {list(storage.shape)} at offset {storage.data_ptr() % PAGE_ALIGNMENT_BYTES} of a "
                f"{PAGE_ALIGNMENT_BYTES}-byte boundary, expected {list(expected)} at 0"
            )
        for layer, pages in enumerate(self._views):
            self._check_layer(layer, pages, storage.data_ptr())

    def discard(self, blocks: Sequence[int]) -> int:
        """Give the memory of exactly these blocks back, which read as zero from now on; bytes.

        Until the next call nobody is promised memory for them, though they may be written again.
        """
        if self._mapping is None:
            return 0
        self._num_discarded = len(set(blocks))
        freed = 0
        size = self.layout.bytes_per_block
        for block in blocks:
            start = -(-block * size // PAGE_ALIGNMENT_BYTES) * PAGE_ALIGNMENT_BYTES
            length = (block + 1) * size // PAGE_ALIGNMENT_BYTES * PAGE_ALIGNMENT_BYTES - start
            if length > 0:
                self._mapping.madvise(mmap.MADV_DONTNEED, start, length)
                freed += length
        return freed

    def untouched_bytes(self) -> int:
        """Bytes of pages that were promised and take no memory yet."""
        if self._mapping is None or self._storage is None:
            return 0
        resident = (ctypes.c_ubyte * -(-self.nbytes // mmap.PAGESIZE))()
        address = ctypes.c_void_p(self._storage.data_ptr())
        if ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(self.nbytes), resident):
            return 0
        promised = self.nbytes - self._num_discarded * self.layout.bytes_per_block
        return max(0, promised - mmap.PAGESIZE * bytes(resident).count(1))

    def close(self) -> None:
        """Give the memory back; views handed out earlier must not be used any more."""
        self._views = []
        self._storage = None
        self._mapping = None

    def _allocate(self) -> torch.Tensor:
        shape = (self.num_blocks, self.layout.bytes_per_block)
        if self.device.type != "cpu":
            # An allocator of a device promises less than a page's alignment.
            size = self.nbytes + PAGE_ALIGNMENT_BYTES
            try:
                raw = torch.zeros(size, dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError as error:
                raise ResourceError(f"KV pool: cannot allocate {size} bytes on {self.device}: {error}") from error
            start = -raw.data_ptr() % PAGE_ALIGNMENT_BYTES
            return raw[start : start + self.nbytes].view(shape)
        try:
            mapping = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise ResourceError(
                f"KV pool: cannot map {self.nbytes} bytes ({self.num_blocks} blocks of "
                f"{self.layout.bytes_per_block}): {error}; give fewer blocks or a smaller cache dtype"
            ) from error
        # frombuffer keeps the mapping alive as long as any view of the tensor lives.
        self._mapping = mapping
        return torch.frombuffer(mapping, dtype=torch.uint8).view(shape)

    def _make_view(self, layer: int) -> Pages:
        layout = self.layout
        parts = {s.name: self._section(s) for s in layout.sections(layer)}
        if isinstance(layout, LatentLayout):
            scale = parts["latent_scale"].squeeze(1) if "latent_scale" in parts else None
            latent, rope = parts["latent"].squeeze(1), parts["rope"].squeeze(1)
            return LatentPages(latent, rope, scale, layout.mode.value, layout.rank, layout.block_size)
        scales = parts.get("k_scale"), parts.get("v_scale")
        return LayerPages(parts["k"], parts["v"], *scales, layout.mode.value, layout.block_size)

    def _section(self, section: Section) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, section.dtype)
        flat = self.storage.view(-1).view(dtype)
        heads, slots, width = section.shape
        page_stride = self.layout.bytes_per_block // section.item_bytes
        return flat.as_strided(
            (self.num_blocks, heads, slots, width),
            (page_stride, slots * width, width, 1),
            flat.storage_offset() + section.offset_bytes // section.item_bytes,
        )

    def _check_layer(self, layer: int, pages: Pages, base: int) -> None:
        for section in self.layout.sections(layer):
            name = section.name.removeprefix("latent_")
            view: torch.Tensor = getattr(pages, name)
            at = view.data_ptr() - base
            if at != section.offset_bytes or view.stride(0) * section.item_bytes != self.layout.bytes_per_block:
                raise GenerationError(
                    f"KV pool: layer {layer} {section.name} lies at byte {at} with page stride "
                    f"{view.stride(0) * section.item_bytes}, expected {section.offset_bytes} and "
                    f"{self.layout.bytes_per_block}"
                )

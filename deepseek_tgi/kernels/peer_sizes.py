"""How much memory ranks on GPUs lend each other, as arithmetic. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

MAX_RANKS = 8
PACKET_BYTES, PACKET_FLOATS = 16, 2
THREADS, CHUNK_FLOATS = 128, 4096
"""Of a block of a short sum, and what a block of a long one takes."""
PACKETS_BYTES = 2 << 20
"""Of all inboxes of one rank for short sums: the quicker ones between two H200s up to 512 KiB."""
PAIR_BYTES, FLOATS_BYTES = 128 << 20, 8 << 20
"""The same for pieces of long sums, of two ranks and of more.

Between two H200s 64 MiB take 193 us in one piece, 229 in four, 278 in sixteen. More ranks send all they have to each
other one, which is for short sums.
"""


@dataclass(frozen=True, slots=True)
class PeerSizes:
    """What `world` ranks write into each other's memory; there are two inboxes of each kind from each of the others."""

    world: int

    @property
    def packets(self) -> int:
        """Of an inbox for short sums."""
        return PACKETS_BYTES // (2 * (self.world - 1) * PACKET_BYTES)

    @property
    def floats(self) -> int:
        """Of an inbox for pieces of long sums."""
        room = PAIR_BYTES if self.world == 2 else FLOATS_BYTES
        return room // (2 * (self.world - 1) * 4 * CHUNK_FLOATS) * CHUNK_FLOATS

    @property
    def long_threads(self) -> int:
        """Of a block of a long sum."""
        return 512 if self.world == 2 else 256

    @property
    def num_bytes(self) -> int:
        """Of all that a rank lends."""
        flags = self.floats // CHUNK_FLOATS
        return 2 * (self.world - 1) * (self.packets * PACKET_BYTES + self.floats * 4 + flags * 4)


def lent_bytes(world: int, on_gpus: bool) -> int:
    """What each of so many ranks may lend to the others, at most."""
    return PeerSizes(world).num_bytes if on_gpus and 1 < world <= MAX_RANKS else 0

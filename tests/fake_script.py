"""What a fake shard says of itself, and what its prompts make it say."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from deepseek_tgi.pb import generate_pb2 as pb


@dataclass(frozen=True)
class Traits:
    """What the shard says of itself."""

    block_size: int = 16
    support_chunking: bool = True
    use_prefix_caching: bool = True
    requires_padding: bool = False
    num_blocks: int = 300
    max_total_tokens: int = 512
    reported_capacity: bool = True


@dataclass
class Script:
    """What a prompt yields: token texts one after the other, then end-of-sequence; without texts `w<n> ` for ever."""

    texts: list[str] | None = None
    lost_at: int | None = None

    @classmethod
    def parse(cls, prompt: str) -> Script:
        """`say[a|b|c]` in the prompt gives the texts; `lose[3]` has it given up in place of its third token."""
        said = re.search(r"say\[(.*?)\]", prompt, re.DOTALL)
        lost = re.search(r"lose\[(\d+)\]", prompt)
        return cls(said[1].split("|") if said else None, int(lost[1]) if lost else None)


@dataclass
class Running:
    """One request inside the shard."""

    request: pb.Request
    ids: list[int]
    script: Script
    stored: int
    chunk: int | None
    made: list[str] = field(default_factory=list)
    ended: bool = False

    @property
    def prefilling(self) -> bool:
        return self.stored < len(self.ids)

"""The two public DeepSeek-V4 shapes that every table uses, and how many input sets to rotate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention layer: heads, groups of the output projection, and keys per token in each pool."""

    name: str
    heads: int
    groups: int
    window_keys: int
    compressed_keys: int
    head_dim: int = 512
    rope_dim: int = 64
    rank: int = 1024  # o_lora_rank: rows of the grouped output projection

    @property
    def keys(self) -> int:
        return self.window_keys + self.compressed_keys

    @property
    def group_width(self) -> int:
        """K of the grouped GEMM: heads per group times head_dim."""
        return self.heads // self.groups * self.head_dim


SHAPES = {
    "pro": Shape("pro", heads=128, groups=16, window_keys=128, compressed_keys=1024),
    "flash": Shape("flash", heads=64, groups=8, window_keys=128, compressed_keys=512),
}


def rotation(bytes_per_set: float, *, target: float = 400e6, low: int = 2, high: int = 12) -> int:
    """Number of input sets to rotate so that together they are far larger than the L2 cache."""
    return max(low, min(high, round(target / max(bytes_per_set, 1.0))))

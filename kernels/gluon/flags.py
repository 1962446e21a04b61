# SPDX-License-Identifier: Apache-2.0
"""Flag words in GPU memory for kernels whose CTAs wait for each other, without a launch that clears them.

A kernel that uses flags finds them at zero and leaves them at zero. So no two launches that may run at the same time
must share them: launches of one stream share its words, and each launch that a CUDA graph captures gets words of its
own, because the graph may be replayed on any stream. Those come out of a pool allocated at the first call outside a
capture: a capture could only allocate memory that its graph may use for something else between two replays.
"""

import torch
from torch import Tensor

STREAM_WORDS = 1 << 10  # per stream; no launch uses more
POOL_WORDS = 1 << 20  # per device, 4 MiB: some 4,000 captured launches of all multiprocessors

_of_stream: dict[tuple[int, int], Tensor] = {}
_pools: dict[int, tuple[Tensor, list[int]]] = {}  # words, [first that is free]


def flags(device: torch.device, words: int) -> Tensor | None:
    """int32 [words] of zeros for one launch on the current stream, or None when there are none (see the module)."""
    if device.type != "cuda":  # compilation for a GPU that is not there
        return torch.zeros(words, dtype=torch.int32)
    if words > STREAM_WORDS:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    if torch.cuda.is_current_stream_capturing():
        pool, free = _pools.get(index, (None, [0]))
        first = free[0]
        if pool is None or first + words > POOL_WORDS:
            return None
        free[0] = first + words
        return pool[first : first + words]
    key = (index, torch.cuda.current_stream(device).cuda_stream)
    if key not in _of_stream:
        if index not in _pools:
            _pools[index] = (torch.zeros(POOL_WORDS, dtype=torch.int32, device=device), [0])
        _of_stream[key] = torch.zeros(STREAM_WORDS, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()  # the pool is read on other streams
    return _of_stream[key]

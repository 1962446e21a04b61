# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Two CTAs of a cluster that wait for each other: what Gluon of Triton 3.6 has no operations for.

Gluon's own clusters (``num_ctas``) make one program of several CTAs. Here every CTA is a program of its own, compiled
as if it were alone, and only the launch puts neighbours into a cluster (``launching.at(..., cluster=2)``). The hardware
starts both at the same time or neither, so that one may wait for the other.

One signals a barrier in the other's shared memory, by its address. These barriers lie behind the shared memory that
Triton has planned, in bytes that the launch adds, so that their place follows from the size of all of it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..launching import CLUSTER_BARRIER_BYTES

# PTX: the address of the added bytes, in register a; n is free afterwards.
_ADDED = gl.constexpr(
    ".reg .pred p; .reg .u32 a, n; mov.u32 n, %dynamic_smem_size; mov.u32 a, global_smem; add.u32 a, a, n; "
    f"sub.u32 a, a, {CLUSTER_BARRIER_BYTES}; "
)


@gluon.constexpr_function
def _init_asm(number, count):
    return (
        f"{{ {_ADDED.value} mov.u32 n, %tid.x; setp.eq.u32 p, n, 0; "
        f"@p mbarrier.init.shared::cta.b64 [a+{8 * number}], {count}; "
        "@p fence.mbarrier_init.release.cluster; mov.u32 $0, 0; }"
    )


@gluon.constexpr_function
def _arrive_asm(number):
    return (
        f"{{ {_ADDED.value} mov.u32 n, %cluster_ctarank; xor.b32 n, n, 1; mapa.shared::cluster.u32 a, a, n; "
        "mov.u32 n, %laneid; setp.eq.u32 p, n, 0; bar.warp.sync 0xffffffff; "
        f"@p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [a+{8 * number}]; mov.u32 $0, 0; }}"
    )


@gluon.constexpr_function
def _wait_asm(number):
    return (
        f"{{ {_ADDED.value} mov.u32 n, 0; "
        f"WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [a+{8 * number}], n; "
        "@!p bra.uni WAIT; mov.u32 $0, 0; }"
    )


@gluon.jit
def _do(ASM: gl.constexpr):
    gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def init_barrier(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Have barrier NUMBER complete its only phase after COUNT arrivals. To be called by the first warpgroup."""
    ASM: gl.constexpr = _init_asm(NUMBER, COUNT)
    _do(ASM)


@gluon.jit
def announce():
    """This thread's CTA has initialised its barriers. All threads of a CTA have to say so, in whatever partition."""
    _do("barrier.cluster.arrive.release.aligned; mov.u32 $0, 0;")


@gluon.jit
def meet(NUMBER: gl.constexpr):
    """Return when both CTAs' warpgroups have come here; what the other has written, wherever, is visible then.

    Barrier NUMBER counts 4 arrivals, of the other's warps. Neither can leave before the other has signalled it. To be
    called once, after `announce`.
    """
    ARRIVE: gl.constexpr = _arrive_asm(NUMBER)
    WAIT: gl.constexpr = _wait_asm(NUMBER)
    _do("barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;")
    _do(ARRIVE)
    _do(WAIT)

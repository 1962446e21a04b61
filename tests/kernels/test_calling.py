# SPDX-License-Identifier: Apache-2.0
"""Kernels called past Triton, with its own classes and no GPU: the same arguments reach the C function."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from fake_machine import descriptor
from fusion_pass.kernels import launching

NAMES = ["a", "b", "c", "size"]


@pytest.fixture
def compiled():
    """(kernel, what its launch returns, arguments of the C function) with Triton's own classes and no GPU behind them:
    parameters are a pointer, a descriptor of [8, 4] in tiles, a number and a compile-time constant."""
    pytest.importorskip("triton")
    from fusion_pass.kernels.triton import calling
    from triton.backends.nvidia import driver
    from triton.compiler import CompiledKernel

    if reason := calling.unknown_form():
        pytest.skip(reason)
    made, launched = CompiledKernel.__new__(CompiledKernel), []
    signature = {0: "*fp32", 1: "tensordesc<fp32[2, 4]>", 2: "i32", 3: "constexpr"}
    meta = [{"swizzle": 0, "elem_size": 4, "elem_type": 7, "block_size": [2, 4], "fp4_padded": False}]
    run = driver.CudaLauncher.__new__(driver.CudaLauncher)
    run.launch = driver.wrap_handle_tensordesc(lambda *args: launched.append(args), signature, meta)
    run.global_scratch_size = run.profile_scratch_size = run.global_scratch_align = run.profile_scratch_align = 0
    run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, True
    made._run, made.function, made.packed_metadata, made.module = run, 4321, (4, 1, 0), "module"
    made.src = SimpleNamespace(signature=signature)
    made.metadata = SimpleNamespace(tensordesc_meta=meta)
    return SimpleNamespace(debug=None, pre_run_hooks=[], arg_names=NAMES), made, launched


def test_entry_calls_what_triton_calls(compiled, monkeypatch):
    """With one and the same tensor, a replay hands the C function exactly what Triton's own launcher hands it."""
    import triton
    from fusion_pass.kernels.triton import calling

    kernel, made, launched = compiled
    encoded = SimpleNamespace(
        fill_tma_descriptor=lambda *args: ("encoded", *args[:5], tuple(args[5]), tuple(args[6]), args[7])
    )
    fake_driver = SimpleNamespace(active=SimpleNamespace(utils=encoded))
    monkeypatch.setattr(triton.runtime, "driver", fake_driver)
    x = torch.zeros(8, 4)
    entry = calling.entry(kernel, made, (3, 2))
    assert not isinstance(entry, str), entry
    made.run(3, 2, 1, 99, made.function, made.packed_metadata, None, None, None, x.data_ptr(), descriptor(x), 5, 0)
    head = list(entry.head)
    head[entry.stream] = 99
    described = entry.descriptors[1](x.data_ptr(), [8, 4], [4, 1], "zero")
    entry.call(*head, x.data_ptr(), *described, 5, 0)
    assert launched[0] == launched[1] and list(entry.descriptors) == [1]
    assert launched[1][:5] == (3, 2, 1, 99, 4321)


def test_entry_refuses_what_it_does_not_know(compiled, monkeypatch):
    from fusion_pass.kernels.triton import calling

    kernel, made, _ = compiled
    assert "NoneType" in calling.entry(kernel, None, (1,))
    made._run.profile_scratch_size = 128
    assert "scratch" in calling.entry(kernel, made, (1,))
    made._run.profile_scratch_size = 0
    kernel.pre_run_hooks.append(print)
    assert "hooks" in calling.entry(kernel, made, (1,))
    kernel.pre_run_hooks.clear()
    made._run.launch = print
    assert "descriptors" in calling.entry(kernel, made, (1,))
    monkeypatch.setattr(calling, "KNOWN_TRITON", ((0, 1),))
    calling.unknown_form.cache_clear()
    try:
        assert "is known for" in calling.entry(kernel, made, (1,))
    finally:
        calling.unknown_form.cache_clear()


def test_hooks_and_debugging_are_noticed(compiled, monkeypatch):
    from fusion_pass.kernels.triton import calling
    from triton import knobs

    assert calling.undisturbed()
    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(print)
        assert not calling.undisturbed()
        chain.remove(print)
    for place, name, value in ((knobs.runtime, "debug", True), (knobs.compilation, "instrumentation_mode", "fpsan"),
                               (knobs.runtime, "launch_enter_hook", print)):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value, raising=False)
            assert not calling.undisturbed()
    assert calling.undisturbed()


def test_every_thread_gets_a_context_once(monkeypatch):
    """Not before CUDA is in use, nor while its thread captures a graph: such a thread has one."""
    asked, capturing, used = [], [], []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: asked.append(threading.get_ident()))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(used))

    def in_threads(count):
        asked.clear()
        for _ in range(count):
            thread = threading.Thread(target=lambda: [launching.ensure_context() for _ in range(3)])
            thread.start()
            thread.join()
        return len(asked)

    assert in_threads(1) == 0
    used.append(True)
    assert in_threads(2) == 2
    capturing.append(True)
    assert in_threads(1) == 0


class _Clustered:
    """A jitted function whose compiled kernel, of one CTA per program, knows what launches go by."""

    def __init__(self, packed):
        self.compiled = SimpleNamespace(metadata=SimpleNamespace(num_warps=4, shared=1000), packed_metadata=packed)
        self.launched = []

    def warmup(self, *args, grid, **options):
        return self.compiled

    def __getitem__(self, grid):
        return lambda *args, **options: self.launched.append((grid, args, options, self.compiled.packed_metadata))


def test_a_launch_in_clusters():
    """The kernel is compiled, told of the clusters, and only then launched, again and again; others are left alone."""
    pytest.importorskip("triton")
    kernel = _Clustered((4, 1, 1000))
    for _ in range(2):
        launching.at(kernel, (3,), cluster=2)(7, SIZE=8)
    assert kernel.launched == [((3,), (7,), {"SIZE": 8}, (4, 2, 1024 + launching.CLUSTER_BARRIER_BYTES))] * 2
    kernel = _Clustered((4, 1, 1000))
    launching.at(kernel, (3,))(7)
    assert kernel.launched == [((3,), (7,), {}, (4, 1, 1000))]


def test_clusters_of_an_unknown_launcher():
    pytest.importorskip("triton")
    kernel = _Clustered({"num_warps": 4})
    with pytest.raises(RuntimeError, match="warps, CTAs and shared memory"):
        launching.at(kernel, (3,), cluster=2)(7)
    assert not kernel.launched

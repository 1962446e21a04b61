"""Benchmarks: ``python -m benchmarks {attention,bgemm,chain,merge,rope_quant,...,all}``.

Every table times whole CUDA graphs with rotating weights and caches, on random data, and puts peers (FlashMLA,
DeepGEMM) into the same run when their packages are importable. Results are JSON files with the versions and the GPU
they came from, under ``benchmarks/results``.
"""

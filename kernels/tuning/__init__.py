# SPDX-License-Identifier: Apache-2.0
"""Launch tables: measured data, one module per kernel and architecture, written by the benchmarks."""

# SPDX-License-Identifier: Apache-2.0
"""Launch parameters as data: one table per kernel, by architecture. The tables import neither Triton nor a GPU."""

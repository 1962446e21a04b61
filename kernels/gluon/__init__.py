# SPDX-License-Identifier: Apache-2.0
"""Warp-specialised kernels in Gluon for one architecture each; gated, with the portable Triton kernels as fallback."""

# SPDX-License-Identifier: Apache-2.0
"""Triton kernels. Importing this package imports nothing: every module below needs Triton and is imported on first
use."""

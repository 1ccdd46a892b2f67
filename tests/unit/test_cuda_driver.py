"""Kernels of our own are left out, without a word, where torch was built without CUDA."""

from __future__ import annotations

import warnings

import pytest
import torch

from shardwise.cuda_driver import compile_kernels


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch was built with CUDA")
def test_without_cuda_there_are_no_kernels_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_kernels('extern "C" __global__ void nothing() {}', ("nothing",), 0) is None

"""Compiles our own CUDA kernels when they are first needed, and launches them without torch.

It uses only the C interfaces of NVIDIA's driver and run-time compiler. Where either is missing there are no kernels,
and torch's operations do the work.
"""

from __future__ import annotations

import ctypes
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from shardwise.torch_internals import raw_cuda_stream


class Kernel:
    """A compiled kernel on one device."""

    def __init__(self, function: ctypes.c_void_p, device_index: int) -> None:
        self._launch = _driver().cuLaunchKernel
        self._function = function
        self._device_index = device_index

    def launch(self, num_blocks: int, num_threads: int, arguments: Any) -> None:
        """Launches the kernel on the current stream; ``arguments`` are pointers to the present values."""
        stream = raw_cuda_stream(self._device_index)
        code = self._launch(self._function, num_blocks, 1, 1, num_threads, 1, 1, 0, stream, arguments, None)
        if code:
            raise RuntimeError(f"CUDA error {code} in the launch of a kernel")


def pointers_to(*values: ctypes.Structure | ctypes.Array[Any] | ctypes.c_int64) -> Any:
    """Returns the arguments of a launch: pointers to values, which the launch reads."""
    return (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))


@lru_cache
def compile_kernels(source: str, names: tuple[str, ...], device_index: int) -> dict[str, Kernel] | None:
    """Returns kernels by name, compiled for this device, or None if they cannot be compiled."""
    if torch.version.cuda is None:
        return None
    try:
        with torch.cuda.device(device_index):
            # A device that has not been used yet has no context to load into.
            torch.cuda.synchronize()
            return _load(_compile(source, torch.cuda.get_device_capability()), names, device_index)
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"kernels could not be compiled ({error}); steps take a little longer without them", stacklevel=2
        )
        return None


def _compile(source: str, capability: tuple[int, int]) -> bytes:
    compiler = _compiler()
    program = ctypes.c_void_p()
    _check(
        compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"shardwise.cu", 0, None, None)
    )
    try:
        options = [b"--gpu-architecture=sm_%d%d" % capability, b"--std=c++17"]
        failed = compiler.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*options)
        )
        if failed:
            raise RuntimeError(_text(compiler.nvrtcGetProgramLogSize, compiler.nvrtcGetProgramLog, program))
        return _bytes(compiler.nvrtcGetCUBINSize, compiler.nvrtcGetCUBIN, program)
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _load(image: bytes, names: tuple[str, ...], device_index: int) -> dict[str, Kernel]:
    # Never unloaded: kernels are used until the process ends.
    driver, module = _driver(), ctypes.c_void_p()
    _check(driver.cuModuleLoadData(ctypes.byref(module), image))
    kernels = {}
    for name in names:
        function = ctypes.c_void_p()
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        kernels[name] = Kernel(function, device_index)
    return kernels


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA's compiler or driver returned error {code}")


def _bytes(size_of: Any, contents_of: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    contents = ctypes.create_string_buffer(size.value)
    _check(contents_of(program, contents))
    return contents.raw


def _text(size_of: Any, contents_of: Any, program: ctypes.c_void_p) -> str:
    return _bytes(size_of, contents_of, program).rstrip(b"\0").decode()


@lru_cache
def _driver() -> ctypes.CDLL:
    # CDLL releases the GIL during calls: a launch blocks when the device is far behind, and the watchdog's thread must
    # be able to run meanwhile.
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    driver.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    return driver


@lru_cache
def _compiler() -> ctypes.CDLL:
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        # torch's wheels bring their own, in a package beside torch.
        found = sorted(Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}"))
        if not found:
            raise
        return ctypes.CDLL(str(found[0]))

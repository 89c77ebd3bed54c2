"""Kernels on a device: loading cubins, packing arguments, launching on torch's stream."""

import ctypes
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ops.msda.cuda.compiler import Compiled
from ops.msda.cuda.plan import MAX_LEVELS

# struct Arguments of csrc/common.cuh: twelve pointers, then ten ints and (H, W) a level
_POINTERS = struct.Struct("@12P")
_NUMBERS = struct.Struct(f"@10i{2 * MAX_LEVELS}i")

_threads = threading.local()


class LaunchError(RuntimeError):
    """The CUDA driver refused to load or launch a kernel. The message names the kernel, device and error."""


@dataclass(frozen=True)
class Kernel:
    """A kernel loaded on one device.

    Attributes:
        name: The instance, for messages.
        handle: The driver's function.
        max_dynamic_shared: Bytes of dynamic shared memory a block may ask for.
    """

    name: str
    handle: Any
    max_dynamic_shared: int


def load_kernel(name: str, compiled: Compiled, device_index: int) -> Kernel:
    """Load a cubin into the primary context of a device, which must be the current one.

    Raises:
        LaunchError: The driver cannot load it.
    """
    from cuda.bindings import driver

    _ensure_context(device_index)
    what = f"loading {name} on {_device_name(device_index)}"
    module = _check(driver.cuModuleLoadData(compiled.image), what)
    handle = _check(driver.cuModuleGetFunction(module, compiled.symbol.encode()), what)
    attribute = driver.CUfunction_attribute
    static = _check(driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, handle), what)
    limit = device_limits(device_index).max_shared - static
    _check(
        driver.cuFuncSetAttribute(handle, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, limit),
        what,
    )
    return Kernel(name, handle, limit)


@dataclass(frozen=True)
class PreparedLaunch:
    """A launch but for its pointers: what depends on dtypes and sizes alone, made once for them.

    Attributes:
        kernel: What runs.
        device_index: Where.
        num_blocks, threads, dynamic_shared: The grid, a block, and its bytes of dynamic shared memory.
        numbers: The packed ints of `Arguments`.
    """

    kernel: Kernel
    device_index: int
    num_blocks: int
    threads: int
    dynamic_shared: int
    numbers: bytes


def pack_numbers(numbers: Sequence[int], sizes: Sequence[int]) -> bytes:
    """The ten ints of `Arguments`, and H and W of each level."""
    return _NUMBERS.pack(*numbers, *sizes, *(0,) * (2 * MAX_LEVELS - len(sizes)))


def launch(prepared: PreparedLaunch, pointers: Sequence[int]) -> None:
    """Launch on the current stream of a device, which must be the current one. Returns before the kernel ends.

    Args:
        pointers: The twelve pointers of `Arguments`, 0 for null.

    Raises:
        LaunchError: The driver refused the launch.
    """
    driver = _driver()
    device_index = prepared.device_index
    if device_index not in getattr(_threads, "devices", ()):
        _ensure_context(device_index)
    packed = _POINTERS.pack(*pointers) + prepared.numbers
    arguments = ctypes.create_string_buffer(packed, len(packed))
    parameters = ctypes.c_void_p(ctypes.addressof(arguments))
    (error,) = driver.cuLaunchKernel(
        prepared.kernel.handle,
        prepared.num_blocks,
        1,
        1,
        prepared.threads,
        1,
        1,
        prepared.dynamic_shared,
        torch.cuda.current_stream(device_index).cuda_stream,
        ctypes.addressof(parameters),
        0,
    )
    if error:
        what = f"launching {prepared.kernel.name} on {_device_name(device_index)} with {prepared.num_blocks} blocks"
        _check((error,), what)


@dataclass(frozen=True)
class DeviceLimits:
    """Of one device.

    Attributes:
        multiprocessors: Their number.
        max_shared: Bytes of shared memory a block may opt into.
    """

    multiprocessors: int
    max_shared: int


@cache
def device_limits(device_index: int) -> DeviceLimits:
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute
    what = f"asking cuda:{device_index} for its limits"
    device = _check(driver.cuDeviceGet(device_index), what)

    def ask(which: Any) -> int:
        return int(_check(driver.cuDeviceGetAttribute(which, device), what))

    return DeviceLimits(
        ask(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        ask(attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
    )


def _ensure_context(device_index: int) -> None:
    """Make the device's primary context current in this thread: autograd's threads may not have one yet."""
    from cuda.bindings import driver

    what = f"taking the context of cuda:{device_index}"
    context = _check(driver.cuCtxGetCurrent(), what)
    if int(context) == 0:
        device = _check(driver.cuDeviceGet(device_index), what)
        context = _check(driver.cuDevicePrimaryCtxRetain(device), what)
        _check(driver.cuCtxSetCurrent(context), what)
    devices: set[int] = getattr(_threads, "devices", set())
    devices.add(device_index)
    _threads.devices = devices


def _check(result: tuple[Any, ...], what: str) -> Any:
    from cuda.bindings import driver

    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(error)
        reason = text.decode() if text else "unknown error"
        raise LaunchError(f"{what}: {error.name} ({reason}). kernel=reference runs without these kernels")
    return values[0] if values else None


@cache
def _driver() -> Any:
    """The driver's bindings, imported on first use: importing ops must not touch CUDA."""
    from cuda.bindings import driver

    return driver


@cache
def _device_name(device_index: int) -> str:
    properties = torch.cuda.get_device_properties(device_index)
    return f"cuda:{device_index} ({properties.name}, sm_{properties.major}{properties.minor})"

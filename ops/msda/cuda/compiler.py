"""CUDA C++ to machine code through NVRTC: no nvcc, no toolkit, no GPU needed.

NVRTC and the CUDA headers come with the wheels that torch itself depends on. Results are cached on disk by
everything that decides them: sources, instance, architecture and NVRTC version.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ops.msda.cache_dir import cache_dir as default_cache_dir

logger = logging.getLogger("ops")

SOURCES = (
    "common.cuh",
    "inputs.cuh",
    "queries.cuh",
    "forward.cuh",
    "gradients.cuh",
    "backward.cuh",
    "dots32.cuh",
    "windows.cuh",
    "bounds.cuh",
    "scatter32.cuh",
    "collect32.cuh",
)
_OPTIONS = ("--std=c++17",)


class CompileError(RuntimeError):
    """NVRTC rejected a kernel. The message holds the instance and the compiler's log."""


@dataclass(frozen=True)
class Compiled:
    """One kernel as machine code.

    Attributes:
        image: The cubin.
        symbol: The mangled name of the kernel in it.
    """

    image: bytes
    symbol: str


Sources = tuple[tuple[str, str], ...]


def compile_kernel(
    instance: str, architecture: str, *, cache_dir: Path | None = None, extra_sources: Sources = ()
) -> Compiled:
    """Compile one template instance, or read it from the cache.

    Args:
        instance: A template instance as C++ spells it, such as `msda::forward<float, ...>`; the kernel is in the header
            of its name.
        architecture: `sm_90` and the like.
        cache_dir: Where cubins are kept; None means `ops.msda.cache_dir`.
        extra_sources: (name, text) of further headers, for kernels that are not part of `ops`.

    Raises:
        CompileError: The source does not compile for this architecture.
    """
    folder = (cache_dir or default_cache_dir()) / "cuda"
    key = hashlib.sha256(
        "\0".join(
            (_sources_digest(), *sum(extra_sources, ()), instance, architecture, repr(_nvrtc_version()), *_OPTIONS)
        ).encode()
    ).hexdigest()[:32]
    path = folder / f"{key}.cubin"
    try:
        symbol, _, image = path.read_bytes().partition(b"\n")
        if image:
            return Compiled(image, symbol.decode())
    except OSError:
        # not compiled yet, or not readable: compile
        pass
    compiled = _run_nvrtc(instance, architecture, extra_sources)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # ranks that start together may all compile; each writes its own file, and the rename is atomic
        handle, temporary = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(compiled.symbol.encode() + b"\n" + compiled.image)
        os.replace(temporary, path)
    except OSError as error:
        logger.warning("compiled kernels are not kept, and every process compiles its own: %s", error)
    return compiled


def nearest_architecture(major: int, minor: int) -> str:
    """What to compile for on a GPU of this compute capability.

    Its own machine code (`sm_90`); or, for a GPU newer than NVRTC, the newest PTX that it can run (`compute_120`),
    which the driver finishes.

    Raises:
        CompileError: The GPU is older than all NVRTC knows.
    """
    capability = major * 10 + minor
    known = _known_architectures()
    if capability in known:
        return f"sm_{capability}"
    older = [architecture for architecture in known if architecture < capability]
    if not older:
        raise CompileError(f"NVRTC compiles for {known}, and the GPU has compute capability {major}.{minor}")
    logger.warning(
        "compute capability %d.%d is newer than NVRTC: kernels are compiled to PTX of %d and finished by the driver. "
        "A newer torch brings a newer NVRTC",
        major,
        minor,
        older[-1],
    )
    return f"compute_{older[-1]}"


def compile_ptx(instance: str, architecture: str, *, extra_sources: Sources = ()) -> str:
    """The PTX of one instance for `compute_90` and the like, as text; not cached. See `compile_kernel`."""
    return _run_nvrtc(instance, architecture, extra_sources).image.rstrip(b"\0").decode()


@cache
def _source_texts() -> tuple[str, ...]:
    folder = resources.files("ops.msda.cuda") / "csrc"
    return tuple((folder / name).read_text() for name in SOURCES)


@cache
def _sources_digest() -> str:
    return hashlib.sha256("\0".join(_source_texts()).encode()).hexdigest()


@cache
def _nvrtc_version() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return major, minor


@cache
def _known_architectures() -> list[int]:
    from cuda.bindings import nvrtc

    _, count = nvrtc.nvrtcGetNumSupportedArchs()
    _, architectures = nvrtc.nvrtcGetSupportedArchs()
    return sorted(architectures[:count])


@cache
def _include_dir() -> str:
    from cuda.pathfinder import find_nvidia_header_directory

    folder = find_nvidia_header_directory("cudart")
    if folder is None:
        raise CompileError(
            "the CUDA headers (cuda_fp16.h, cuda_bf16.h) were not found; they come with the package "
            "nvidia-cuda-runtime, which torch's CUDA wheels depend on: reinstall torch"
        )
    return folder


def _run_nvrtc(instance: str, architecture: str, extra_sources: Sources) -> Compiled:
    from cuda.bindings import nvrtc

    def check(result: tuple[Any, ...]) -> Any:
        error, *values = result
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"NVRTC: {error.name} for {instance} on {architecture}")
        return values[0] if values else None

    header = instance.partition("<")[0].rpartition("::")[2] + ".cuh"
    texts = [text.encode() for text in (*_source_texts(), *(text for _, text in extra_sources))]
    names = [name.encode() for name in (*SOURCES, *(name for name, _ in extra_sources))]
    program = check(nvrtc.nvrtcCreateProgram(f'#include "{header}"\n'.encode(), b"msda.cu", len(names), texts, names))
    options = [f"-arch={architecture}", f"-I{_include_dir()}", *_OPTIONS]
    check(nvrtc.nvrtcAddNameExpression(program, instance.encode()))
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = _read(check, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        raise CompileError(f"{instance} does not compile for {architecture}:\n{log.rstrip(bytes(1)).decode()}")
    symbol = check(nvrtc.nvrtcGetLoweredName(program, instance.encode())).decode()
    if architecture.startswith("compute"):
        image = _read(check, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    else:
        image = _read(check, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    check(nvrtc.nvrtcDestroyProgram(program))
    return Compiled(image, symbol)


def _read(
    check: Callable[[tuple[Any, ...]], Any], size: Callable[..., Any], read: Callable[..., Any], program: object
) -> bytes:
    buffer = b" " * check(size(program))
    check(read(program, buffer))
    return buffer

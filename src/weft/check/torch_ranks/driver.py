"""Words that streams store and for which they wait, through the driver's operations under their names in
`cuda.bindings.driver`. If that package is not installed, a module of the same name replaces it while `patched`
lasts."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from enum import IntEnum
from types import ModuleType
from typing import NoReturn, SupportsInt

from ...emulator.bounds import ADDRESS
from ...errors import Unsupported
from .cuda import stream_of
from .ranks import current_rank

DRIVER = "cuda.bindings.driver"
INSTALLED = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec(DRIVER) is not None


class CUresult(IntEnum):
    CUDA_SUCCESS = 0


class CUstreamWriteValue_flags(IntEnum):
    CU_STREAM_WRITE_VALUE_DEFAULT = 0
    CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER = 1


class CUstreamWaitValue_flags(IntEnum):
    CU_STREAM_WAIT_VALUE_GEQ = 0
    CU_STREAM_WAIT_VALUE_EQ = 1
    CU_STREAM_WAIT_VALUE_AND = 2
    CU_STREAM_WAIT_VALUE_NOR = 3
    CU_STREAM_WAIT_VALUE_FLUSH = 1 << 30


_REACHED: dict[int, Callable[[int, int], bool]] = {
    0: lambda word, value: (word - value) & 0xFFFFFFFF < 1 << 31,
    1: lambda word, value: word == value,
    2: lambda word, value: word & value != 0,
    3: lambda word, value: ~(word | value) & 0xFFFFFFFF != 0,
}


def _enqueue(stream: SupportsInt, text: str, do: Callable[[], None]) -> tuple[CUresult]:
    rank, emulated = current_rank(), stream_of(int(stream))
    rank.enqueue_or_capture(lambda: rank.streams.enqueue(emulated, text, do))
    return (CUresult.CUDA_SUCCESS,)


def cuStreamWriteValue32(
    stream: SupportsInt, address: SupportsInt, value: SupportsInt, flags: int = 0
) -> tuple[CUresult]:
    """Enqueue a store of a word, after a memory barrier unless the flags exclude it."""
    machine, where = current_rank().backend.machine, int(address) & ADDRESS

    def do() -> None:
        machine.pause()
        machine.store_word(where, int(value), releases=not int(flags) & 1)

    return _enqueue(stream, "cuStreamWriteValue32", do)


def cuStreamWaitValue32(
    stream: SupportsInt, address: SupportsInt, value: SupportsInt, flags: int = 0
) -> tuple[CUresult]:
    """Enqueue a wait until a word has reached a value, equals it, and so on."""
    machine, where = current_rank().backend.machine, int(address) & ADDRESS
    reached, wanted = _REACHED[int(flags) & 3], int(value) & 0xFFFFFFFF

    def do() -> None:
        machine.poll_word(where, lambda word: reached(word & 0xFFFFFFFF, wanted))

    return _enqueue(stream, "cuStreamWaitValue32", do)


class _Driver(ModuleType):
    """A module with the functions above; it refuses any other name."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Unsupported(f"{DRIVER}.{name}: the emulator does not model it")


def modules() -> Iterator[tuple[str, ModuleType]]:
    """Yield (name, module) for each package that is not installed."""
    if INSTALLED:
        return
    driver = _Driver(DRIVER)
    for value in (
        CUresult,
        CUstreamWriteValue_flags,
        CUstreamWaitValue_flags,
        cuStreamWriteValue32,
        cuStreamWaitValue32,
    ):
        setattr(driver, value.__name__, value)
    for name in ("CUstream", "CUdeviceptr", "cuuint32_t"):
        setattr(driver, name, int)
    bindings, cuda = ModuleType("cuda.bindings"), ModuleType("cuda")
    bindings.driver, cuda.bindings = driver, bindings  # type: ignore[attr-defined]
    yield from (("cuda", cuda), ("cuda.bindings", bindings), (DRIVER, driver))


def replacements() -> Iterator[tuple[object, str, object]]:
    """Yield (place, name, value) of each object that replaces one of the package's, if the package is installed."""
    if INSTALLED:
        installed = importlib.import_module(DRIVER)
        yield installed, "cuStreamWriteValue32", cuStreamWriteValue32
        yield installed, "cuStreamWaitValue32", cuStreamWaitValue32

"""Kernels of our own for CUDA lanes: copies that a GPU starts itself, and clocks that make a slice take modelled time.

CUDA C++, compiled once a GPU architecture by NVRTC (``cuda.bindings``) and loaded through the driver. Launches go to the
current stream of the current device.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..passes.errors import ClusterError

SOURCE = r"""
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Bytes into memory that may be another GPU's. Where there is a flag, the last block to finish raises it: every block's
// stores are made visible to the whole system before it counts itself.
extern "C" __global__ void move_bytes(const u8* from, u8* to, u64 n, u32* arrived, u32* flag) {
  u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x;
  u64 wide = (((u64)from | (u64)to) & 15) ? 0 : n / 16;
  for (u64 i = at; i < wide; i += step) ((uint4*)to)[i] = ((const uint4*)from)[i];
  for (u64 i = 16 * wide + at; i < n; i += step) to[i] = from[i];
  if (!flag) return;
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x) return;
  if (atomicAdd(arrived, 1) + 1 == gridDim.x) {
    *arrived = 0;
    __threadfence_system();
    asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(flag), "r"(1) : "memory");
  }
}

__device__ i64 now() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return (i64)t;
}

// Clocks are nanoseconds of %globaltimer. counts: a lane's steps and those that overran; totals: requests and their nanoseconds.
__device__ void reach(i64* clock, i64 deadline, i64* counts) {
  atomicAdd((u64*)counts, 1);
  i64 t = now();
  if (t > deadline) { atomicAdd((u64*)(counts + 1), 1); *clock = t; return; }
  while (now() < deadline) __nanosleep(100);
  *clock = deadline;
}

extern "C" __global__ void pace_begin(i64* clock, i64* started) {
  i64 t = now();
  if (*clock < t) *clock = t;
  if (started) *started = *clock;
}

extern "C" __global__ void pace_ran(i64* clock, i64 ns, i64* counts) { reach(clock, *clock + ns, counts); }

extern "C" __global__ void pace_sent(const i64* clock, i64* link, i64 ns, i64* arrival) {
  i64 begin = *clock > *link ? *clock : *link;
  *link = *arrival = begin + ns;
}

extern "C" __global__ void pace_received(i64* clock, const i64* arrival, i64* counts) {
  if (*arrival > *clock) reach(clock, *arrival, counts);
  else counts[0] += 1;
}

// Of many requests at once: a request's words say since when what a lane has of it is there, and when a transfer was sent and
// arrived. A lane's stream alone writes its words, a link's the arrivals.
extern "C" __global__ void clock_begin(i64* since, int lanes, i64* started) {
  i64 t = now();
  *started = t;
  for (int i = 0; i < lanes; ++i) since[i] = t;
}

extern "C" __global__ void clock_ran(i64* clock, i64* since, i64 ns, i64* counts) {
  if (*since > *clock) *clock = *since;
  reach(clock, *clock + ns, counts);
  *since = *clock;
}

extern "C" __global__ void clock_sent(const i64* since, i64* sent) { *sent = *since; }

extern "C" __global__ void clock_moved(i64* link, const i64* sent, i64 ns, i64* arrived, i64* counts) {
  i64 arrival = (*sent > *link ? *sent : *link) + ns, t = now();
  atomicAdd((u64*)counts, 1);
  if (t > arrival && ns) { atomicAdd((u64*)(counts + 1), 1); arrival = t; }
  while (now() < arrival) __nanosleep(100);
  *link = *arrived = arrival;
}

extern "C" __global__ void clock_taken(i64* since, const i64* arrived) { if (*arrived > *since) *since = *arrived; }

extern "C" __global__ void clock_level(i64* clocks, int count, const i64* started) {
  i64 last = *started;
  for (int i = 0; i < count; ++i) if (clocks[i] > last) last = clocks[i];
  for (int i = 0; i < count; ++i) clocks[i] = last;
}

extern "C" __global__ void pace_end(const i64* clocks, int lanes, const i64* started, i64* totals) {
  i64 last = clocks[0];
  for (int i = 1; i < lanes; ++i) if (clocks[i] > last) last = clocks[i];
  totals[0] += 1;
  totals[1] += last - *started;
}
"""


def launch(name: str, blocks: int, threads: int, *args: torch.Tensor | int | tuple[int, int] | None) -> None:
    """Launch kernel ``name`` of ``SOURCE`` on the current stream. Tensors are passed by address, None as a null pointer,
    ``(value, 4)`` as 32 bits, other integers as 64."""
    from cuda.bindings import driver

    held = [_argument(a) for a in args]
    pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(h) for h in held))
    function = _functions(torch.cuda.current_device())[name]
    stream = torch.cuda.current_stream().cuda_stream
    check(
        driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, ctypes.addressof(pointers), 0),
        f"launching {name}",
    )


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ctypes.c_uint64(value.data_ptr())
    if isinstance(value, tuple):
        return ctypes.c_uint32(value[0])
    return ctypes.c_int64(value or 0)


NAMES = (
    "move_bytes", "pace_begin", "pace_ran", "pace_sent", "pace_received", "pace_end",
    "clock_begin", "clock_ran", "clock_sent", "clock_moved", "clock_taken", "clock_level",
)  # fmt: skip


@functools.cache
def _functions(device: int) -> dict[str, int]:
    from cuda.bindings import driver

    image = _compiled(*torch.cuda.get_device_capability(device))
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the device's primary context current
        (library,) = check(driver.cuLibraryLoadData(image, [], [], 0, [], [], 0), "loading the lanes' own kernels")
        found = {}
        for name in NAMES:
            (kernel,) = check(driver.cuLibraryGetKernel(library, name.encode()), f"finding {name}")
            (function,) = check(driver.cuKernelGetFunction(kernel), f"finding {name}")
            found[name] = int(function)
    return found


@functools.cache
def _compiled(major: int, minor: int) -> bytes:
    """The machine code for one architecture."""
    from cuda.bindings import nvrtc

    (program,) = check(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"tessera.cu", 0, [], []), "compiling the lanes' own kernels")
    options: Sequence[bytes] = [f"--gpu-architecture=sm_{major}{minor}".encode()]
    result = nvrtc.nvrtcCompileProgram(program, len(options), list(options))
    if int(result[0]) != 0:
        (size,) = check(nvrtc.nvrtcGetProgramLogSize(program), "reading the compiler's log")
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise ClusterError(f"NVRTC refuses the lanes' own kernels for sm_{major}{minor}: {log.decode(errors='replace').strip()}")
    (size,) = check(nvrtc.nvrtcGetCUBINSize(program), "reading machine code")
    image: bytes = b" " * size
    check(nvrtc.nvrtcGetCUBIN(program, image), "reading machine code")
    return image


def check(result: Any, what: str) -> tuple[Any, ...]:
    """(error, values…) of cuda.bindings → values. Raises ClusterError, which says ``what`` failed."""
    error, *values = result
    if int(error) != 0:
        raise ClusterError(f"{what}: the driver says {error.name}")
    return tuple(values)

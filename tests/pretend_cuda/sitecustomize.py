"""Gives every Python process that starts with this folder on its path the device of `device.cpp` as
torch's one CUDA device.

PYOPS_PRETEND_CUDA names the compiled library; without it nothing happens. The library has to be
there before torch is imported.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
from types import SimpleNamespace
from typing import Any

GIB = 80


def _library(path: str) -> Any:
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401 - its symbols are needed before the module's bindings

    loader = importlib.machinery.ExtensionFileLoader("_pretend_cuda", path)
    spec = importlib.util.spec_from_loader("_pretend_cuda", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    assert module.has_hooks(), "torch looked for CUDA before this device was there"
    return module


def _streams(cuda: Any, device: Any) -> None:
    import torch

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **known: int) -> Any:
            if known:
                return super().__new__(cls, **known)
            return super().__new__(cls, device="cuda:0")

        def record_event(self, event: Any = None) -> Any:
            event = event if event is not None else Event()
            event.record(self)
            return event

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, **_: Any) -> Any:
            return super().__new__(cls, device="cuda:0", enable_timing=enable_timing)

    class StreamContext:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            if self.stream is not None:
                self.before = torch.accelerator.current_stream()
                torch.accelerator.set_stream(self.stream)

        def __exit__(self, *_: object) -> None:
            if self.stream is not None:
                torch.accelerator.set_stream(self.before)

    def current(_: Any = None) -> Any:
        found = torch.accelerator.current_stream()
        return Stream(
            stream_id=found.stream_id,
            device_index=found.device_index,
            device_type=found.device_type,
        )

    cuda.Stream, cuda.Event, cuda.StreamContext = Stream, Event, StreamContext
    cuda.streams.Stream, cuda.streams.Event = Stream, Event
    cuda.stream = StreamContext
    cuda.current_stream = current
    cuda.default_stream = lambda _=None: Stream(stream_id=0, device_index=0, device_type=1)
    cuda.set_stream = torch.accelerator.set_stream
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]


def _graphs(cuda: Any, device: Any) -> None:
    class CUDAGraph:
        def __init__(self, keep_graph: bool = False) -> None:
            self.graph = device.Graph()

        def capture_begin(self, *_: object, **__: object) -> None:
            device.begin_capture(self.graph)

        def capture_end(self) -> None:
            device.end_capture()

        def replay(self) -> None:
            self.graph.replay()

        def reset(self) -> None:
            self.graph.reset()

        def pool(self) -> tuple[int, int]:
            return (0, 1)

    cuda.CUDAGraph = cuda.graphs.CUDAGraph = CUDAGraph


def _memory(cuda: Any, device: Any) -> None:
    cuda.memory_allocated = lambda _=None: device.held()
    cuda.max_memory_allocated = lambda _=None: device.peak()
    cuda.memory_reserved = lambda _=None: device.held()
    cuda.max_memory_reserved = lambda _=None: device.peak()
    cuda.reset_peak_memory_stats = lambda _=None: device.reset_peak()
    cuda.empty_cache = lambda: None
    cuda.mem_get_info = lambda _=None: ((GIB << 30) - device.held(), GIB << 30)

    class Runtime:
        cudaError = SimpleNamespace(success=0)

        def cudaHostRegister(self, address: int, nbytes: int, _: int) -> int:
            device.register_memory(address, nbytes)
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            return 0 if device.unregister_memory(address) else 1

    cuda.cudart = Runtime


def _storages(device: Any) -> None:
    """torch.load to this device, whose storages torch makes in C++ that it was built without."""
    import torch
    from torch import serialization

    def restore(storage: Any, location: str) -> Any:
        if not location.startswith("cuda"):
            return None
        there = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cuda")
        there.copy_(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
        return there.untyped_storage()

    clone = torch.UntypedStorage.clone

    def clone_there(self: Any) -> Any:
        if self.device.type != "cuda":
            return clone(self)
        whole = torch.empty(0, dtype=torch.uint8, device="cuda").set_(self)
        return whole.clone().untyped_storage()

    resize = torch.UntypedStorage.resize_

    def resize_there(self: Any, nbytes: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, nbytes)
        device.resize_storage(torch.empty(0, dtype=torch.uint8, device="cuda").set_(self), nbytes)
        return self

    torch.UntypedStorage.resize_ = resize_there  # type: ignore[method-assign]
    torch.UntypedStorage.clone = clone_there  # type: ignore[method-assign]
    serialization.register_package(
        1, lambda storage: "cuda:0" if storage.device.type == "cuda" else None, restore
    )


def _kernels(device: Any) -> None:
    """CPU kernels of extensions answer for CUDA as well; Triton's do where TRITON_INTERPRET says
    that they can."""
    import torch

    load, impl = torch.ops.load_library, torch.library.Library.impl
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    known: set[str] = set()

    def load_library(path: str) -> None:
        load(path)
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
            if name.startswith("pyops::") and name not in known:
                known.add(name)
                device.answer_for(name)

    def impl_where_it_runs(
        self: Any, name: Any, function: Any, dispatch_key: str = "", **more: Any
    ) -> None:
        if self.ns == "pyops" and dispatch_key == "CUDA" and not interpreted:
            return
        impl(self, name, function, dispatch_key, **more)

    torch.ops.load_library = load_library  # type: ignore[method-assign]
    torch.library.Library.impl = impl_where_it_runs  # type: ignore[method-assign]


def _nccl() -> None:
    """A backend called nccl, which is Gloo: the order of pyops' calls is that of NCCL, their
    transport is not."""
    from torch import distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if not dist.is_available() or c10d.is_nccl_available():
        return

    class ProcessGroupNCCL(c10d.ProcessGroupGloo):  # type: ignore[name-defined,misc]
        class Options(SimpleNamespace):
            pass

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            super().__init__(store, rank, size, timeout=options._timeout)

    register = dist.ProcessGroup._register_backend

    def register_backend(self: Any, device: Any, kind: Any, backend: Any = None) -> None:
        register(self, device, kind, backend)
        if isinstance(backend, ProcessGroupNCCL):  # the tensors' twins are on the CPU
            try:
                self._get_backend(type(device)("cpu"))
            except RuntimeError:
                register(self, type(device)("cpu"), kind, backend)

    def averaging(real: Any) -> Any:
        """Gloo has no average: the tensors are scaled before they are added, as NCCL does it."""

        def call(*tensors: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **more: Any) -> Any:
            if op == dist.ReduceOp.AVG:
                *out, scaled = tensors
                divided = scaled.div(dist.get_world_size(group))
                tensors, op = (*out, divided if out else scaled.copy_(divided)), dist.ReduceOp.SUM
            return real(*tensors, op=op, group=group, **more)

        return call

    for name in ("all_reduce", "reduce_scatter_tensor"):
        setattr(dist, name, averaging(getattr(dist, name)))
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
    c10d._NCCL_AVAILABLE = True
    dist.ProcessGroup._register_backend = register_backend


def install(path: str) -> None:
    """Put the device in place of torch.cuda's, which a CPU build of torch left empty."""
    device = _library(path)
    import torch

    cuda: Any = torch.cuda
    if torch.version.cuda is not None:
        raise ImportError(
            "PYOPS_PRETEND_CUDA is for a CPU build of torch; this one has a CUDA of its own"
        )
    cuda._lazy_init = lambda: None
    cuda._initialized = True
    c: Any = torch._C
    c._cuda_getDeviceCount = lambda: 1
    c._cuda_getDevice = lambda: 0
    c._cuda_setDevice = lambda _: None
    c._cuda_exchangeDevice = lambda _: 0
    c._cuda_maybeExchangeDevice = lambda _: 0
    c._cuda_synchronize = lambda: device.waited("synchronize")
    c._cuda_isCurrentStreamCapturing = lambda: device.is_capturing()
    c._host_emptyCache = lambda: None
    c._cuda_getCurrentRawStream = lambda _: 0
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1  # functions of their own: torch.compile tells them apart
    cuda._exchange_device = lambda _: 0
    cuda._maybe_exchange_device = lambda _: 0
    cuda.default_generators = (device.default_generator(),)
    properties = SimpleNamespace(
        name="no GPU",
        major=9,
        minor=0,
        total_memory=GIB << 30,
        multi_processor_count=132,
        warp_size=32,
        L2_cache_size=50 << 20,
    )
    cuda.get_device_properties = lambda _=None: properties
    cuda.get_device_name = lambda _=None: properties.name
    cuda.get_device_capability = lambda _=None: (9, 0)
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.is_current_stream_capturing = lambda: device.is_capturing()
    cuda._sleep = lambda _: None
    modes = {"default": 0, "warn": 1, "error": 2}
    cuda.set_sync_debug_mode = lambda mode: device.set_sync_mode(modes.get(mode, mode))
    cuda.get_sync_debug_mode = device.get_sync_mode
    torch.backends.cuda.is_built = lambda: True
    _streams(cuda, device)
    _graphs(cuda, device)
    _memory(cuda, device)
    _kernels(device)
    _storages(device)
    _nccl()


if path := os.environ.get("PYOPS_PRETEND_CUDA"):
    install(path)

"""Megatron-Core on CPU and gloo, without touching its source.

`install()` must run before the first `import megatron.core`; where CUDA exists it only answers the last
of what follows. Megatron-Core speaks to the accelerator in six ways, and this file answers each of them for a machine
that has none:

1. device names      torch.cuda.current_device(), device="cuda", .cuda(), .to("cuda"), pin_memory
2. streams, events   Stream, Event, synchronize, memory statistics, nvtx
3. random numbers    torch.cuda.{get,set}_rng_state, manual_seed, default_generators, _lazy_call
4. type names        `param.type() == "torch.cuda.FloatTensor"` in the optimizers
5. compilation       jit_fuser is torch.compile: slow to start and of no use here
6. Adam              the distributed optimizer's checkpoints need Apex's state layout; also on a GPU, where neither
                     Transformer Engine nor apex brings one that has it

gloo itself needs no help. `torch.cuda.is_available()` stays False, so that every other library sees the truth.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
import warnings
from typing import Any

import torch

CPU = torch.device("cpu")

FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones", "ones_like"),
    *("rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like"),
)


def install() -> bool:
    """Make Megatron-Core run on this machine; True if that took the CPU platform, False on CUDA."""
    if torch.cuda.is_available():
        _answer_adam()
        return False
    if is_installed():
        return True
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron.core was imported before card_megatron.platform.install(); "
            "on a machine without CUDA call install() first"
        )
    _quiet_megatron()
    _answer_device_names()
    _answer_streams_and_events()
    _answer_random_numbers()
    _answer_type_names()
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # 5. compilation
    torch.cuda._card_megatron_cpu = True  # type: ignore[attr-defined]
    _answer_adam()
    return True


def is_installed() -> bool:
    """True once this process has taken the CPU platform."""
    return getattr(torch.cuda, "_card_megatron_cpu", False)


def _nothing() -> Any:
    """A new function that does nothing: torch's compiler refuses one object under two names of torch.cuda."""
    return lambda *args, **kwargs: None


NO_NEWS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    "When using async grad allreduce it is recommended",
    "Please use DTensor instead",
    "`load_state_dict` is deprecated and will be removed",
    "`torch.distributed.(reduce_scatter|all_gather)_.*` is deprecated",
)
"""What Megatron-Core's own code makes torch and itself warn of: true, and nothing that a user can act on."""


def _quiet_megatron() -> None:
    for message in NO_NEWS:
        warnings.filterwarnings("ignore", message=message)


# ---------------------------------------------------------------- 1. device names


def _means_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _on_cpu(factory):
    """The torch factory, with device="cuda" meaning the CPU and pinned memory meaning memory."""

    @functools.wraps(factory)
    def make(*args, **kwargs):
        if _means_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _move_on_cpu(move):
    """Tensor.to or Module.to, with "cuda" meaning the CPU."""

    @functools.wraps(move)
    def to(self, *args, **kwargs):
        if args and _means_cuda(args[0]):
            args = (CPU, *args[1:])
        if _means_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return move(self, *args, **kwargs)

    return to


def _itself(self, *args, **kwargs):
    return self


def _answer_device_names() -> None:
    # `with torch.device(...)` knows the factories by identity and looks them up once: let it find the real ones.
    # Else models that transformers builds on the meta device keep uninitialised rotary frequencies, without a word.
    from torch.utils._device import _device_constructors

    _device_constructors()
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for kind in (torch.Tensor, torch.nn.Module):
        kind.to = _move_on_cpu(kind.to)  # type: ignore[method-assign]
        kind.cuda = _itself  # type: ignore[method-assign]
    torch.Tensor.pin_memory = _itself  # type: ignore[method-assign]
    torch.Tensor.record_stream = _nothing()  # type: ignore[method-assign]
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    torch.cuda.set_device = _nothing()
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda device=None: (0, 0)


# ---------------------------------------------------------------- 2. streams and events


class Stream:
    """A stream whose work is always done: the CPU runs in order."""

    cuda_stream = 0
    device = CPU
    __init__ = wait_stream = wait_event = synchronize = __exit__ = _nothing()

    def __enter__(self):
        return self

    def query(self) -> bool:
        return True

    def record_event(self, event=None):
        event = event or Event()
        event.record()
        return event


class Event:
    """An event that happens when it is recorded; Megatron's timers read the time between two."""

    recorded_at = 0.0
    __init__ = wait = synchronize = _nothing()

    def query(self) -> bool:
        return True

    def record(self, stream=None) -> None:
        self.recorded_at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end.recorded_at - self.recorded_at) * 1e3


def _answer_streams_and_events() -> None:
    cuda: Any = torch.cuda
    only_stream = Stream()
    cuda.Stream, cuda.Event = Stream, Event
    cuda.current_stream, cuda.default_stream = lambda device=None: only_stream, lambda device=None: only_stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    for name in ("set_stream", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, _nothing())
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda device=None: 0)
    cuda.memory_stats = lambda device=None: {}
    cuda.is_current_stream_capturing = lambda: False
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _nothing(), _nothing()
    cuda.nvtx.range = lambda *args, **kwargs: contextlib.nullcontext()


# ---------------------------------------------------------------- 3. random numbers


class _OneGenerator:
    """torch.cuda.default_generators: the CPU's only one, whatever the index."""

    def __getitem__(self, index) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _seed_cpu(seed) -> None:
    torch.default_generator.manual_seed(int(seed))


def _answer_random_numbers() -> None:
    for module in (torch.cuda, torch.cuda.random):
        namespace: Any = module
        namespace.get_rng_state = lambda device="cuda": torch.default_generator.get_state()
        namespace.set_rng_state = lambda state, device="cuda": torch.default_generator.set_state(state)
        namespace.manual_seed, namespace.manual_seed_all = lambda seed: _seed_cpu(seed), lambda seed: _seed_cpu(seed)
    cuda: Any = torch.cuda
    cuda.default_generators = _OneGenerator()
    cuda._lazy_init = _nothing()
    cuda._lazy_call = lambda call, **kwargs: call()
    # Megatron's RNG tracker warns that the CPU generator moved: here it is the very one it forks.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


# ---------------------------------------------------------------- 4. type names


def _answer_type_names() -> None:
    type_of = torch.Tensor.type

    def type_name(self, dtype=None, *args, **kwargs):
        """Tensor.type(): Megatron's optimizers compare it with CUDA names, and get those; nobody else does."""
        if dtype is not None:
            return type_of(self, dtype, *args, **kwargs)
        name = type_of(self)
        asker = sys._getframe(1).f_globals.get("__name__", "")
        return name.replace("torch.", "torch.cuda.", 1) if asker.startswith("megatron.core.optimizer") else name

    torch.Tensor.type = type_name  # type: ignore[method-assign]


# ---------------------------------------------------------------- 6. Adam


def _answer_adam() -> None:
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer
    import megatron.core.transformer.moe.moe_utils as moe_utils

    from card_megatron.platform.adam import FusedAdam

    if optimizer.USING_PYTORCH_OPTIMIZER:
        optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
        distrib_optimizer.Adam = FusedAdam
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
    # moe_utils asks `te_general_gemm is not None`, a name that it defines only where Transformer Engine is
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

"""Counts of what a GPU would do, on a machine without one.

Tensors are fake: they have a shape, a type and the device `cuda`, and no values, so sizes may be
those of real training. What is counted is what torch would launch eagerly.
"""

import ctypes
import hashlib
import math
import multiprocessing
import shutil
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention.flex_attention import AuxOutput
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SOURCE = Path(__file__).with_suffix(".cpp")
T = TypeVar("T")

# What launches no kernel: views and memory that nothing is written to.
FREE = {
    *("_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "diagonal"),
    *("expand", "flatten", "lift_fresh", "narrow", "permute", "reshape", "select", "slice"),
    *("split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten"),
    *("unfold", "unsqueeze", "view", "view_as", "empty", "empty_like", "empty_strided"),
    *("new_empty", "new_empty_strided", "device", "is_same_size", "sym_size"),
}
# What does not read its first argument.
WRITES = {
    *("copy_", "fill_", "zero_", "zeros_like", "ones_like", "full_like", "rand_like"),
    *("new_zeros", "new_ones", "new_full"),
}
GATHERS = {"embedding", "gather", "index", "index_select"}  # reads as much as it returns
SCATTERS = {"scatter_", "scatter_add_"}  # touches as many elements as it has indices
FLASH = "_scaled_dot_product_flash_attention"  # causal
MASKED = "_scaled_dot_product_efficient_attention"


@dataclass(frozen=True)
class Kernel:
    """One launch: its tag, torch's name, bytes read and written, FLOPs of a product."""

    tag: str
    name: str
    bytes: int
    flops: int


class Counts(TorchDispatchMode):
    """The kernels on fake CUDA tensors, and where the host waits for the GPU.

    Set `tag` to count parts of a program apart. A kernel reads each of its arguments and writes
    each of its results once; what is expanded counts as little as its memory. `waits` names the
    operations for which the host waits: reading a value, or a size that depends on values, and
    copies between the devices that are not non_blocking. What it then reads is 1; nonzero finds all
    positions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.waits: list[str] = []
        self.tag = ""

    def gigabytes(self, *tags: str) -> float:
        """Return the bytes of all that is no product, with these tags or any, in 10^9."""
        return sum(k.bytes for k in self.of(*tags) if not k.flops) / 1e9

    def teraflops(self, *tags: str) -> float:
        """Return the FLOPs of products and fused attention, with these tags or any, in 10^12."""
        return sum(k.flops for k in self.of(*tags)) / 1e12

    def of(self, *tags: str) -> list[Kernel]:
        """Return the kernels with one of these tags; all of them, if none is given."""
        return [kernel for kernel in self.kernels if not tags or kernel.tag in tags]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        inputs = _tensors((args, kwargs))
        if name == "_local_scalar_dense":
            self.waits += [name] * _on_cuda(inputs[0])
            return 1.0 if inputs[0].is_floating_point() else 1
        if name == "nonzero":
            self.waits += [name] * _on_cuda(inputs[0])
            result = inputs[0].new_empty((inputs[0].numel(), inputs[0].ndim), dtype=torch.int64)
        elif func._overloadname == "dtype_out":  # of addmm; torch 2.11 has no fake form of it
            result = kwargs["out"]
        else:
            result = func(*args, **kwargs)
        outputs = _tensors(result)
        on_cuda = {_on_cuda(t) for t in (*inputs, *outputs) if t.ndim or "copy" in name}
        if not any(map(_on_cuda, (*inputs, *outputs))):
            return result
        if len(on_cuda) > 1:
            blocking = kwargs.get("non_blocking") is not True and args[2:] != (True,)
            self.waits += [name] * blocking
        if name.removesuffix("_") not in FREE:
            moved = _bytes_moved(name, inputs, outputs)
            self.kernels.append(Kernel(self.tag, name, moved, _flops(name, inputs)))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _on_cuda(tensor: Tensor) -> bool:
    # `.device` of a fake tensor takes a fifth of a millisecond.
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device.type == "cuda"


def _bytes_moved(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    if name in GATHERS:
        indices = inputs[1:]
        return sum(map(_nbytes, (*indices, *outputs, *outputs)))
    if name in SCATTERS:
        (index,) = (tensor for tensor in inputs[1:] if tensor.dtype == torch.int64)
        return _nbytes(index) + 3 * index.numel() * inputs[0].itemsize
    return sum(map(_nbytes, (*inputs[name in WRITES :], *outputs)))


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of memory behind a tensor, whose expanded axes have none of their own."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.itemsize


def _flops(name: str, inputs: list[Tensor]) -> int:
    """Return the FLOPs of a product, and of causal attention, which skips half of the scores."""
    if name.removesuffix("_") in ("mm", "bmm", "addmm", "baddbmm"):
        a, b = inputs["add" in name :][:2]
        return 2 * a.numel() * b.shape[-1]
    if name in (FLASH, MASKED):
        q, k, v = inputs[:3]
        whole = 2 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        return whole // 2 if name == FLASH else whole
    if name in (f"{FLASH}_backward", f"{MASKED}_backward"):
        return 5 * _flops(name.removesuffix("_backward"), inputs[1:4]) // 2
    return 0


def count_on_cuda(function: Callable[[Counts], T]) -> T:
    """Return function(counts), called where tensors are fake and `cuda` is a device.

    That is in a fork of this process, so `function` may be a closure, and its result is pickled.
    There, compiled functions run eagerly, and `scaled_dot_product_attention` is a fused kernel.
    Skips the test where there is a GPU, or no compiler.
    """
    library = prepare()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(sender, library, function))
    with warnings.catch_warnings():
        # Of Python 3.12, where a process has threads. The child needs none of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    sender.close()
    failure, result = receiver.recv()
    child.join()
    assert failure is None, failure
    return result


@cache
def prepare() -> Path:
    """Import what each child would import, and compile fakecuda.cpp, unless another process has."""
    compiler = shutil.which("g++")
    if sys.platform != "linux" or compiler is None or torch.cuda.is_available():
        pytest.skip("fake CUDA tensors need Linux, g++ and no GPU")
    torch.ones((), requires_grad=True).backward()  # in torch 2.11 a fork's first one would hang
    with FakeTensorMode():
        torch.empty(1).add(1)
    folder = Path(__file__).parents[1] / ".pytest_cache" / "fakecuda"
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    library = folder / f"torch-{torch.__version__}-{digest}.so"
    with FileLock(folder / "lock"):
        if not library.exists():
            home = Path(torch.__file__).parent
            made = library.with_suffix(".new")
            flags = ["-shared", "-fPIC", "-std=c++20", f"-I{home / 'include'}"]
            links = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu"]
            subprocess.run([compiler, *flags, str(SOURCE), "-o", str(made), *links], check=True)
            made.rename(library)
    return library


def _answer(sender: Connection, library: Path, function: Callable[[Counts], Any]) -> None:
    """Send (None, what the function returns), or (the traceback, None)."""
    try:
        torch.set_num_threads(1)  # OpenMP's others stayed in the parent process
        torch.ones((), requires_grad=True).backward()
        ctypes.CDLL(str(library)).start_device_threads()
        with ExitStack() as stack:
            enter = stack.enter_context
            never = mock.Mock(return_value=False)
            enter(mock.patch("torch.cuda.amp.common.amp_definitely_not_available", never))
            enter(mock.patch("torch.cuda.is_bf16_supported", mock.Mock(return_value=True)))
            enter(mock.patch("torch._subclasses.fake_tensor.init_gpu_context"))  # of CUDA builds
            enter(mock.patch.object(F, "scaled_dot_product_attention", _attend))
            enter(torch.compiler.set_stance("force_eager"))
            enter(FakeTensorMode(allow_non_fake_inputs=True))
            answer = None, function(enter(Counts()))
    except BaseException:
        answer = traceback.format_exc(), None
    sender.send(answer)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as CUDA computes it: in half precision under autocast, all of one width.

    The memory-efficient kernel takes masks, as numbers, and no shared heads.
    """
    if torch.is_autocast_enabled("cuda"):
        half = torch.get_autocast_dtype("cuda")
        q, k, v = q.to(half), k.to(half), v.to(half)
    width = v.shape[-1]
    most = max(width, q.shape[-1])
    q, k, v = (x if x.shape[-1] == most else F.pad(x, (0, most - x.shape[-1])) for x in (q, k, v))
    if attn_mask is None:
        y = getattr(torch.ops.aten, FLASH)(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    else:
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(
                ~attn_mask, -math.inf
            )
        bias = attn_mask.expand(*q.shape[:-1], k.shape[-2])
        kernel = getattr(torch.ops.aten, MASKED)
        y = kernel(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]
    return y[..., :width]


class _Flex(torch.autograd.Function):
    """flex's kernels, as those of flash: its log-sum-exp has a gradient, which one more takes."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        of_flash = getattr(torch.ops.aten, FLASH)(q, k, v, 0.0, True, False, scale=scale)
        y, lse, _, _, *ctx.sizes, seed, offset, _ = of_flash
        ctx.save_for_backward(q, k, v, y, lse, seed, offset)
        return y, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, y, lse, seed, offset = ctx.saved_tensors
        torch.linalg.vecdot(y, grad)
        kernel = getattr(torch.ops.aten, f"{FLASH}_backward")
        more = None, None, *ctx.sizes, 0.0, True, seed, offset
        return *kernel(grad, *inputs, y, lse, *more), None


def attend_by_flex(
    q: Tensor, k: Tensor, v: Tensor, scale: float, **rest: Any
) -> tuple[Tensor, AuxOutput]:
    """Attention as the compiled `flex_attention` computes it, whatever its rule: fused."""
    y, lse = _Flex.apply(q, k, v, scale)
    return y, AuxOutput(lse=lse)

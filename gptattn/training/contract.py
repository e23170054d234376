"""Checks each kind of layer before a run: causal, the same through its cache, and trainable.

A *changed token*, not a gradient, shows what an output depends on: the gradient is exactly zero for
leaks through detached statistics, expert choice, top-k before the mask, or means over the batch.
Gradients are held against finite differences, and the run's device against the CPU.
"""

import inspect
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gptattn.attention.base import Attention, Shared
from gptattn.attention.cache import Cache
from gptattn.attention.softmax import SoftmaxAttention
from gptattn.build.model import build_layer
from gptattn.errors import ConfigError, ForeignError
from gptattn.machine.device import resolve_device
from gptattn.machine.ending import find_own_code
from gptattn.position.base import Documents
from gptattn.settings.config import TrainConfig
from gptattn.settings.construct import arguments_of, find_target
from gptattn.training.preflight import DTYPES

WIDTH = 64  # about that of the copies that are checked
TOKENS = 70  # beyond a chunk of 64
SOME_CUTS = (1, 2, 3, 16, 31, 32, 33, 63, 64, 65)  # enough where a layer is too wide for all
# Of the largest output, by the type of the least exact step: beyond rounding, below any leak.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
SCALES = (1.0, 30.0, 1 / 30)  # of the changed tokens: the usual ones rarely move a maximum
# What rounding explains, relative to the norm on a CPU: thrice that of any mechanism of the menu.
DEVIATION = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.01}
FLIPS = 0.4  # the same where it flips the choices of a few tokens, as the top-k of dsa
CONSTANT_STD = 0.1  # of what constant parameters become: an output that starts at 0 hides faults


# Settings of layers, and their classes, which a notebook may reload -> the notes on them.
_notes: dict[tuple[str, tuple[Any, ...]], list[str]] = {}


class BrokenLayer(ConfigError):
    """A layer that cannot be compared with others: it leaks, or its cache changes its outputs."""


@dataclass(frozen=True)
class Stack:
    """A layer, behind the earlier ones whose state it shares."""

    layers: list[Attention]
    field: str  # the setting that chose it
    drops: bool  # whether its constructor takes dropout, which is not 0

    @property
    def title(self) -> str:
        """What messages call the last layer: its class, with its parts."""
        last = self.layers[-1]
        parts = getattr(last, "parts", None)
        return "+".join([last.title, *(parts if isinstance(parts, nn.ModuleDict) else ())])

    @property
    def stops_gradient(self) -> bool:
        """Whether a module of these layers declares that its gradients are not the outputs'."""
        modules = nn.ModuleList(self.layers).modules()
        return any(getattr(module, "stops_gradient", False) for module in modules)

    def fail(self, what: str) -> BrokenLayer:
        """Return the error about the last layer."""
        without = "checks=false trains it as it is, not comparable"
        return BrokenLayer(self.field, f"{self.title} {what}; {without}")


class CannotRun(Exception):
    """A layer raised an error on `x`, which is the cause of this one."""

    def __init__(self, layer: Attention, x: Tensor, cached: int | None) -> None:
        super().__init__(type(layer).__name__)
        shape = f"x {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        self.layer, self.x = layer, x
        self.given = shape if cached is None else f"{shape} after {cached} cached tokens"


class LeastExact(TorchDispatchMode):
    """Finds the tolerance for the code run in this context: some modules insist on float32."""

    def __init__(self) -> None:
        super().__init__()
        self.tolerance = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor) and one.ndim > 1:  # no constants
                self.tolerance = max(self.tolerance, TOLERANCE.get(one.dtype, 0.0))
        return result


def check_layers(cfg: TrainConfig) -> list[str]:
    """Check each kind of layer of these settings on the CPU; return notes on what is unusual.

    Small float64 copies are checked where the constructor and the module allow it: with random
    values in constant parameters, in training (with dropout, at the same random state) and in
    evaluation mode. Raises ConfigError, which names the setting, for a layer that breaks the
    contract (a BrokenLayer), and ForeignError for an error in the user's own file. What cannot be
    built at all is left to `build_model`, which says why. Layers that this process has checked are
    not checked again: a sweep asks for each text, budget and optimizer.
    """
    kinds = cfg.kinds()
    targets = tuple(find_target(kind.field, kind.attn, cfg.allow_targets) for kind in kinds)
    key = repr((kinds, cfg.pattern, cfg.model, cfg.block)), targets
    if key in _notes:
        return _notes[key]
    heads = cfg.model.num_heads
    width = min(cfg.model.d_model, 8 * heads * max(1, WIDTH // (8 * heads)))
    narrow = replace(cfg, model=replace(cfg.model, d_model=width))
    small = replace(narrow, model=replace(narrow.model, context_length=TOKENS))
    attempts = [*product((small, narrow, cfg), (torch.float64, torch.float32))]
    notes: dict[str, None] = {}
    passed: set[int] = set()
    for i, (sizes, dtype) in enumerate(attempts):
        with torch.random.fork_rng(devices=[]):
            try:
                layers = draw_layers(sizes)
            except Exception:
                continue  # the constructor refuses this width, or this context
            try:
                for number, stack in enumerate(list_stacks(layers, sizes)):
                    if number not in passed:
                        notes |= dict.fromkeys(check_stack(stack, dtype))
                        passed.add(number)
                break
            except CannotRun as error:
                if i + 1 == len(attempts):
                    raise explain(error) from error.__cause__
    _notes[key] = list(notes)
    return _notes[key]


def draw_layers(cfg: TrainConfig) -> list[Attention]:
    """Build the attention of each layer, with weights that all matter, always the same."""
    torch.manual_seed(0)
    encodings, provided, layers = {}, {}, []
    for layer in range(cfg.model.num_layers):
        layers.append(build_layer(cfg, encodings, provided, layer))
    draw_weights(layers)
    return layers


@torch.no_grad()
def draw_weights(layers: Sequence[Attention]) -> None:
    """Draw all weights so that each matters; what the constructor made constant becomes random."""
    for layer in layers:
        layer.initialise(layer.d_in**-0.5)
        for parameter in layer.parameters():
            if parameter.numel() and (parameter == parameter.flatten()[0]).all():
                parameter.normal_(0.0, CONSTANT_STD)


def list_stacks(layers: Sequence[Attention], cfg: TrainConfig) -> Iterator[Stack]:
    """Yield one stack for each kind of layer."""
    known = set()
    for i, layer in enumerate(layers):
        chosen = cfg.layer(i)
        state = [sorted(named.values()) for named in (layer.provides(), layer.needs())]
        sizes = [(name, tuple(weight.shape)) for name, weight in layer.state_dict().items()]
        kind = repr((chosen, state, sizes))
        if kind in known:
            continue
        known.add(kind)
        needed, members = {*layer.needs()}, [layer]
        for earlier in reversed(layers[:i]):
            if needed & earlier.provides().keys():
                members.insert(0, earlier)
                needed |= earlier.needs().keys()
        takes = arguments_of(find_target(chosen.field, chosen.attn, cfg.allow_targets)).types
        drops = "dropout" in takes and chosen.attn.get("dropout", cfg.model.dropout) > 0
        yield Stack(members, chosen.field.partition(".")[0], drops)


def check_stack(stack: Stack, dtype: torch.dtype) -> list[str]:
    """Check a stack on the CPU in this dtype; return notes. Raises ConfigError, or CannotRun."""
    last = stack.layers[-1]
    dtypes = {p.dtype for p in last.parameters() if p.is_floating_point()}
    dtypes -= {torch.get_default_dtype()}
    if dtypes:
        listed = ", ".join(sorted(map(str, dtypes)))
        raise BrokenLayer(
            stack.field,
            f"{stack.title} builds weights of {listed}; leave their dtype out",
        )
    modules = nn.ModuleList(stack.layers).to(dtype)
    T = min(TOKENS, last.context_length)
    some = [cut for cut in SOME_CUTS if cut < T]
    cuts = [*range(1, T)] if last.d_in <= 2 * WIDTH else some
    changes = [*product(cuts, SCALES[:1]), *product(some, SCALES[1:])]
    pair = torch.randn(2, T, last.d_in, dtype=dtype)
    x = pair[:1].repeat(len(changes) + 1, 1, 1)
    changed = x.clone()  # row 0 as it was, each other from a cut of its own on
    for row, (cut, scale) in enumerate(changes, 1):
        changed[row, cut:] = scale * torch.randn(T - cut, last.d_in, dtype=dtype)

    notes = []
    for training in (True, False):
        modules.train(training)
        with torch.set_grad_enabled(training), LeastExact() as seen:
            y = run(stack, pair).detach()
        near = seen.tolerance * float(y.abs().max())

        mode = "in training" if training else "in evaluation"
        if not y.isfinite().all():
            raise stack.fail(
                f"gives NaN or infinity {mode} for finite x; look for a row without keys"
            )
        with torch.no_grad():
            again, reseeded = run(stack, pair), run(stack, pair, seed=1)
        drops = bool(differ(reseeded, y, near).any())
        if differ(again, y, near).any() or (drops and not training):
            random = "with numbers of its own" if training else "without self.training"
            raise stack.fail(
                f"gives another output for the same x {mode}: it keeps state between batches, "
                f"or is random {random}; keep state in the cache alone"
            )
        with torch.no_grad():
            among = run(stack, changed)
            # Without dropout, whose masks depend on the number of rows, row 0 stands for all.
            expected = run(stack, x) if drops else y[:1]
            moved = differ(among, expected, near)
            if moved[0].any():
                raise stack.fail(
                    "gives different outputs when processed without the other rows of a batch, or "
                    "with others; let each output depend on its own row alone"
                )
            early = [
                (int(moved[row, :cut].nonzero()[0]), cut)
                for row, (cut, scale) in enumerate(changes, 1)
                if moved[row, :cut].any() and (scale == 1 or among[row].isfinite().all())
            ]
            if early:
                output = min(early)[0]
                token = max(cut for first, cut in early if first == output)
                which = f"token {token}" if len(cuts) == T - 1 else f"tokens from {token} on"
                raise stack.fail(
                    f"is not causal: output {output} changes with {which}; mask the scores, or "
                    "shift what it reads, so that an output depends on no later token"
                )
        if training:
            notes += check_gradients(stack, pair, seen.tolerance)
            if stack.drops and not drops:
                notes.append(f"{stack.field}: {stack.title} takes dropout, and ignores it")
        else:
            check_prefixes(stack, pair, y, near)
    return notes


def differ(a: Tensor, b: Tensor, near: float) -> Tensor:
    """Return whether each output differs, or is NaN: [B, T]."""
    return ~((a - b).abs().amax(-1) <= near)


def check_gradients(stack: Stack, x: Tensor, tolerance: float) -> list[str]:
    """Check that all gradients are finite and right; return a note on parameters without one.

    Right is what finite differences along a random direction say, where outputs of this `tolerance`
    are exact enough and no module declares `stops_gradient`.
    """
    last = stack.layers[-1]
    pull = torch.randn(*x.shape[:2], last.d_out, dtype=x.dtype)
    leaves = differentiate(stack, x, pull)
    for name, leaf in leaves.items():
        if leaf.grad is not None and not leaf.grad.isfinite().all():
            raise stack.fail(f"has a gradient that is not finite, of {name}")
    along = {name: torch.randn_like(leaf) for name, leaf in leaves.items()}

    def is_wrong(names: Sequence[str]) -> bool:
        grads = [(leaves[name].grad, along[name]) for name in names]
        found = [(gradient, way) for gradient, way in grads if gradient is not None]
        slope = sum(float((gradient * way).sum()) for gradient, way in found)
        size = sum(float(gradient.square().sum()) for gradient, _ in found) ** 0.5
        for shrink in (1, 10, 100):  # a kink may lie between
            step, values = tolerance**0.75 / shrink, []
            for distance in (step, -2 * step, step):  # the last leads back
                with torch.no_grad():
                    for name in names:
                        leaves[name].add_(along[name], alpha=distance)
                values.append(float(measure(stack, leaves["x"], pull).detach()))
            between = (values[0] - values[1]) / (2 * step)
            if abs(between - slope) <= tolerance**0.5 * max(size, abs(between)):
                return False
        return True

    exact = tolerance <= TOLERANCE[torch.float32]
    if exact and not stack.stops_gradient and is_wrong([*leaves]):
        wrong = ", ".join(name for name in leaves if is_wrong([name])) or "x and weights together"
        raise stack.fail(
            f"has another gradient than finite differences, of {wrong}; correct its backward or "
            "detach(), or declare stops_gradient = True if it is so on purpose"
        )
    named = {name: p for name, p in last.named_parameters() if p.requires_grad}
    idle = ", ".join(name.removeprefix("module.") for name, p in named.items() if p.grad is None)
    return [f"{stack.field}: {stack.title} does not use its {idle}"] if idle else []


def measure(stack: Stack, x: Tensor, pull: Tensor) -> Tensor:
    """Return the sum of the outputs for x, weighted by `pull`, and of the layers' own losses."""
    own: dict[str, list[Tensor]] = {}
    y = run(stack, x, losses=own)
    return (y * pull).sum() + sum(one for losses in own.values() for one in losses)


def differentiate(stack: Stack, x: Tensor, pull: Tensor) -> dict[str, Tensor]:
    """Return a copy of x and the weights, by name, with the gradients of `measure`, if any."""
    modules, last = nn.ModuleList(stack.layers), f"{len(stack.layers) - 1}."
    modules.zero_grad()
    named = {n: p for n, p in modules.named_parameters() if p.requires_grad}
    leaves: dict[str, Tensor] = {
        name.removeprefix(last).removeprefix("module."): p for name, p in named.items()
    }
    leaves["x"] = x.detach().clone().requires_grad_()
    loss = measure(stack, leaves["x"], pull)
    try:
        if loss.requires_grad:  # it may use neither x nor weights
            loss.backward()
    except RuntimeError as error:
        raise stack.fail(
            f"cannot be trained: backward raises {type(error).__name__}: {error}"
        ) from error
    return leaves


def check_device(cfg: TrainConfig) -> None:
    """Check that each kind of layer computes on the run's device what it does on a CPU in float32.

    Compared are outputs and gradients of the same weights, in the run's precision and backend, at
    the model's width, because kernels differ by the size of a head, and in evaluation mode, because
    devices draw other masks. What cannot be built is left to `build_model`. Raises a BrokenLayer,
    or ForeignError for an error in the user's own file.
    """
    device, precision = resolve_device(cfg.trainer.accelerator), cfg.trainer.precision
    dtype, mixed = DTYPES[precision], precision.endswith("-mixed")
    if (device.type, dtype) == ("cpu", torch.float32):
        return
    if device.type == "cuda":  # that of this process, and before cuBLAS reads Lightning's setting
        local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0
        device = torch.device("cuda", int(local) % torch.cuda.device_count())
        if cfg.trainer.deterministic:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            layers = draw_layers(cfg)
        except Exception:
            return
        for stack in list_stacks(layers, cfg):
            modules, last = nn.ModuleList(stack.layers).eval(), stack.layers[-1]
            stored = torch.float32 if mixed else dtype
            modules.to(stored)
            x = torch.randn(2, min(TOKENS, last.context_length), last.d_in, dtype=stored)
            pull = torch.randn(*x.shape[:2], last.d_out)
            expected = compute(stack, x, pull, torch.device("cpu"), torch.float32)
            with torch.autocast(device.type, dtype, enabled=mixed):
                found = compute(stack, x, pull, device, stored)
            # Where terms cancel, as in the gradient of a key's bias, rounding is all there is.
            least = 0.1 * max(one.square().mean().sqrt() for one in expected.values())
            far = {
                name: (found[name] - one).norm() / one.norm().clamp_min(least * one.numel() ** 0.5)
                for name, one in expected.items()
            }
            deviation, name = max((float(x.nan_to_num(torch.inf)), name) for name, x in far.items())
            limit = FLIPS if stack.stops_gradient else DEVIATION[dtype]
            if deviation > limit:
                raise stack.fail(
                    f"computes otherwise on {device.type} in {precision} than on a CPU in float32: "
                    f"{name} differs by {deviation:.2g} of its norm, and rounding explains "
                    f"{limit:g}; choose another backend or trainer.precision"
                )


def compute(
    stack: Stack, x: Tensor, pull: Tensor, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the outputs for x and all gradients there in this type, by name; on the CPU."""
    nn.ModuleList(stack.layers).to(device, dtype)
    x, pull = x.to(device, dtype), pull.to(device)
    try:
        found = {"the output": run(stack, x)}
        for name, leaf in differentiate(stack, x, pull).items():
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            found[f"the gradient of {name}"] = gradient
    except CannotRun as error:
        raise explain(error) from error.__cause__
    return {name: one.detach().float().cpu() for name, one in found.items()}


def check_prefixes(stack: Stack, x: Tensor, y: Tensor, near: float) -> None:
    """Check in evaluation mode that prefixes, and chunks through the cache, give the same y."""
    T = x.shape[1]
    with torch.no_grad():
        for tokens in (1, (T + 1) // 2):
            alone = run(stack, x[:, :tokens])
            if not alone.isfinite().all():
                raise stack.fail(
                    f"gives NaN or infinity for {tokens} token{'s' * (tokens > 1)} alone"
                )
            if differ(alone, y[:, :tokens], near).any():
                raise stack.fail(
                    f"is not causal: the output changes with the text's length: the first {tokens} "
                    f"of {T} tokens give other outputs alone"
                )
        singly = [1] * min(5, T)  # then the rest but two at once, where there are so many
        middle = [T - 7, 1, 1] if T > 7 else [1] * (T - len(singly))
        for chunks in ([*singly, *middle], [(T + 1) // 2, T // 2]):
            wrong = differ(run(stack, x, chunks), y, near).any(0)
            if wrong.any():
                raise stack.fail(
                    "is not the same with its cache: decoding through the cache differs from one "
                    f"full pass at output {int(wrong.nonzero()[0])} (chunks of "
                    f"{','.join(map(str, chunks))} tokens); write every token's entries, and read "
                    "those of all before it"
                )


def run(
    stack: Stack,
    x: Tensor,
    chunks: Sequence[int] | None = None,
    *,
    seed: int = 0,
    documents: Documents | None = None,
    losses: dict[str, list[Tensor]] | None = None,
) -> Tensor:
    """Return the last layer's y [B, T, d_out], from the random state of this seed.

    Each layer reads the stream to which the ones before it have added. `chunks`: through caches,
    with so many tokens at a time. `documents`: of rows that hold several. `losses`
    gets the layers' own. Raises CannotRun.
    """
    torch.manual_seed(seed)
    caches: list[Cache | None] = [None] * len(stack.layers)
    if chunks is not None:
        caches = [layer.new_cache(len(x), x.shape[1]) for layer in stack.layers]
    start, ys = 0, []
    for part in x.split([tokens for tokens in chunks or [x.shape[1]] if tokens], dim=1):
        at, stream, y = documents or range(start, start + part.shape[1]), part, part
        shared = Shared(at, losses=losses)
        for layer, cache in zip(stack.layers, caches, strict=True):
            y = _call(stack, layer, stream, cache, shared)
            stream = stream + y
        for cache in caches:
            if cache is not None:
                cache.advance(part.shape[1])
        start += part.shape[1]
        ys.append(y)
    return torch.cat(ys, dim=1)


def _call(stack: Stack, layer: Attention, x: Tensor, cache: Cache | None, shared: Shared) -> Tensor:
    try:
        y = layer(x, cache, shared)
        wanted, given = [*x.shape[:2], layer.d_out], f"x {list(x.shape)} of {x.dtype}"
        if not isinstance(y, Tensor) or list(y.shape) != wanted:
            what = list(y.shape) if isinstance(y, Tensor) else f"a {type(y).__name__}"
            raise BrokenLayer(
                stack.field, f"{layer.title} returns {what} for {given}; return a tensor {wanted}"
            )
        if y.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            said = f"{layer.title} returns {y.dtype} for {given}; return x's own dtype"
            raise BrokenLayer(stack.field, said)
    except Exception as error:
        raise CannotRun(layer, x, None if cache is None else cache.length) from error
    return y


def explain(error: CannotRun) -> Exception:
    """Return the one-line error for a layer that cannot run; a bug of ours as it was raised."""
    cause, layer = error.__cause__, error.layer
    assert isinstance(cause, Exception)
    if isinstance(cause, BrokenLayer):
        return cause
    kind = getattr(layer, "module", layer)
    what = f"{type(cause).__name__}: {cause}"
    if (place := find_own_code(cause)) is not None:
        return ForeignError(place, f"{what}; {layer.title} was given {error.given}")
    if type(kind).__module__.startswith("gptattn."):
        return cause
    if isinstance(layer, SoftmaxAttention):
        shapes = [list(one.shape) for one in layer.project(error.x)]
        what += f"; its project() returns {', '.join(map(str, shapes))}, which must be "
        what += "[B, H, T, D] of queries, [B, G, T, D] of keys and of values"
    file = inspect.getsourcefile(type(kind)) or type(kind).__module__
    return ForeignError(os.path.relpath(file), f"{layer.title} fails on {error.given}: {what}")

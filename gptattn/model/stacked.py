"""Several GPTs of one shape as one model: their parameters are stacked, and the inputs too.

N stands for the models, beside the letters of the attention.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gptattn.model.gpt import GPT
from gptattn.model.loss import linear_cross_entropy, scored


class StackedGPT:
    """N models that are trained at once: `parameters` maps names to [N, ...].

    The parameters of the models given become views of these, so each of them stays a model of its
    own, for all that does not train it. Raises ValueError if a buffer is not the same in all.
    """

    def __init__(self, models: Sequence[GPT]) -> None:
        self.models = list(models)
        _check_buffers(models)
        each = [dict(model.named_parameters()) for model in models]
        self.parameters: dict[str, Tensor] = {}
        for name in each[0]:
            stack = torch.stack([own[name].detach() for own in each]).requires_grad_()
            for own, view in zip(each, stack.detach(), strict=True):
                own[name].data = view
            self.parameters[name] = stack
        self._hidden = _Hidden(models[0])
        head = models[0].head.weight
        self._head = next(name for name, p in each[0].items() if p is head)

    def hidden(self, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return what each model's head takes [N, B, T, d_model], of its own ids [N, B, T].

        `documents` [N, B, T] numbers those of each model's rows, as in `GPT.hidden`.
        """

        def hidden(parameters: dict[str, Tensor], *row: Tensor) -> Tensor:
            named = {f"model.{name}": value for name, value in parameters.items()}
            return functional_call(self._hidden, named, row)

        rows = (ids,) if documents is None else (ids, documents)
        return torch.vmap(hidden)(self.parameters, *rows)

    def losses(
        self,
        ids: Tensor,
        targets: Tensor,
        documents: Tensor | None = None,
        *,
        chunk_tokens: int | None = None,
        ignoring: bool = False,
    ) -> Tensor:
        """Return the loss [N] of each model on its own ids and targets [N, B, T].

        The other arguments are as in `GPT.loss`.
        """
        # unbind: its gradient is one stack, where that of an index would be N times as large.
        heads = self.parameters[self._head].unbind()
        losses = []
        hiddens = self.hidden(ids, documents).unbind()
        for hidden, head, own in zip(hiddens, heads, targets, strict=True):
            part = scored(hidden, own) if ignoring else (hidden, own)
            losses.append(linear_cross_entropy(part[0], head, part[1], chunk_tokens))
        return torch.stack(losses)

    def gradient_norms(self) -> Tensor:
        """Return the norm [N] of each model's gradients together."""
        found = [
            torch.linalg.vector_norm(p.grad.reshape(len(p), -1), dim=1)
            for p in self.parameters.values()
            if p.grad is not None
        ]
        return torch.linalg.vector_norm(torch.stack(found), dim=0)

    def scale_gradients(self, factor_N: Tensor) -> None:
        """Multiply the gradients of each model by its own factor."""
        for p in self.parameters.values():
            if p.grad is not None:
                p.grad.mul_(factor_N.to(p.grad.dtype).view(-1, *[1] * (p.ndim - 1)))


class _Hidden(nn.Module):
    """The model without its head, as a module whose call gives that."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.model.hidden(ids, None, documents)


def _check_buffers(models: Sequence[GPT]) -> None:
    for name, value in models[0].named_buffers():
        if not all(torch.equal(dict(model.named_buffers())[name], value) for model in models):
            raise ValueError(f"the buffer {name} depends on the seed; train each seed alone")

"""The number format of the weights while decoding: float32, or bfloat16 where that is faster."""

import copy
import time
from typing import Literal

import torch
from torch import Tensor

from gptattn.decode.generate import stream
from gptattn.decode.sampling import Sampling
from gptattn.machine.device import synchronize
from gptattn.model.gpt import GPT

DecodeDType = Literal["auto", "float32", "bfloat16"]

TRIAL_PROMPT, TRIAL_TOKENS = 16, 6
MARGIN = 1.1  # float32 is the more exact one: bfloat16 has to be faster by this factor


def in_dtype(model: GPT, dtype: DecodeDType, ids: Tensor) -> GPT:
    """Return the model, or a copy of it in bfloat16 if that is asked for, or faster with `auto`.

    `auto` decodes a few tokens in both formats after the newest of the prompts `ids` [B, T]: a
    processor reads half the bytes in bfloat16, and without instructions for it computes several
    times more slowly.
    """
    if dtype == "float32":
        return model
    half = copy.deepcopy(model).to(torch.bfloat16)
    if dtype == "bfloat16":
        return half
    wide_seconds, half_seconds = token_seconds([model, half], ids[:, -TRIAL_PROMPT:])
    return half if MARGIN * half_seconds < wide_seconds else model


def token_seconds(models: list[GPT], ids: Tensor) -> list[float]:
    """Return the seconds of a token for each model: the least of some, which take turns.

    The first token, which comes with the prompt and with the preparation, does not count.
    """
    streams = [stream(model, ids, 1 + TRIAL_TOKENS, Sampling(temperature=0)) for model in models]
    for one in streams:
        next(one)
    seconds: list[list[float]] = [[] for _ in models]
    for _ in range(TRIAL_TOKENS):
        for one, own in zip(streams, seconds, strict=True):
            synchronize(ids.device)
            start = time.perf_counter()
            next(one)
            synchronize(ids.device)
            own.append(time.perf_counter() - start)
    for one in streams:
        next(one, None)  # ends the preparation
    return [min(own) for own in seconds]

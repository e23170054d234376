"""A run as a model of lm-evaluation-harness, and its scores. Only this file imports the harness."""

import hashlib
import os
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from gptattn.data.hub import name_errors
from gptattn.decode.generate import pad_left, stream
from gptattn.decode.sampling import Sampling
from gptattn.errors import ConfigError, DataError
from gptattn.evaluate.losses import compare_tokens
from gptattn.runs.evaluation import TaskScores
from gptattn.runs.load import SavedRun, load_run

try:
    from lm_eval import __version__
    from lm_eval.api.model import TemplateLM
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.utils import Collator, normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ConfigError("lm_eval", f"{error}; run pip install 'gptattn[lm-eval]'") from None

TOKENS_AT_A_TIME = 2**13  # in one pass through the model, and in its cache
# Supported generation_kwargs of a task. Others, such as top_p and num_beams, do nothing at 1.
FOLLOWED = {"until", "max_gen_toks", "do_sample", "temperature", "top_k"}
RESAMPLES = 1_000  # for standard errors without a formula; the harness's default is 100,000

# A context, and its continuations with the indices of their requests.
Group = tuple[tuple[int, ...], list[tuple[int, list[int]]]]


class HarnessModel(TemplateLM):
    """A run for `lm_eval.simple_evaluate(model=...)`, on the device of its weights.

    Requests are cut at the left to the trained context, as the harness's own HFLM does. An empty
    context becomes the end-of-text id. Raises DataError if there is none, for text it can't encode,
    and if asked to score no tokens or more than fit; ConfigError for what it can't generate.
    """

    def __init__(self, saved: SavedRun) -> None:
        super().__init__()
        self.model, self.own_tokenizer = saved.model, saved.tokenizer
        self.max_length, self._device = saved.model.context_length, saved.model.head.weight.device

    @property
    def eot_token_id(self) -> int:
        if (end := self.own_tokenizer.end_of_text) is None:
            what = "a request has no context, and the run's tokenizer has no end-of-text id"
            raise DataError("lm_eval", f"{what}; leave the task out, or train with tokenizer=gpt2")
        return end

    def tok_encode(self, string: str, add_special_tokens: Any = None, **kwargs: Any) -> list[int]:
        return self.own_tokenizer.encode(string, "lm_eval").tolist()

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        groups: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
        for number, (_, context, ids) in enumerate(requests):
            if not 0 < len(ids) <= self.max_length:  # none: merged into the context
                what = f"has {len(ids)} tokens to score, not 1 to {self.max_length}"
                raise DataError("lm_eval", f"a request {what}; leave the task out")
            read = [*(context or [self.prefix_token_id]), *ids][-self.max_length - 1 :]
            start = len(read) - len(ids)
            groups.setdefault(tuple(read[:start]), []).append((number, read[start:]))
        waiting = sorted(groups.items(), key=_count_tokens, reverse=True)
        found: dict[int, tuple[float, bool]] = {}
        while waiting:
            most = TOKENS_AT_A_TIME // _count_tokens(waiting[0])
            rows = accumulate(len(continuations) for _, continuations in waiting)
            count = max(1, len([*takewhile(most.__ge__, rows)]))
            found |= self._score(waiting[:count])
            waiting = waiting[count:]
        return [found[number] for number in range(len(requests))]

    @torch.inference_mode()
    def _score(self, batch: Sequence[Group]) -> dict[int, tuple[float, bool]]:
        """Return each continuation's log-likelihood in nats, and whether greedy decoding finds it.

        If contexts have several continuations, the start of each context, of the same length in
        all, is read once. The rest is padded on the right, which no earlier token sees.
        """
        rows = [(which, *one) for which, (_, group) in enumerate(batch) for one in group]
        whole = [torch.tensor([*batch[which][0], *ids]) for which, _, ids in rows]
        past, shared = None, 0
        if len(rows) > len(batch):  # a context's last token predicts, so each row reads it
            shared = min(len(context) for context, _ in batch) - 1
        if shared:
            first = torch.tensor([context[:shared] for context, _ in batch], device=self.device)
            past = self.model.new_cache(len(batch), max(map(len, whole)) - 1)
            self.model.hidden(first, past)
            of_row = torch.tensor([which for which, _, _ in rows], device=self.device)
            for layer in past.caches:
                layer.tensors = {name: x[of_row] for name, x in layer.tensors.items()}
        rest = pad_sequence([ids[shared:-1] for ids in whole], batch_first=True)
        hidden = self.model.hidden(rest.to(self.device), past)
        ends = [len(ids) - 1 - shared for ids in whole]
        counts = [len(ids) for _, _, ids in rows]
        scored = [x[end - n : end] for x, end, n in zip(hidden, ends, counts, strict=True)]
        targets = torch.tensor([id for _, _, ids in rows for id in ids], device=self.device)
        compared = compare_tokens(self.model, torch.cat(scored), targets)
        losses, greedy = (x.cpu().split(counts) for x in compared)
        answers = [(-x.sum().item(), bool(y.all())) for x, y in zip(losses, greedy, strict=True)]
        return {number: one for (_, number, _), one in zip(rows, answers, strict=True)}

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        cut = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            cut.append([(None, *make_disjoint_window(one)) for one in windows])
        found = iter(self._loglikelihood_tokens([one for windows in cut for one in windows]))
        return [sum(loss for loss, _ in islice(found, len(windows))) for windows in cut]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        given = [(self.tok_encode(one.args[0]), one.args[1]) for one in requests]
        order = Collator(
            given, lambda one: -len(one[0]), group_by="gen_kwargs", group_fn=lambda one: one[1]
        )
        texts = []
        for batch in order.get_batched(n=max(1, TOKENS_AT_A_TIME // self.max_length)):
            options: Any = normalize_gen_kwargs(batch[0][1])
            room = self.max_length - options["max_gen_toks"]
            if room < 1:
                what = f"generating {options['max_gen_toks']} tokens leaves no room in the context"
                raise ConfigError("lm_eval", f"{what} of {self.max_length}; leave the task out")
            if odd := [name for name, x in options.items() if name not in FOLLOWED and x != 1]:
                raise ConfigError("lm_eval", f"{odd[0]} is not supported; leave the task out")
            temperature = options.get("temperature", 1.0) if options["do_sample"] else 0.0
            sampling = Sampling(temperature, options.get("top_k") or None)
            read = [torch.tensor((ids or [self.prefix_token_id])[-room:]) for ids, _ in batch]
            ids, padding = (x.to(self.device) for x in pad_left(read))
            sizes = {"padding": padding, "vocab_size": self.own_tokenizer.vocab_size}
            drawn, cut = [], []
            for token in stream(self.model, ids, options["max_gen_toks"], sampling, **sizes):
                drawn.append(token.cpu())
                cut = [self._cut(row, options["until"]) for row in torch.cat(drawn, 1).numpy()]
                if all(stopped for _, stopped in cut):
                    break
            texts += [text for text, _ in cut]
        return order.get_original(texts)

    def _cut(self, ids: NDArray[np.integer], until: Sequence[str]) -> tuple[str, bool]:
        """Return the text of the ids up to a stop or the end of text, and whether one was found."""
        ends = np.flatnonzero(ids == self.own_tokenizer.end_of_text)
        whole = text = self.own_tokenizer.decode(ids[: ends[0]] if len(ends) else ids)
        for stop in filter(None, until):
            text = text.split(stop)[0]
        return text, len(ends) > 0 or text != whole


def _count_tokens(group: Group) -> int:
    return len(group[0]) + max(len(ids) for _, ids in group[1])


def lm_eval_model(run: SavedRun | str | Path) -> HarnessModel:
    """Return a run, or the run in this folder, for `lm_eval.simple_evaluate(model=...)`."""
    return HarnessModel(run if isinstance(run, SavedRun) else load_run(run))


find_tasks = cache(lambda named: TaskManager(include_defaults=named))  # reads 10,000 files


def check_task(task: str) -> None:
    """Raise ConfigError if `task` is neither the name of a task nor a file."""
    if not Path(task).is_file() and task not in find_tasks(True).all_tasks:
        what = f"{task!r} is neither a task of lm_eval {__version__} nor a YAML file"
        raise ConfigError("lm_eval", f"{what}; list the tasks with: lm-eval ls tasks")


def score_tasks(saved: SavedRun, task: str) -> dict[str, TaskScores]:
    """Return the scores on a task, or on each task of a group, by name.

    Raises DataError if its file or its data set cannot be read.
    """
    named = not Path(task).is_file()
    manager = find_tasks(named)
    advice = "if offline, download the data elsewhere and copy ~/.cache/huggingface (HF_HOME)"
    with name_errors(DataError, "lm_eval", task, advice if named else "check the file"):
        loaded = manager.load(task)
    tasks: Any = [*loaded.get("groups", {}).values()][:1] or [*loaded["tasks"].values()]
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # otherwise it forks this process to resample
    found: Any = simple_evaluate(
        HarnessModel(saved), tasks=tasks, bootstrap_iters=RESAMPLES, task_manager=manager
    )
    return {name: _read_scores(found, name, task) for name in found["results"]}


def _read_scores(found: Any, task: str, requested: str) -> TaskScores:
    """Return a task's scores from what `simple_evaluate` returns."""
    samples, shots = found["samples"].get(task, []), found["n-shot"].get(task)
    hashed = samples or [one for each in found["samples"].values() for one in each]  # of a group
    hashes = "".join(one["doc_hash"] + one["prompt_hash"] + one["target_hash"] for one in hashed)
    digest = hashlib.sha256(hashes.encode()).hexdigest()[:16]
    scores = TaskScores(requested, __version__, shots, digest, {}, {}, {})
    for key, value in found["results"][task].items():
        metric, comma, way = key.partition(",")
        if not comma or not isinstance(value, float) or not np.isfinite(value):
            continue
        plain = metric.removesuffix("_stderr")
        shown = plain if way == "none" else f"{plain},{way}"  # how answers were filtered
        (scores.values if plain == metric else scores.errors)[shown] = float(value)
        own = np.array([one[metric] for one in samples if one["filter"] == way and metric in one])
        # A perplexity is not a mean over items.
        if own.size and own.ndim == 1 and own.dtype.kind in "bif" and np.isclose(own.mean(), value):
            scores.items[shown] = own.astype(float).tolist()
    return scores

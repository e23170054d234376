"""The recorded attention statistics, against scipy on the weights that the run saved."""

import numpy as np
import pytest
import scipy.stats
import torch
from support import TEXT, rows, train

from gptattn.runs.load import load_run

CONTEXT = 16
FIGURE = "val_attention/entropy/layer_00"


def test_the_figures_are_those_of_the_opening_of_the_validation_text(tmp_path):
    run = train(tmp_path, "attn=gqa", "model.num_layers=2")
    found = [row for row in rows(run) if FIGURE in row]
    assert [row["step"] for row in found] == [2, 4]
    figures = found[-1]
    raw = np.frombuffer(TEXT.encode(), dtype=np.uint8)
    cut = len(raw) - round(0.1 * len(raw))
    val = raw[cut - 1 :]
    ids = torch.from_numpy(val[: len(val) // CONTEXT * CONTEXT].astype("int64")).view(-1, CONTEXT)
    for layer, w_BHTS in enumerate(load_run(run).model.attention_weights(ids)):
        w = w_BHTS.double().numpy()[:, :, 1:]
        entropy_H = scipy.stats.entropy(w, axis=-1).mean((0, 2))
        for name, expected_H in (("entropy", entropy_H), ("sink", w[..., 0].mean((0, 2)))):
            place = f"val_attention/{name}/layer_{layer:02d}"
            assert figures[place] == pytest.approx(expected_H.mean(), rel=1e-4)

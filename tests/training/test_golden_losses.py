"""The losses of a short run of each variant, to the last bit: a refactor must not change them.

If a change is meant to change them, rewrite golden_losses.json with `GPTATTN_WRITE_GOLDEN=1 pytest`
on this file, which takes new variants up as well. The last bits depend on the torch version, the
kind of processor and the thread count, which the file names; with others the losses must agree to
five digits.
"""

import json
import os
import platform
from pathlib import Path

import pytest
import torch
from building import menu
from support import series, train
from torch.nn.functional import cross_entropy

from gptattn.build.data import build_data
from gptattn.data.sampler import ValidationSet
from gptattn.runs.load import load_run

GOLDEN = Path(__file__).with_name("golden_losses.json")
RUN = (
    "budget.steps=6",
    "validation.count=2",
    "model.num_layers=2",
    "model.dropout=0.1",
    "checks=false",
)
KNOWN = json.loads(GOLDEN.read_text())
WRITES = "GPTATTN_WRITE_GOLDEN" in os.environ


def processor() -> str:
    """The properties of the CPU by which torch and its libraries choose their kernels."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.name == "posix" else []
    names = ("vendor_id", "cpu family", "model\t")
    kind = [line.partition(":")[2].strip() for line in lines if line.startswith(names)][:3]
    return " ".join([platform.machine(), torch.backends.cpu.get_cpu_capability(), *kind])


def environment() -> dict[str, str]:
    return {"torch": str(torch.__version__), "processor": processor(), "threads": "1"}


def loss_from_checkpoint(run: Path) -> float:
    """The validation loss of a fresh model with the weights of the run, in float64."""
    saved = load_run(run)
    data = build_data(saved.cfg)
    nats, count = 0.0, 0
    with torch.no_grad():
        for ids, targets in ValidationSet(data.val[:], batch_size=3, context_length=16):
            logits = saved.model(ids).double()
            nats += cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
            count += targets.numel()
    assert count == len(data.val) - 1
    return nats / count


# The others are slow; of more kinds, test_fingerprint.py holds the losses to eight digits.
QUICK = ("mha", "mla")


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in (menu("attn") if WRITES else KNOWN["losses"])
    ],
)
def test_losses_of_a_short_run_match_the_golden_ones_and_its_checkpoint(variant, tmp_path):
    run = train(tmp_path, *RUN, f"attn={variant}")
    found = {name: [loss for _, loss in series(run, name)] for name in ("train/loss", "val/loss")}
    assert loss_from_checkpoint(run) == pytest.approx(found["val/loss"][-1], abs=1e-5)
    if WRITES:
        KNOWN["environment"], KNOWN["losses"][variant] = environment(), found
        GOLDEN.write_text(json.dumps(KNOWN, indent=1, sort_keys=True) + "\n")
    same_machine = KNOWN["environment"] == environment()
    for name, values in {} if WRITES else KNOWN["losses"][variant].items():
        assert found[name] == (values if same_machine else pytest.approx(values, rel=1e-5)), name
        assert len(values) == {"train/loss": 6, "val/loss": 2}[name]

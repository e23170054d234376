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

GOLDEN = Path(__file__).with_name("golden_losses.json")
RUN = ("budget.steps=6", "validation.count=2", "model.num_layers=2", "model.dropout=0.1")
KNOWN: dict[str, dict[str, list[float]]] = json.loads(GOLDEN.read_text())["losses"]
WRITES = "GPTATTN_WRITE_GOLDEN" in os.environ


def processor() -> str:
    """The properties of the CPU by which torch and its libraries choose their kernels."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.name == "posix" else []
    names = ("vendor_id", "cpu family", "model\t")
    kind = [line.partition(":")[2].strip() for line in lines if line.startswith(names)][:3]
    return " ".join([platform.machine(), torch.backends.cpu.get_cpu_capability(), *kind])


def environment() -> dict[str, str]:
    return {"torch": str(torch.__version__), "processor": processor(), "threads": "1"}


def losses(folder: Path, variant: str) -> dict[str, list[float]]:
    run = train(folder, *RUN, f"attn={variant}")
    return {name: [value for _, value in series(run, name)] for name in ("train/loss", "val/loss")}


@pytest.mark.parametrize("variant", menu("attn") if WRITES else KNOWN)
def test_the_losses_of_a_short_run_are_those_that_they_were(variant: str, tmp_path: Path) -> None:
    found = losses(tmp_path, variant)
    if WRITES:
        KNOWN[variant] = found
        lines = ",\n".join(f'  "{name}": {json.dumps(KNOWN[name])}' for name in sorted(KNOWN))
        GOLDEN.write_text(
            f'{{\n "environment": {json.dumps(environment())},\n "losses": {{\n{lines}\n }}\n}}\n',
            encoding="utf-8",
        )
    expected = KNOWN[variant]
    same_machine = json.loads(GOLDEN.read_text())["environment"] == environment()
    for name, values in expected.items():
        assert found[name] == (values if same_machine else pytest.approx(values, rel=1e-5)), name
        assert len(values) == {"train/loss": 6, "val/loss": 2}[name]

"""scripts/attention_map.py: what it writes and prints, and a user's mistakes."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from building import SMALL, build_gpt, settings
from matplotlib.image import imread
from support import Call, train

from gptattn.compare.finished_runs import read_runs
from gptattn.data.tokenizer import ByteTokenizer
from gptattn.runs.load import load_run, save_model


def model_folder(folder: Path, *overrides: str, vocab_size: int = 256) -> Path:
    """Write a folder as scripts/convert.py does: two layers of six heads, a context of 11."""
    model = build_gpt(*overrides, vocab_size=vocab_size, std=0.3)
    save_model(folder, settings(*SMALL, *overrides), model, ByteTokenizer())
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model") / "mine", "attn=mha")


def table(out: str) -> dict[str, tuple[float, float]]:
    found = re.findall(r"^ *(\d+|even) +([\d.]+) +([\d.]+)$", out, re.MULTILINE)
    return {name: (float(entropy), float(sink)) for name, entropy, sink in found}


def page_data(file: Path) -> dict:
    text = file.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert found is not None
    return json.loads(found.group(1))


@pytest.mark.parametrize("variant", ["differential", "cross_layer"])
def test_a_variant_is_drawn(variant: str, tmp_path: Path, call: Call) -> None:
    run = model_folder(tmp_path / "run", f"attn={variant}")
    code, out, err = call("attention_map", f"run={run}", "prompt=naïve list", "device=cpu")
    assert (code, err) == (0, "")
    files = ["attention.html", "layer_00.png", "layer_01.png"]
    assert sorted(path.name for path in (run / "attention").iterdir()) == files
    for name in files:
        assert f"written: {run / 'attention' / name}" in out
    saved = load_run(run)
    ids = torch.tensor([list("naïve list".encode())])
    maps = saved.model.attention_weights(ids)
    data = page_data(run / "attention" / "attention.html")
    assert data["labels"] == ["n", "a", "\\xc3", "\\xaf", *"ve␣list"]
    assert [len(layer["heads"]) for layer in data["layers"]] == [m.shape[1] for m in maps]
    means = table(out)
    for layer, w_BHTS in enumerate(maps):
        entropy = torch.distributions.Categorical(w_BHTS[:, :, 1:]).entropy().mean().item()
        assert means[str(layer)] == pytest.approx(
            (entropy, w_BHTS[:, :, 1:, 0].mean().item()), abs=6e-4
        )
    assert set(means) == {"0", "1", "even"}


def test_a_trained_run_is_drawn_and_stays_a_run(tmp_path: Path, call: Call) -> None:
    run = train(tmp_path, "attn=gqa")
    before = {f: f.read_bytes() for f in run.rglob("*") if f.is_file()}
    code, out, _ = call("attention_map", f"run={run}", "prompt=The end.")
    assert code == 0
    assert before == {f: f.read_bytes() for f in before}
    title = (run / "attention" / "attention.html").read_text(encoding="utf-8")
    assert f"<title>Attention of {run.name}</title>" in title
    found, passed_over = read_runs([run])
    assert ([r.folder for r in found], passed_over) == ([run], [])
    assert call("generate", f"run={run}", "prompt=a", "tokens=2")[0] == 0
    assert table(out).keys() == {"0", "even"}


def test_one_layer_goes_to_a_folder_of_choice(folder: Path, tmp_path: Path, call: Call) -> None:
    ask = ("attention_map", f"run={folder}", "prompt=a list")
    code, out, _ = call(*ask, "layer=1", f"out={tmp_path / 'one'}")
    assert code == 0
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["attention.html", "layer_01.png"]
    data = page_data(tmp_path / "one" / "attention.html")
    assert [layer["number"] for layer in data["layers"]] == [1]
    whole = page_data_of(call(*ask, f"out={tmp_path / 'all'}"), tmp_path / "all")
    assert data["layers"][0] == whole["layers"][1]
    assert table(out).keys() == {"1", "even"}


def page_data_of(result: tuple[int, str, str], out: Path) -> dict:
    assert result[0] == 0
    return page_data(out / "attention.html")


def test_a_prompt_comes_from_a_file_or_from_stdin(
    folder: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("π list", encoding="utf-8")
    ask = ("attention_map", f"run={folder}", "layer=0")
    for source in ("prompt=π list", f"prompt_file={file}", "prompt=-"):
        with file.open() as opened:
            monkeypatch.setattr(sys, "stdin", opened)
            out = tmp_path / str(len(source))
            data = page_data_of(call(*ask, source, f"out={out}"), out)
        assert data["labels"] == ["\\xcf", "\\x80", *"␣list"]


def test_a_single_token_has_a_map_and_no_figures(folder: Path, tmp_path: Path, call: Call) -> None:
    code, out, _ = call("attention_map", f"run={folder}", "prompt=a", f"out={tmp_path}")
    assert code == 0
    page = (tmp_path / "attention.html").read_text(encoding="utf-8")
    assert "nan" not in out
    assert "entropy nan" not in page
    assert "entropy –<br>sink –" in page  # noqa: RUF001
    assert imread(tmp_path / "layer_00.png").ndim == 3


MISTAKES = {
    "lone surrogate": (["prompt=\udcff"], 3, "error: prompt: cannot be written as UTF-8"),
    "no layer": (["prompt=a", "layer=2"], 2, "error: layer: 2 does not exist; give 0 to 1"),
    "negative layer": (["prompt=a", "layer=-1"], 2, "error: layer: -1 does not exist; give 0 to 1"),
}


@pytest.mark.parametrize(("arguments", "code", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_writes_nothing(
    arguments: list[str], code: int, said: str, tmp_path: Path, folder: Path, call: Call
) -> None:
    if not any(argument.startswith("run=") for argument in arguments):
        arguments = [f"run={folder}", *arguments]
    result = call("attention_map", *arguments, f"out={tmp_path / 'out'}")
    assert result[0] == code
    (line,) = result[2].splitlines()
    assert line.startswith(said)
    assert not (tmp_path / "out").exists()

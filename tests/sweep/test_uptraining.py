"""The uses of the real GPT-2, tested with a small random one from transformers: convert it,
generate from it, convert it back, and train it further with other attention.
"""

import json
import re
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest
import torch
from support import TEXT, Call, bpe, command, series, summary, tiny, train
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from gptattn.data import hub
from gptattn.runs.load import load_config, load_run

SIZES = ("model.num_layers=2", "model.num_heads=4", "model.d_model=20", "model.context_length=16")


@pytest.fixture(autouse=True)
def _ask_the_hub_anew() -> Iterator[None]:
    hub._fetched.cache_clear()
    yield
    hub._fetched.cache_clear()


def make_gpt2(folder: Path, vocab_size: int, tokenizer: bool = True) -> Path:
    torch.manual_seed(3)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=4, n_embd=20, n_positions=16, vocab_size=vocab_size)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    if tokenizer:
        bpe(folder)
        (folder / "tokenizer.json").unlink()  # vocab.json and merges.txt suffice
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `save_pretrained` folder whose vocabulary of 416 exceeds the tokenizer's 400."""
    return make_gpt2(tmp_path_factory.mktemp("gpt2"), 416)


@torch.no_grad()
def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    out = model.eval()(ids)
    return getattr(out, "logits", out)


def test_a_converted_gpt2_generates_wherever_its_source_has_gone(
    checkpoint: Path, tmp_path: Path, call: Call
) -> None:
    source = shutil.copytree(checkpoint, tmp_path / "source")
    out = tmp_path / "as_gqa"
    code, said, _ = call("convert", "from=gpt2", f"path={source}", "to=gqa", f"out={out}")
    assert code == 0
    assert "byte" not in said.replace("bytes", "")
    cfg = load_config(out)
    assert (cfg.choices["tokenizer"], cfg.tokenizer["path"]) == ("gpt2", str(source))
    shutil.rmtree(source)
    ask = ("prompt=Line 001: naïve", "tokens=30", "temperature=0", "threads=1", "device=cpu")
    code, told, _ = call("generate", f"run={out}", *ask)
    assert code == 0
    assert told.startswith("Line 001: naïve")
    # A changed tokenizer is refused: its tokens are not those that the weights were trained on.
    kept = out / "tokenizer" / "tokenizer.json"
    kept.write_text(kept.read_text().replace('"Line"', '"Enil"'))
    code, _, err = call("generate", f"run={out}", *ask)
    assert code == 3
    assert len(err.splitlines()) == 1


def test_to_hf_and_back_keeps_logits_and_tokens(
    checkpoint: Path, tmp_path: Path, call: Call
) -> None:
    out = tmp_path / "out"
    assert call("convert", "from=gpt2", f"path={checkpoint}", "to=hf", f"out={out}")[0] == 0
    before, after = AutoTokenizer.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(out)
    text = TEXT[:300] + "<|endoftext|>"
    ids = after(text)["input_ids"]
    assert ids == before(text)["input_ids"]
    assert ids[-1] == after.eos_token_id == before.eos_token_id
    assert type(after) is type(before)
    short = torch.tensor(ids[:16])[None]
    old, new = (GPT2LMHeadModel.from_pretrained(folder) for folder in (checkpoint, out))
    torch.testing.assert_close(logits(new, short), logits(old, short), rtol=0, atol=1e-6)
    # Our own loader gives the same ids and logits.
    run = tmp_path / "run"
    assert call("convert", "from=gpt2", f"path={out}", "to=mha_wrapper", f"out={run}")[0] == 0
    saved = load_run(run)
    plain = TEXT[:300]
    assert saved.tokenizer.encode(plain, "text").tolist() == before(plain)["input_ids"]
    torch.testing.assert_close(logits(saved.model, short), logits(old, short), rtol=0, atol=1e-5)


def test_gpt2_trains_on_with_grouped_queries(checkpoint: Path, tmp_path: Path, call: Call) -> None:
    # Four groups of one head and a tiny rate change nothing: the loss must equal the source's.
    still = ["attn=gqa", "attn.num_kv_heads=4", "optim.lr=1e-12", "budget.steps=1"]
    common = [f"init_from={checkpoint}", "tokenizer=gpt2", "model.vocab_size=416"]
    sizes = [*SIZES, "model.qkv_bias=true"]
    same = train(tmp_path / "same", *common, *sizes, *still)
    lost = series(same, "val/loss")[-1][1]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    raw = TEXT.encode()
    end = len(raw) - round(len(raw) * 0.1)
    before, after = (tokenizer(part.decode())["input_ids"] for part in (raw[:end], raw[end:]))
    tail = torch.tensor([before[-1], *after])
    old = GPT2LMHeadModel.from_pretrained(checkpoint)
    expected = [
        torch.nn.functional.cross_entropy(
            logits(old, tail[None, start : start + 16])[0][: len(tail) - 1 - start],
            tail[start + 1 : start + 17],
            reduction="sum",
        ).item()
        for start in range(0, len(tail) - 1, 16)
    ]
    assert lost == pytest.approx(sum(expected) / (len(tail) - 1), abs=1e-4)
    # Fewer groups raise the loss a little, and training lowers it again.
    run = train(tmp_path / "up", *common, *sizes, "attn=gqa", "optim.lr=0.01", "budget.steps=30")
    first, *_, last = [loss for _, loss in series(run, "train/loss")]
    assert last < first - 0.1
    assert summary(run)["init_from"] == str(checkpoint)
    # The run can be the source of another one, which takes its tokenizer, too.
    again = train(tmp_path / "next", f"init_from={run}", *common[1:], *sizes, "attn=mqa")
    assert load_run(again).tokenizer.fingerprint() == load_run(run).tokenizer.fingerprint()
    told = call("generate", f"run={again}", "prompt=Line", "tokens=5", "threads=1", "device=cpu")
    assert told[0] == 0


GIVE = r"error: init_from: \S+ differs from this run; give "
MISTAKES = [
    (["tokenizer=gpt2"], 2, GIVE + r"model\.vocab_size=416$"),
    (["model.qkv_bias=false"], 2, GIVE + r"tokenizer=gpt2 model\.qkv_bias=true$"),
    (
        ["tokenizer=gpt2", "block=llama", "position=none", "model.vocab_size=416"],
        2,
        GIVE + r"block=gpt2 position=learned block\.norm_eps=1e-05 model\.qkv_bias=true "
        r"block\.tied_head=true$",
    ),
    (["tokenizer=gpt2", "tokenizer.path=none"], 3, "error: tokenizer.path: none is not a folder; "),
    (["tokenizer=gpt2", "model.vocab_size=399"], 2, r"error: model.vocab_size: 399 is below"),
    (["tokenizer=gpt2", "tokenizer.sha256=00"], 3, "error: tokenizer.sha256: .* other tokens"),
]


def test_weights_of_fewer_ids_than_the_tokenizer_has_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small = make_gpt2(tmp_path / "small", 30, tokenizer=False)
    capfd.readouterr()  # drop transformers' progress bar
    assert command(tmp_path, *tiny(tmp_path, *SIZES, f"init_from={small}")) == 2
    said = "error: init_from: it has 30 ids, but tokenizer=byte has 256; use the tokenizer that "
    assert capfd.readouterr().err.startswith(said)


@pytest.mark.parametrize(("overrides", "code", "said"), MISTAKES)
def test_a_mistake_is_one_line_that_names_the_setting_to_give(
    overrides: list[str],
    code: int,
    said: str,
    checkpoint: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    arguments = tiny(tmp_path, *SIZES, f"init_from={checkpoint}", *overrides)
    capfd.readouterr()
    assert command(tmp_path, *arguments) == code
    (line,) = capfd.readouterr().err.splitlines()
    assert re.match(said, line), line
    assert not (tmp_path / "outputs").exists()


def test_the_settings_that_a_mistake_names_are_those_that_work(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = tiny(tmp_path, f"init_from={checkpoint}", "model.d_mlp=9", "position=none")
    for _ in range(3):
        if command(tmp_path, *arguments) == 0:
            break
        line = capfd.readouterr().err
        arguments += re.findall(r"[\w.]+=\S+", line.partition("; give ")[2])
    else:
        pytest.fail(line)


def test_a_gpt2_without_a_tokenizer_is_said_to_be_one(tmp_path: Path, call: Call) -> None:
    bare = make_gpt2(tmp_path / "bare", 300, tokenizer=False)
    code, said, _ = call("convert", "from=gpt2", f"path={bare}", "to=gqa")
    assert code == 0
    assert "no tokenizer found; recorded the byte tokenizer. " in said
    assert load_run(tmp_path / "bare_to_gqa").tokenizer.vocab_size == 256
    small = make_gpt2(tmp_path / "small", 30, tokenizer=False)
    code, _, err = call("convert", "from=gpt2", f"path={small}", "to=gqa")
    assert code == 2
    assert "byte tokenizer has 256 ids, the model 30" in err
    assert call("convert", "from=gpt2", f"path={small}", "to=hf")[0] == 0
    lacking = make_gpt2(tmp_path / "lacking", 399)
    code, _, err = call("convert", "from=gpt2", f"path={lacking}", "to=hf")
    assert code == 2
    assert "the tokenizer has 400 ids, the model 399" in err
    assert not (tmp_path / "lacking_to_hf").exists()


DAMAGE = {
    "missing": (lambda folder: shutil.rmtree(folder), 4, "has no config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), 4, "does not exist"),
    "cut": (lambda folder: cut(folder / "model.safetensors"), 4, "cannot be read"),
    "cut config": (lambda folder: cut(folder / "config.json"), 4, "config.json cannot be used"),
    "brackets": (lambda folder: (folder / "config.json").write_text("[" * 99_999), 4, "be used"),
    "llama": (
        lambda folder: change(folder / "config.json", model_type="llama"),
        4,
        "model_type is 'llama', but must be 'gpt2'",
    ),
    "vocabulary": (lambda folder: change(folder / "config.json", vocab_size=400), 4, "wte.weight"),
    "cut tokens": (lambda folder: cut(folder / "vocab.json"), 3, "vocab.json cannot be used"),
}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_one_line_and_nothing_is_written(
    damage: str, checkpoint: Path, tmp_path: Path, call: Call
) -> None:
    source = shutil.copytree(checkpoint, tmp_path / "source")
    act, expected, said = DAMAGE[damage]
    act(source)
    code, _, err = call("convert", "from=gpt2", f"path={source}", "to=gqa")
    (line,) = err.splitlines()
    assert code == expected, line
    assert re.search(said, line), line
    assert not (tmp_path / "source_to_gqa").exists()


def test_convert_takes_a_name_on_the_hub_where_no_such_folder_is(
    checkpoint: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo, revision))
        assert {"config.json", "model.safetensors.index.json"} < set(allow_patterns)
        assert any(fnmatch("model-00002-of-00003.safetensors", name) for name in allow_patterns)
        return str(checkpoint)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    for path in ("owner/small", "hf:owner/small2@v1"):
        assert call("convert", "from=gpt2", f"path={path}", "to=gqa")[0] == 0
    assert asked == [("owner/small", None), ("owner/small2", "v1")]
    assert load_run(tmp_path / "outputs" / "small_to_gqa").tokenizer.vocab_size == 400
    assert (tmp_path / "outputs" / "small2_to_gqa").is_dir()
    (tmp_path / "owner" / "small").mkdir(parents=True)
    code, _, err = call("convert", "from=gpt2", "path=owner/small", "to=mqa")
    assert code == 4
    assert "owner/small has no config.json" in err
    assert len(asked) == 2


def test_a_run_starts_from_a_name_on_the_hub(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(checkpoint))
    sizes = [*SIZES, "model.qkv_bias=true", "model.vocab_size=416"]
    run = train(tmp_path, *sizes, "init_from=hf:owner/small@main", "tokenizer=gpt2", "attn=gqa")
    assert load_config(run).tokenizer["path"] == str(checkpoint)

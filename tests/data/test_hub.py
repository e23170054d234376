"""Names on the hub: the requests, and the messages when the hub does not answer. No network."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from gptattn.data.hub import local_folder
from gptattn.errors import CheckpointError, ConfigError

FILES = ("config.json", "model.safetensors")


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[Any]]:
    """Make the hub return a folder or raise an error; returns the list of its requests."""

    def set_answer(given: Any) -> list[Any]:
        asked: list[Any] = []

        def download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
            asked.append((repo, revision, allow_patterns))
            if isinstance(given, Exception):
                raise given
            return str(given)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return asked

    return set_answer


def test_a_name_is_fetched_with_only_the_files_that_are_needed(answer, tmp_path: Path) -> None:
    asked = answer(tmp_path)
    assert local_folder("hf:openai-community/gpt2", "init_from", FILES) == tmp_path
    assert local_folder("hf:a.b/c_d@refs/pr/2", "path", FILES) == tmp_path
    assert local_folder("hf/x", "init_from", FILES) == Path("hf/x")  # whether it exists or not
    for name in ("hf:", "hf:gpt2", "hf:a/b/c", "hf:a b/c", "hf:a/b@", "hf:../x/y"):
        with pytest.raises(ConfigError, match=r"^init_from: .* is not a name on the hub; give hf:"):
            local_folder(name, "init_from", FILES)
    assert asked == [
        ("openai-community/gpt2", None, list(FILES)),
        ("a.b/c_d", "refs/pr/2", list(FILES)),
    ]


def test_a_failure_is_one_line_with_exit_code_4(answer) -> None:
    answer(errors.LocalEntryNotFoundError("no route\nand more"))
    with pytest.raises(CheckpointError) as raised:
        local_folder("hf:owner/other@v9", "init_from", FILES)
    assert str(raised.value) == (
        "init_from: hf:owner/other@v9 cannot be fetched (LocalEntryNotFoundError: no route); check "
        "the name, the network and your login (hf auth login), or give a folder"
    )
    assert raised.value.exit_code == 4
    answer(OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space"):  # no fault of the name
        local_folder("hf:owner/other", "init_from", FILES)

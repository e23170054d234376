"""Write a model that was not trained here as a folder that `load.py` reads."""

from pathlib import Path

from gptattn.data.tokenizer import Tokenizer
from gptattn.errors import CheckpointError
from gptattn.model.gpt import GPT
from gptattn.runs.folder import RunFolder
from gptattn.runs.tensor_file import write_tensors
from gptattn.settings.config import TrainConfig


def save_model(folder: Path, cfg: TrainConfig, model: GPT, tokenizer: Tokenizer) -> None:
    """Write a folder that `load_run` reads. Raises CheckpointError if it already holds a run."""
    refuse_taken(folder)
    made = RunFolder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    made.write_tokenizer(tokenizer.files())
    write_tensors(made.weights_file, model.state_dict(), {})
    made.write_settings(cfg)


def refuse_taken(folder: Path) -> None:
    """Raise CheckpointError if the folder to write already holds a run or a model."""
    there = RunFolder(folder)
    for file in (there.config_file, folder / "config.json", there.weights_file):
        if file.exists():
            raise CheckpointError(
                "out", f"{folder} already holds a {file.name}; give another folder"
            )

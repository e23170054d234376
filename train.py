"""Trains a model: `python train.py attn=gqa`. Hydra composes the settings for training/run.py."""

import hydra
from omegaconf import DictConfig

from gptattn.cli.train import CONF, end, run_job


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def main(cfg: DictConfig) -> float:
    """Train a run with these settings; return its validation loss."""
    return run_job(cfg)


if __name__ == "__main__":
    end(main)

"""The command lines: Hydra's side of `train.py`, and the scripts' arguments. It may import every
other room; Hydra and OmegaConf are known here and in `hydra_plugins` alone. Start reading at
`main.py`.
"""

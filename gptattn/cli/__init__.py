"""The command lines: `train.py`, which uses Hydra, and the other commands' arguments. It may import
every other room. Only this room and `hydra_plugins` import Hydra and OmegaConf. Start reading at
`main.py`.
"""

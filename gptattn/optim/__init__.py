"""Optimizers of the layers' matrices. Each file in `conf/optim` may name the class of one."""

from gptattn.optim.matrix_rule import MatrixRule
from gptattn.optim.muon import Muon

__all__ = ["MatrixRule", "Muon"]

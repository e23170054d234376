"""Rules that update the layers' matrices in place of AdamW; a file in `conf/optim` names one. It
may import `errors` and `machine`. Start reading at `matrix_rule.py`.
"""

from gptattn.optim.matrix_rule import MatrixRule
from gptattn.optim.muon import Muon

"""Backends against the reference, for rules, shapes and positions that hypothesis draws."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from torch import Tensor

from gptattn.attention import Rule, attend, core
from gptattn.attention.rule import Decay
from gptattn.position import Positions

# hypothesis keeps files between runs: keep them outside of the repository.
set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "gptattn-hypothesis")


@dataclass(frozen=True)
class Case:
    """One call of `attend`: T queries, after `held` further tokens and before `later` ones."""

    B: int
    G: int
    R: int
    T: int
    held: int
    later: int
    D: int
    wider: int  # values than queries and keys
    window: int | None
    softcap: float | None
    sink: bool
    decay: float | None  # the most that one token takes off
    one_decay: bool  # for all rows, as with ALiBi
    padded: bool
    ring: bool  # keys in any order
    seed: int

    @property
    def S(self) -> int:
        return self.held + self.T + self.later

    def positions(self) -> tuple[Positions, Positions]:
        q_pos, k_pos = range(self.held, self.held + self.T), range(self.S)
        if self.ring and not self.padded:
            return q_pos, torch.randperm(self.S)
        if not self.padded:
            return q_pos, k_pos
        padding_B1 = torch.randint(self.S + 1, (self.B, 1))
        q, k = (torch.tensor(p) - padding_B1 for p in (q_pos, k_pos))
        return q.clamp_min(-1), k.clamp_min(-1)

    def tensors(self) -> list[Tensor]:
        """Return q, k, v, the sinks and the running sum of what is taken off."""
        H, kept = self.G * self.R, 1 if self.one_decay else self.B
        shapes = (
            (self.B, H, self.T, self.D),
            (self.B, self.G, self.S, self.D),
            (self.B, self.G, self.S, self.D + self.wider),
            (H,),
        )
        lost_BHS = (self.decay or 0.0) * torch.rand(kept, H, self.S, dtype=torch.float64)
        drawn = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        return [*drawn, -lost_BHS.cumsum(-1)]


cases = st.builds(
    Case,
    B=st.sampled_from([1, 2, 3]),
    G=st.sampled_from([1, 2, 3]),
    R=st.sampled_from([1, 2, 5]),
    T=st.sampled_from([1, 2, 7, 31, 67]),
    held=st.sampled_from([0, 0, 1, 5, 37]),
    later=st.sampled_from([0, 0, 2]),
    D=st.sampled_from([1, 5, 8]),
    wider=st.sampled_from([0, 0, 2]),
    window=st.none() | st.sampled_from([1, 2, 11, 17, 40, 200]),
    softcap=st.sampled_from([None, None, 0.7]),
    sink=st.booleans(),
    decay=st.sampled_from([None, 0.01, 3.0]),
    one_decay=st.booleans(),
    padded=st.booleans(),
    ring=st.sampled_from([False, False, True]),
    seed=st.integers(0, 2**16),
)


def run(case: Case, backend: str, dtype: torch.dtype) -> list[Tensor]:
    """Return the output and the gradients of all inputs."""
    torch.manual_seed(case.seed)
    inputs = [x.to(dtype).requires_grad_() for x in case.tensors()]
    q_pos, k_pos = case.positions()
    q, k, v, sink_H, c = inputs
    decay = Decay(c[..., case.held : case.held + case.T], c)
    rule = Rule(0.6, case.window, case.softcap, None, sink_H if case.sink else None)
    rule = rule if case.decay is None else replace(rule, decay=decay)
    at = {"q_pos": q_pos, "k_pos": k_pos}
    y = attend(q, k, v, rule, **at, backend=backend)
    with torch.no_grad():  # decoding may go another way
        assert_near([attend(q, k, v, rule, **at, backend=backend)], [y])
    upstream = torch.randn(y.shape, dtype=torch.float64).to(dtype)
    gradients = torch.autograd.grad(y, inputs, upstream, materialize_grads=True)
    return [y.detach(), *gradients]


def assert_near(actual: list[Tensor], expected: list[Tensor]) -> None:
    near = 1e-12 if actual[0].dtype == torch.float64 else 1e-5
    for a, e in zip(actual, expected, strict=True):
        most = max(1.0, e.abs().max().item() if e.numel() else 0.0)
        torch.testing.assert_close(a.double(), e.double(), rtol=0, atol=near * most)


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(case=cases)
def test_sdpa_is_the_reference_in_outputs_and_gradients_for_any_rule_and_positions(case):
    expected = run(case, "reference", torch.float64)
    # Blocks of 8 queries, so that small sizes have several.
    with patch.object(core, "BLOCK", 8):
        for dtype in (torch.float64, torch.float32):
            assert_near(run(case, "sdpa", dtype), expected)

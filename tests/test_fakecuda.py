"""The counts on fake CUDA tensors, of programs whose kernels can be counted by hand."""

import pytest
import torch
import torch.nn.functional as F
from fakecuda import Counts, count_on_cuda

N, D, V = 1000, 64, 512


def test_kernels_bytes_and_products_are_those_of_the_program():
    def program(counts: Counts) -> tuple[list[str], float, float]:
        x = torch.empty(N, D, device="cuda", requires_grad=True)
        w = torch.empty(D, V, device="cuda", requires_grad=True)
        counts.tag = "forward"
        loss = F.relu(x @ w).sum()
        counts.tag = "backward"
        loss.backward()
        assert x.grad is not None
        assert x.grad.is_cuda
        names = [kernel.name for kernel in counts.of("forward")]
        return names, counts.gigabytes("forward"), counts.teraflops("backward")

    names, gigabytes, teraflops = count_on_cuda(program)
    assert names == ["mm", "relu", "sum"]
    assert gigabytes == 4 * (3 * N * V + 1) / 1e9  # relu reads and writes, sum reads
    assert teraflops == 2 * 2 * N * D * V / 1e12


def test_a_gather_moves_what_it_returns_and_expanded_axes_cost_nothing():
    def program(counts: Counts) -> list[tuple[str, int]]:
        x = torch.empty(N, V, dtype=torch.bfloat16, device="cuda")
        at = torch.empty(N, 1, dtype=torch.int64, device="cuda")
        x.gather(1, at)
        x.add_(torch.empty(1, V, dtype=torch.bfloat16, device="cuda").expand(N, V))
        return [(kernel.name, kernel.bytes) for kernel in counts.kernels]

    assert count_on_cuda(program) == [
        ("gather", N * (8 + 2 * 2)),
        ("add_", 2 * N * V * 2 + 2 * V),
    ]


def test_only_what_the_host_waits_for_is_named():
    def program(counts: Counts) -> list[str]:
        on_host = torch.empty(N)
        x = on_host.to("cuda", non_blocking=True)
        (x + torch.tensor(1.0)).to("cpu", non_blocking=True)
        x.copy_(on_host, non_blocking=True)
        assert counts.waits == []
        on_host.to("cuda")
        x.copy_(on_host)
        assert x.sum().item() == 1
        assert len(x.nonzero()) == N
        x.cpu()
        return counts.waits

    waits = ["_to_copy", "copy_", "_local_scalar_dense", "nonzero", "_to_copy"]
    assert count_on_cuda(program) == waits


def test_an_error_there_fails_here():
    def program(counts: Counts) -> None:
        raise ValueError("seen")

    with pytest.raises(AssertionError, match="ValueError: seen"):
        count_on_cuda(program)

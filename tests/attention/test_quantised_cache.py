"""Packed caches: numbers worked out by hand; tests/evaluate decodes with them."""

import pytest
import torch
from torch import Tensor

from gptattn.attention import Entry, new_token_cache
from gptattn.attention.quantised_cache import BFloat16, Format, Int4, Int8, QuantisedCache

FLOAT, CPU = torch.float32, torch.device("cpu")
FORMS: dict[str, Format] = {"bf16": BFloat16(), "int8": Int8(), "int4": Int4()}


def packed(form: Format, size: int, capacity: int = 6, **more: Entry) -> QuantisedCache:
    kept = {"k": Entry(heads=2, size=size), **more}
    return QuantisedCache(new_token_cache(kept, 3, capacity, FLOAT, CPU), kept, form)


def there_and_back(form: Format, x: Tensor) -> Tensor:
    return form.unpack(form.pack(x), x.shape[-1], x.dtype)


def test_int8_by_hand():
    # The largest is 254, so the scale is 2: codes 127, -50, 0 (0.9 / 2 rounds to 0), 2 and -127.
    parts = Int8().pack(torch.tensor([254.0, -99.6, 0.9, 3.2, -254.0]))
    assert parts["scale"].tolist() == [2.0]
    assert parts["codes"].tolist() == [127, -50, 0, 2, -127]
    assert parts["codes"].dtype == torch.int8
    assert Int8().unpack(parts, 5, FLOAT).tolist() == [254.0, -100.0, 0.0, 4.0, -254.0]


def test_int4_by_hand_with_two_codes_in_a_byte():
    # From -2 to 5.5 in steps of 0.5: codes 0, 15, 4 and 7 (1.4 is 6.8 steps up), and one alone.
    parts = Int4().pack(torch.tensor([-2.0, 5.5, 0.0, 1.4, 5.0]))
    assert (parts["zero"].tolist(), parts["scale"].tolist()) == ([-2.0], [0.5])
    assert parts["codes"].tolist() == [0 + 16 * 15, 4 + 16 * 7, 14]
    assert parts["codes"].dtype == torch.uint8
    assert Int4().unpack(parts, 5, FLOAT).tolist() == [-2.0, 5.5, 0.0, 1.5, 5.0]


def test_int4_groups_have_their_own_scales_and_the_last_can_be_shorter():
    small, large, few = torch.linspace(0, 15, 32) / 64, torch.linspace(-1, 1, 32), torch.ones(3)
    parts = Int4().pack(torch.cat([small, large, few]))
    assert parts["zero"].tolist() == [0.0, -1.0, 1.0]
    assert parts["scale"].tolist() == pytest.approx([1 / 64, 2 / 15, 0.0], rel=1e-3)
    back = Int4().unpack(parts, 67, FLOAT)
    assert (back[:32] - small).abs().max() <= 1 / 128 + 1e-6
    assert back[64:].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_numbers_that_are_all_the_same_or_very_large_stay_finite(form):
    for x in (torch.zeros(9), torch.full((9,), 0.25), torch.full((9,), 1e-9)):
        assert torch.allclose(there_and_back(form, x), x, rtol=4e-3, atol=1e-7)
    assert torch.isfinite(there_and_back(form, torch.linspace(-1e30, 1e30, 9))).all()


def test_running_sums_and_single_numbers_stay_as_they_are():
    cache = packed(Int8(), 8, sums=Entry(4, 1, wide=True), few=Entry(5, 7))
    new = {"k": torch.randn(3, 2, 2, 8), "sums": torch.randn(3, 4, 2, 1) * 1e3}
    new |= {"few": torch.randn(3, 5, 2, 7)}
    held, k_pos = cache.write(new)
    cache.advance(2)
    assert k_pos == range(2)
    for name in ("sums", "few"):
        assert torch.equal(held[name], new[name])
        assert torch.equal(cache.newest(name), new[name][:, :, -1:])
    assert torch.equal(held["k"], there_and_back(Int8(), new["k"]))

"""Attention weights as an image, without a plotting library."""

import numpy as np
from numpy.typing import NDArray

# Five anchors of viridis (Smith and van der Walt 2015): dark for 0, yellow for 1.
_VIRIDIS = np.array(
    [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], dtype=np.float64
)


def heatmap(w_HTS: NDArray[np.floating], pixels: int = 4, gap: int = 6) -> NDArray[np.uint8]:
    """Return an image of the heads side by side [height, width, 3]: rows are queries, columns keys.

    Brightness is the square root of the weight, so that small weights can be seen. A token has
    `pixels` pixels, and `gap` white ones separate two heads.
    """
    H, T, S = w_HTS.shape
    image = np.full((T * pixels, H * (S * pixels + gap) - gap, 3), 255, dtype=np.uint8)
    for head in range(H):
        left = head * (S * pixels + gap)
        tile = viridis(np.sqrt(w_HTS[head].clip(0, 1)))
        image[:, left : left + S * pixels] = tile.repeat(pixels, axis=0).repeat(pixels, axis=1)
    return image


def viridis(value: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Return the colours [..., 3] of values from 0 to 1."""
    anchors = np.linspace(0, 1, len(_VIRIDIS))
    channels = [np.interp(value, anchors, _VIRIDIS[:, c]) for c in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)

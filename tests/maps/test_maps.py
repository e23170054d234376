"""What is shown of attention weights: labels, cells, the picture's pixels, the page's data."""

import base64
import io
import json
import re

import numpy as np
from matplotlib.image import imread

from gptattn.data.tokenizer import ByteTokenizer
from gptattn.maps import layer_picture as figure
from gptattn.maps.heatmap import pack_cells
from gptattn.maps.labels import label_tokens, make_visible, shorten
from gptattn.maps.layer_picture import draw_layer
from gptattn.maps.map_page import Layer, render_page

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    " {{ 7*7 }} $x^2$ '\" &amp;\u202e\0"
)


def causal(H: int, T: int) -> np.ndarray:
    w = np.tril(np.random.default_rng(0).random((H, T, T)))
    return w / w.sum(-1, keepdims=True)


def test_bytes_of_a_split_character_show_their_number():
    text = "aï\n 中"
    ids = ByteTokenizer().encode(text, "prompt")
    assert label_tokens(ByteTokenizer(), ids) == [
        *("a", "\\xc3", "\\xaf", "⏎", "␣", "\\xe4", "\\xb8", "\\xad"),
    ]


def test_nothing_invisible_or_turning_is_left():
    text = "a\x00\x1b[31m\r\u202e\u200b\xa0\u2028\u0301\ufeff"
    shown = make_visible(text)
    assert shown == "aU+0000U+001B[31mU+000DU+202EU+200BU+00A0U+2028◌\u0301U+FEFF"
    assert shown.isprintable()
    assert shorten("x" * 12) == "x" * 12
    assert shorten("x" * 13) == "x" * 11 + "…"


def pixel(image: np.ndarray, row: float, column: float, T: int) -> tuple[int, ...]:
    """Return the colour at a place in the first panel, given in tokens from its corner."""
    side = figure.MIN
    left, top = figure.LABELS + side * column / T, figure.TOP + side * row / T
    return tuple(round(255 * c) for c in image[round(150 * top), round(150 * left), :3])


def test_the_picture_has_colour_where_the_weight_is():
    w_HTS = np.array([[[1, 0, 0], [0, 1, 0], [1, 0, 0]]], dtype=np.float64)
    image = imread(io.BytesIO(draw_layer(w_HTS, ["a", "b", "c"], ["head 0"], "title")))
    yellow, dark, white = (253, 231, 36), (68, 1, 84), (255, 255, 255)
    expected = [[yellow, white, white], [dark, yellow, white], [yellow, dark, dark]]
    found = [[pixel(image, i + 0.5, j + 0.5, 3) for j in range(3)] for i in range(3)]
    assert found == expected


def test_any_text_can_stand_in_a_picture():
    labels = ["中", "👍", "$x^", "_a", "א", "\\alpha", make_visible("\0")]
    png = draw_layer(causal(5, 7), labels, ["h"] * 5, make_visible(HOSTILE))
    assert png.startswith(b"\x89PNG")


def test_a_character_is_drawn_by_any_font_that_has_it(monkeypatch):
    before = draw_layer(causal(1, 3), ["\u23b0", "b", "a"], ["h"], "t")
    # It comes with matplotlib, and has this character, which DejaVu Sans lacks.
    monkeypatch.setattr(figure, "FONTS", ("DejaVu Sans", "not installed", "STIXSizeOneSym"))
    drawn = draw_layer(causal(1, 3), ["\u23b0", "b", "a"], ["h"], "t")
    assert drawn != before


def page(w_LHTS: np.ndarray, labels: list[str]) -> str:
    layers = [
        Layer(number, [1.5] * len(w_HTS), [0.25] * len(w_HTS), pack_cells(w_HTS))
        for number, w_HTS in enumerate(w_LHTS)
    ]
    words = {"run": HOSTILE, "variant": "mha", "prompt": HOSTILE}
    return render_page(layers, **words, labels=labels, uniform=(1.25, 0.5))


def scripts(text: str) -> list[tuple[str, str]]:
    """The attributes and the content of each script, as a browser finds them."""
    return re.findall(r"<script(.*?)>(.*?)</script", text, re.DOTALL | re.IGNORECASE)


def test_the_page_holds_every_weight_and_label():
    w_LHTS = np.stack([causal(2, 5), causal(2, 5)[::-1]])
    labels = ["a", "␣", make_visible("\n"), "</script>", "中"]
    text = page(w_LHTS, labels)
    data = json.loads(scripts(text)[0][1])
    assert data["labels"] == labels
    for layer, w_HTS in zip(data["layers"], w_LHTS, strict=True):
        for packed, w_TS in zip(layer["heads"], w_HTS, strict=True):
            cells = np.frombuffer(base64.b64decode(packed), dtype=np.uint8)
            np.testing.assert_allclose((cells / 255) ** 2, w_TS[np.tril_indices(5)], atol=0.004)
    colours = np.frombuffer(base64.b64decode(data["colours"]), dtype=np.uint8).reshape(256, 3)
    assert colours[[0, 255]].tolist() == [[68, 1, 84], [253, 231, 36]]
    heads = re.findall(r'<button .*?data-layer="(\d)" data-head="(\d)"', text)
    assert heads == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]

"""Pictures are drawn from records and predictions, whatever of them there is."""

import io

import numpy as np
import pytest
from PIL import Image

from convjax.data import ArraySource, make_dataset
from convjax.training.errors import RunError
from convjax.training.pictures import draw_curves, draw_predictions


def pixels(path) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(path.read_bytes())).convert("RGB"))


def test_curves_show_the_records(tmp_path):
    records = [{"step": step, "loss": 1 / step, "accuracy": 0.5} for step in (1, 2, 3)]
    records.append({"step": 3, "test_loss": 0.4, "test_accuracy": 0.6})
    draw_curves(records, tmp_path / "some.png")
    draw_curves([], tmp_path / "none.png")
    assert np.any(pixels(tmp_path / "some.png") != pixels(tmp_path / "none.png"))


@pytest.mark.parametrize("channels", [1, 3])
def test_wrong_predictions_look_different(tmp_path, channels):
    images = np.full((3, 8, 8, channels), 200, np.uint8)
    source = ArraySource(images, np.array([0, 1, 1]), ("cat", "dog"))
    data = make_dataset(source, batch_size=2, train=False)
    draw_predictions(data, np.array([0, 1, 1], np.int32), tmp_path / "right.png")
    draw_predictions(data, np.array([0, 1, 0], np.int32), tmp_path / "wrong.png")
    assert np.any(pixels(tmp_path / "right.png") != pixels(tmp_path / "wrong.png"))


def test_an_unwritable_place_is_named(tmp_path):
    path = tmp_path / "missing" / "curves.png"
    with pytest.raises(RunError, match=f"cannot write {path}: No such file or directory"):
        draw_curves([], path)

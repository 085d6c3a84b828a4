"""What a finished run looks like: its curves, and test images with what they were taken for.

matplotlib is drawn on through its objects: pyplot would look for a screen, and takes seconds.
"""

from pathlib import Path

import numpy as np
from jaxtyping import Int32
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from convjax.data import Dataset
from convjax.training.metrics import Record
from convjax.training.workdir import writing

_CURVES = (
    ("loss", "loss", "test_loss"),
    ("accuracy", "accuracy", "test_accuracy"),
    ("learning rate", "learning_rate", None),
)


def draw_curves(records: list[Record], path: Path) -> None:
    """Draw loss, accuracy and learning rate over the steps into a PNG file.

    Raises:
      RunError: the file cannot be written.
    """
    figure = Figure(figsize=(12, 3.5), layout="constrained")
    for axes, (title, training, test) in zip(figure.subplots(1, 3), _CURVES, strict=True):
        _draw_curve(axes, records, training, "training")
        if test is not None:
            _draw_curve(axes, records, test, "test")
        if len(axes.lines) > 1:
            axes.legend()
        axes.set(title=title, xlabel="step")
    with writing(path):
        figure.savefig(path, dpi=120)


def draw_predictions(
    data: Dataset,
    predictions: Int32[np.ndarray, " n"],
    path: Path,
    *,
    rows: int = 4,
    columns: int = 8,
) -> None:
    """Draw evenly spaced images of a split into a PNG file, each under its predicted class.

    Args:
      data: made with `train=False`.
      predictions: the class of each image in the split's order.
      path: of the picture.
      rows: of images.
      columns: of images.

    Raises:
      RunError: the file cannot be written.
    """
    figure = Figure(figsize=(1.4 * columns, 1.7 * rows), layout="constrained")
    count = min(rows * columns, len(predictions))
    chosen = np.linspace(0, len(predictions) - 1, count).round().astype(int)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid:
        axes.set_axis_off()
    for axes, index in zip(grid, chosen.tolist(), strict=False):
        example, names = data.source[index], data.source.class_names
        label, prediction = example["label"], int(predictions[index])
        right = label == prediction
        title = names[prediction] if right else f"{names[prediction]}\n(is {names[label]})"
        image = data.augmentation.centred(example["image"])
        grey = image.shape[-1] == 1
        axes.imshow(image.squeeze(-1) if grey else image, cmap="gray", vmin=0, vmax=255)
        axes.set_title(title, fontsize=7, color="black" if right else "firebrick")
    with writing(path):
        figure.savefig(path, dpi=120)


def _draw_curve(axes: Axes, records: list[Record], name: str, label: str) -> None:
    points = [(record["step"], record[name]) for record in records if name in record]
    if points:
        marker = "." if label == "test" or len(points) == 1 else ""
        axes.plot(*zip(*points, strict=True), label=label, marker=marker)

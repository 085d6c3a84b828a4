"""Each transform does what it says to every image, and the same from the same generator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convjax.data.augmentation import (
    Augmentation,
    centre_crop,
    horizontal_flip,
    normalise,
    pad_crop,
    random_crop,
    random_resized_crop,
    resize,
    resize_short_side,
)


def numbered(height, width, channels=1):
    """An image whose pixels are all different, as far as a byte goes, and never 0."""
    count = height * width * channels
    return (np.arange(count) % 255 + 1).astype(np.uint8).reshape(height, width, channels)


def windows(image, height, width):
    """Every window of a size, as bytes."""
    return {
        image[top : top + height, left : left + width].tobytes()
        for top in range(image.shape[0] - height + 1)
        for left in range(image.shape[1] - width + 1)
    }


def test_centre_crop_literal():
    image = numbered(4, 5)
    np.testing.assert_array_equal(centre_crop(image, 2)[..., 0], [[7, 8], [12, 13]])
    np.testing.assert_array_equal(centre_crop(image, 4), image[:, :4])


@pytest.mark.parametrize(
    "crop", [centre_crop, lambda image, side: random_crop(image, side, np.random.default_rng(0))]
)
def test_crop_that_does_not_fit(crop):
    with pytest.raises(ValueError, match="crop=4 does not fit into an image of 3x9; set resize"):
        crop(numbered(3, 9), 4)


def test_random_crop_takes_every_window_and_no_other():
    image, rng = numbered(4, 5), np.random.default_rng(0)
    seen = {random_crop(image, 3, rng).tobytes() for _ in range(200)}
    assert seen == windows(image, 3, 3)


def test_pad_crop_takes_every_window_of_the_padded_image_and_no_other():
    image, rng = numbered(3, 4), np.random.default_rng(0)
    seen = {pad_crop(image, rng, padding=1).tobytes() for _ in range(300)}
    assert seen == windows(np.pad(image, ((1, 1), (1, 1), (0, 0))), 3, 4)
    assert len(seen) == 9


def test_flip_mirrors_about_half():
    image, rng = numbered(3, 4, 3), np.random.default_rng(0)
    flipped = [horizontal_flip(image, rng).tobytes() for _ in range(1000)]
    assert set(flipped) == {image.tobytes(), image[:, ::-1].tobytes()}
    assert 430 < flipped.count(image.tobytes()) < 570


def test_resize_literal():
    image = np.array([[0, 100], [200, 40]], np.uint8)[..., None]
    np.testing.assert_array_equal(resize(image, (1, 1)), [[[85]]])
    np.testing.assert_array_equal(resize(image, (2, 2)), image)
    # Four columns from two: pixel centres at 1/4 and 3/4 of the way.
    np.testing.assert_array_equal(resize(image[:1], (1, 4))[0, :, 0], [0, 25, 75, 100])


def test_resize_keeps_colours_apart():
    image = np.zeros((6, 6, 3), np.uint8)
    image[..., 1] = 77
    assert np.unique(resize(image, (3, 9)).reshape(-1, 3), axis=0).tolist() == [[0, 77, 0]]
    with pytest.raises(ValueError, match="4 channels: resizing takes 1 or 3"):
        resize(np.zeros((6, 6, 4), np.uint8), (3, 3))


@pytest.mark.parametrize(
    ("height", "width", "shape"),
    [(300, 400, (256, 341, 3)), (400, 300, (341, 256, 3)), (100, 100, (256, 256, 3))],
)
def test_resize_short_side(height, width, shape):
    assert resize_short_side(numbered(height, width, 3), 256).shape == shape


@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**32), st.booleans()
)
def test_random_resized_crop_stays_inside(height, width, side, seed, colour):
    image = np.full((height, width, 3 if colour else 1), 200, np.uint8)
    cut = random_resized_crop(image, side, np.random.default_rng(seed))
    assert cut.shape == (side, side, image.shape[2])
    assert (cut == 200).all()


def test_random_resized_crop_of_everything_is_a_resize():
    image = numbered(12, 12)
    cut = random_resized_crop(
        image, 6, np.random.default_rng(0), scale=(1.0, 1.0), ratio=(1.0, 1.0)
    )
    np.testing.assert_array_equal(cut, resize(image, (6, 6)))


def test_random_resized_crop_falls_back_on_the_largest_central_part():
    # No part of a 4×40 strip has more than half of its area and an aspect of at most 4/3.
    image = numbered(4, 40)
    cut = random_resized_crop(image, 4, np.random.default_rng(0), scale=(0.5, 1.0))
    np.testing.assert_array_equal(cut, resize(image[:, 17:22], (4, 4)))


def test_random_resized_crop_areas_fill_the_scale():
    # Each pixel holds its row, so a part's first and last row tell its height.
    image = np.repeat(np.arange(200, dtype=np.uint8), 200).reshape(200, 200, 1)
    rng = np.random.default_rng(0)
    heights = []
    for _ in range(500):
        cut = random_resized_crop(image, 200, rng, scale=(0.25, 0.81), ratio=(1.0, 1.0))
        heights.append(int(cut.max()) - int(cut.min()) + 1)
    assert min(heights) == pytest.approx(100, abs=3)
    assert max(heights) == pytest.approx(180, abs=3)
    # The area is uniform, not the side: half of the parts have an area below 0.53.
    assert np.median(heights) == pytest.approx(200 * 0.53**0.5, abs=6)


def test_default_changes_nothing():
    image = numbered(5, 7, 3)
    augmentation = Augmentation()
    np.testing.assert_array_equal(augmentation.randomly(image, np.random.default_rng(0)), image)
    np.testing.assert_array_equal(augmentation.centred(image), image)
    assert not augmentation.fixes_size


@pytest.mark.parametrize(
    ("augmentation", "shape"),
    [
        (Augmentation(crop_padding=4, flip=True), (40, 50, 3)),
        (Augmentation(resize=32, crop=28, flip=True), (28, 28, 3)),
        (Augmentation(resize=32, crop=28, resized_crop=True, flip=True), (28, 28, 3)),
        (Augmentation(resize=20), (20, 25, 3)),
    ],
)
def test_recipes_are_pure_and_of_one_shape(augmentation, shape):
    image = numbered(40, 50, 3)
    before = image.copy()
    seen = [augmentation.randomly(image, np.random.default_rng(seed)) for seed in range(20)]
    again = [augmentation.randomly(image, np.random.default_rng(seed)) for seed in range(20)]
    np.testing.assert_array_equal(seen, again)
    assert {cut.shape for cut in seen} == {shape} == {augmentation.centred(image).shape}
    if augmentation.flip:
        assert len({cut.tobytes() for cut in seen}) > 10
    np.testing.assert_array_equal(image, before)


def test_evaluation_ignores_what_training_varies():
    image = numbered(40, 50, 3)
    plain = Augmentation(resize=32, crop=28).centred(image)
    varied = Augmentation(resize=32, crop=28, resized_crop=True, flip=True, scale=(0.5, 0.6))
    np.testing.assert_array_equal(plain, centre_crop(resize(image, (32, 40)), 28))
    np.testing.assert_array_equal(varied.centred(image), plain)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"resize": 0}, "resize=0 must be at least 1"),
        ({"crop": -3}, "crop=-3 must be at least 1"),
        ({"crop_padding": -1}, "crop_padding=-1 must not be negative"),
        ({"resize": 224, "crop": 256}, "crop=256 must fit into resize=224"),
        ({"crop_padding": 4, "crop": 28}, "crop_padding=4 and crop=28 exclude each other"),
        ({"resized_crop": True}, "resized_crop=True needs crop"),
        ({"scale": (0.0, 1.0)}, r"scale=\(0.0, 1.0\) must be increasing, in \(0, 1\]"),
        ({"scale": (0.5, 0.2)}, "scale="),
        ({"scale": (0.5, 1.5)}, "scale="),
        ({"ratio": (2.0, 1.0)}, "ratio="),
    ],
)
def test_contradictions_are_named(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        Augmentation(**fields)


def test_normalise_literal_under_jit():
    images = np.array([0, 51, 255, 255], np.uint8).reshape(1, 2, 1, 2)
    floats = jax.jit(lambda x: normalise(x, (0.2, 0.5), (0.5, 0.25)))(images)
    assert floats.dtype == jnp.float32
    np.testing.assert_allclose(floats.ravel(), [-0.4, -1.2, 1.6, 2.0], rtol=1e-6)


@pytest.mark.parametrize(("mean", "std"), [((0.5,), (1.0, 1.0, 1.0)), ((0.5,) * 3, (1.0,) * 2)])
def test_normalise_wants_a_value_a_channel(mean, std):
    with pytest.raises(ValueError, match="must have one value for each of channels=3"):
        normalise(jnp.zeros((1, 2, 2, 3), jnp.uint8), mean, std)

"""Batches are a pure function of seed and step, and cover a source exactly however it is shared."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convjax.data import ArraySource, Augmentation, BatchIterator, load_source, make_dataset
from convjax.data.pipeline import epoch_order

VARIED = Augmentation(crop_padding=2, flip=True)


def counting_source(length):
    """A source whose example i is the label i and an image full of i."""
    images = np.arange(length, dtype=np.uint8).reshape(-1, 1, 1, 1) * np.ones((5, 6, 1), np.uint8)
    return ArraySource(images, np.arange(length), tuple(map(str, range(length))))


def assert_same(one, other):
    assert one.keys() == other.keys() == {"image", "label", "mask"}
    for name in one:
        assert one[name].dtype == other[name].dtype
        np.testing.assert_array_equal(one[name], other[name])


def global_batch(source, step, processes, **options):
    """The rows of all processes, one after the other."""
    parts = [
        make_dataset(source, process_index=i, process_count=processes, **options).batch(step)
        for i in range(processes)
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def test_order_literal():
    # Fixed for good: these are ranks of a bit generator's raw stream, which numpy promises.
    assert epoch_order(10, 0, 0).tolist() == [0, 8, 9, 3, 7, 5, 1, 2, 6, 4]
    assert epoch_order(10, 0, 1).tolist() == [3, 7, 4, 2, 9, 8, 1, 6, 5, 0]
    assert epoch_order(10, 1, 0).tolist() == [2, 0, 1, 4, 5, 6, 7, 8, 3, 9]
    assert not epoch_order(10, 0, 0).flags.writeable


def test_order_visits_positions_evenly():
    orders = np.stack([epoch_order(8, 3, epoch) for epoch in range(2000)])
    counts = np.stack([np.bincount(orders[:, place], minlength=8) for place in range(8)])
    assert np.abs(counts - 250).max() < 75  # five standard deviations


@given(
    length=st.integers(1, 50),
    rows=st.integers(1, 9),
    processes=st.integers(1, 3),
    seed=st.integers(0, 2**40),
    train=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_each_example_once_an_epoch(length, rows, processes, seed, train, epoch):
    source = counting_source(length)
    options = {"batch_size": rows * processes, "seed": seed, "train": train}
    dataset = make_dataset(source, **options)
    epoch = epoch if train else 0
    steps = range(epoch * dataset.steps_per_epoch, (epoch + 1) * dataset.steps_per_epoch)
    batches = [global_batch(source, step, processes, **options) for step in steps]
    seen = np.concatenate([batch["label"][batch["mask"]] for batch in batches])
    assert sorted(seen.tolist()) == list(range(length))
    if not train:
        assert seen.tolist() == list(range(length))
    for batch in batches:
        assert batch["image"].shape == (rows * processes, 5, 6, 1)
        assert batch["image"].dtype == np.uint8
        assert batch["label"].dtype == np.int32
        np.testing.assert_array_equal(batch["image"][:, 0, 0, 0], batch["label"])
        # The padding repeats the batch's own real examples, in turn.
        real = batch["label"][batch["mask"]]
        assert batch["mask"].tolist() == [True] * len(real) + [False] * (
            len(batch["mask"]) - len(real)
        )
        np.testing.assert_array_equal(batch["label"], np.resize(real, rows * processes))


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_the_batch_of_one_process(processes):
    source = counting_source(20)
    options = {"batch_size": 6, "seed": 5, "augmentation": VARIED, "train": True}
    alone = make_dataset(source, **options)
    for step in range(2 * alone.steps_per_epoch):
        assert_same(alone.batch(step), global_batch(source, step, processes, **options))


def test_process_without_a_real_row_gets_real_images():
    source = counting_source(9)
    options = {"batch_size": 8, "seed": 0, "train": False, "process_count": 4}
    datasets = [make_dataset(source, process_index=i, **options) for i in range(4)]
    assert {dataset.steps_per_epoch for dataset in datasets} == {2}
    last = [dataset.batch(1) for dataset in datasets]
    assert [batch["mask"].tolist() for batch in last] == [[True, False]] + [[False, False]] * 3
    assert all(batch["label"].tolist() == [8, 8] for batch in last)


def test_epochs_differ_in_order_and_augmentation():
    dataset = make_dataset(
        counting_source(12), batch_size=12, seed=0, augmentation=VARIED, train=True
    )
    first, second = dataset.batch(0), dataset.batch(1)
    assert first["label"].tolist() != second["label"].tolist()
    same_order = [batch["image"][np.argsort(batch["label"])] for batch in (first, second)]
    assert (same_order[0] != same_order[1]).any(axis=(1, 2, 3)).sum() >= 8


def test_augmentation_depends_on_seed_epoch_and_example_alone():
    source = counting_source(12)
    by_label = []
    for batch_size in (12, 4):
        dataset = make_dataset(
            source, batch_size=batch_size, seed=7, augmentation=VARIED, train=True
        )
        batches = [dataset.batch(step) for step in range(dataset.steps_per_epoch)]
        labels = np.concatenate([batch["label"] for batch in batches])
        by_label.append(np.concatenate([batch["image"] for batch in batches])[np.argsort(labels)])
    np.testing.assert_array_equal(*by_label)
    other_seed = make_dataset(source, batch_size=12, seed=8, augmentation=VARIED, train=True)
    batch = other_seed.batch(0)
    assert (batch["image"][np.argsort(batch["label"])] != by_label[0]).any()


def test_first_training_rows_of_fashion_mnist_small_literal():
    source = load_source("fashion_mnist_small", "train")
    dataset = make_dataset(source, batch_size=128, seed=0, augmentation=VARIED, train=True)
    assert dataset.steps_per_epoch == 79
    assert dataset.image_shape == (28, 28, 1)
    assert dataset.batch(0)["label"][:12].tolist() == [6, 5, 3, 3, 6, 4, 3, 8, 1, 4, 7, 2]
    assert dataset.batch(78)["mask"].sum() == 10_000 - 78 * 128


def test_evaluation_is_one_pass_in_order():
    dataset = make_dataset(counting_source(10), batch_size=4, train=False, augmentation=VARIED)
    iterator = dataset.iterator()
    labels = [batch["label"].tolist() for batch in iterator]
    assert labels == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 8, 9]]
    iterator.close()
    for step in (-1, 3):
        with pytest.raises(IndexError, match=rf"step={step} must be in \[0, 3\)"):
            dataset.batch(step)


def test_evaluation_does_not_vary_images():
    source = counting_source(6)
    dataset = make_dataset(source, batch_size=6, train=False, augmentation=VARIED)
    np.testing.assert_array_equal(dataset.batch(0)["image"], source.images)


@pytest.mark.parametrize("stop", [0, 1, 5, 13])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_resumed_from_saved_state_is_the_uninterrupted_run(stop, num_threads):
    """Steps 0-17 are six epochs of three: the stops fall inside epochs and, at 0, before any."""
    options = {"batch_size": 4, "seed": 3, "augmentation": VARIED, "train": True}
    uninterrupted = make_dataset(counting_source(10), **options).iterator()
    expected = [next(uninterrupted) for _ in range(18)]
    uninterrupted.close()

    first = make_dataset(counting_source(10), **options).iterator(num_threads=num_threads)
    assert isinstance(first, BatchIterator)
    for _ in range(stop):
        next(first)
    saved = json.dumps(first.get_state())
    first.close()

    resumed = make_dataset(counting_source(10), **options).iterator(num_threads=num_threads)
    next(resumed)  # what was made ahead of time before the state is set must not show
    resumed.set_state(json.loads(saved))
    for step in range(stop, 18):
        assert_same(next(resumed), expected[step])
    resumed.close()


def test_iterator_gives_what_batch_gives():
    dataset = make_dataset(
        counting_source(7), batch_size=3, seed=1, augmentation=VARIED, train=True
    )
    iterator = dataset.iterator(num_threads=4, buffer_size=8)
    for step in range(20):
        assert_same(next(iterator), dataset.batch(step))
    iterator.close()


def test_closed_iterator_says_so():
    iterator = make_dataset(counting_source(7), batch_size=3, train=True).iterator()
    next(iterator)
    iterator.close()
    iterator.close()
    with pytest.raises(ValueError, match="closed iterator"):
        next(iterator)


def test_torn_first_image_is_named_before_any_work(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split / "leaf").mkdir(parents=True)
        (tmp_path / split / "leaf" / "torn.png").write_bytes(b"torn")
    source = load_source(f"folder:{tmp_path}", "train")
    with pytest.raises(ValueError, match=r"torn\.png is not a readable image"):
        make_dataset(source, batch_size=1, train=True, augmentation=Augmentation(resize=4, crop=4))


def test_error_in_a_thread_reaches_the_consumer():
    class Torn(ArraySource):
        def __getitem__(self, index, /):
            if index == 5:
                raise ValueError("example 5 is torn")
            return super().__getitem__(index)

    whole = counting_source(8)
    dataset = make_dataset(
        Torn(whole.images, whole.labels, whole.class_names), batch_size=2, train=False
    )
    iterator = dataset.iterator()
    assert [next(iterator)["label"].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="example 5 is torn"):
        next(iterator)
    iterator.close()


def test_interpreter_ends_with_an_iterator_left_open():
    code = (
        "from convjax.data import load_source, make_dataset; "
        "source = load_source('fashion_mnist_small', 'test'); "
        "iterator = make_dataset(source, batch_size=64, train=True).iterator(); "
        "print(next(iterator)['image'].shape)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert ran.stdout.strip() == "(64, 28, 28, 1)"


class SizedSource(ArraySource):
    """Images that may come in any size, for all that is said."""

    image_shape = None


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"batch_size": 0}, "process_count=1 must divide batch_size=0, both at least 1"),
        ({"batch_size": 8, "process_count": 3}, "process_count=3 must divide batch_size=8"),
        ({"batch_size": 8, "process_count": 0}, "process_count=0 must divide batch_size=8"),
        ({"batch_size": 8, "process_count": 2, "process_index": 2}, r"process_index=2 .* \[0, 2\)"),
        ({"batch_size": 8, "process_index": -1}, "process_index=-1"),
        ({"batch_size": 8, "seed": -1}, "seed=-1 must not be negative"),
        ({"batch_size": 8, "augmentation": Augmentation(crop=9)}, "crop=9 does not fit into"),
    ],
)
def test_bad_arguments_are_named(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_dataset(counting_source(10), train=True, **fields)


def test_sources_that_cannot_be_batched():
    with pytest.raises(ValueError, match="the source is empty"):
        make_dataset(counting_source(0), batch_size=8, train=True)
    whole = counting_source(4)
    sized = SizedSource(whole.images, whole.labels, whole.class_names)
    with pytest.raises(ValueError, match="vary in size; set crop"):
        make_dataset(sized, batch_size=4, train=True, augmentation=Augmentation(resize=5))
    cropped = make_dataset(sized, batch_size=4, train=True, augmentation=Augmentation(crop=3))
    assert cropped.image_shape == (3, 3, 1)

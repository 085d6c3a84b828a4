"""There and back in every format, and what is said of files that do not fit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from convjax.models import create_model
from convjax.weights import load_weights, save_weights
from convjax.weights.files import read_file, replace, write_file
from tests.convjax.weights.networks import ENDINGS, SMALL, assert_same, read, small

CASES = [
    pytest.param(name, form, ending, marks=[pytest.mark.slow] if name == "googlenet" else [])
    for name, (_, _, _, forms) in SMALL.items()
    for form in [*forms.split(), "convjax"]
    for ending in ENDINGS[form][: 2 if name == "resnet18" else 1]
]


@pytest.mark.parametrize(("name", "form", "ending"), CASES)
def test_there_and_back_is_exact(tmp_path, name, form, ending):
    model, variables = small(name)
    path = tmp_path / f"weights{ending}"
    save_weights(variables, path, target=form, model=model)
    assert_same(read(model, path, source=form), variables)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["resnet18", "alexnet_owt", "vgg11_bn"])
def test_convolutional_networks_are_known_by_their_variables(tmp_path, name):
    model, variables = small(name)
    save_weights(variables, tmp_path / "a.safetensors", target="torchvision", model=model)
    save_weights(variables, tmp_path / "b.safetensors", target="torchvision")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_heads_are_those_of_the_published_width_unless_a_model_says(tmp_path):
    model, variables = small("vit", width=192, depth=1)
    for path, given in (("three.npz", model), ("published.npz", None)):
        save_weights(variables, tmp_path / path, target="big_vision", model=given)
    name = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/bias"
    assert read_file(tmp_path / "published.npz")[name].shape == (3, 64)
    np.testing.assert_array_equal(
        read_file(tmp_path / "published.npz")[name], read_file(tmp_path / "three.npz")[name]
    )
    _, variables = small("vit")
    with pytest.raises(ValueError, match="width=12 is no published one, so save_weights needs"):
        save_weights(variables, tmp_path / "a.npz", target="big_vision")


def test_all_that_does_not_fit_is_said_at_once(tmp_path):
    model, variables = small("resnet18")
    path = tmp_path / "weights.safetensors"
    save_weights(variables, path, target="torchvision")
    tensors = read_file(path)
    del tensors["layer2.1.bn2.running_var"], tensors["conv1.weight"]
    tensors["fc.bias"] = tensors["fc.bias"][:3]
    tensors["fc.weight"] = tensors["fc.weight"].astype(np.int64)
    tensors |= {"layer9.weight": np.ones(1, np.float32), "extra": np.ones(1, np.float32)}
    write_file(path, tensors)
    with pytest.raises(ValueError, match="does not fit") as caught:
        load_weights(model, path, source="torchvision")
    assert str(caught.value) == (
        f"{path} does not fit the model; missing: conv1.weight, layer2.1.bn2.running_var; "
        "unexpected: extra, layer9.weight; unfit: fc.bias is float32[3], not float[5], "
        "fc.weight is int64[5, 8], not float[5, 8]"
    )


def test_long_lists_are_cut(tmp_path):
    model, _ = small("resnet18")
    path = tmp_path / "weights.safetensors"
    write_file(path, {"conv1.weight": np.ones((4, 3, 7, 7), np.float32)})
    with pytest.raises(ValueError, match=r"layer2\.0\.bn1\.weight and 21 more$"):
        load_weights(model, path, source="torchvision")


def test_counters_are_written_as_zero_and_not_missed(tmp_path):
    model, variables = small("resnet18")
    path = tmp_path / "weights.safetensors"
    save_weights(variables, path, target="timm")
    tensors = read_file(path)
    counters = [name for name in tensors if name.endswith("num_batches_tracked")]
    assert len(counters) == 8
    for name in counters:
        assert tensors[name].dtype == np.int64
        assert tensors.pop(name) == 0
    write_file(path, tensors)  # as files from before torch 0.4.1
    assert_same(load_weights(model, path, source="timm"), variables)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_floats_become_float32(tmp_path, dtype):
    model, variables = small("resnet18")
    path = tmp_path / "weights.safetensors"
    save_weights(variables, path, target="convjax")
    tensors = {name: tensor.astype(dtype) for name, tensor in read_file(path).items()}
    safetensors.numpy.save_file(tensors, path)
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf).astype(dtype).astype("f4"), variables)
    assert_same(load_weights(model, path, source="convjax"), rounded)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("vgg11_bn", "googlenet")]


@pytest.mark.parametrize("name", ["vit", *SLOW])
def test_a_new_head_for_other_classes(tmp_path, name):
    model, variables = small(name)
    path = tmp_path / "weights.safetensors"
    save_weights(variables, path, target="torchvision", model=model)
    wider, _ = small(name, num_classes=7)
    with pytest.raises(ValueError, match=r"unfit: .*\[5"):
        load_weights(wider, path, source="torchvision")
    with pytest.raises(ValueError, match="head='new' needs a key"):
        load_weights(wider, path, source="torchvision", head="new")
    key = jax.random.key(1)
    found = load_weights(wider, path, source="torchvision", head="new", key=key)
    side = SMALL[name][2]
    drawn = jax.jit(wider.init)(key, jnp.zeros((1, side, side, 3)))
    expected = jax.tree.map(lambda leaf: leaf, variables)
    expected["params"][wider.head] = drawn["params"][wider.head]
    for auxiliary in ("aux1", "aux2") if name == "googlenet" else ():
        expected["params"][auxiliary]["fc2"] = drawn["params"][auxiliary]["fc2"]
    assert_same(found, expected)


@pytest.mark.parametrize(("name", "form"), [("resnet18", "convjax"), ("vit", "timm")])
def test_a_model_without_a_head(tmp_path, name, form):
    model, variables = small(name)
    path = tmp_path / "weights.safetensors"
    save_weights(variables, path, target=form, model=model)
    headless, _ = small(name, num_classes=0)
    found = read(headless, path, source=form, head="new", key=jax.random.key(0))
    del variables["params"][model.head]
    assert_same(found, variables)


@pytest.mark.slow
def test_auxiliary_heads_are_left_out_where_the_model_has_none(tmp_path):
    _, variables = small("googlenet")
    save_weights(variables, tmp_path / "a.pth", target="torchvision")
    without, _ = small("googlenet", auxiliary_heads=False)
    found = load_weights(without, tmp_path / "a.pth", source="torchvision")
    for part in variables.values():
        del part["aux1"], part["aux2"]
    assert_same(found, variables)


@pytest.mark.parametrize("name", ["resnet18", "vgg13", "vit", "alexnet"])
def test_images_of_one_channel(tmp_path, name):
    model, variables = small(name, channels=1)
    save_weights(variables, tmp_path / "a.safetensors", target="convjax")
    assert_same(load_weights(model, tmp_path / "a.safetensors", source="convjax"), variables)


POSITIONS = np.float32([9.0, 0.0, 1.0, 4.0, 2.0, 2.0, 4.0, 1.0, 0.0, 1.0])
# timm 1.0.31, resample_abs_pos_embed(positions, [side, side], num_prefix_tokens=1)
RESIZED = {
    32: [9.0, 0.87353152, 3.2067251, 1.1360990, 1.5637401],
    64: [
        *(9.0, -0.15944532, 0.34087515, 2.1608212, 4.1594453, 1.3005041, 1.4301459, 2.7101719),
        *(4.3381181, 1.7902349, 1.3799570, 1.8735509, 2.9615769, 1.0027289, 0.22177234),
        *(0.17544644, 0.89279354),
    ],
}


@pytest.mark.parametrize("form", ["torchvision", "timm", "convjax"])
@pytest.mark.parametrize("side", RESIZED)
def test_positions_of_images_of_another_size(tmp_path, form, side):
    model, variables = small("vit")
    positions = np.broadcast_to(POSITIONS.reshape(1, 10, 1), (1, 10, 12))
    variables["params"]["position_embedding"] = positions
    path = tmp_path / "a.safetensors"
    save_weights(variables, path, target=form, model=model)
    found = read(model, path, source=form, image_size=side)
    resized = np.broadcast_to(np.reshape(RESIZED[side], (1, -1, 1)), (1, (side // 16) ** 2 + 1, 12))
    np.testing.assert_allclose(found["params"]["position_embedding"], resized, atol=2e-6)
    assert_same(read(model, path, source=form, image_size=48), variables)


def test_positions_of_a_grid_that_is_no_square(tmp_path):
    model, variables = small("vit", size=(48, 80))
    save_weights(variables, tmp_path / "a.safetensors", target="convjax")
    with pytest.raises(ValueError, match=r"position_embedding is float32\[1, 16, 12\], not"):
        load_weights(model, tmp_path / "a.safetensors", source="convjax")
    found = load_weights(model, tmp_path / "a.safetensors", source="convjax", image_size=(48, 80))
    assert_same(found, variables)


def test_positions_without_a_row_for_the_token_get_one_of_zeros(tmp_path):
    model, variables = small("vit")
    save_weights(variables, tmp_path / "a.safetensors", target="timm", model=model)
    tensors = read_file(tmp_path / "a.safetensors")
    tensors["pos_embed"] = tensors["pos_embed"][:, 1:]
    write_file(tmp_path / "a.safetensors", tensors)
    found = load_weights(model, tmp_path / "a.safetensors", source="timm")
    positions = variables["params"]["position_embedding"].at[:, 0].set(0.0)
    variables["params"]["position_embedding"] = positions
    assert_same(found, variables)


def test_networks_that_a_format_has_not(tmp_path):
    path = tmp_path / "a.safetensors"
    refusals = [
        ("alexnet", "torchvision", {}, "^torchvision has no form for AlexNet$"),
        ("vgg13", "timm", {}, "^timm has no form for VGG$"),
        ("preact", "torchvision", {}, "^torchvision has no form for PreActResNet$"),
        ("googlenet", "torchvision", {"large_size": 5}, "3×3 kernels in its third branch only"),
        ("vit_map", "torchvision", {}, "torchvision has class_token, and the network no"),
        ("vit_qk_norm", "torchvision", {}, "torchvision has no name for .*query_norm/scale"),
        ("vit_norm_pooled", "big_vision", {}, "norm_pooled=True: big_vision has no norm after"),
        ("resnet50", "torchvision", {"strided_layer": "1x1"}, "strided_layer='1x1': torchvision"),
        ("resnet18", "timm", {"shortcut": "none"}, "has no form for a ResNet with shortcut='none'"),
        ("resnet18", "timm", {"stem": "cifar"}, "for a ResNet whose conv1 is 3×3, only for 7×7"),
    ]
    for name, form, fields, message in refusals:
        model, variables = small(name, **fields)
        where = path.with_suffix(".npz" if form == "big_vision" else ".safetensors")
        with pytest.raises(ValueError, match=message):
            save_weights(variables, where, target=form, model=model)
    assert list(tmp_path.iterdir()) == []
    model, variables = small("alexnet")  # whose layers have the names of alexnet_owt's
    with pytest.raises(ValueError, match="torchvision has no form for these variables"):
        save_weights(variables, path, target="torchvision")


@pytest.mark.parametrize("form", ["torchvision", "timm"])
@pytest.mark.parametrize("name", ["plain20_cifar", "resnet20_cifar"])
def test_networks_for_small_images_have_no_form_of_torchs(tmp_path, name, form):
    path, model = tmp_path / "a.pth", create_model(name)
    variables = model.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
    for given in (model, None):
        with pytest.raises(ValueError, match=f"^{form} has no form for a ResNet whose conv1 is"):
            save_weights(variables, path, target=form, model=given)
    assert list(tmp_path.iterdir()) == []


def test_plain_networks_are_known_by_their_variables(tmp_path):
    _, variables = small("resnet18", shortcut="none")
    with pytest.raises(ValueError, match="a ResNet with shortcut='none', only with 'projection'"):
        save_weights(variables, tmp_path / "a.pth", target="torchvision")


@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_a_folder_that_is_not_there_is_named_and_not_a_hidden_file(tmp_path, ending):
    _, variables = small("resnet18")
    path = tmp_path / "gone" / f"a{ending}"
    with pytest.raises(FileNotFoundError) as caught:
        save_weights(variables, path, target="torchvision")
    assert str(caught.value) == f"[Errno 2] No such file or directory: '{path}'"


def test_wrong_arguments(tmp_path, unchecked):
    model, variables = small("resnet18")
    path = tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match="target='keras' must be one of torchvision, timm"):
        save_weights(variables, path, target="keras")
    with pytest.raises(ValueError, match=r"a.npz: timm's files have .safetensors or .pth or .pt$"):
        save_weights(variables, path.with_suffix(".npz"), target="timm")
    with pytest.raises(ValueError, match="variables hold intermediates, which are no weights"):
        save_weights({**variables, "intermediates": {}}, path, target="timm")
    with pytest.raises(ValueError, match="source='keras' must be one of torchvision, timm"):
        load_weights(model, path, source="keras")
    with pytest.raises(ValueError, match="head='old' must be 'file' or 'new'"):
        load_weights(model, path, source="timm", head="old")
    with pytest.raises(ValueError, match=r"key=0 must be a key, such as jax.random.key\(0\)"):
        load_weights(model, path, source="timm", head="new", key=0)
    with pytest.raises(ValueError, match="image_size=0 must be at least 1"):
        load_weights(model, path, source="timm", image_size=0)
    with pytest.raises(ValueError, match=r"a.h5 must end in .safetensors, .npz or one of .pth"):
        load_weights(model, path.with_suffix(".h5"), source="timm")
    for name in ("gone.safetensors", "gone.pth", "gone.npz"):
        with pytest.raises(FileNotFoundError, match="gone"):
            load_weights(model, tmp_path / name, source="timm")
    with pytest.raises(FileNotFoundError, match="gone"):
        load_weights(model, tmp_path / "gone", source="convjax")


@pytest.mark.parametrize("ending", [".safetensors", ".npz", ".pth"])
def test_damaged_files_are_named(tmp_path, ending):
    path = tmp_path / f"damaged{ending}"
    write_file(path, {"a": np.ones((50, 50), np.float32)})
    whole = path.read_bytes()
    model = create_model("resnet18")
    for content in (b"", b"PK\x03\x04", whole[:100], whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"damaged\{ending} cannot be read"):
            load_weights(model, path, source="torchvision")


def test_a_damaged_folder_is_named(tmp_path):
    model, variables = small("resnet18")
    save_weights(variables, tmp_path / "folder", target="convjax")
    with pytest.raises(FileExistsError, match="folder is there already"):
        save_weights(variables, tmp_path / "folder", target="convjax")
    (tmp_path / "folder" / "_METADATA").write_text("{")
    with pytest.raises(ValueError, match="folder cannot be read as a folder of Orbax"):
        load_weights(model, tmp_path / "folder", source="convjax")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty cannot be read as a folder of Orbax"):
        load_weights(model, tmp_path / "empty", source="convjax")


def test_a_file_stays_whole_if_the_new_one_fails(tmp_path):
    path = tmp_path / "weights.pth"
    write_file(path, {"a": np.ones(3, np.float32)})
    before = path.read_bytes()

    def fail(new):
        new.write_bytes(b"half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        replace(path, fail)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_pickled_arrays_in_npz_are_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, a=np.asarray([print], object))
    with pytest.raises(ValueError, match=r"a\.npz cannot be read as \.npz: Object arrays"):
        read_file(path)

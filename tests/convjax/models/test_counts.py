"""Parameters and multiply-adds of the papers, by name, through the command that prints them."""

import fnmatch
import json
import re

import pytest

from convjax.models.__main__ import main
from convjax.models.network import Network

# Parameters that evaluation uses, those of auxiliary heads, and GMACs at 224 pixels.
EXPECTED = {
    "alexnet": (60_965_224, 0, 0.724),
    "alexnet_one_tower": (62_378_344, 0, None),
    "alexnet_owt": (61_100_840, 0, None),
    "zfnet": (62_357_608, 0, 1.168),
    "vgg11": (132_863_336, 0, None),
    "vgg11_bn": (132_868_840, 0, None),
    "vgg13": (133_047_848, 0, None),
    "vgg13_bn": (133_053_736, 0, None),
    "vgg16": (138_357_544, 0, 15.470),
    "vgg16_bn": (138_365_992, 0, 15.470),
    "vgg19": (143_667_240, 0, 19.632),
    "vgg19_bn": (143_678_248, 0, 19.632),
    "googlenet": (6_998_552, 6_379_728, 1.583),
    "googlenet_bn": (7_005_832, 6_379_984, None),
    "googlenet_torchvision": (6_624_904, 6_379_984, 1.498),
    "resnet18": (11_689_512, 0, 1.814),
    "resnet34": (21_797_672, 0, 3.664),
    "resnet50": (25_557_032, 0, 4.089),
    "resnet50_v1": (25_557_032, 0, 3.858),
    "resnet101": (44_549_160, 0, 7.801),
    "resnet101_v1": (44_549_160, 0, 7.570),
    "resnet152": (60_192_808, 0, 11.514),
    "resnet152_v1": (60_192_808, 0, 11.283),
    "vit_ti16": (5_717_416, 0, None),
    "vit_s16": (22_050_664, 0, None),
    "vit_s32": (22_878_952, 0, None),
    "vit_b16": (86_567_656, 0, 17.564),
    "vit_b32": (88_224_232, 0, None),
    "vit_l16": (304_326_632, 0, None),
    "vit_l32": (306_535_400, 0, None),
    "vit_h14": (632_045_800, 0, None),
}


@pytest.mark.parametrize("pattern", ["alexnet*", "zfnet", "vgg*", "googlenet*", "resnet*", "vit*"])
def test_counts_of_the_papers(pattern, capsys):
    assert main([pattern, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    expected = {name: row for name, row in EXPECTED.items() if fnmatch.fnmatch(name, pattern)}
    assert expected.keys() <= rows.keys()
    for name, (parameters, auxiliary, gmacs) in expected.items():
        assert rows[name]["parameters"] == parameters, name
        assert rows[name]["auxiliary_parameters"] == auxiliary, name
        if gmacs is not None:
            assert abs(rows[name]["gmacs"] - gmacs) <= 0.001, name


def test_what_is_a_matrix_product(capsys):
    main(["vit_b16", "--json"])
    main(["resnet50", "--json"])
    vit, resnet = map(json.loads, capsys.readouterr().out.replace("]\n[", "]\f[").split("\f"))
    assert vit[0]["matrix_product_share"] == 1.0
    # 1×1 convolutions with stride 1 and the classifier: 1.813 of 4.089 GMACs.
    assert abs(resnet[0]["matrix_product_share"] - 0.4434) < 1e-4
    assert vit[0]["activations"] == 16_491_496  # timm's table: 16.49 million
    assert resnet[0]["activations"] == 11_114_984  # timm's table: 11.1 million


def test_the_table_of_one_model_shows_the_towers(capsys):
    assert main(["alexnet"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert "55×55×96" in lines["conv1"]
    assert lines["conv1"].rstrip().endswith("48  the image")
    assert lines["conv2"].rstrip().endswith("128  its own tower")
    assert "2 groups" in lines["conv4"]
    assert lines["conv3"].rstrip().endswith("192  both towers")
    assert lines["fc6"].rstrip().endswith("2,048  both towers")
    assert "60,965,224" in lines["60,965,224"]


def test_the_table_of_one_model_ends_with_its_fields(capsys):
    assert main(["alexnet"]) == 0
    _, fields = capsys.readouterr().out.split("\n\n")
    rows = [re.split(r"\s{2,}", line.strip()) for line in fields.splitlines()]
    assert rows[0] == ["field", "type", "default"]
    assert ["source", "'paper' | 'archive'", "'paper'"] in rows
    assert ["kernel_stddev", "float | None", "None"] in rows
    assert ["widths", "tuple[int, int, int, int, int]", "(96, 256, 384, 384, 256)"] in rows
    assert ["dtype", "dtype", "float32"] in rows
    assert main(["resnet50_v1"]) == 0
    fields = capsys.readouterr().out.split("\n\n")[1]
    assert "'1x1' | '3x3'" in fields
    assert "callable" in fields


def test_a_summary_finds_the_shapes_once(monkeypatch, capsys):
    found, shapes = [], Network.shapes
    monkeypatch.setattr(
        Network, "shapes", lambda self, images: found.append(1) or shapes(self, images)
    )
    assert main(["resnet8_cifar", "--json"]) == 0
    assert len(found) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vgg17"], "error: unknown model 'vgg17'; nearest: vgg"),
        (["alexnet", "--size=51"], "error: images of 51×51 pixels are too small: at least 52×52"),
        (["alexnet", "--size=0"], "error: --size=0 must be at least 1"),
        (["--sise=3"], "error: unknown argument --sise; the nearest is --size"),
        (["alexnet", "zfnet"], "error: unknown argument zfnet\n"),
    ],
)
def test_a_typing_error_is_answered_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1
    assert captured.out == ""

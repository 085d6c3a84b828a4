"""C6, C7 and C8 read compiled steps of AlexNet, and tell what holds from what does not."""

import json

import pytest

from experiments.claims import c06_memory, c07_exchange, c08_bus

GIB = 2**30
TWO_TOWERS = {"conv3": 100, "fc6": 20, "fc7": 10, "fc8": 10}
RETURNED = {"fc7": 10, "fc6": 20, "conv3": 100}


def test_memory_holds_where_one_device_is_too_small_and_two_are_not():
    assert c06_memory.holds(3 * GIB + 1, 3 * GIB) == "yes"
    assert c06_memory.holds(3 * GIB, GIB) == "no"
    assert c06_memory.holds(7 * GIB, 4 * GIB) == "no"


def test_memory_without_reuse_is_counted_from_the_layers():
    # Outputs of modules: 5 convolutions, 2 dropouts, 3 dense layers and the logits once more.
    outputs = 55**2 * 96 + 27**2 * 256 + 13**2 * (384 + 384 + 256) + 4 * 4096 + 2 * 1000
    outputs += 55**2 * 96 + 27**2 * 96 + 27**2 * 256 + 13**2 * 256 + 6**2 * 256
    expected = 4 * (2 * 128 * outputs + 3 * 60_965_224 + 128 * 224 * 224 * 3)
    assert c06_memory.without_reuse() == expected


def test_exchange_holds_where_the_devices_talk_at_four_layers_alone():
    assert c07_exchange.holds(TWO_TOWERS, RETURNED, {})
    assert not c07_exchange.holds(TWO_TOWERS | {"conv2": 1}, RETURNED, {})
    assert not c07_exchange.holds(TWO_TOWERS, RETURNED | {"conv4": 1}, {})
    assert not c07_exchange.holds(RETURNED, RETURNED, {})
    assert not c07_exchange.holds(TWO_TOWERS, {}, {})
    assert not c07_exchange.holds(TWO_TOWERS, RETURNED, {"fc6": 9})


def test_exchange_is_summed_by_layer_without_single_numbers():
    def collective(*parts):
        names = ("layer", "pass", "bytes")
        return {"parts": [dict(zip(names, part, strict=True)) for part in parts]}

    found = [
        collective(("conv3", "forward", 100)),
        collective(("conv3", "backward", 100), ("fc6", "backward", 30)),
        collective(("fc6", "backward", 3), ("loss", "backward", 4)),
    ]
    assert c07_exchange.sent(found, "forward") == {"conv3": 100}
    assert c07_exchange.sent(found, "backward") == {"conv3": 100, "fc6": 30}
    assert c07_exchange.in_words({"fc6": 3 * 2**20}) == "fc6 3.0 MiB"
    assert c07_exchange.in_words({}) == "nothing"


def test_the_bus_holds_where_towers_send_least_and_fast():
    sent = {"towers": 10, "full connectivity": 100, "data parallelism": 50}
    assert c08_bus.holds(sent, 0.01)
    assert not c08_bus.holds(sent, 0.02)  # more than a tenth of 0.176 s
    assert not c08_bus.holds(sent | {"data parallelism": 5}, 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("script", [c06_memory, c07_exchange, c08_bus])
def test_a_smoke_run_leaves_its_row_and_picture(script, tmp_path, capsys):
    assert script.main(script.CLAIM, script.__doc__, [f"--out={tmp_path}", "--preset=smoke"]) == 0
    row = json.loads((tmp_path / f"{script.CLAIM.script}.json").read_text())
    assert row["claim"] == script.CLAIM.name
    assert all((tmp_path / figure).stat().st_size > 5000 for figure in row["figures"])
    assert script.CLAIM.name in capsys.readouterr().out

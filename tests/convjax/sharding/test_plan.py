"""`python -m convjax.sharding.plan`: what it finds and prints; with a GPU's compiler or without."""

import dataclasses
import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from convjax.sharding import make_mesh
from convjax.sharding import targets as targets_module
from convjax.sharding.collectives import Collective, Part
from convjax.sharding.plan.command import main
from convjax.sharding.plan.memory import Memory, device_bytes
from convjax.sharding.plan.placeholder import Placeholder, source_of
from convjax.sharding.plan.planning import Plan, mesh_sizes
from convjax.sharding.plan.report import print_plan
from convjax.sharding.targets import TARGETS, NoPluginError, target
from convjax.training.config import load_config
from convjax.training.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"
# AlexNet with its towers, as small as it gets.
SMALL = [
    f"--config={CONFIGS / 'alexnet.py'}",
    "--config.model.fields.widths=(4, 4, 4, 4, 4)",
    "--config.model.fields.dense_width=8",
    "--config.model.fields.dropout=0.0",  # its random numbers take seconds to compile
    "--config.data.batch_size=8",
]
EXCHANGES = [("conv3", 8 // 2 * 6 * 6 * 2 * 4), ("fc6", 8 // 2 * 3 * 3 * 2 * 4)]
EXCHANGES += [("fc7", 8 // 2 * 4 * 4), ("fc8", 8 // 2 * 4 * 4)]
"""Of 4 images on this device, half of the channels of what each layer reads, in float32."""


@pytest.fixture
def no_plugin(monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(targets_module.importlib.metadata, "version", version)


@pytest.fixture
def gpu_compiler():
    try:
        TARGETS["H200"].devices(1)
    except NoPluginError as error:
        pytest.skip(str(error))


def planned(capsys, *arguments):
    assert main([*SMALL, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def assert_splits_alexnet(plan):
    """What must hold of the compiled step, whoever compiled it, on data=2, tower=2."""
    found = plan["collectives"]
    gathers = [each for each in found if each["kind"] == "all-gather"]
    scatters = [each for each in found if each["kind"] == "reduce-scatter"]
    assert [(each["layer"], each["bytes"]) for each in gathers] == EXCHANGES
    assert {each["pass"] for each in gathers} == {"forward"}
    assert [(each["layer"], each["bytes"]) for each in scatters] == EXCHANGES[2::-1]
    assert {each["pass"] for each in scatters} == {"backward"}
    assert {each["axis"] for each in gathers + scatters} == {"tower"}
    sums = [each for each in found if each["kind"] == "all-reduce"]
    gradients = [each for each in sums if each["pass"] == "backward"]
    assert len(gathers + scatters + sums) == len(found)
    assert {each["axis"] for each in gradients} == {"data"}
    # Between two devices each sends as many bytes as it holds; the loss may be summed with them.
    parts = [part for each in gradients for part in each["parts"] if part["pass"] == "backward"]
    memory = plan["memory_per_device"]
    assert sum(part["bytes"] for part in parts) == memory["parameters"]
    layers = {*(f"conv{i}" for i in range(1, 6)), "fc6", "fc7", "fc8"}
    assert {part["layer"] for part in parts} == layers
    # SGD's momentum, and the numbers of the step and of the schedule's step.
    assert memory["optimiser"] == memory["parameters"] + 8
    assert memory["batch"] == 4 * (28 * 28 + 4 + 1)
    assert memory["activations"] > 4 * 28 * 28 * 4  # the images as floats
    assert sum(memory.values()) == 2 * memory["total"]


@pytest.mark.usefixtures("no_plugin")
def test_alexnets_split_from_the_cpus_program(capsys):
    plan = planned(capsys, "--mesh=data=2,tower=2", "--memory=3GB")
    assert_splits_alexnet(plan)
    assert plan["program"] == "cpu"
    assert "simulated CPU devices" in plan["notes"][0]
    assert (plan["devices"], plan["device"]) == (4, "NVIDIA H200")
    assert plan["mesh"] == {"data": 2, "fsdp": 1, "model": 1, "tower": 2}
    assert (plan["capacity"], plan["fits"]) == (3 * 2**30, True)
    sent = sum(each["bytes"] for each in plan["collectives"])
    assert plan["sent_per_device"] == sent
    assert plan["seconds"]["PCIe 2.0 x16"] == sent / 8e9


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_alexnets_split_from_a_gpus_program(gpu_compiler, capsys):
    plan = planned(capsys, "--mesh=data=2,tower=2")
    assert_splits_alexnet(plan)
    assert (plan["program"], plan["notes"]) == ("gpu", [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--config must be given"),
        (["--confg=x.py"], "unknown argument --confg; the nearest is --config"),
        (["--config=none.py"], "no config file none.py"),
        ([*SMALL, "--mesh=data:2"], "mesh='data:2' must be like data=4,tower=2"),
        ([*SMALL, "--mesh=data=2,data=2"], "mesh='data=2,data=2' must be like data=4,tower=2"),
        ([*SMALL, "--mesh=dat=2"], "mesh: no axis dat; there are data, fsdp, model, tower"),
        ([*SMALL, "--mesh=data=0"], "mesh: data=0 must be at least 1"),
        ([*SMALL, "--device=H20"], "device='H20' must be one of NVIDIA A100-SXM4-80GB, "),
        ([*SMALL, "--memory=3"], "memory='3' must be like 3GB or 512MB, above 0"),
        ([*SMALL, "--memory=0GB"], "memory='0GB' must be like 3GB or 512MB, above 0"),
        ([*SMALL, "--config.seeed=1"], "unknown field seeed; the nearest is seed"),
        ([*SMALL, "--config.seed"], "--config.seed needs a value"),
        ([*SMALL, "--mesh=data=3"], "data=3 × fsdp=1 must divide the batch of 8"),
        ([*SMALL, "--mesh=tower=4"], "tower=4 of the mesh must be the network's towers=2"),
        ([*SMALL, "--mesh=data=16"], "16 devices: this process simulates 8 on its CPU"),
    ],
)
@pytest.mark.usefixtures("no_plugin", "unchecked")
def test_a_wrong_question_is_answered_with_one_line(arguments, message, capsys):
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    out, error = capsys.readouterr()
    assert (status, out) == (2, "")
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["H200", "nvidia h200", "NVIDIA H200"])
def test_a_gpu_has_two_names(name):
    assert target(name).memory == 151_397_597_184


def test_a_plugin_of_another_version_is_no_plugin(monkeypatch):
    monkeypatch.setattr(targets_module.importlib.metadata, "version", lambda name: "0.9.9")
    with pytest.raises(NoPluginError, match=r"jax-cuda13-plugin 0\.9\.9 is not jax's version"):
        TARGETS["H200"].devices(2)


def test_all_gpus_can_be_compiled_for(gpu_compiler):
    kinds = [each.devices(2)[1].device_kind for each in TARGETS.values()]
    assert kinds == [each.gpu.device_kind for each in TARGETS.values()]


def test_bytes_of_a_device():
    mesh = make_mesh(2, model=4)
    split = NamedSharding(mesh, P("data", "model"))
    shapes = {
        "split": jax.ShapeDtypeStruct((6, 8), "bfloat16", sharding=split),
        "whole": jax.ShapeDtypeStruct((6, 8), "float32", sharding=NamedSharding(mesh, P())),
    }
    assert device_bytes(shapes) == 3 * 2 * 2 + 6 * 8 * 4


def test_images_that_are_not_here_are_as_large_as_the_crop(tmp_path):
    config = load_config(CONFIGS / "alexnet_2012.py", {"data.data_dir": str(tmp_path)})
    source = source_of(config)
    assert isinstance(source, Placeholder)
    assert (source.image_shape, source.num_classes) == ((224, 224, 3), 1000)
    assert source[0]["image"].shape == (224, 224, 3)
    uncut = load_config(
        CONFIGS / "alexnet_2012.py",
        {"data.data_dir": str(tmp_path), "data.augmentation": "{}"},
    )
    with pytest.raises(ConfigError, match=r"augmentation\.crop must say how large"):
        source_of(uncut)


def test_a_plan_fits_into_eighty_columns(capsys):
    parts = tuple(Part(f"layer{i}/attention/query", "backward", 2**20) for i in range(40))
    summed = Collective("all-reduce", "data,fsdp", 8, 2**20, 40 * 2**20, 12, parts)
    gathered = dataclasses.replace(summed, kind="all-gather", axis=None, times=None)
    plan = Plan(
        config=load_config(CONFIGS / "vit.py"),
        target=target("H200"),
        mesh={"data": 2, "fsdp": 4, "model": 1, "tower": 1},
        on_gpu=False,
        memory=Memory(2**30, 0, 2**31, 2**20, 5 * 2**30, 100, 2**33 + 2**20 + 100),
        capacity=3 * 2**30,
        collectives=(summed, gathered) * 13,
        notes=("pip install 'convjax[plan]'",),
    )
    print_plan(plan)
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    text = "\n".join(lines)
    assert "note: pip install 'convjax[plan]'" in text
    assert "does not fit in 3.0 GiB" in text
    assert "layer0/attention/query …" in text
    assert "(40)" in text
    assert "1.0 GiB" in text  # 26 × 40 MiB are sent
    fewer = dataclasses.replace(plan, collectives=(), capacity=2**34)
    assert fewer.fits
    print_plan(fewer)
    assert "no collectives: the devices do not talk" in capsys.readouterr().out


def test_axes_that_are_not_named_are_one():
    config = load_config(CONFIGS / "alexnet.py", {"mesh.data": "-1", "mesh.tower": "2"})
    assert mesh_sizes(config, {"data": 4}) == {"data": 4, "fsdp": 1, "model": 1, "tower": 1}
    assert mesh_sizes(config, None) == {"data": 1, "fsdp": 1, "model": 1, "tower": 2}

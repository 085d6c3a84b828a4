"""GPUs to compile for on a machine that has none, as XLA's compiler wants them described.

    devices = TARGETS["H200"].devices(8)    # for a Mesh; nothing can be computed on them

This needs the CUDA plug-in of exactly jax's version, and neither a GPU nor CUDA's libraries:
`pip install 'convjax[plan]'`, which is jax's own extra `cuda13-local`. With that and without the
libraries, jax complains once in other programs that it cannot load cuDNN, and computes on the CPU;
under JAX_PLATFORMS=cpu it is quiet.
"""

import importlib.metadata
from dataclasses import dataclass

import jax
from jax.experimental import topologies

from pallas_kernels.inspect.architectures import ARCHITECTURES
from pallas_kernels.inspect.roofline import GPU, GPUS

_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")

_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: {threads}
  core_count: {cores}  fpus_per_core: {lanes}  clock_rate_ghz: {gigahertz}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_block: 49152  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared_optin}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  memory_bandwidth: {bandwidth}  l2_cache_size: {cache}  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  device_vendor: "NVIDIA Corporation"  device_address_bits: 64  name: "{name}"
  driver_version: "13.0.0"  runtime_version: "12.8.0"  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""
"""A stream_executor.GpuTargetConfigProto in text form."""


class NoPluginError(RuntimeError):
    """Nothing here can compile for a GPU; says what to install."""


@dataclass(frozen=True)
class Target:
    """A GPU and what its compiler asks beside the datasheet's rates.

    Attributes:
      gpu: its name, rates and architecture.
      memory: bytes, as its driver gives them.
      lanes: of float32 arithmetic in a multiprocessor.
      gigahertz: at most.
      cache: bytes of its second level.
    """

    gpu: GPU
    memory: int
    lanes: int
    gigahertz: float
    cache: int

    def devices(self, count: int) -> list[jax.Device]:
        """As many of them, joined by NVLink in one machine, to compile for.

        Raises:
          NoPluginError: no CUDA plug-in, or one of another version than jax.
        """
        _check_plugin()
        try:
            topology = topologies.get_topology_desc(
                platform="cuda",
                topology_name="",
                target_config=self._text(),
                topology=f"1x1x{count}",
            )
        except NotImplementedError as error:
            # Without a GPU, the plug-in only joins a process that says it wants none.
            raise NoPluginError("the CUDA plug-in needs JAX_PLATFORMS=cpu here") from error
        return list(topology.devices)

    def _text(self) -> str:
        architecture = ARCHITECTURES[self.gpu.architecture]
        major, minor = divmod(architecture.capability, 10)
        return _DESCRIPTION.format(
            threads=32 * architecture.warps,
            cores=self.gpu.multiprocessors,
            lanes=self.lanes,
            gigahertz=self.gigahertz,
            shared=architecture.shared_bytes,
            shared_optin=architecture.shared_bytes - 1024,
            bandwidth=round(self.gpu.terabytes * 1e12),
            cache=self.cache,
            memory=self.memory,
            major=major,
            minor=minor,
            features="feature_extension: ACCELERATED_FEATURES" if major >= 9 else "",
            name=self.gpu.device_kind,
        )


# Memory, clocks and caches: the descriptions in XLA's repository (xla/backends/gpu/target_config),
# which are what the drivers answer; for the RTX 4090, NVIDIA's Ada whitepaper.
_ALL = (
    Target(GPUS["A100"], 85_100_068_864, 64, 1.41, 41_943_040),
    Target(GPUS["RTX4090"], 25_393_692_672, 128, 2.52, 75_497_472),
    Target(GPUS["H100"], 84_942_979_072, 128, 1.98, 52_428_800),
    Target(GPUS["H200"], 151_397_597_184, 128, 1.98, 52_428_800),
    Target(GPUS["B200"], 191_514_411_008, 128, 1.965, 132_644_864),
)

TARGETS = {target.gpu.name: target for target in _ALL}


def target(name: str) -> Target:
    """The GPU of that name: "H200", or as its driver and jax say, "NVIDIA H200".

    Raises:
      ValueError: none here has that name.
    """
    for each in _ALL:
        if name.upper().replace(" ", "") in (each.gpu.name, _plain(each.gpu.device_kind)):
            return each
    known = ", ".join(each.gpu.device_kind for each in _ALL)
    raise ValueError(f"device={name!r} must be one of {known}")


def _plain(name: str) -> str:
    return name.upper().replace(" ", "")


def _check_plugin() -> None:
    for name in _PLUGINS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version == jax.__version__:
            return
        raise NoPluginError(f"{name} {version} is not jax's version, {jax.__version__}")
    raise NoPluginError("no CUDA plug-in for jax: pip install 'convjax[plan]'")

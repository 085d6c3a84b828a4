"""Compiled programs, read from the text in which XLA prints them."""

import jax
import jax.numpy as jnp
import pytest

from convjax.sharding.activations import activation_bytes
from convjax.sharding.origin import NOWHERE, Origin, origin_of
from convjax.sharding.program import Program, elements_of, size_of

# A step of two scanned layers, as XLA's GPU compiler schedules it, shortened.
STEP = """HloModule jit_step, is_scheduled=true, num_partitions=2

FileNames
1 "step (of two).py"

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%layer (state: (s32[], f32[8,4], f32[2,4,4])) -> (s32[], f32[8,4], f32[2,4,4]) {
  %state = (s32[], f32[8,4]{1,0}, f32[2,4,4]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %h = f32[8,4]{1,0} get-tuple-element(%state), index=1
  %w = f32[2,4,4]{2,1,0} get-tuple-element(%state), index=2
  %sum.1 = f32[8,4]{1,0} all-reduce(%h), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  ROOT %next = (s32[], f32[8,4]{1,0}, f32[2,4,4]{2,1,0}) tuple(%i, %sum.1, %w)
}

%go_on (state.1: (s32[], f32[8,4], f32[2,4,4])) -> pred[] {
  %state.1 = (s32[], f32[8,4]{1,0}, f32[2,4,4]{2,1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (kernel: f32[2,4,4], images: f32[8,4]) -> f32[2,4,4] {
  %kernel = f32[2,4,4]{2,1,0} parameter(0), metadata={op_name="state.params['fc']['kernel']"}
  %images = f32[8,4]{1,0} parameter(1), metadata={op_name="batch['image']"}
  %zero = s32[] constant(0)
  %copied = f32[2,4,4]{0,2,1:T(8,128)} copy(%kernel)
  %scaled = f32[8,4]{1,0} fusion(%images), kind=kLoop, calls=%f, metadata={op_name="jit(step)/div"}
  %start = (s32[], f32[8,4]{1,0}, /*index=2*/f32[2,4,4]{2,1,0}) tuple(%zero, %scaled, %kernel)
  %loop = (s32[], f32[8,4]{1,0}, /*index=2*/f32[2,4,4]{2,1,0}) while(%start), condition=%go_on, \
body=%layer, metadata={op_name="jit(step)/jvp()/while"}, \
backend_config={"known_trip_count":{"n":"2"},"ir":"a (b"}
  %h.1 = f32[8,4]{1,0} get-tuple-element(%loop), index=1
  %w.1 = f32[2,4,4]{2,1,0} get-tuple-element(%loop), index=2
  %square = (f32[8,4]{1,0}, bf16[8,4]{1,0}) fusion(%h.1), kind=kLoop, calls=%g, \
metadata={op_name="jit(step)/jvp()/mul"}
  %half = bf16[8,4]{1,0} get-tuple-element(%square), index=1
  %viewed = bf16[4,8]{0,1} bitcast(%half)
  ROOT %gradient = f32[2,4,4]{2,1,0} fusion(%viewed, %scaled, %w.1, %copied), kind=kLoop, \
calls=%h, metadata={op_name="jit(step)/transpose(jvp())/dot_general"}
}
"""


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[128,55,55,96]{3,2,1,0}", 148_684_800),
        ("pred[]", 1),
        ("(f32[3]{0}, u8[0]{0}, /*index=2*/bf16[2,2]{1,0:T(8,128)}, token[])", 20),
        ("f8e4m3fn[5]", 5),
        ("c128[2]", 32),
        ("s4[6]{0:E(4)}", 3),
        ("((f32[4]{0}), f32[<=8]{0})", 48),
    ],
)
def test_the_size_of_a_shape(shape, size):
    assert size_of(shape) == size


def test_the_elements_of_a_shape():
    assert elements_of("f32[2,3]{1,0}") == ["f32[2,3]{1,0}"]
    nested = "((f32[2,3]{1,0}, s32[]), /*index=1*/u8[4]{0:T(8,128)}, f32[])"
    assert [size_of(each) for each in elements_of(nested)] == [28, 4, 4]


def test_a_program_is_read_in_order():
    program = Program.parse(STEP)
    assert list(program.computations) == ["add", "layer", "go_on", "main"]
    assert list(program.entry.instructions)[:4] == ["kernel", "images", "zero", "copied"]
    loop = program.entry.instructions["loop"]
    assert (loop.opcode, loop.operands, loop.trips) == ("while", ("start",), 2)
    assert loop.called == ("layer",)
    assert loop.op_name == "jit(step)/jvp()/while"
    assert program.entry.instructions["half"].index == 1
    assert program.entry.root == "gradient"
    assert [each.name for each in program.entry.users["h.1"]] == ["square"]


def test_what_a_loop_runs_is_counted():
    visits = {each.instruction.name: each for each in Program.parse(STEP).visits()}
    assert visits["sum.1"].times == 2
    assert visits["loop"].times == 1
    assert visits["sum.1"].caller is visits["loop"]
    assert "sum" not in visits  # it is arithmetic inside of the all-reduce
    unknown = Program.parse(STEP.replace('"known_trip_count":{"n":"2"},', ""))
    assert {each.instruction.name: each.times for each in unknown.visits()}["sum.1"] is None


@pytest.mark.parametrize("text", ["", "HloModule empty\n\n%f (x: f32[]) -> f32[] {\n}\n"])
def test_what_is_no_program_is_refused(text):
    with pytest.raises(ValueError, match="no ENTRY computation"):
        Program.parse(text)


def test_activations_are_what_the_backward_pass_reads_of_the_forward_pass():
    # %scaled [8, 4] float32 and %half [8, 4] bfloat16: neither the parameters, which the loop gives
    # back as they were, nor their copy, nor %h.1, which the backward pass does not read.
    assert activation_bytes(Program.parse(STEP)) == 8 * 4 * 4 + 8 * 4 * 2


def test_activations_of_a_compiled_step():
    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    weights = [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 3
    compiled = jax.jit(jax.grad(loss)).lower(weights, jnp.ones((64, 32))).compile()
    # tanh's outputs are all that its gradient needs.
    assert activation_bytes(Program.parse(compiled.as_text())) == 3 * 64 * 32 * 4


PARAMS = {
    "conv1": {"kernel": 0, "bias": 0},
    "blocks": {"attention": {"qkv": {"kernel": 0}}, "mlp": {"fc1": {"kernel": 0}}},
}


@pytest.mark.parametrize(
    ("op_name", "origin"),
    [
        ("", NOWHERE),
        ("jit(step)/jvp(AlexNet)/conv1/conv_general_dilated", Origin("conv1", "forward")),
        ("jit(step)/transpose(jvp(AlexNet))/conv1/dot", Origin("conv1", "backward")),
        (
            "jit(step)/transpose(jvp())/shard_map/conv1/AlexNet/AlexNet._both/reduce_scatter",
            Origin("conv1", "backward"),
        ),
        (
            "jit(f)/jvp(ViT)/blocks/while/body/closed_call/Block/attention/qkv/dot_general",
            Origin("blocks/attention/qkv", "forward"),
        ),
        ("jit(f)/jvp(ViT)/blocks/while/body/mlp/norm/mul", Origin("blocks/mlp", "forward")),
        ("jit(step)/jvp(ViT)/add", Origin("ViT", "forward")),
        ("jit(step)/jvp()/reduce_sum", Origin("", "forward")),
        ("jit(step)/reduce_sum", Origin("", "update")),
        ("jit(f)/(jvp()/gather:transpose(jvp())/conv1/psum)", Origin("conv1", "backward")),
    ],
)
def test_where_an_operation_comes_from(op_name, origin):
    assert origin_of(op_name, PARAMS) == origin

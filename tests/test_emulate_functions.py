"""Functions of a PTX module, which are emulated in the place of their calls."""

from __future__ import annotations

import pytest
import torch

from mla_lab.core.errors import InvalidInput, Unsupported
from mla_lab.emulate import Options
from mla_lab.emulate.direct import Direct, ptx_kernel
from mla_lab.emulate.functions import without_calls
from mla_lab.emulate.ptx import bare, parse

#: of the numbers in two registers, the result in a third
CALL = """	{ // callseq
	.param .b32 param0;
	.param .b64 param1;
	.param .b32 retval0;
	st.param.b64 	[param1], BY;
	st.param.b32 	[param0], N;
	call.uni (retval0), times, (param0, param1);
	ld.param.b32 	OUT, [retval0];
	} // callseq
"""


def call(n: str, by: str, out: str) -> str:
    return CALL.replace("BY", by).replace("N", n).replace("OUT", out)


#: times(n, by) = n by additions, as libNVVM writes a loop in a function, called twice
MODULE = """
.version 8.6
.target sm_90a
.address_size 64
.func (.param .b32 func_retval0) times(
	.param .b32 times_param_0,
	.param .b64 times_param_1
)
{
	.reg .pred 	%p<2>;
	.reg .b32 	%r<5>;
	.reg .b64 	%rd<2>;

	ld.param.b64 	%rd1, [times_param_1];
	mov.b32 	%r1, 0;
$L__BB0_1:
	ld.param.b32 	%r2, [times_param_0];
	add.s32 	%r1, %r1, %r2;
	add.s64 	%rd1, %rd1, -1;
	setp.gt.s64 	%p1, %rd1, 0;
	@%p1 bra 	$L__BB0_1;
	st.param.b32 	[func_retval0], %r1;
	ret;
}
.visible .entry k(
	.param .u64 k_param_0
)
{
	.reg .b32 	%r<6>;
	.reg .b64 	%rd<4>;

	ld.param.b64 	%rd1, [k_param_0];
	mov.b32 	%r1, 6;
	mov.b64 	%rd2, 7;
FIRST_CALL	mov.b64 	%rd3, 2;
SECOND_CALL	st.global.b32 	[%rd1], %r2;
	st.global.b32 	[%rd1+4], %r3;
	ret;
}
"""
MODULE = MODULE.replace("FIRST_CALL", call("%r1", "%rd2", "%r2"))
MODULE = MODULE.replace("SECOND_CALL", call("%r2", "%rd3", "%r3"))


def test_a_function_stands_in_the_place_of_each_call() -> None:
    kernel = parse(MODULE)["k"]
    opcodes = [i.opcode for i in kernel.code]
    assert not any(opcode.startswith("call") for opcode in opcodes)
    assert opcodes.count("ld.param.b64") == 1 and opcodes.count("ret") == 1
    assert opcodes.count("setp.gt.s64") == 2
    assert len({kernel.labels[name] for name in kernel.labels if "BB0_1" in name}) == 2
    registers = {i.args[0] for i in kernel.code if i.opcode == "add.s64"}
    assert len(registers) == 2 and "%rd1" not in registers


def test_what_calls_return_is_computed() -> None:
    kernel = ptx_kernel(MODULE, "k", Direct(), Options(check=True))
    words = torch.zeros(2, dtype=torch.int32)
    kernel(words)
    assert words.tolist() == [42, 84]


def test_a_module_without_functions_stays_as_it_is() -> None:
    text = bare(
        MODULE[: MODULE.index(".func")] + MODULE[MODULE.index(".visible") :].split("{ //")[0]
    )
    assert without_calls(text) == text


def test_a_call_of_what_the_module_lacks_is_refused() -> None:
    with pytest.raises(InvalidInput, match="a call of times"):
        parse(MODULE[: MODULE.index(".func")] + MODULE[MODULE.index(".visible") :])


#: twice(n, by) = times(times(n, by), by)
TWICE = """
.func (.param .b32 func_retval0) twice(
	.param .b32 twice_param_0,
	.param .b64 twice_param_1
)
{
	.reg .b32 	%r<4>;
	.reg .b64 	%rd<2>;

	ld.param.b32 	%r1, [twice_param_0];
	ld.param.b64 	%rd1, [twice_param_1];
FIRST_CALL
SECOND_CALL
	st.param.b32 	[func_retval0], %r3;
	ret;
}
"""
TWICE = TWICE.replace("FIRST_CALL", call("%r1", "%rd1", "%r2"))
TWICE = TWICE.replace("SECOND_CALL", call("%r2", "%rd1", "%r3"))
NESTED = MODULE.replace("\n.visible", TWICE + ".visible")
KERNEL = NESTED.index(".visible")
NESTED = NESTED[:KERNEL] + NESTED[KERNEL:].replace(", times,", ", twice,")


def test_a_function_may_call_another() -> None:
    kernel = ptx_kernel(NESTED, "k", Direct(), Options(check=True))
    words = torch.zeros(2, dtype=torch.int32)
    kernel(words)
    assert words.tolist() == [6 * 7 * 7, 6 * 7 * 7 * 2 * 2]


@pytest.mark.parametrize("first", ["times", "twice"])
def test_a_function_that_calls_itself_is_refused(first: str) -> None:
    """Itself, or by another."""
    inside = TWICE.replace(", times,", f", {first},").replace("twice", "times")
    other = TWICE if first == "twice" else ""
    module = MODULE[: MODULE.index(".func")] + inside + other + MODULE[MODULE.index(".visible") :]
    with pytest.raises(InvalidInput, match="a call of times inside itself; supported: functions w"):
        parse(module)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(param0, param1)", "(param0)"),
        ("(param0, param1)", "()"),
        ("(retval0), times, (param0, param1)", "times"),
        ("[times_param_0]", "[times_param_7]"),
        ("st.param.b32 \t[func_retval0], %r1;", ""),
    ],
)
def test_a_call_whose_values_do_not_fit_is_refused(old: str, new: str) -> None:
    assert old in MODULE
    with pytest.raises(InvalidInput, match=r"a call of times .*; supported: one ld\.param"):
        parse(MODULE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[times_param_0]", "[times_param_0+4]"),
        ("st.param.b32 \t[param0], %r1;", "st.param.v2.b32 \t[param0], {%r1, %r1};"),
    ],
)
def test_a_part_of_a_parameter_is_refused(old: str, new: str) -> None:
    assert old in MODULE
    with pytest.raises(Unsupported, match=r"\w\w.param"):
        ptx_kernel(MODULE.replace(old, new), "k", Direct())(torch.zeros(2, dtype=torch.int32))


def test_a_parameter_at_offset_zero_is_the_parameter() -> None:
    module = MODULE
    for name in ("param0", "param1", "retval0", "times_param_0", "func_retval0"):
        module = module.replace(f"[{name}]", f"[{name}+0]")
    words = torch.zeros(2, dtype=torch.int32)
    ptx_kernel(module, "k", Direct())(words)
    assert words.tolist() == [42, 84]


def test_a_function_may_take_and_leave_nothing() -> None:
    nothing = ".func none()\n{\n\tret;\n}\n.visible"
    for call_of in ("none, ();", "none;"):
        made = MODULE.replace(".visible", nothing).replace(
            "mov.b32 \t%r1, 6;",
            f"""
        mov.b32 \t%r1, 6; {{ call.uni {call_of} }}""",
        )
        words = torch.zeros(2, dtype=torch.int32)
        ptx_kernel(made, "k", Direct())(words)
        assert words.tolist() == [42, 84]

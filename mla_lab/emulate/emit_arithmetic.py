"""Python of moves, arithmetic, comparisons and conversions."""

from __future__ import annotations

from .ptx import SIZES, Instruction
from .writer import BITS, NUMPY, Lines, Writer, emits

WHERE = "where=MASK"
UFUNCS = {"add": "add", "sub": "subtract", "mul": "multiply", "and": "bitwise_and"}
UFUNCS |= {"or": "bitwise_or", "xor": "bitwise_xor", "max": "maximum", "min": "minimum"}
FLOATS = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide"}
LOGICAL = {"and": "logical_and", "or": "logical_or", "xor": "logical_xor"}
COMPARISONS = {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal"}
COMPARISONS |= {"gt": "greater", "ge": "greater_equal", "lo": "less", "ls": "less_equal"}
COMPARISONS |= {"hi": "greater", "hs": "greater_equal"}
#: a comparison that NaN satisfies, as the negation of its contrary
UNORDERED = {"leu": "greater", "ltu": "greater_equal", "geu": "less", "gtu": "less_equal"}
UNORDERED |= {"neu": "equal"}
WIDER = {"s32": "s64", "u32": "u64", "s16": "s32", "u16": "u32"}
ROUNDINGS = {"rni": "rint", "rmi": "floor", "rpi": "ceil", "rzi": "trunc"}
TWO_HALVES = ("f16x2", "bf16x2", "u16x2", "s16x2")


def put(target: str, value: str) -> Lines:
    """Write an expression to a row, under the mask."""
    return [f"copyto({target}, {value}, {WHERE})"]


def call(function: str, target: str, *values: str) -> Lines:
    """A ufunc that writes a row itself."""
    return [f"{function}({', '.join(values)}, out={target}, {WHERE})"]


@emits("mov")
def _mov(w: Writer, s: Instruction, pc: int) -> Lines:
    kind, (target, source) = s.parts[-1], s.args
    half = {"b32": "u16", "b64": "u32"}.get(kind, "")
    if target.startswith("{"):
        parts = f"{w.value(source, 'u32' if half == 'u16' else 'u64')}.view({NUMPY[half]})"
        names = enumerate(w.group(target))
        lines = [put(w.row(n, half), f"{parts}[{i}::2]")[0] for i, n in names if n != "_"]
        return lines or ["pass"]
    if source.startswith("{"):
        low, high = (w.value(x, half) for x in w.group(source))
        whole, bits = (NUMPY["u32"], 16) if half == "u16" else (NUMPY["u64"], 32)
        value = f"{low}.astype({whole}) | {high}.astype({whole}) << {whole}({bits})"
        return put(w.bits(target), value)
    if source in ("%globaltimer", "%clock64", "%clock"):
        return put(w.row(target, kind), "g.clock()")
    return put(w.row(target, kind), w.value(source, kind))


@emits("add", "sub", "mul", "and", "or", "xor", "max", "min", "div", "rem")
def _binary(w: Writer, s: Instruction, pc: int) -> Lines:
    op, kind = s.parts[0], s.parts[-1]
    if kind in TWO_HALVES:
        return _two_halves(w, s, f"{op}.NaN" if "NaN" in s.parts else op)
    if kind == "f32x2":
        return _two_floats(w, s, FLOATS[op])
    if op == "mul" and s.parts[1] in ("wide", "hi"):
        return _long_product(w, s)
    target = w.row(s.args[0], kind)
    a, b = (w.value(x, kind) for x in s.args[1:3])
    if kind == "f32":
        if op in ("max", "min"):
            name = f"{op}.NaN" if "NaN" in s.parts else op
            third = [w.value(x, kind) for x in s.args[3:]]
            a, b = (f"extreme({name!r}, {a}, {b})", *third) if third else (a, b)
            return put(target, f"extreme({name!r}, {a}, {b})")
        if "approx" in s.parts:
            return put(target, f"div_approx({a}, {b})")
        return call(FLOATS[op], target, a, b)
    if kind == "pred":
        return call(LOGICAL[op], target, a, b)
    if op in ("div", "rem"):
        return put(target, f"{'div' if op == 'div' else 'fmod'}({a}, {b})")
    if "relu" in s.parts:
        return put(target, f"maximum({UFUNCS[op]}({a}, {b}), 0)")
    return call(UFUNCS[op], target, a, b)


def _two_halves(w: Writer, s: Instruction, op: str) -> Lines:
    """An operation on both 16-bit halves of 32-bit registers, as add.bf16x2."""
    values = ", ".join(w.value(a, "u32") for a in s.args[1:])
    return put(w.row(s.args[0], "u32"), f"packed({op!r}, {s.parts[-1]!r}, {values})")


def _two_floats(w: Writer, s: Instruction, function: str) -> Lines:
    """An operation on both fp32 halves of 64-bit registers, as add.f32x2."""
    values = ", ".join(f"{w.value(a, 'u64')}.view(float32)" for a in s.args[1:])
    return put(w.row(s.args[0], "u64"), f"{function}({values}).view(uint64)")


def _long_product(w: Writer, s: Instruction) -> Lines:
    kind = s.parts[-1]
    wide, a, b = WIDER[kind], w.value(s.args[1], kind), w.value(s.args[2], kind)
    if s.parts[1] == "wide":
        target = w.row(s.args[0], wide)
        return [f"multiply({a}, {b}, out={target}, dtype={NUMPY[wide]}, {WHERE})"]
    return put(w.row(s.args[0], kind), _high(w, s))


def _high(w: Writer, s: Instruction) -> str:
    """The upper half of a product."""
    kind = s.parts[-1]
    a, b = w.value(s.args[1], kind), w.value(s.args[2], kind)
    product = f"multiply({a}, {b}, dtype={NUMPY[WIDER[kind]]})"
    return f"({product} >> {8 * SIZES[kind]}).astype({NUMPY[kind]})"


@emits("mad")
def _mad(w: Writer, s: Instruction, pc: int) -> Lines:
    kind = s.parts[-1]
    if kind == "f32":  # mad.rn.f32 rounds once, as fma.rn.f32
        return _fma(w, s, pc)
    a, b = w.value(s.args[1], kind), w.value(s.args[2], kind)
    if s.parts[1] == "wide":
        wide = WIDER[kind]
        product = f"multiply({a}, {b}, dtype={NUMPY[wide]})"
        return call("add", w.row(s.args[0], wide), product, w.value(s.args[3], wide))
    if s.parts[1] == "hi":
        return call("add", w.row(s.args[0], kind), _high(w, s), w.value(s.args[3], kind))
    return call("add", w.row(s.args[0], kind), f"{a} * {b}", w.value(s.args[3], kind))


@emits("fma")
def _fma(w: Writer, s: Instruction, pc: int) -> Lines:
    kind = s.parts[-1]
    if kind in TWO_HALVES:
        return _two_halves(w, s, "fma")
    if kind == "f32x2":
        return _two_floats(w, s, "fma")
    a, b, c = (w.value(x, kind) for x in s.args[1:])
    a = f"-{a}" if "minus_a" in s.parts else a  # of `contraction`
    c = f"-{c}" if "minus_c" in s.parts else c
    function = {"rn": "fma", "rm": "fma_down"}[s.parts[1]]
    return put(w.row(s.args[0], kind), f"{function}({a}, {b}, {c})")


@emits("shl", "shr")
def _shift(w: Writer, s: Instruction, pc: int) -> Lines:
    op, kind = s.parts
    target, value = w.row(s.args[0], kind), w.value(s.args[1], kind)
    count = s.args[2]
    if count in w.rows:
        return put(target, f"shift({value}, {w.value(count, 'u32')}, {op == 'shl'})")
    number, bits = int(count.rstrip("U"), 0) & 0xFFFFFFFF, 8 * SIZES[kind]
    if number >= bits and not (op == "shr" and kind[0] == "s"):
        return put(target, w.constant(kind, 0))
    amount = w.constant(kind, min(number, bits - 1))
    return call("left_shift" if op == "shl" else "right_shift", target, value, amount)


@emits("shf")
def _funnel(w: Writer, s: Instruction, pc: int) -> Lines:
    low, high, count = (w.value(a, "u32") for a in s.args[1:])
    how = f"{s.parts[1] == 'r'}, {s.parts[2] == 'clamp'}"
    return put(w.row(s.args[0], "u32"), f"funnel({low}, {high}, {count}, {how})")


@emits("not", "neg", "abs")
def _unary(w: Writer, s: Instruction, pc: int) -> Lines:
    op, kind = s.parts[0], s.parts[-1]
    if kind in TWO_HALVES:
        return _two_halves(w, s, op)
    function = {"not": "invert", "neg": "negative", "abs": "absolute"}[op]
    function = "logical_not" if kind == "pred" else function
    return call(function, w.row(s.args[0], kind), w.value(s.args[1], kind))


#: mnemonic -> types of the target and of the operands, "" that of the opcode, and the expression
EXPRESSIONS = {
    "bfi": ("", ("", "", "u32", "u32"), "bfi({0}, {1}, {2}, {3})"),
    "cvta": ("u64", ("u64",), "{0}"),
    "mapa": ("u32", ("u32", "u32"), "{0} & uint32(0xFFFFFF) | {1} << uint32(24)"),
    "popc": ("u32", ("",), "bitwise_count({0})"),
    "prmt": ("u32", ("u32", "u32", "u32"), "prmt({0}, {1}, {2})"),
    "selp": ("", ("", "", "pred"), "pick({2}, {0}, {1})"),
}


@emits(*EXPRESSIONS)
def _expression(w: Writer, s: Instruction, pc: int) -> Lines:
    target, kinds, form = EXPRESSIONS[s.parts[0]]
    own, operands = s.parts[-1], zip(s.args[1:], kinds, strict=True)
    values = [w.value(arg, kind or own) for arg, kind in operands]
    return put(w.row(s.args[0], target or own), form.format(*values))


@emits("setp")
def _setp(w: Writer, s: Instruction, pc: int) -> Lines:
    test, kind = s.parts[1], s.parts[-1]
    target = w.row(s.args[0], "pred")
    a, b = w.value(s.args[1], kind), w.value(s.args[2], kind)
    if len(s.parts) == 3 and test in COMPARISONS and (test, kind) != ("ne", "f32"):
        return call(COMPARISONS[test], target, a, b)
    found = _compared(test, kind, a, b)
    if len(s.parts) > 3:
        found = f"{LOGICAL[s.parts[2]]}({found}, {w.predicate(s.args[3])})"
    return put(target, found)


def _compared(test: str, kind: str, a: str, b: str) -> str:
    """Whether the comparison holds. NaN is not unequal to a number by `ne`, but by `neu`."""
    if kind == "f32" and test in ("ne", "equ"):
        differ = f"(less({a}, {b}) | greater({a}, {b}))"
        return differ if test == "ne" else f"~{differ}"
    if kind == "f32" and test in UNORDERED:
        return f"~{UNORDERED[test]}({a}, {b})"
    return f"{COMPARISONS[test]}({a}, {b})"


@emits("ex2", "lg2", "rcp", "rsqrt", "sqrt")
def _approximation(w: Writer, s: Instruction, pc: int) -> Lines:
    value = w.value(s.args[1], "f32")
    name, target = s.parts[0], w.row(s.args[0], "f32")
    if "rn" in s.parts or name == "sqrt":
        flushed = f"flush({value})" if "ftz" in s.parts else value
        return put(target, f"{'rcp_rn' if name == 'rcp' else name}({flushed})")
    function = f"g.{name}" if name != "rsqrt" else name
    if "ftz" in s.parts:
        return put(target, f"{function}({value})")
    return put(target, f"without_ftz({name!r}, {function}, {value})")


@emits("dp2a")
def _dp2a(w: Writer, s: Instruction, pc: int) -> Lines:
    values = ", ".join(w.value(a, "u32") for a in s.args[1:])
    signed = (s.parts[2][0] == "s", s.parts[3][0] == "s")
    return put(w.row(s.args[0], "u32"), f"dp2a({values}, {s.parts[1] == 'hi'}, {signed})")


#: (target, source) types -> (register of the target, of the source, expression)
TWO_VALUES = {
    ("bf16x2", "f32"): ("u32", "f32", "to_bf16({0}) << uint32(16) | to_bf16({1})"),
    ("f16x2", "f32"): ("u32", "f32", "to_f16({0}) << uint32(16) | to_f16({1})"),
    ("e4m3x2", "f32"): ("u16", "f32", "to_e4m3({0}) << uint32(8) | to_e4m3({1})"),
    ("e4m3x2", "f16x2"): ("u16", "u32", "f16x2_to_e4m3x2({0})"),
    ("f16x2", "e4m3x2"): ("u32", "u16", "e4m3x2_to_f16x2({0})"),
    ("bf16", "f32"): ("u16", "f32", "to_bf16({0})"),
    ("f16", "f32"): ("u16", "f32", "to_f16({0})"),
    ("f32", "f16"): ("f32", "u16", "{0}.view(float16)"),
    ("f32", "bf16"): ("f32", "u16", "from_bf16({0})"),
}


@emits("cvt")
def _cvt(w: Writer, s: Instruction, pc: int) -> Lines:
    target, source = s.parts[-2:]
    if (target, source) in TWO_VALUES:
        to, of, form = TWO_VALUES[target, source]
        value = form.format(*(w.value(a, of) for a in s.args[1:]))
        return [f"copyto({w.row(s.args[0], to)}, {value}, casting='unsafe', {WHERE})"]
    if source == "f32":
        return _from_float(w, s, target)
    if target == "f32":
        value = f"{_narrowed(w, s.args[1], source)}.astype(float32)"
        return put(w.row(s.args[0], "f32"), value)
    value = f"{_narrowed(w, s.args[1], source)}.astype({NUMPY[target]})"
    register = BITS[w.rows[s.args[0]][0]]
    if target.startswith("s") and SIZES[target] < SIZES[register]:
        value += f".astype({NUMPY[register.replace('u', 's')]})"
    return put(w.row(s.args[0], register), f"{value}.astype({NUMPY[register]})")


def _narrowed(w: Writer, arg: str, kind: str) -> str:
    """A source whose register may be wider than its type."""
    register = BITS[w.rows[arg][0]] if arg in w.rows else ("u64" if SIZES[kind] == 8 else "u32")
    return f"{w.value(arg, register)}.astype({NUMPY[kind]})"


def _from_float(w: Writer, s: Instruction, target: str) -> Lines:
    value = w.value(s.args[1], "f32")
    rounding = next((ROUNDINGS[p] for p in s.parts if p in ROUNDINGS), "")
    if rounding:
        value = f"{rounding}({value})"
    if target == "f32":
        value = f"minimum(fmax({value}, float32(0)), float32(1))" if "sat" in s.parts else value
        return put(w.row(s.args[0], "f32"), value)
    return put(w.row(s.args[0], target), f"to_integer({value}, {NUMPY[target]})")

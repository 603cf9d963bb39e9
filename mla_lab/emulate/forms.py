"""Forms of instructions that the emulator takes: types, roundings, scopes, hints without effect.

A handler reads the words of an opcode that change its result and skips the rest. A word that no
handler reads, as `.sat` of an add, is refused here: it would be taken for another instruction.
"""

from __future__ import annotations

import re

from ..core.errors import unsupported
from .ptx import SIZES, Instruction

_WHOLE = "[us](16|32|64)"
_PAIR = "(f16x2|bf16x2)"
_TESTS = "(eq|ne|lt|le|gt|ge|lo|ls|hi|hs)"
_COMBINED = r"(\.(and|or|xor))?"
_RELAXED, _SHARED = r"(\.relaxed\.(cta|cluster))?", r"(\.shared(::cta|::cluster)?)?"
_APPROXIMATE = r"approx(\.ftz)?\.f32"

#: mnemonics -> what may follow, as a pattern
_PATTERNS = {
    "add sub": rf"({_WHOLE}|(rn\.)?({_PAIR}|f32x2|f32)|[us]16x2)",
    "mul": rf"((lo|hi|wide)\.{_WHOLE}|(rn\.)?({_PAIR}|f32x2|f32))",
    "mad": rf"((lo|hi|wide)\.{_WHOLE}|rn\.f32)",
    "fma": rf"(rn\.({_PAIR}|f32x2|f32)|rm\.f32|rn\.minus_[ac]\.f32)",
    "max min": rf"((relu\.)?s32|{_WHOLE}|(NaN\.)?(f32|{_PAIR})|[us]16x2)",
    "div": rf"({_WHOLE}|(rn|approx|full)\.f32)",
    "rem": _WHOLE,
    "and or xor not": "(pred|b(16|32|64))",
    "neg": "(s(16|32|64)|f32)",
    "abs": rf"(s(16|32|64)|f32|{_PAIR})",
    "shl": "b(16|32|64)",
    "shr": "[usb](16|32|64)",
    "shf": r"[lr]\.(wrap|clamp)\.b32",
    "bfi popc": "b(32|64)",
    "prmt": "b32",
    "dp2a": r"(lo|hi)\.[us]32\.[us]32",
    "mapa": r"(shared::cluster\.)?u32",
    "selp": "[busf](16|32|64)",
    "setp": rf"({_TESTS}{_COMBINED}\.{_WHOLE}|(eq|ne){_COMBINED}\.b(16|32|64)"
    rf"|({_TESTS}|equ|neu|ltu|leu|gtu|geu){_COMBINED}\.f32)",
    "ex2 lg2 rsqrt": _APPROXIMATE,
    "rcp sqrt": rf"({_APPROXIMATE}|rn\.f32)",
    "cvt": r"(rn\.(f16x2|bf16x2|f16|bf16)\.f32|rn\.satfinite\.e4m3x2\.(f32|f16x2)"
    rf"|rn\.f16x2\.e4m3x2|f32\.(f16|bf16)|r[nmpz]i\.{_WHOLE}\.f32|(r[nmpz]i\.)?(sat\.)?f32\.f32"
    r"|rn\.f32\.[us](8|16|32|64)|[us](8|16|32|64)\.[us](8|16|32|64))",
    "shfl": r"sync\.(idx|up|down|bfly)\.b32",
    "vote": r"sync\.((any|all)\.pred|ballot\.b32)",
    "elect": "sync",
    "ldmatrix stmatrix": r"sync\.aligned\.m8n8\.x[124](\.trans)?\.shared(::cta)?\.b16",
    "movmatrix": r"sync\.aligned\.m8n8\.trans\.b16",
    "mbarrier": rf"(init|inval)(\.shared(::cta)?)?\.b64|expect_tx{_RELAXED}{_SHARED}\.b64"
    rf"|arrive(\.expect_tx)?(\.noComplete)?(\.release\.(cta|cluster)|{_RELAXED}){_SHARED}\.b64"
    rf"|(try|test)_wait\.parity(\.acquire\.(cta|cluster)|{_RELAXED})(\.shared(::cta)?)?\.b64",
    "redux": r"sync\.((add|min|max)\.[us]32|(and|or|xor)\.b32)",
    "bar barrier": r"(warp\.sync|(sync|arrive)(\.aligned)?|red(\.aligned)?\.(and|or)\.pred"
    r"|cluster\.(arrive(\.release|\.relaxed)?|wait(\.acquire)?)(\.aligned)?)",
    "fence": r"(mbarrier_init\.release\.cluster|proxy\.async(\.(shared::(cta|cluster)|global))?"
    r"|(sc|acq_rel)\.(cta|cluster|gpu|sys))",
    "membar": "(cta|gl|sys)",
    "mma": r"sync\.aligned\.(m16n8k16\.row\.col\.f32\.(f16\.f16|bf16\.bf16)"
    r"|m16n8k32\.row\.col\.f32\.e4m3\.e4m3)\.f32",
}
_FORMS = {name: re.compile(p) for names, p in _PATTERNS.items() for name in names.split()}

#: words of an access to memory; scopes below a card's are refused: checks hold each for a card's
_MEMORY = (
    "weak volatile relaxed acquire release acq_rel mmio gpu sys global shared shared::cta "
    "shared::cluster ca cg cs lu cv wb wt nc " + " ".join(SIZES)
)
_ATOMIC = f"{_MEMORY} add inc dec min max and or xor exch cas"
_COPY = (
    "async bulk tensor prefetch 1d 2d 3d 4d 5d tile shared shared::cta shared::cluster global ca "
    "cg L2 mbarrier mbarrier::complete_tx::bytes multicast::cluster cta_group::1 cta_group::2 "
    "arrive noinc commit_group wait_all wait_group b64"
)
_WORDS = {
    "ld": f"{_MEMORY} v2 v4 v8 param param::entry",
    "st": f"{_MEMORY} v2 v4 v8 async mbarrier::complete_tx::bytes",
    "atom": _ATOMIC,
    "red": _ATOMIC,
    "cp": _COPY,
}
#: of what is in shared memory, which only a cluster reaches
_SCOPES = {"cta", "cluster"}


def check(s: Instruction) -> None:
    """Raises Unsupported for an opcode with a word, or an order of words, that is not taken."""
    name, _, rest = s.opcode.partition(".")
    if name in _FORMS and not _FORMS[name].fullmatch(rest):
        raise unsupported("opcode", s.opcode, f"{name}.{_FORMS[name].pattern}")
    if name in _WORDS:
        known = set(_WORDS[name].split())
        if any(p.startswith("shared") for p in s.parts):
            known = known | _SCOPES
        other = [p for p in s.parts[1:] if p not in known and not p.startswith(("L1::", "L2::"))]
        if other:
            raise unsupported("opcode", f"{s.opcode} (.{other[0]})", sorted(known))

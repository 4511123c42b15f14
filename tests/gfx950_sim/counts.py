"""What a kernel is made of: its instructions by class, whole, in its loops, and as executed.

Everything here comes from the machine code and from the order in which waves executed it; nothing
from the kernel's source.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gfx950_sim.decode import Instruction

MFMA, VALU, SALU, LDS = "MFMA", "VALU", "SALU", "LDS"
LOAD, STORE, DMA, SMEM = "memory load", "memory store", "DMA to LDS", "scalar load"
WAIT, BARRIER, BRANCH, OTHER = "wait", "barrier", "branch", "nop and hint"
GROUPS = (MFMA, VALU, LDS, LOAD, DMA, STORE, SMEM, SALU, BRANCH, WAIT, BARRIER, OTHER)
"""Every class, in the order reports print them."""

_TRANSCENDENTAL = ("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_")
_LANE_MOVES = ("v_permlane", "v_readlane", "v_readfirstlane", "v_writelane")
_BITS = ("v_and", "v_or", "v_xor", "v_not", "v_lsh", "v_ash", "v_bf", "v_perm_", "v_align")
_HINTS = ("s_nop", "s_setprio", "s_sleep", "s_sched", "s_inst_prefetch", "s_endpgm")


@dataclass(frozen=True)
class Class:
    """What an instruction is counted as."""

    group: str
    """One of `GROUPS`."""
    kind: str
    """Finer, within the group: "scaled fp8", "convert", "read b128" ..."""


def classify(instruction: Instruction) -> Class:
    """The class of an instruction, from its mnemonic and encoding."""
    name, encoding = instruction.name, instruction.encoding
    if name.startswith(("v_mfma", "v_smfmac")):
        return Class(MFMA, _mfma_kind(instruction))
    if encoding.startswith("VOP"):
        return Class(VALU, _valu_kind(name))
    if encoding == "DS":
        return Class(LDS, name.removeprefix("ds_").replace("_", " "))
    if encoding in ("GLOBAL", "MUBUF", "FLAT", "SCRATCH"):
        return _vector_memory(instruction)
    if encoding == "SMEM":
        return Class(SMEM, name.removeprefix("s_"))
    if name == "s_waitcnt":
        return Class(WAIT, name)
    if name == "s_barrier":
        return Class(BARRIER, name)
    if "branch" in name or name in ("s_setpc_b64", "s_swappc_b64", "s_call_b64"):
        return Class(BRANCH, name)
    if name.startswith(_HINTS):
        return Class(OTHER, name)
    return Class(SALU, name)


_F8F6F4_WIDTHS = {0: "fp8", 1: "fp8", 2: "fp6", 3: "fp6", 4: "fp4"}
"""What cbsz and blgp of *_f8f6f4 are counted as: by their width."""


def _mfma_kind(instruction: Instruction) -> str:
    """fp8, fp6 and fp4 by width; "fp8 by fp4" when A and B differ."""
    name, operand = instruction.name, instruction.name.rsplit("_", 1)[1]
    if "f8f6f4" in name:
        a, b = (_F8F6F4_WIDTHS[instruction.modifiers.get(m, 0)] for m in ("cbsz", "blgp"))
        return ("scaled " if "_scale_" in name else "") + (a if a == b else f"{a} by {b}")
    return {"bf8": "fp8", "16f16": "f16"}.get(operand, operand)


def _valu_kind(name: str) -> str:
    if name.startswith("v_cvt"):
        return "convert"
    if name.startswith(_TRANSCENDENTAL):
        return "transcendental"
    if name.startswith("v_cmp"):
        return "compare"
    if name.startswith("v_cndmask"):
        return "select"
    if name.startswith(("v_mov", "v_accvgpr")):
        return "move"
    if name.startswith(_LANE_MOVES):
        return "lane exchange"
    if name.startswith("v_pk_"):
        return "packed"
    if name.startswith(_BITS):
        return "bits"
    return "float" if "_f32" in name or "_f16" in name or "_f64" in name else "integer"


def _vector_memory(instruction: Instruction) -> Class:
    name = instruction.name
    kind = name.split("_", 1)[1].replace("_", " ")
    if "_load_lds" in name or instruction.modifiers.get("lds"):
        return Class(DMA, kind.replace("lds ", ""))
    if "_store" in name or "_atomic" in name:
        return Class(STORE, kind)
    if "_load" in name:
        return Class(LOAD, kind)
    return Class(OTHER, name)


@dataclass(frozen=True)
class Counts:
    """Numbers of instructions by class; fractional when they are averages."""

    by_class: Mapping[Class, float]

    @classmethod
    def of(cls, instructions: Iterable[Instruction]) -> "Counts":
        """Counts of a stretch of machine code."""
        return cls(Counter(classify(i) for i in instructions))

    def group(self, group: str) -> float:
        """The instructions of a group."""
        return sum(n for c, n in self.by_class.items() if c.group == group)

    def kinds(self, group: str) -> dict[str, float]:
        """The instructions of a group by kind, most first."""
        found = {c.kind: n for c, n in self.by_class.items() if c.group == group}
        return dict(sorted(found.items(), key=lambda kv: -kv[1]))

    @property
    def total(self) -> float:
        """All instructions."""
        return sum(self.by_class.values())


@dataclass(frozen=True)
class Loop:
    """A loop of a kernel's control flow."""

    header: int
    """Index of the first instruction of an iteration."""
    body: frozenset[int]
    """Indexes of its instructions, the header's among them."""

    def instructions(self, program: Sequence[Instruction]) -> list[Instruction]:
        """The body in the order of the machine code."""
        return [program[i] for i in sorted(self.body)]


def successors(program: Sequence[Instruction]) -> list[tuple[int, ...]]:
    """For each instruction, the indexes that may run after it."""
    index_at = {instruction.pc: instruction.index for instruction in program}
    following: list[tuple[int, ...]] = []
    for instruction in program:
        after: tuple[int, ...] = (
            (instruction.index + 1,) if instruction.index + 1 < len(program) else ()
        )
        if instruction.name == "s_endpgm":
            after = ()
        elif instruction.encoding == "SOPP" and "branch" in instruction.name:
            offset = instruction.modifiers["simm16"]
            offset -= 0x10000 if offset & 0x8000 else 0
            target = index_at[instruction.pc + 4 + 4 * offset]
            after = (target,) if instruction.name == "s_branch" else (*after, target)
        following.append(after)
    return following


def loops(program: Sequence[Instruction]) -> list[Loop]:
    """The loops, nested ones too, largest body first.

    A loop is a strongly connected part of the control flow; its header is where it is entered,
    which need not be the target of its backward branch (compilers rotate loops). Those inside it
    are found with its header taken out.
    """
    following = successors(program)
    found: list[Loop] = []
    pending = [frozenset(range(len(program)))]
    while pending:
        within = pending.pop()
        for body in _cycles(following, within):
            entered = {
                target
                for index in range(len(program))
                if index not in body
                for target in following[index]
                if target in body
            }
            header = min(entered, default=min(body))
            found.append(Loop(header, body))
            pending.append(body - {header})
    return sorted(found, key=lambda loop: -len(loop.body))


def _cycles(following: list[tuple[int, ...]], within: frozenset[int]) -> list[frozenset[int]]:
    """The strongly connected components with a cycle among the nodes of ``within`` (Tarjan, without
    recursion)."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found = []
    for root in sorted(within):
        work = [(root, 0)] if root not in order else []
        while work:
            node, edge = work.pop()
            if edge == 0:
                order[node] = low[node] = len(order)
                stack.append(node)
                on_stack.add(node)
            targets = [t for t in following[node] if t in within]
            if edge > 0:
                low[node] = min(low[node], low[targets[edge - 1]])
            while edge < len(targets):
                target = targets[edge]
                edge += 1
                if target not in order:
                    work += [(node, edge), (target, 0)]
                    break
                if target in on_stack:
                    low[node] = min(low[node], order[target])
            else:
                if low[node] == order[node]:
                    component = set()
                    while node not in component:
                        component.add(stack.pop())
                    on_stack -= component
                    if len(component) > 1 or node in following[node]:
                        found.append(frozenset(component))
    return found


def hot_loop(
    program: Sequence[Instruction], traces: Iterable[Sequence[int]] | None = None
) -> Loop | None:
    """The loop in which most instructions are executed; without traces, that with most MFMA, then
    instructions.

    None if there is no loop.
    """
    candidates = loops(program)
    if not candidates:
        return None
    if traces is None:
        matrix = {i.index for i in program if classify(i).group == MFMA}
        return max(candidates, key=lambda loop: (len(loop.body & matrix), len(loop.body)))
    executed: Counter[int] = Counter()
    for trace in traces:
        executed.update(trace)
    # Of nested loops the outer executes all that the inner does: prefer the inner unless it holds
    # less than half.
    totals = {loop.header: sum(executed[i] for i in loop.body) for loop in candidates}
    most = max(totals.values())
    inner_enough = [loop for loop in candidates if totals[loop.header] > most / 2]
    return min(inner_enough, key=lambda loop: len(loop.body))


def executed_per_iteration(
    program: Sequence[Instruction], loop: Loop, traces: Iterable[Sequence[int]]
) -> Counts:
    """Instructions a wave executes in an average iteration of a loop."""
    executed: Counter[int] = Counter()
    for trace in traces:
        executed.update(i for i in trace if i in loop.body)
    iterations = max(executed[loop.header], 1)
    by_class: Counter[Class] = Counter()
    for index, count in executed.items():
        by_class[classify(program[index])] += count
    return Counts({c: n / iterations for c, n in by_class.items()})


def executed_outside(loop: Loop | None, traces: Sequence[Sequence[int]]) -> float:
    """Instructions that a wave executes outside a loop, on average."""
    body = loop.body if loop else frozenset()
    return sum(sum(i not in body for i in trace) for trace in traces) / max(len(traces), 1)

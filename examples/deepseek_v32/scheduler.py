"""Planning steps: which rows of which requests go into the next step, and what its tokens mean.

Everything here is on the host and knows nothing of the model. A plan takes the rows of running
requests first (one to a few: the last token, and drafts to be checked), then prompt tokens of
others in chunks until the step is full. A request that waits is admitted when there is a line and
there are blocks for its whole length; the blocks of a known prefix are shared.
"""

import dataclasses
from collections import deque

import numpy as np

from examples.deepseek_v32.cache import BlockAllocator, OutOfBlocks


@dataclasses.dataclass
class Request:
    """One prompt and what has become of it."""

    number: int
    prompt: list[int]
    max_new_tokens: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    """The prompt and the tokens generated so far."""
    drafts: list[int] = dataclasses.field(default_factory=list)
    """Guesses behind ``tokens`` in the step under way."""
    computed: int = 0
    """Leading tokens whose records are in the cache."""
    blocks: list[int] = dataclasses.field(default_factory=list)
    line: int = -1
    """Its line of the block table."""
    is_done: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def generated(self) -> list[int]:
        """Tokens behind the prompt."""
        return self.tokens[len(self.prompt) :]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes of the cache and of steps; they fix the compiled shapes."""

    num_blocks: int
    block_size: int
    max_length: int
    """Tokens of the longest request, generated ones included."""
    lines: int = 8
    """Requests that run at a time."""
    prefill_rows: int = 256
    """Rows of a step that holds prompt tokens."""
    draft_tokens: int = 0
    """Guessed tokens a request and step."""

    @property
    def decode_rows(self) -> int:
        """Rows of a step without prompt tokens, and output rows of every step."""
        return self.lines * (1 + self.draft_tokens)

    @property
    def table_width(self) -> int:
        """Blocks of the longest request."""
        return -(-self.max_length // self.block_size)

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_length", "lines", "prefill_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.draft_tokens <= 8:
            raise ValueError(f"draft_tokens must be in 0 .. 8, got {self.draft_tokens}")
        if self.prefill_rows < self.decode_rows:
            raise ValueError(
                f"prefill_rows {self.prefill_rows} is less than lines * (1 + draft_tokens), "
                f"{self.decode_rows}"
            )


@dataclasses.dataclass
class Plan:
    """One step's rows as arrays, filled up with padding rows, and the requests they belong to."""

    tokens: np.ndarray  # [n] int32
    requests: np.ndarray  # [n] int32, lines of the block table
    positions: np.ndarray  # [n] int32, -1 in padding rows
    block_table: np.ndarray  # [lines, w] int32
    output_rows: np.ndarray  # [m] int32
    output_requests: np.ndarray  # [m] int32, numbers of the requests
    spans: list[tuple[Request, int, int]]
    """(request, rows in this step, its first output or -1)."""
    num_rows: int
    """Rows that are no padding."""
    has_prompt: bool
    """Whether the step is of the size that has room for prompt tokens."""


@dataclasses.dataclass
class Choice:
    """Which requests have how many rows in the next step."""

    spans: list[tuple[Request, int]]
    has_prompt: bool
    """Whether prompt tokens are among them."""


class Scheduler:
    """Requests waiting and running, and the blocks they hold."""

    def __init__(self, limits: Limits):
        """Start with an empty cache.

        Args:
          limits: sizes of the cache and of steps.
        """
        self.limits = limits
        self.allocator = BlockAllocator(limits.num_blocks, limits.block_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.block_table = np.full((limits.lines, limits.table_width), -1, np.int32)
        self._lines = list(range(limits.lines))

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
          ValueError: the prompt is empty, or the request can never fit.
        """
        length = len(request.prompt) + request.max_new_tokens
        capacity = self.limits.num_blocks * self.limits.block_size
        if not request.prompt:
            raise ValueError(f"prompt {request.number} is empty")
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
        if length > min(self.limits.max_length, capacity):
            raise ValueError(
                f"prompt {request.number} is too long: {len(request.prompt)} tokens and "
                f"{request.max_new_tokens} new ones, but a request may have "
                f"{self.limits.max_length} and the cache holds {capacity}"
            )
        self.waiting.append(request)

    @property
    def is_busy(self) -> bool:
        """Whether any request is not done."""
        return bool(self.waiting or self.running)

    def choose(self) -> Choice:
        """Choose the next step's rows; none if no request is waiting or running."""
        decoding = [r for r in self.running if r.computed == len(r.tokens) - 1]
        prefilling = [r for r in self.running if r.computed < len(r.tokens) - 1]
        spans: list[tuple[Request, int]] = []
        for request in decoding:
            request.drafts = self._draft(request)
            spans.append((request, 1 + len(request.drafts)))
        room = self.limits.prefill_rows - sum(rows for _, rows in spans)
        has_prompt = False
        while room > 0:
            next_request = prefilling.pop(0) if prefilling else self._admit()
            if next_request is None:
                break
            request = next_request
            rows = min(room, len(request.tokens) - request.computed)
            # Published before the step runs: later rows of the same step may already share them.
            written = request.tokens[: request.computed + rows]
            self.allocator.publish(written, request.blocks)
            spans.append((request, rows))
            room -= rows
            has_prompt = True
        return Choice(spans, has_prompt)

    def _admit(self) -> Request | None:
        if not self.waiting or not self._lines:
            return None
        request = self.waiting[0]
        size = self.limits.block_size
        # The last prompt token is always computed: its logits are wanted.
        shared = self.allocator.share(request.prompt[:-1])
        length = len(request.prompt) + request.max_new_tokens
        try:
            own = self.allocator.allocate(-(-length // size) - len(shared))
        except OutOfBlocks:
            self.allocator.release(shared)
            return None
        self.waiting.popleft()
        request.blocks = shared + own
        request.computed = len(shared) * size
        request.line = self._lines.pop(0)
        self.block_table[request.line, : len(request.blocks)] = request.blocks
        self.running.append(request)
        return request

    def _draft(self, request: Request) -> list[int]:
        left = request.max_new_tokens - len(request.generated)
        return prompt_lookup(request.tokens, min(self.limits.draft_tokens, left - 1))

    def plan(self, choice: Choice, has_prompt: bool) -> Plan:
        """Write chosen rows out as arrays.

        Args:
          choice: from `choose`.
          has_prompt: whether the step is of the size that has room for prompt tokens, which on a
            mesh another group's rows may decide.
        """
        limits = self.limits
        n = limits.prefill_rows if has_prompt else limits.decode_rows
        tokens, requests = np.zeros(n, np.int32), np.zeros(n, np.int32)
        positions = np.full(n, -1, np.int32)
        output_rows = np.zeros(limits.decode_rows, np.int32)
        output_requests = np.zeros(limits.decode_rows, np.int32)
        row = output = 0
        placed = []
        for request, rows in choice.spans:
            sequence = request.tokens + request.drafts
            first = request.computed
            tokens[row : row + rows] = sequence[first : first + rows]
            requests[row : row + rows] = request.line
            positions[row : row + rows] = np.arange(first, first + rows)
            outputs = 0
            if first + rows == len(sequence):
                outputs = 1 + len(request.drafts)
                output_rows[output : output + outputs] = np.arange(row + rows - outputs, row + rows)
                output_requests[output : output + outputs] = request.number
            placed.append((request, rows, output if outputs else -1))
            row += rows
            output += outputs
        return Plan(
            tokens=tokens,
            requests=requests,
            positions=positions,
            block_table=self.block_table.copy(),
            output_rows=output_rows,
            output_requests=output_requests,
            spans=placed,
            num_rows=row,
            has_prompt=has_prompt,
        )

    def finish(self, plan: Plan, sampled: np.ndarray, end_tokens: tuple[int, ...]) -> int:
        """Take a step's tokens in.

        A request with drafts keeps those that the model itself would have chosen, and the token
        behind them. The records of the others are wrong; the next step's rows start at the first
        of them and write those slots anew.

        Args:
          plan: the step's.
          sampled: ``[m]`` the token chosen after each output row.
          end_tokens: a request is done behind one of these.

        Returns:
          How many tokens were generated.
        """
        count = 0
        for request, rows, output in plan.spans:
            if output < 0:
                request.computed += rows
                continue
            drafts, request.drafts = request.drafts, []
            request.computed = len(request.tokens)
            for number in range(1 + len(drafts)):
                token = int(sampled[output + number])
                request.tokens.append(token)
                count += 1
                full = len(request.generated) == request.max_new_tokens
                if full or token in end_tokens:
                    request.is_done = True
                    break
                if number == len(drafts) or token != drafts[number]:
                    break
                request.computed += 1
            self.allocator.publish(request.tokens[: request.computed], request.blocks)
            if request.is_done:
                self._retire(request)
        return count

    def _retire(self, request: Request) -> None:
        self.running.remove(request)
        self.allocator.release(request.blocks)
        self.block_table[request.line] = -1
        self._lines.append(request.line)


def prompt_lookup(tokens: list[int], count: int, ngram: int = 2) -> list[int]:
    """Guess the next tokens: what stood behind the last occurrence of the last ``ngram`` tokens.

    Args:
      tokens: so far.
      count: guesses wanted at most.
      ngram: tokens that must agree.
    """
    tail = tokens[-ngram:]
    if count < 1:
        return []
    for end in range(len(tokens) - 1, ngram - 1, -1):
        if tokens[end - ngram : end] == tail:
            return tokens[end : end + count]
    return []

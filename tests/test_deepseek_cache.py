"""Blocks and their sharing, plans of steps: the host's side, no model."""

import numpy as np
import pytest

from examples.deepseek_v32.cache import BlockAllocator, OutOfBlocks
from examples.deepseek_v32.scheduler import Limits, Request, Scheduler, prompt_lookup


def test_blocks_are_shared_by_prefix():
    allocator = BlockAllocator(8, block_size=4)
    tokens = list(range(10))
    first = allocator.allocate(3)
    allocator.publish(tokens, first)
    assert allocator.share(tokens) == first[:2]
    assert allocator.share(tokens[:7]) == first[:1]
    assert allocator.share([99, *tokens[1:]]) == []
    # The same tokens behind another prefix are another block.
    assert allocator.share([*range(50, 54), *tokens[4:8]]) == []


def test_released_blocks_stay_known_until_needed():
    allocator = BlockAllocator(4, block_size=2)
    a = allocator.allocate(2)
    allocator.publish([1, 2, 3, 4], a)
    allocator.release(a)
    assert allocator.available == 4
    assert allocator.share([1, 2, 3, 4]) == a
    assert allocator.available == 2
    allocator.release(a)
    taken = allocator.allocate(3)
    # Free blocks went first, then the end of the prefix; its beginning is still known.
    assert a[1] in taken
    assert a[0] not in taken
    assert allocator.share([1, 2, 3, 4]) == a[:1]


def test_a_block_is_free_when_its_last_user_has_gone():
    allocator = BlockAllocator(2, block_size=1)
    block = allocator.allocate(1)
    allocator.publish([7], block)
    assert allocator.share([7]) == block
    allocator.release(block)
    assert allocator.available == 1
    with pytest.raises(OutOfBlocks):
        allocator.allocate(2)
    assert allocator.available == 1
    allocator.release(block)
    assert allocator.available == 2


def next_plan(scheduler):
    choice = scheduler.choose()
    return scheduler.plan(choice, choice.has_prompt)


def run(scheduler, choose):
    """Drive a scheduler with a model that is a function of (request number, position)."""
    plans = []
    while scheduler.is_busy:
        plan = next_plan(scheduler)
        plans.append(plan)
        sampled = [
            choose(int(r), int(plan.positions[row]) + 1)
            for r, row in zip(plan.output_requests, plan.output_rows, strict=True)
        ]
        scheduler.finish(plan, np.array(sampled), end_tokens=(-5,))
    return plans


def covered(plans):
    """Positions that each line's rows had, step by step."""
    return [
        [
            (int(line), int(p))
            for line, p in zip(plan.requests, plan.positions, strict=True)
            if p >= 0
        ]
        for plan in plans
    ]


def test_prompts_of_different_lengths_share_steps():
    limits = Limits(num_blocks=20, block_size=4, max_length=32, lines=2, prefill_rows=8)
    scheduler = Scheduler(limits)
    requests = [Request(i, list(range(i * 100, i * 100 + n)), 3) for i, n in enumerate((11, 3, 5))]
    for request in requests:
        scheduler.add(request)
    plans = run(scheduler, lambda request, position: 1000 * request + position)
    assert covered(plans)[0] == [(0, p) for p in range(8)]
    # The first prompt's rest, then the second prompt in the same step.
    assert covered(plans)[1] == [(0, 8), (0, 9), (0, 10), (1, 0), (1, 1), (1, 2)]
    assert covered(plans)[2] == [(0, 11), (1, 3)]
    for i, request in enumerate(requests):
        n = len(request.prompt)
        assert request.generated == [1000 * i + p for p in range(n, n + 3)]
    assert scheduler.allocator.available == 20
    assert np.all(scheduler.block_table == -1)


def test_plans_write_each_position_once_and_in_order():
    limits = Limits(num_blocks=40, block_size=4, max_length=64, lines=4, prefill_rows=16)
    scheduler = Scheduler(limits)
    rng = np.random.default_rng(0)
    for i in range(12):
        prompt = rng.integers(0, 1000, rng.integers(1, 50)).tolist()
        scheduler.add(Request(i, prompt, int(rng.integers(1, 14))))
    seen = {}
    plans = run(scheduler, lambda request, position: -5 if position % 40 == 39 else position)
    for plan in plans:
        row = 0
        for request, rows, _ in plan.spans:
            positions = plan.positions[row : row + rows].tolist()
            seen.setdefault(request.number, []).extend(positions)
            assert np.all(plan.block_table[plan.requests[row], np.array(positions) // 4] >= 0)
            row += rows
        assert np.all(plan.positions[row:] == -1)
    for number, positions in seen.items():
        assert positions == list(range(len(positions))), number
    assert len(seen) == 12


def test_a_common_prefix_is_computed_once():
    limits = Limits(num_blocks=20, block_size=4, max_length=32, lines=4, prefill_rows=32)
    scheduler = Scheduler(limits)
    prefix = list(range(10))
    requests = [
        Request(0, [*prefix, 50], 2),
        Request(1, [*prefix, 60, 61], 2),
        Request(2, prefix, 2),
    ]
    for request in requests:
        scheduler.add(request)
    plan = next_plan(scheduler)
    # All in one step: the second begins behind the two full blocks, as the first writes them.
    assert [rows for _, rows, _ in plan.spans] == [11, 4, 2]
    assert requests[1].blocks[:2] == requests[0].blocks[:2] == requests[2].blocks[:2]
    assert len({*requests[0].blocks[2:], *requests[1].blocks[2:], *requests[2].blocks[2:]}) == 5
    scheduler.finish(plan, np.arange(4), ())


def test_a_whole_prompt_is_never_shared():
    """At least one row is left to compute: the next token comes from its logits."""
    scheduler = Scheduler(Limits(num_blocks=9, block_size=4, max_length=16, prefill_rows=16))
    for i in range(2):
        scheduler.add(Request(i, list(range(8)), 1))
    plan = next_plan(scheduler)
    assert [rows for _, rows, _ in plan.spans] == [8, 4]


def test_requests_wait_for_blocks_and_lines():
    limits = Limits(num_blocks=4, block_size=4, max_length=16, lines=4, prefill_rows=16)
    scheduler = Scheduler(limits)
    for i in range(3):
        scheduler.add(Request(i, list(range(i * 10, i * 10 + 6)), 2))
    plan = next_plan(scheduler)
    assert [request.number for request, _, _ in plan.spans] == [0, 1]
    run(scheduler, lambda request, position: position)
    assert not scheduler.waiting


def test_drafts_are_checked_and_rejected_slots_written_again():
    limits = Limits(
        num_blocks=9, block_size=4, max_length=36, lines=1, prefill_rows=8, draft_tokens=3
    )
    scheduler = Scheduler(limits)
    # The text repeats, so prompt lookup guesses it, until the model says 9 at position 15.
    request = Request(0, [1, 2, 3, 4, 5, 1, 2], 12)
    scheduler.add(request)
    truth = [1, 2, 3, 4, 5] * 3 + [9] + [1, 2, 3, 4]
    plans = run(scheduler, lambda request, position: truth[position] if position < 20 else 7)
    assert request.generated == truth[7:19]
    steps = covered(plans)
    assert steps[1] == [(0, 7), (0, 8), (0, 9), (0, 10)]
    starts = [rows[0][1] for rows in steps]
    # The step that drafted position 15 wrongly is followed by one that starts there.
    assert 15 in starts
    assert len(plans) < 1 + 12
    assert request.computed <= len(request.tokens)


def test_prompt_lookup():
    assert prompt_lookup([1, 2, 3, 9, 1, 2], 2) == [3, 9]
    assert prompt_lookup([1, 2, 3, 1, 2, 4, 1, 2], 3) == [4, 1, 2]
    assert prompt_lookup([1, 2, 3], 2) == []
    assert prompt_lookup([1, 1, 1], 0) == []
    assert prompt_lookup([5], 3) == []


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([], 1, "prompt 3 is empty"),
        ([1], 0, "max_new_tokens"),
        ([1] * 30, 3, "prompt 3 is too long: 30 tokens and 3 new ones"),
        ([1] * 16, 9, "the cache holds 24"),
    ],
)
def test_bad_requests(prompt, new, message):
    scheduler = Scheduler(Limits(num_blocks=6, block_size=4, max_length=32, prefill_rows=16))
    with pytest.raises(ValueError, match=message):
        scheduler.add(Request(3, prompt, new))


def test_bad_limits():
    with pytest.raises(ValueError, match="prefill_rows 4 is less than"):
        Limits(num_blocks=6, block_size=4, max_length=32, prefill_rows=4)
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        Limits(num_blocks=6, block_size=0, max_length=32)
    with pytest.raises(ValueError, match="draft_tokens"):
        Limits(num_blocks=6, block_size=4, max_length=32, draft_tokens=9)

"""The kernel report's numbers against what the launch must do."""

import re

import pytest
from gfx950_sim import counts

from benchmarks import kernel_report
from benchmarks.kernel_measure import Measured
from benchmarks.kernel_run import SparseMla, make_inputs
from benchmarks.kernel_targets import target_rows
from jax_sparse_mla.kernel.compiler import code_object
from jax_sparse_mla.kernel.specialisation import ALL

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def measured():
    return Measured(SparseMla(code_object(ALL[0]).code))


def test_a_tile_reads_its_records_once_and_multiplies_all_of_them(measured):
    records = 128 * 656
    assert records <= measured.tile_memory.global_read < 1.25 * records
    # 16 heads x 128 entries x (512 latent + 64 rope for scores, 512 for values), by 4 waves.
    useful = 16 * 128 * (576 + 512) * 2
    depth = {"scaled fp8": 2 * 16 * 16 * 128, "bf16": 2 * 16 * 16 * 32, "f16": 2 * 16 * 16 * 32}
    kinds = measured.tile.kinds(counts.MFMA)
    assert 4 * sum(number * depth.get(kind, 0) for kind, number in kinds.items()) >= useful


def test_counts_do_not_depend_on_the_rows_length(measured):
    refined = measured.refined
    longer = refined._executed(2048).total
    shorter = refined._executed(1024).total
    tile = refined.tile.total + refined.beside_loop
    assert longer == pytest.approx(refined.outside + 16 * tile)
    assert shorter == pytest.approx(refined.outside + 8 * tile)


def test_even_weights_leave_tiles_plain_and_rising_ones_refine_all(measured):
    plain, refined = (m.tile.kinds(counts.MFMA) for m in (measured, measured.refined))
    assert plain.get("scaled fp8 by fp4", 0) == 0
    assert refined["scaled fp8 by fp4"] == 8
    assert 0 < measured.refined_share < 1


def test_estimates_have_the_order_that_costs_give(measured):
    floor = max(clocks for unit, clocks in measured.floors.items() if unit != "issue of a wave")
    near = measured.clocks_per_tile(measured.residents)
    far = measured.clocks_per_tile(measured.residents, 2000)
    assert floor * 0.99 <= near <= far * 1.05
    assert 0 <= measured.steady.bytes_in_flight < 160 * 1024
    assert measured.decode_one().splits >= 8


def test_the_table_prints_every_row(measured, capsys):
    kernel_report.print_table({"ours": measured}, None)
    out = capsys.readouterr().out
    for row in target_rows(1.0):
        assert re.search(re.escape(row.label) + r" +\S", out), row.label
    assert "not run" not in out
    assert "estimate" in out


def test_the_runs_inputs_are_a_sparse_row():
    inputs = make_inputs(2, 256)
    assert inputs.q.shape == (2, 16, 576)
    assert inputs.records.shape[1] == 656
    assert len(set(inputs.indices[:256].tolist())) == 256

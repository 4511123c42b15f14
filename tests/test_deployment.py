"""Runs every code block of docs/deployment.md, in order, on eight host devices."""

import os
import re
import socket
from pathlib import Path

import jax
import numpy as np
import pytest
from device_process import Child, on_devices

import jax_sparse_mla as jsm

PAGE = Path(__file__).parent.parent / "docs" / "deployment.md"


def blocks():
    """Heading and code of each block."""
    heading, found = "", []
    for match in re.finditer(
        r"^#+ ([^\n]*)$|^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S
    ):
        if match[1]:
            heading = match[1]
        else:
            found.append((heading, match[2]))
    return found


def run(block, namespace):
    exec(compile(block, str(PAGE), "exec"), namespace)


def assert_close(got, want):
    """Equal but for the rounding of bfloat16, done in another order."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-3)


@pytest.mark.slow
@on_devices(8)
def test_every_block_runs_and_gives_the_single_device_result():
    space: dict = {"__name__": "deployment"}
    seen = []
    for heading, block in blocks():
        space.pop("out", None)
        run(block, space)
        out = space.get("out")
        if out is None:
            continue
        seen.append(heading)
        if heading.startswith(("TP8", "Context", "Export")):
            want = space["single"]
        else:  # rows with caches of their own: as one call for each
            parts = 2 if heading.startswith("TP4") else 8
            own = {"TP4": "group", "Dat": "own"}[heading[:3]]
            split = [np.split(np.asarray(space[k]), parts) for k in ("q", "cache", own, "lengths")]
            want = np.concatenate(
                [
                    jsm.sparse_mla_fwd(q, kv, None, slots, space["softmax_scale"], row_lengths=rows)
                    for q, kv, slots, rows in zip(*split, strict=True)
                ]
            )
            if heading.startswith("Dat"):
                data_parallel = want
        assert len(out.sharding.device_set) == 8
        assert_close(out, want)
    assert len(seen) == 5
    assert_close(space["stacked"].reshape(data_parallel.shape), data_parallel)
    values = np.einsum("nhc,hcv->nhv", *(np.float32(space[k]) for k in ("single", "w_uv")))
    hidden = np.einsum("nhv,hvd->nd", values, np.float32(space["w_o"]))
    np.testing.assert_allclose(space["hidden"], hidden, rtol=5e-2, atol=2e-2)
    assert int(space["tiles"].sum()) <= 8 * 8
    assert "jax_sparse_mla_fwd" in space["exported"].mlir_module()  # it carries the kernel


def several_hosts():
    (block,) = [code for heading, code in blocks() if heading == "Several hosts"]
    run(block, {"jax": jax})
    assert jax.process_count() == 1
    assert jax.distributed.is_initialized()


def test_the_block_for_several_hosts():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    assert "COORDINATOR" not in os.environ
    child = Child(2, env={"COORDINATOR": address, "NUM_PROCESSES": "1", "PROCESS_ID": "0"})
    child.call(several_hosts)
    child.stop()

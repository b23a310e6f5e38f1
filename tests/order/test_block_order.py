"""BlockOrder against the C++ classes that it equals, compiled here from torch's headers."""

from __future__ import annotations

import dataclasses
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from pipegraph.errors import GraphError
from pipegraph.order import BlockOrder

SOURCE = Path(__file__).with_name("cpp_samplers.cpp")


@pytest.fixture(scope="module")
def cpp_samplers(tmp_path_factory):
    """A function: lines of cases in, lists of indices out, by the real C++ classes."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler (g++) on this machine")
    root = Path(torch.__file__).parent
    program = tmp_path_factory.mktemp("cpp") / "samplers"
    include = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    link = [f"-L{root}/lib", f"-Wl,-rpath,{root}/lib", "-ltorch_cpu", "-lc10"]
    command = [compiler, "-std=c++20", "-O1", *include, str(SOURCE), "-o", str(program), *link]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr[-4000:]

    def run(cases):
        lines = "".join(" ".join(map(str, case)) + "\n" for case in cases)
        ran = subprocess.run([program], input=lines, capture_output=True, text=True, check=True, timeout=300)
        return [[int(index) for index in line.split()] for line in ran.stdout.split("\n")[:-1]]

    return run


def drawn_cases(kind, count, draw):
    for case in range(count):
        size = draw.randint(0, 12) if case % 2 else draw.randint(1, 700)
        world_size = draw.randint(1, 20)
        new_size = draw.randint(0, 300) if draw.random() < 0.3 else -1
        epoch = draw.choice([0, 1, draw.randrange(1_000), draw.randrange(2**40)])
        yield kind, size, world_size, draw.randrange(world_size), draw.randint(0, 1), epoch, new_size


@pytest.mark.slow  # torch's headers take a compiler half a minute
@pytest.mark.parametrize(
    ("kind", "order"),
    [("random", BlockOrder(compat=True)), ("sequential", BlockOrder(shuffle=False))],
)
def test_it_equals_the_cpp_sampler_index_for_index(cpp_samplers, kind, order):
    cases = list(drawn_cases(kind, 3_000, random.Random(2)))
    assert sum(size < world_size for _, size, world_size, *_ in cases) > 300
    for case, expected in zip(cases, cpp_samplers(cases), strict=True):
        _, size, world_size, rank, duplicates, epoch, new_size = case
        this = dataclasses.replace(order, allow_duplicates=bool(duplicates))
        if new_size >= 0:
            size = max(size, new_size)
            this = dataclasses.replace(this, size=new_size)
        ours = this.indices(size, 11, epoch, rank, world_size)
        assert ours.tolist() == expected, case
        assert this.length(size, world_size) == len(expected)


def test_without_duplicates_every_epoch_leaves_out_others():
    order = BlockOrder(allow_duplicates=False)
    left_out = set()
    for epoch in range(30):
        read = np.concatenate([order.indices(103, 0, epoch, rank, 4) for rank in range(4)])
        left_out |= set(range(103)) - set(read.tolist())
    assert len(left_out) > 30


def test_the_sequential_order_reads_contiguous_blocks_and_wraps():
    order = BlockOrder(shuffle=False)
    assert [order.indices(10, rank=r, world_size=3).tolist() for r in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 0, 1],
    ]
    assert order.positions(10, rank=2, world_size=3).tolist() == [8, 9, 10, 11]


def test_a_resize_cuts_the_remaining_spans_of_the_first_list_anew():
    order = BlockOrder(shuffle=False)
    # 2 ranks of 10 read 3 each: 3..9 and 13..19 are left, 14 places for 3 ranks of 5.
    after = [order.indices(20, rank=r, world_size=3, history=[(2, 3)]).tolist() for r in range(3)]
    assert after == [[3, 4, 5, 6, 7], [8, 9, 13, 14, 15], [16, 17, 18, 19, 3]]
    assert order.positions(20, rank=2, world_size=3, start=4, history=[(2, 3)]).tolist() == [23]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compat": True, "shuffle": False}, "compat=True needs shuffle=True"),
        ({"size": -1}, "size must be None or an int >= 0, got -1"),
    ],
)
def test_wrong_parameters_are_refused(arguments, message):
    with pytest.raises(GraphError, match=message):
        BlockOrder(**arguments)

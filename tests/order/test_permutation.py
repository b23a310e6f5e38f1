"""Keyed permutations: bijective at every size, uniform, and the same for ever."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pipegraph.order.permutation import TABLE_SIZE, derived_keys, key64, permute, permute_one, shuffled

# 2**(2k) + 1 is where a rounded bit count fails; the others are the edges around it.
NETWORK_SIZES = [
    size for bits in range(10, 19) for size in (2**bits - 1, 2**bits, 2**bits + 1) if size > TABLE_SIZE
]


@pytest.mark.parametrize("size", [1, 2, 3, 17, TABLE_SIZE, *NETWORK_SIZES])
def test_every_size_has_a_bijection(size):
    images = permute_one(np.arange(size), size, key64("test", size))
    assert np.array_equal(np.sort(images), np.arange(size))
    if size > 3:
        assert not np.array_equal(images, np.arange(size))


@pytest.mark.parametrize("size", [2**30 + 1, 2**32 + 1, 2**40 + 1, 2_500_000_000, 2**52])
def test_large_domains_keep_their_bounds_and_have_no_collision(size):
    places = np.concatenate([np.arange(20_000), np.arange(size - 20_000, size)])
    images = permute_one(places, size, 5)
    assert images.min() >= 0
    assert images.max() < size
    assert len(np.unique(images)) == len(places)


def test_elements_of_many_permutations_are_permuted_each_by_its_own():
    rng = np.random.default_rng(0)
    sizes = rng.choice([1, 2, 9, TABLE_SIZE, TABLE_SIZE + 1, 5_000], 4_000)
    values = rng.integers(0, sizes)
    numbers = rng.integers(0, 3, 4_000)
    keys = derived_keys(7, numbers)
    together = permute(values, sizes, keys)
    for size, number in itertools.product((1, 2, 9, TABLE_SIZE, TABLE_SIZE + 1, 5_000), range(3)):
        mine = (sizes == size) & (numbers == number)
        key = int(derived_keys(7, np.array([number]))[0])
        assert np.array_equal(together[mine], permute_one(values[mine], size, key))


def test_the_permutations_never_change():
    assert shuffled(10, 3).tolist() == [6, 8, 4, 1, 3, 5, 9, 7, 0, 2]
    assert permute_one(np.arange(8), 2**20 + 1, 3).tolist() == [
        858893,
        345915,
        891244,
        113503,
        295588,
        133918,
        698666,
        1011342,
    ]
    assert key64("test", 1, 2) == 116309771675965203


def test_keys_are_hashed_not_added():
    assert key64("x", 0, 1) != key64("x", 1, 0)
    assert key64("x", 12, 3) != key64("x", 1, 23)
    assert key64("x", 1) == key64("x", np.int64(1))
    a, b = np.array([0]), np.array([1])
    assert derived_keys(0, a, b) != derived_keys(0, b, a)

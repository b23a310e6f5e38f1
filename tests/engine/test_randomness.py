"""Generators are keyed by what an item is."""

from __future__ import annotations

import pickle

import numpy as np

from pipegraph.randomness import generator, key, uniforms

ITEM = (7, 2, (5, 1), "map")


def test_a_generator_is_philox_with_the_items_key():
    expected = np.random.Generator(np.random.Philox(key=key(*ITEM))).random(9).tolist()
    assert generator(*ITEM).random(9).tolist() == expected
    assert uniforms(7, 2, [(5, 1), (6,)], "map", 9)[0] == expected


def test_what_users_do_with_generators_is_as_repeatable_as_the_generator():
    first, second = generator(*ITEM), generator(*ITEM)
    for ours, same in zip(first.spawn(2) + first.spawn(1), second.spawn(2) + second.spawn(1), strict=True):
        assert ours.random() == same.random()
    children = generator(*ITEM).spawn(3)
    assert len({child.random() for child in children} | {generator(*ITEM).random()}) == 4
    again = pickle.loads(pickle.dumps(first))
    assert first.random() == again.random()
    words = [np.random.PCG64(generator(*ITEM).bit_generator.seed_seq).random_raw() for _ in range(2)]
    assert words[0] == words[1]

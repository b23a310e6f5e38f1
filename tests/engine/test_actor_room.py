"""What a Ray actor waits for, and resources that no node of its cluster has: pure, without Ray."""

from pipegraph.engine.actors.room import unknown, why_it_waits

SMALL = {"CPU": 4.0, "memory": 8e9, "node:10.0.0.1": 1.0}
LARGE = {"CPU": 16.0, "GPU": 2.0, "memory": 64e9, "decoder": 1.0, "accelerator_type:A100": 1.0}


def test_an_actor_for_which_a_node_has_room_is_starting_and_needs_nothing():
    for running, free in ((False, [{"CPU": 1.0}, SMALL]), (True, [{}, {}])):
        said = why_it_waits({"CPU": 2, "memory": 4e9}, running, free, [SMALL, SMALL])
        assert said.startswith("is starting: ")
        assert said.endswith(". Nothing is missing")


def test_an_actor_without_room_names_what_it_needs_and_what_is_free_on_each_node():
    said = why_it_waits({"CPU": 3}, False, [{"CPU": 2.0}, {}], [SMALL, SMALL])
    assert said.startswith("waits for room: it needs CPU 3 of one node, free are CPU 2; CPU 0.")
    assert "fewer workers=" in said


def test_an_actor_that_fits_on_no_node_says_so():
    said = why_it_waits({"CPU": 8, "GPU": 1}, False, [SMALL], [SMALL])
    assert said.startswith(
        "waits for a new node: it needs CPU 8, GPU 1, and no node of the cluster has as much"
    )
    assert "(at most CPU 4, GPU 0)" in said


def test_a_resource_that_no_node_has_is_named_with_the_one_that_is_meant():
    said = unknown({"num_cpus": 1, "num_gpu": 1}, [SMALL, LARGE])
    assert said.startswith("resources={'num_gpu': 1}: no node of the Ray cluster has such a resource")
    assert "did you mean 'num_gpus'?" in said
    assert "(there are 'decoder'): ray start --resources='{\"num_gpu\": 1}'" in said
    assert "(there is none)" in unknown({"zebra": 2}, [SMALL])
    assert "did you mean" not in unknown({"zebra": 2}, [SMALL])


def test_other_resources_are_not_refused():
    there = {"num_gpus": 8, "memory": 1e15, "decoder": 5, "accelerator_type:A100": 0.1, "absent": 0}
    assert unknown(there, [SMALL, LARGE]) == ""

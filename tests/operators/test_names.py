"""The names of ``pipegraph.operators``."""

import pickle
import types

import cloudpickle
import torch

from pipegraph import operators as ops


def test_a_function_that_uses_torch_and_ops_can_be_pickled_by_value():
    def use():
        return torch.ops, ops.Batch

    by_value = types.FunctionType(use.__code__, {"torch": torch, "ops": ops, "__name__": "__main__"})
    assert pickle.loads(cloudpickle.dumps(by_value))() == (torch.ops, ops.Batch)

// Sparse tensors of the simulated device: indices and values lie there, and operators run on the host, which waits.
#pragma once
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>

#include "operators.h"

namespace simulated {

inline Tensor moved(const Tensor& t, c10::Device device) {
  if (!t.defined() || t.device().type() == device.type()) return t;
  if (!t.is_sparse()) return t.to(device);
  return at::_sparse_coo_tensor_unsafe(t._indices().to(device), t._values().to(device), t.sizes(), t.options().device(device),
                                       t.is_coalesced());
}

inline void run_sparse(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, stack);
  std::vector<std::pair<Tensor, Tensor>> written;
  auto whole = *stack;
  call.each(whole, [&](const Tensor& t, bool writes) {
    call.check(t);
    auto host = moved(t, c10::Device(at::kCPU));
    if (writes) written.push_back({t, host});
    return host;
  });
  for (size_t i = call.begin; i < whole.size(); i++)
    if (whole[i].isDevice()) whole[i] = c10::Device(at::kCPU);
  Stack values(whole.begin() + call.begin, whole.end());
  op.callBoxed(values);
  c10::Device here(TYPE, static_cast<c10::DeviceIndex>(call.device < 0 ? current_device : call.device));
  torch::jit::drop(*stack, stack->size() - call.begin);
  for (auto& value : values) {
    if (!value.isTensor()) {
      stack->push_back(value);
      continue;
    }
    auto result = value.toTensor();
    auto same = std::find_if(written.begin(), written.end(), [&](auto& pair) { return pair.second.is_same(result); });
    if (same == written.end()) {
      stack->push_back(moved(result, here));
      continue;
    }
    TORCH_CHECK(!result.is_sparse(), "simulated device: ", op.schema().name(), " cannot write to a sparse tensor");
    stack->push_back(same->first.copy_(result));
  }
}

}  // namespace simulated

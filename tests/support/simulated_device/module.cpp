// A device of torch (PrivateUse1) in host memory, to test the code of streams on machines without an accelerator.
#include <ATen/autocast_mode.h>
#include <torch/csrc/Generator.h>

#include "sparse.h"

namespace {

using namespace simulated;

void convolution(const c10::OperatorHandle&, Stack* stack) {
  run_operator(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", ""), stack);
}

void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  auto grad = stack->at(stack->size() - 10).toTensor();
  stack->insert(stack->end() - 7, c10::IValue(std::vector<int64_t>{grad.size(1)}));  // the bias
  run_operator(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", ""), stack);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", simulated::empty);
  library.impl("empty_strided", simulated::empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", simulated::resize_);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("record_stream", simulated::record_stream);
  library.impl("_fused_sdp_choice", mathematical_attention);
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_sparse>()); }

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, library) {
  library.impl("_sparse_coo_tensor_with_dims_and_tensors", TORCH_FN(at::native::new_with_dims_and_tensor_sparse_symint));
  library.impl("_sparse_coo_tensor_with_dims", TORCH_FN(at::native::new_with_dims_sparse));
  library.impl("_indices", TORCH_FN(at::native::_indices_sparse));
  library.impl("_values", TORCH_FN(at::native::_values_sparse));
  library.impl("indices", TORCH_FN(at::native::indices_sparse));
  library.impl("values", TORCH_FN(at::native::values_sparse));
  library.impl("_nnz", TORCH_FN(at::native::_nnz_sparse));
  library.impl("sparse_dim", TORCH_FN(at::native::sparse_dim_sparse));
  library.impl("dense_dim", TORCH_FN(at::native::dense_dim_sparse));
  library.impl("is_coalesced", TORCH_FN(at::native::is_coalesced_sparse));
  library.impl("_coalesced_", TORCH_FN(at::native::_coalesced_sparse_));
  library.impl("clone", torch::CppFunction::makeFromBoxedFunction<&run_sparse>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) { KERNEL_PRIVATEUSEONE(linear, lower_precision_fp) }

void finish_all_work() {
  Locked locked(mutex);
  for (auto& [key, line] : lines) {
    run_until({key.first, key.second, line.submitted});
    line.failure = nullptr;
  }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(TYPE, &device_memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  module.attr("DEVICES") = DEVICES;
  module.attr("STREAMS") = STREAMS;
  module.def("is_available", [] { return available; });
  module.def("device_count", [] { return available ? DEVICES : 0; });
  module.def("set_available", [](bool on) { available = on; });
  module.def("listen", [](py::object call) {
    auto* before = std::exchange(listener, call.is_none() ? nullptr : new py::object(call));
    delete before;
  });
  module.def("schedule", [](const std::string& name, uint64_t seed) {
    static const std::map<std::string, Order> orders{
        {"latest", Order::latest}, {"random", Order::random}, {"eager", Order::eager}, {"threads", Order::threads}};
    {
      Locked locked(mutex);
      order = orders.at(name);
      draws.seed(seed);
      moved_on.notify_all();
    }
    if (order != Order::threads) end_threads();
  }, py::call_guard<py::gil_scoped_release>());
  py::class_<Offered>(module, "Offered")
      .def(py::init<>())
      .def_readwrite("streams", &Offered::streams)
      .def_readwrite("events", &Offered::events)
      .def_readwrite("pinned", &Offered::pinned)
      .def_readwrite("missing", &Offered::missing);
  module.def("offer", [](const Offered& what) { offered = what; });
  module.def("finish_all_work", finish_all_work, py::call_guard<py::gil_scoped_release>());
  module.def("pending", [] {
    Locked locked(mutex);
    uint64_t waiting = 0;
    for (auto& [key, line] : lines) waiting += line.given.size();
    return waiting;
  });
  module.def("default_generator", [](int device) {
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(generators().at(device)));
  });
}

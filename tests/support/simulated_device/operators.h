// Operators of the simulated device: each runs as the CPU's, on the same memory, when its stream gets to it.
#pragma once
#include <ATen/EmptyTensor.h>
#include <c10/util/strides.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "runtime.h"

namespace simulated {

using at::Tensor;
using torch::jit::Stack;

inline bool is_here(const Tensor& t) { return t.defined() && t.device().type() == TYPE; }

inline char* first_byte(const Tensor& t) {
  auto* start = static_cast<char*>(t.storage().mutable_data());
  return start ? start + t.storage_offset() * t.itemsize() : nullptr;
}

// The same memory as a tensor of the CPU, which owns nothing: as a kernel, it knows an address.
inline Tensor address_of(const Tensor& t) {
  auto made = at::from_blob(first_byte(t), t.sizes(), t.strides(), at::TensorOptions(at::kCPU).dtype(t.dtype()));
  made._set_conj(t.is_conj());
  made._set_neg(t.is_neg());
  return made;
}

inline Access access(const Tensor& t, bool writes) {
  size_t nbytes = t.numel() ? at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize()) : 0;
  return {reinterpret_cast<uint64_t>(first_byte(t)), nbytes, writes};
}

// The CPU's kernels, whichever thread runs them.
struct OnTheHost {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::NoGradGuard no_grad;
};

inline Tensor made(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype, int device) {
  Guard guard;
  auto before = guard.exchangeDevice({TYPE, static_cast<c10::DeviceIndex>(device)});
  auto tensor = at::detail::empty_strided_generic(
      sizes, strides, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
  guard.uncheckedSetDevice(before);
  return tensor;
}

inline int chosen(std::optional<c10::Device> device) {
  int index = device ? Guard::index(*device) : current_device;
  TORCH_CHECK(available, "simulated device: it is not in use");
  check_index(index);
  return index;
}

inline Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::Device(TYPE, static_cast<c10::DeviceIndex>(chosen(device))));
  return at::detail::empty_generic(
      sizes, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  return made(sizes, strides, c10::dtype_or_default(dtype), chosen(device));
}

// A copy on the current stream of the device; between two devices on both of their streams, as CUDA's.
inline Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  bool out = is_here(from), in = is_here(to);
  int device = out ? from.device().index() : to.device().index();
  int64_t stream = stream_now(device);
  int other = to.device().index();
  bool across = out && in && other != device;
  Tensor source = address_of(from), target = address_of(to);
  bool blocks = !(out && in) && !non_blocking;
  std::vector<Access> accesses;
  std::vector<std::pair<uint64_t, std::array<int64_t, 4>>> joins;
  uint64_t number;
  {
    Locked locked(mutex);
    auto* pinned = out && in ? nullptr : pinned_block(first_byte(out ? to : from));
    if (!out && !pinned) source = from.clone();  // a driver reads pageable memory before it returns
    if (!in && !pinned) blocks = true;           // and has written it when it returns
    if (out || pinned) accesses.push_back(access(from, false));
    if (in || pinned) accesses.push_back(access(to, true));
    if (across) {
      submit_wait(device, stream, mark_of(other, stream_now(other)));
      joins.push_back({ticket(), {device, stream, other, stream_now(other)}});
    }
    number = ticket();
    submit_work(device, stream, [source, target] {
      OnTheHost host;
      target.copy_(source);
    });
    if (pinned) pinned->ends.push_back({0, mark_of(device, stream)});
    if (across) {
      submit_wait(other, stream_now(other), mark_of(device, stream));
      joins.push_back({ticket(), {other, stream_now(other), device, stream}});
    }
  }
  for (auto& [at, j] : joins) tell(at, "join", j[0], j[1], j[2], j[3]);
  tell(number, "work", device, stream, 0, 0, "copy", accesses);
  if (blocks) Guard::finish(device, stream);
  return to;
}

inline at::Scalar local_scalar(const Tensor& t) {
  auto copy = at::empty(t.sizes(), t.options().device(at::kCPU));
  copy_from(t, copy, false);
  return copy.item();
}

inline void grow(const c10::Storage& storage, size_t nbytes, int device) {
  Guard guard;
  auto before = guard.exchangeDevice({TYPE, static_cast<c10::DeviceIndex>(device)});
  auto memory = device_memory.allocate(nbytes);
  guard.uncheckedSetDevice(before);
  auto *old = storage.mutable_data(), *start = memory.get();
  if (auto kept = std::min(nbytes, storage.nbytes()); kept && old)
    submit_work(device, stream_now(device), [start, old, kept] { std::memcpy(start, old, kept); });
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(nbytes);
}

inline void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const {
  grow(storage, nbytes, storage.device().index());
}

inline const Tensor& resize_(const Tensor& t, c10::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  size_t needed = (c10::multiply_integers(sizes) + t.storage_offset()) * t.itemsize();
  if (t.storage().nbytes() < needed) grow(t.storage(), needed, t.device().index());
  t.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return t;
}

inline void check_offered(const std::string& name) {
  TORCH_CHECK_NOT_IMPLEMENTED(!offered.missing.count(name), name, " has no kernel on a simulated device that does without it");
}

inline Tensor& set_storage(Tensor& t, c10::Storage storage, int64_t offset, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  check_offered("aten::set_");
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  auto dense = c10::contiguous_strides(sizes);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides.empty() ? c10::IntArrayRef(dense) : strides, offset);
  return t;
}

inline Tensor& set_whole_storage(Tensor& t, c10::Storage storage) {
  auto rows = static_cast<int64_t>(storage.nbytes() / t.itemsize());
  return set_storage(t, std::move(storage), 0, {rows}, {});
}

inline void record_stream(Tensor& t, c10::Stream stream) {
  check_offered("aten::record_stream");
  device_memory.recordStream(t.storage().data_ptr(), stream);
}

inline Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) resize_(to, from.sizes(), {});
  return copy_from(from, to, false);
}

inline Tensor reshape_alias(const Tensor& t, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::native::as_strided_tensorimpl(t, sizes, strides, t.storage_offset());
}

inline int64_t mathematical_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double,
                                      bool, std::optional<double>, bool) {
  return 0;
}

Tensor moved(const Tensor& t, c10::Device device);  // in sparse.h

// One call of an operator: its arguments, and where they lie.
struct Call {
  const c10::OperatorHandle& op;
  Stack* stack;
  size_t begin;
  int device = -1;
  std::vector<Tensor> given, addresses, metas;  // side by side: tensors of this device
  std::vector<Access> accesses;

  Call(const c10::OperatorHandle& op, Stack* stack)
      : op(op), stack(stack), begin(stack->size() - op.schema().arguments().size()) {}

  std::string name() const { return op.schema().name(); }

  // CUDA takes numbers of the host, and indices; whatever else lies elsewhere it refuses.
  void check(const Tensor& t) {
    if (!is_here(t)) {
      bool index = name().find("index") != std::string::npos;
      TORCH_CHECK(t.dim() == 0 || index || t.numel() == 0, "Expected all tensors to be on the same device, but got one on ",
                  t.device(), " in ", name(), " on a simulated device");
      return;
    }
    if (device < 0) device = t.device().index();
    TORCH_CHECK(t.device().index() == device, "Expected all tensors to be on the same device, but found at least two devices, ",
                c10::Device(TYPE, device), " and ", t.device(), " in ", name());
  }

  Tensor address(const Tensor& t, bool writes) {
    if (!t.defined()) return t;
    check(t);
    if (!is_here(t)) return t.unsafeGetTensorImpl()->is_wrapped_number() ? t : t.clone();
    accesses.push_back(access(t, writes));
    given.push_back(t);
    // An empty result is resized by the kernel, which an address cannot be.
    addresses.push_back(writes && !t.numel() ? at::empty({0}, at::TensorOptions(at::kCPU).dtype(t.dtype())) : address_of(t));
    metas.push_back(at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta)));
    return addresses.back();
  }

  template <class F>
  void each(Stack& values, F convert) const {  // convert(tensor, whether it is written)
    for (size_t i = begin; i < values.size(); i++) {
      auto& value = values[i];
      auto* alias = op.schema().arguments()[i - begin].alias_info();
      bool writes = alias && alias->isWrite();
      if (value.isTensor()) {
        value = convert(value.toTensor(), writes);
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& t : value.toTensorVector()) list.push_back(convert(t, writes));
        value = list;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (std::optional<Tensor> t : value.toOptionalTensorList())
          list.push_back(t && t->defined() ? std::optional<Tensor>(convert(*t, writes)) : t);
        value = list;
      }
    }
  }

  // Moves `values` to the addresses; the device arguments of operators that make tensors become the CPU.
  Stack to_addresses() {
    Stack values(stack->begin() + begin, stack->end());
    auto whole = *stack;
    each(whole, [this](const Tensor& t, bool writes) { return address(t, writes); });
    for (size_t i = begin; i < whole.size(); i++) {
      if (whole[i].isDevice() && whole[i].toDevice().type() == TYPE) {
        if (device < 0) device = Guard::index(whole[i].toDevice());
        whole[i] = c10::Device(at::kCPU);
      }
    }
    if (device < 0) device = current_device;
    return Stack(whole.begin() + begin, whole.end());
  }

  Stack to_metas() {
    auto whole = *stack;
    size_t next = 0;
    each(whole, [&](const Tensor& t, bool) { return is_here(t) ? metas[next++] : t; });
    for (size_t i = begin; i < whole.size(); i++)
      if (whole[i].isDevice() && whole[i].toDevice().type() == TYPE) whole[i] = c10::Device(at::kMeta);
    return Stack(whole.begin() + begin, whole.end());
  }

  // The tensor of this device that a result is, or views, or becomes; a new one is noted in `fresh`.
  Tensor result(const Tensor& t, const std::vector<Tensor>& arguments, std::vector<std::pair<Tensor, bool>>& fresh) {
    if (!t.defined()) return t;
    if (t.is_sparse()) {
      fresh.push_back({Tensor(), false});
      return moved(t, c10::Device(TYPE, static_cast<c10::DeviceIndex>(device)));
    }
    for (size_t i = 0; i < arguments.size(); i++) {
      if (!arguments[i].is_same(t)) continue;
      bool grown = given[i].sizes() != t.sizes();
      if (grown) resize_(given[i], t.sizes(), {});
      fresh.push_back({given[i], grown});
      return given[i];
    }
    for (size_t i = 0; i < arguments.size(); i++) {
      if (!t.has_storage() || t.numel() == 0 || arguments[i].numel() == 0) continue;
      auto &mine = arguments[i].storage(), &its = t.storage();
      if (its.unsafeGetStorageImpl() != mine.unsafeGetStorageImpl()) continue;
      fresh.push_back({Tensor(), false});
      auto view = at::native::as_strided_tensorimpl(given[i], {0}, {1}, 0);
      view.unsafeGetTensorImpl()->set_storage_and_dtype(view.storage(), t.dtype());
      int64_t start = given[i].storage_offset() * given[i].itemsize() / t.itemsize();  // numbers of complex tensors are pairs
      view.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), start + t.storage_offset());
      return view;
    }
    auto tensor = made(t.sizes(), t.strides(), t.scalar_type(), device);
    accesses.push_back(access(tensor, true));
    fresh.push_back({tensor, true});
    return tensor;
  }

  void deliver(const Stack& results, const std::vector<Tensor>& arguments, std::vector<std::pair<Tensor, bool>>& fresh) {
    Stack delivered;
    for (auto& value : results) {
      if (value.isTensor()) {
        delivered.push_back(result(value.toTensor(), arguments, fresh));
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& t : value.toTensorVector()) list.push_back(result(t, arguments, fresh));
        delivered.push_back(list);
      } else {
        delivered.push_back(value);
      }
    }
    torch::jit::drop(*stack, stack->size() - begin);
    stack->insert(stack->end(), delivered.begin(), delivered.end());
  }
};

inline void each_result(const Stack& results, const std::function<void(const Tensor&)>& take) {
  for (auto& value : results) {
    if (value.isTensor()) take(value.toTensor());
    else if (value.isTensorList()) for (const Tensor& t : value.toTensorVector()) take(t);
  }
}

// Copies what the CPU's kernel made into the memory that was allocated for it.
inline void store(const Stack& results, const std::vector<Tensor>& targets) {
  size_t next = 0;
  each_result(results, [&](const Tensor& t) {
    if (!t.defined()) return;
    auto& target = targets[next++];
    if (target.defined() && t.numel()) target.copy_(t);
  });
}

inline std::vector<Tensor> addresses_of(const std::vector<std::pair<Tensor, bool>>& fresh) {
  std::vector<Tensor> targets;
  for (auto& [t, is_new] : fresh) targets.push_back(is_new ? address_of(t) : Tensor());
  return targets;
}

// Operators that draw random numbers use the device's generator, at once: in the order in which they are called.
struct Drawing {
  at::Generator host = at::detail::getDefaultCPUGenerator();
  at::Generator device;
  Tensor before;
  explicit Drawing(int index) : device(generators()[index]), before(host.get_state()) { host.set_state(device.get_state()); }
  ~Drawing() {
    device.set_state(host.get_state());
    host.set_state(before);
  }
};

inline std::set<std::string> without_shapes;  // operators that do not know their results' shapes beforehand

inline bool shapes_known(const c10::OperatorHandle& op) {
  for (auto tag : {at::Tag::data_dependent_output, at::Tag::dynamic_output_shape, at::Tag::nondeterministic_seeded})
    if (op.hasTag(tag)) return false;
  for (auto& result : op.schema().returns()) {
    auto kind = result.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return false;
  }
  Locked locked(mutex);
  return !without_shapes.count(op.schema().name());
}

inline std::optional<Stack> results_in_meta(Call& call) {
  if (!shapes_known(call.op)) return std::nullopt;
  auto values = call.to_metas();
  try {
    OnTheHost host;
    call.op.callBoxed(values);
    for (auto& value : values) if (value.isTensor() && value.toTensor().is_sparse()) return std::nullopt;
    return values;
  } catch (const c10::NotImplementedError&) {
    Locked locked(mutex);
    without_shapes.insert(call.name());
    return std::nullopt;
  } catch (const std::exception&) {
    return std::nullopt;  // the CPU's kernel says what is wrong with these arguments
  }
}

inline void run_operator(const c10::OperatorHandle& op, Stack* stack) {
  check_offered(op.schema().name());
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), op.schema().name(),
                              " has no kernel on a simulated device, for the CPU has none");
  Call call(op, stack);
  auto values = call.to_addresses();
  int device = call.device;
  int64_t stream = stream_now(device);
  std::vector<std::pair<Tensor, bool>> fresh;
  uint64_t number;
  if (auto shapes = results_in_meta(call)) {
    call.deliver(*shapes, call.metas, fresh);
    auto targets = addresses_of(fresh);
    Locked locked(mutex);
    number = ticket();
    submit_work(device, stream, [op, values, targets] {
      OnTheHost host;
      auto results = values;
      op.callBoxed(results);
      store(results, targets);
    });
  } else {
    Locked locked(mutex);
    synchronize_stream(device, stream);
    std::optional<Drawing> drawing;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) {
      for (auto& value : values) if (value.isGenerator()) check_generator(value.toGenerator());
      drawing.emplace(device);
    }
    OnTheHost host;
    op.callBoxed(values);
    call.deliver(values, call.addresses, fresh);
    synchronize_stream(device, stream);
    store(values, addresses_of(fresh));
    number = ticket();
  }
  tell(number, "work", device, stream, 0, 0, call.name(), call.accesses);
}

}  // namespace simulated

// Every operator: CUDA's rules are checked, then the CPU's kernel computes on the same bytes.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <torch/library.h>
#include <unordered_set>
#include "tensors.h"

namespace hostcuda {
using Names = std::unordered_set<std::string>;
inline Names checked_by_iterator;  // numbers on the host may meet tensors of the device in them
inline const Names on_any_device = {
    "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::index.Tensor", "aten::index.Tensor_out",
    "aten::index_put.out", "aten::_index_put_impl.out", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put",
    "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put", "aten::set_.source_Tensor"};
inline const Names read_by_host = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave.Tensor", "aten::equal", "aten::is_nonzero"};

struct SameDevice {  // torch's rule: one device, but numbers
  const std::string& operation;
  bool numbers_may_differ, off;
  c10::optional<Device> device;
  bool host = false;
  void see(const Tensor& t) {
    if (!t.defined() || off || t.is_meta()) return;
    const char* both = "Expected all tensors to be on the same device, but found at least two devices, ";
    if (t.is_cuda()) {
      TORCH_CHECK(!device || *device == t.device(), both, *device, " and ", t.device(), "! (", operation, ")");
      device = t.device();
    } else if (t.dim() || !(numbers_may_differ || t.unsafeGetTensorImpl()->is_wrapped_number())) {
      host = true;
    }
    TORCH_CHECK(!(host && device), both, *device, " and cpu! (", operation, ")");
  }
};

template <typename F> void each_tensor(const c10::IValue& value, F f) {
  if (value.isTensor()) f(value.toTensor());
  else if (value.isTensorList()) for (const auto& t : value.toTensorVector()) f(t);
  else if (value.isOptionalTensorList()) for (const auto& t : value.toOptionalTensorVector()) if (t) f(*t);
}
template <typename F> void replace_tensors(c10::IValue& value, F f) {
  if (value.isTensor()) { value = f(value.toTensor()); return; }
  if (value.isTensorList()) {
    std::vector<Tensor> list;
    for (const auto& t : value.toTensorVector()) list.push_back(f(t));
    value = c10::IValue(list);
  } else if (value.isOptionalTensorList()) {
    c10::List<c10::optional<Tensor>> list;
    for (const auto& t : value.toOptionalTensorVector()) list.push_back(t ? c10::optional<Tensor>(f(*t)) : c10::nullopt);
    value = c10::IValue(list);
  }
}

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string what = toString(schema.operator_name());
  const auto& arguments = schema.arguments();
  const auto first = stack->size() - arguments.size();
  order().raise_late_fault();

  SameDevice rule{what, checked_by_iterator.count(what) > 0, on_any_device.count(what) > 0};
  c10::optional<Device> device;
  bool sized = what == "aten::repeat_interleave.Tensor" && !stack->back().isNone();  // by the host
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& value = (*stack)[first + i];
    each_tensor(value, [&](const Tensor& t) { rule.see(t); if (on_device(t) && !device) device = t.device(); });
    if (value.isDevice() && value.toDevice().is_cuda() && !device)
      device = Device(c10::kCUDA, index_of(value.toDevice()));
  }
  if (!device) device = Device(c10::kCUDA, current_device);
  TORCH_CHECK(device->index() == current_device || current_stream[current_device] == 0, what, " runs on ", *device,
              " while a stream of cuda:", current_device, " is current: it is not in that stream");

  const auto stream = stream_of(device->index());
  const auto time = order().next(stream);
  Pairs pairs;
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& value = (*stack)[first + i];
    const auto* alias = arguments[i].alias_info();
    if (!alias || alias->isWrite())  // else it makes a view, and touches nothing
      each_tensor(value, [&](const Tensor& t) { access(t, stream, time, alias != nullptr, what); });
    replace_tensors(value, [&](const Tensor& t) { return to_host(t, pairs); });
    if (value.isDevice() && value.toDevice().is_cuda()) value = Device(c10::kCPU);
    else if (value.isNone() && arguments[i].name() == "generator") value = generator(device->index());
  }
  {
    c10::DeviceGuard guard(*device);
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  write_back(pairs);
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
    replace_tensors((*stack)[i], [&](const Tensor& t) {
      auto made = to_device(t, *device, pairs);
      if (!schema.returns()[0].alias_info()) access(made, stream, time, true, what);
      return made;
    });
  if (read_by_host.count(what) && !sized) {
    note_wait();
    order().host_waits(order().reached(stream));
  }
}

inline uint64_t hash_of(const char* begin, const char* end) { return std::hash<std::string_view>{}({begin, size_t(end - begin)}); }

// Between host and device. Without waiting, values come to pinned memory when somebody waits for the stream, and
// pinned memory that goes to the device must not be written until then.
inline Tensor& copy_(Tensor& self, const Tensor& source, bool without_waiting) {
  if (self.is_meta() || source.is_meta()) return self;
  order().raise_late_fault();
  const bool to = on_device(self), from = on_device(source);
  const auto device = (from ? source : self).device();
  const auto stream = stream_of(device.index()), other = stream_of(to ? self.get_device() : device.index());
  if (stream.first != other.first) {  // torch makes both devices' streams wait for each other
    order().wait(stream, order().reached(other));
    order().wait(other, order().reached(stream));
  }
  const auto time = order().next(stream);
  access(source, stream, time, false, "copy_");
  access(self, stream, time, true, "copy_");
  at::NoGradGuard no_grad;
  Tensor into = to ? to_host(self) : self, values = from ? to_host(source) : source;
  const auto& host = to ? source : self;
  const auto [begin, end] = extent(host);
  const bool waits = to != from && !(without_waiting && is_pinned(begin, end));
  if (to == from || waits || to) into.copy_(values);
  if (stream.first != other.first) order().wait(other, order().reached(stream));
  if (to == from) return self;
  if (waits) {
    note_wait();
    order().host_waits(order().reached(stream));
  } else if (from) {
    order().later(stream, time, [into, copy = values.clone()]() mutable { at::NoGradGuard no; into.copy_(copy); });
  } else {
    order().later(stream, time, [host, begin = begin, end = end, before = hash_of(begin, end)] {
      TORCH_CHECK(hash_of(begin, end) == before, "pinned memory was written while it was copied to the device");
    });
  }
  return self;
}

inline Tensor empty(c10::SymIntArrayRef size, c10::optional<at::ScalarType> dtype, c10::optional<at::Layout>,
                    c10::optional<Device> device, c10::optional<bool> pin, c10::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(Device(c10::kCUDA, device ? index_of(*device) : current_device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}
inline Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, c10::optional<at::ScalarType> dtype,
                            c10::optional<at::Layout>, c10::optional<Device> device, c10::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(Device(c10::kCUDA, device ? index_of(*device) : current_device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}
inline Tensor& set_part(Tensor& t, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(t, storage, offset, size, stride);
}
inline Tensor& set_storage(Tensor& t, at::Storage storage) {
  int64_t n = storage.nbytes() / t.dtype().itemsize();
  return at::cpu::set_(t, storage, 0, c10::IntArrayRef({n}), c10::IntArrayRef({1}));
}
inline Tensor& set_tensor(Tensor& t, const Tensor& source) {
  return at::cpu::set_(t, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline Tensor& set_nothing(Tensor& t) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_allocator.allocate(0), &device_allocator, true);
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(none));
  t.unsafeGetTensorImpl()->set_sizes_contiguous({0});
  return t;
}
inline void record_stream(Tensor& t, c10::Stream s) { order().record(t.storage().data(), key(s)); }
inline int64_t plain_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                               std::optional<double>, bool) { return 0; }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("copy_", copy_);
}
}  // namespace hostcuda
namespace at::native { REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &hostcuda::plain_attention) }

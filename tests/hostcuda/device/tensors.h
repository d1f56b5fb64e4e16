// The same bytes as a tensor of the device and as one of the host, for the kernels of the CPU.
#pragma once
#include <ATen/ATen.h>
#include "guard.h"

namespace hostcuda {
using at::Tensor;
struct Pair { Tensor device, host; };
using Pairs = std::vector<Pair>;
struct Output { c10::Storage storage; void* base; int device; int64_t bytes; };  // memory that an operator made

inline void drop_alias(void* storage) { delete static_cast<c10::Storage*>(storage); }
inline void drop_output(void* p) {
  auto* output = static_cast<Output*>(p);
  order().freed(output->base);
  { std::lock_guard<std::mutex> lock(memory_mutex); if (output->bytes) count(output->device, -output->bytes); }
  delete output;
}
inline c10::DataPtr counted(const c10::Storage& made, Device d) {
  auto* base = const_cast<void*>(made.data());
  auto bytes = int64_t(made.nbytes());
  if (base) order().made(base, d.index());
  { std::lock_guard<std::mutex> lock(memory_mutex); if (bytes) count(d.index(), bytes); }
  return {base, new Output{made, base, d.index(), bytes}, &drop_output, d};
}
inline bool on_device(const Tensor& t) { return t.defined() && t.is_cuda(); }
inline void copy_layout(const Tensor& from, const Tensor& to) {
  to.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
}
inline Tensor with_layout(c10::Storage storage, c10::DispatchKey place, const Tensor& like) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(place), like.dtype());
  copy_layout(like, t);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) t.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (like.is_conj()) t._set_conj(true);
  if (like.is_neg()) t._set_neg(true);
  return t;
}
inline Tensor to_host(const Tensor& t) {
  auto storage = t.storage();
  c10::DataPtr bytes(const_cast<void*>(storage.data()), new c10::Storage(storage), &drop_alias, Device(c10::kCPU));
  c10::Storage alias(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(bytes), c10::GetAllocator(c10::kCPU), true);
  return with_layout(std::move(alias), c10::DispatchKey::CPU, t);
}
inline Tensor to_host(const Tensor& t, Pairs& pairs) {
  if (!on_device(t)) return t;
  for (auto& pair : pairs) if (pair.device.is_same(t)) return pair.host;
  pairs.push_back({t, to_host(t)});
  return pairs.back().host;
}
inline Tensor to_device(const Tensor& t, Device d, const Pairs& pairs = {}) {
  if (!t.defined() || t.is_cuda()) return t;
  for (auto& pair : pairs) if (pair.host.is_same(t)) return pair.device;
  for (auto& pair : pairs)
    if (pair.host.storage().unsafeGetStorageImpl() == t.storage().unsafeGetStorageImpl())
      return with_layout(pair.device.storage(), c10::DispatchKey::CUDA, t);
  c10::Storage made(c10::Storage::use_byte_size_t(), t.storage().nbytes(), counted(t.storage(), d), &device_allocator, true);
  return with_layout(std::move(made), c10::DispatchKey::CUDA, t);
}
inline void write_back(Pairs& pairs) {  // what the operator has resized
  for (auto& [t, host] : pairs) {
    if (t.storage().data() != host.storage().data() || t.storage().nbytes() != host.storage().nbytes()) {
      t.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(counted(host.storage(), t.device()));
      t.storage().unsafeGetStorageImpl()->set_nbytes(host.storage().nbytes());
    }
    if (t.sizes() != host.sizes() || t.strides() != host.strides() || t.storage_offset() != host.storage_offset())
      copy_layout(host, t);
  }
}
inline std::pair<const char*, const char*> extent(const Tensor& t) {  // first and last byte of a tensor's elements
  auto* begin = static_cast<const char*>(t.storage().data()) + t.storage_offset() * t.itemsize();
  if (t.numel() == 0) return {begin, begin};
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); i++) last += (t.size(i) - 1) * t.stride(i);
  return {begin, begin + (last + 1) * t.itemsize()};
}
inline void access(const Tensor& t, StreamKey s, uint64_t time, bool writes, const std::string& what) {
  if (!on_device(t) || t.numel() == 0) return;
  auto [begin, end] = extent(t);
  order().access(t.storage().data(), begin, end, s, time, writes, what);
}
}  // namespace hostcuda

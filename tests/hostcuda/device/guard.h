// What torch asks of a device: the current device and stream of each thread, events, generators.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include "memory.h"

namespace hostcuda {
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
struct Event { Clock clock; };

inline int index_of(Device d) { return d.index() < 0 ? current_device : d.index(); }
inline Stream as_stream(StreamKey s) { return Stream(Stream::UNSAFE, Device(c10::kCUDA, s.first), s.second); }
inline StreamKey key(const Stream& s) { return {s.device_index(), s.id()}; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::kCUDA;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device getDevice() const override { return {c10::kCUDA, DeviceIndex(current_device)}; }
  Device exchangeDevice(Device d) const override { auto old = getDevice(); setDevice(d); return old; }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() >= 0 && d.index() < kDevices, "CUDA error: invalid device ordinal ", int(d.index()));
    current_device = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) current_device = d.index(); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  Stream getStream(Device d) const override { return as_stream(stream_of(index_of(d))); }
  Stream getDefaultStream(Device d) const override { return as_stream({index_of(d), 0}); }
  Stream getNewStream(Device d, int = 0) const override { return as_stream({index_of(d), next_stream++}); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d); }
  void* getStreamNativeHandle(const Stream s) const override { return reinterpret_cast<void*>(s.id() ? 0x1000 + s.id() : 0); }
  Stream exchangeStream(Stream s) const override {
    auto old = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return old;
  }
  bool queryStream(const Stream& s) const override { return order().host_looks(order().reached(key(s))); }
  void synchronizeStream(const Stream& s) const override { order().host_waits(order().reached(key(s))); }
  void synchronizeDevice(DeviceIndex i) const override { order().host_waits_for_device(i < 0 ? current_device : i); }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override { order().record(p.get(), key(s)); }

  void record(void** event, const Stream& s, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = Event{order().reached(key(s))};
  }
  void block(void* event, const Stream& s) const override { if (event) order().wait(key(s), static_cast<Event*>(event)->clock); }
  bool queryEvent(void* event) const override { return !event || order().host_looks(static_cast<Event*>(event)->clock); }
  void synchronizeEvent(void* event) const override { if (event) order().host_waits(static_cast<Event*>(event)->clock); }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

inline at::Generator& generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < kDevices; i++) made->push_back(at::detail::createCPUGenerator(1234 + i));
    return made;
  }();
  return (*all)[device < 0 ? current_device : device];
}
struct CUDAHooks final : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasCuBLASLt() const override { return true; }
  long versionCUDART() const override { return 13000; }
  std::string showConfig() const override { return "hostcuda"; }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override { return generator(i); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  Device getDeviceFromPtr(void* p) const override {
    std::lock_guard<std::mutex> lock(memory_mutex);
    auto it = blocks.find(p);
    return {c10::kCUDA, DeviceIndex(it == blocks.end() ? hostcuda::current_device : it->second.device)};
  }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex current_device() const override { return hostcuda::current_device; }
  DeviceIndex getCurrentDevice() const override { return hostcuda::current_device; }
  void setCurrentDevice(DeviceIndex d) const override { hostcuda::current_device = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(hostcuda::current_device, int(d)); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override {
    return d < 0 ? getCurrentDevice() : exchangeDevice(d);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  void deviceSynchronize(DeviceIndex d) const override { order().host_waits_for_device(d); }
};
}  // namespace hostcuda
namespace at { using hostcuda::CUDAHooks; REGISTER_CUDA_HOOKS(CUDAHooks) }

// What Python sees of the device; ../cuda.py gives it the names that torch built for CUDA has.
#include <torch/extension.h>
#include "nccl.h"
#include "operators.h"

namespace py = pybind11;
using namespace hostcuda;

PYBIND11_MODULE(hostcuda, m) {
  c10::SetAllocator(c10::kCUDA, &device_allocator);
  at::setHostAllocator(c10::kCUDA, &pinned_allocator);
  at::globalContext().lazyInitDevice(c10::kCUDA);
  m.attr("device_count") = kDevices;
  m.def("set_device", [](int i) { Guard().setDevice(Device(c10::kCUDA, i)); });
  m.def("get_device", [] { return current_device; });
  m.def("synchronize", [] { order().host_waits_for_device(current_device); });
  m.def("new_stream", [] { return int64_t(next_stream++); });
  m.def("get_stream", [](int i) { return current_stream[i]; });
  m.def("set_stream", [](int i, int64_t s) { current_stream[i] = s; });
  m.def("generator", [](int i) { return generator(i); });
  m.def("warn_of_waits", [](bool on) { warns_of_waits = on; });
  m.def("check_by_iterator", [](std::vector<std::string> names) { checked_by_iterator = {names.begin(), names.end()}; });
  m.def("in_pool", [](bool on) { return std::exchange(in_pool, on); });
  m.def("register_host", [](uintptr_t p, size_t bytes) {
    auto* begin = reinterpret_cast<char*>(p);
    bool overlaps = is_pinned(begin) || is_pinned(begin + bytes - 1);
    std::lock_guard<std::mutex> lock(memory_mutex);
    if (!overlaps) pinned[begin] = bytes;
    return !overlaps;
  });
  m.def("unregister_host", [](uintptr_t p) {
    std::lock_guard<std::mutex> lock(memory_mutex);
    return pinned.erase(reinterpret_cast<void*>(p)) > 0;
  });
  m.def("file_of", [](uintptr_t p) {
    std::lock_guard<std::mutex> lock(memory_mutex);
    auto it = blocks.find(reinterpret_cast<void*>(p));
    return it == blocks.end() ? -1 : it->second.file;
  });
  m.def("memory", [](int i) {
    std::lock_guard<std::mutex> lock(memory_mutex);
    return std::make_tuple(counts[i].held, counts[i].peak, counts[i].blocks);
  });
  m.def("reset_peak", [](int i) { std::lock_guard<std::mutex> lock(memory_mutex); counts[i].peak = counts[i].held; });
  m.def("resize", [](const Tensor& t, size_t bytes) {
    auto* storage = t.storage().unsafeGetStorageImpl();
    c10::DeviceGuard guard(t.device());
    auto memory = device_allocator.allocate(bytes);
    if (auto kept = std::min(bytes, storage->nbytes())) memcpy(memory.get(), storage->data(), kept);
    storage->set_data_ptr_noswap(std::move(memory));
    storage->set_nbytes(bytes);
  });
  m.def("register_nccl", [] {  // when torch.distributed has made the class that it derives from
    py::class_<Nccl, c10d::Backend, c10::intrusive_ptr<Nccl>>(py::module_::import("hostcuda"), "Nccl", py::dynamic_attr())
        .def(py::init<int, int, py::function>())
        .def_property_readonly("connected", &Nccl::connected);
  });
  m.def("as_host", [](const Tensor& t) { return to_host(t); });
  m.def("as_device", [](const Tensor& t, int i) { return to_device(t, Device(c10::kCUDA, i)); });
}

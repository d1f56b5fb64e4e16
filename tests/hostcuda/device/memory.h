// Memory of the devices, pinned memory of the host, and pools. Memory that nothing wrote reads as NaN, or -1.
#pragma once
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <sys/mman.h>
#include <unistd.h>
#include "streams.h"

namespace hostcuda {
struct Block { size_t bytes; int device; int file; };  // file: of memory that other processes can map, else -1
struct Counts { int64_t held = 0, peak = 0, blocks = 0; };
inline std::mutex memory_mutex;
inline std::map<void*, Block> blocks;
inline std::map<void*, size_t> pinned;  // ranges of the host
inline Counts counts[kDevices];
inline thread_local bool in_pool = false;  // plain segments of a pool, which CUDA's handles can name

inline void count(int device, int64_t bytes) {
  auto& c = counts[device];
  c.held += bytes;
  c.blocks += bytes > 0 ? 1 : -1;
  c.peak = std::max(c.peak, c.held);
}
inline void free_block(void* p) {
  if (!p) return;
  order().freed(p);
  std::lock_guard<std::mutex> lock(memory_mutex);
  auto it = blocks.find(p);
  if (it == blocks.end()) return;
  auto block = it->second;
  blocks.erase(it);
  count(block.device, -int64_t(block.bytes));
  if (block.file < 0) { free(p); return; }
  munmap(p, block.bytes);
  close(block.file);
}
struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* p = nullptr;
    int file = -1;
    if (bytes) {
      if (in_pool) {
        file = memfd_create("hostcuda", 0);
        TORCH_CHECK(ftruncate(file, bytes) == 0);
        p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      } else {
        TORCH_CHECK(posix_memalign(&p, 512, bytes) == 0, "CUDA out of memory");
      }
      memset(p, 0xFF, bytes);
      order().made(p, current_device);
      std::lock_guard<std::mutex> lock(memory_mutex);
      blocks[p] = {bytes, current_device, file};
      count(current_device, bytes);
    }
    return {p, p, &free_block, c10::Device(c10::kCUDA, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
};
inline DeviceAllocator device_allocator;

inline bool is_pinned(const void* p) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  auto it = pinned.upper_bound(const_cast<void*>(p));
  if (it == pinned.begin()) return false;
  --it;
  return static_cast<const char*>(p) < static_cast<char*>(it->first) + it->second;
}
inline bool is_pinned(const char* begin, const char* end) { return begin >= end || (is_pinned(begin) && is_pinned(end - 1)); }
inline void free_pinned(void* p) {
  if (!p) return;
  { std::lock_guard<std::mutex> lock(memory_mutex); pinned.erase(p); }
  free(p);
}
struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* p = nullptr;
    if (bytes) {
      TORCH_CHECK(posix_memalign(&p, 512, bytes) == 0);
      memset(p, 0xFF, bytes);
      std::lock_guard<std::mutex> lock(memory_mutex);
      pinned[p] = bytes;
    }
    return {p, p, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
inline PinnedAllocator pinned_allocator;
}  // namespace hostcuda

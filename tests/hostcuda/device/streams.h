// Streams, events and the host as vector clocks: everything is executed at once and in order, and what the
// program has not ordered by an event, a wait or a synchronization is an error.
#pragma once
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <atomic>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace hostcuda {
constexpr int kDevices = 8;
using StreamKey = std::pair<int, int64_t>;  // device, number; 0: the default stream, negative: of a process group
using Clock = std::map<StreamKey, uint64_t>;  // of each stream, the last operation that is known to be done

inline thread_local int current_device = 0;
inline thread_local int64_t current_stream[kDevices] = {0};
inline std::atomic<int64_t> next_stream{1};
inline std::atomic<bool> warns_of_waits{false};

inline StreamKey stream_of(int device) { return {device, current_stream[device]}; }
inline std::string name(StreamKey s) {
  return "stream " + std::to_string(s.second) + " of cuda:" + std::to_string(s.first);
}

struct Access { const char* begin; const char* end; StreamKey stream; uint64_t time; bool writes; std::string what; };
struct Memory { StreamKey made_in; std::vector<Access> accesses; std::set<StreamKey> recorded; };
struct Transfer { StreamKey stream; uint64_t time; std::function<void()> finish; };

class Order {
 public:
  // Time of the next operation of a stream; the host has launched it, so what the host has waited for is done.
  uint64_t next(StreamKey s) {
    std::lock_guard<std::mutex> lock(mutex_);
    join(streams_[s], host_);
    return ++streams_[s][s];
  }
  Clock reached(StreamKey s) { std::lock_guard<std::mutex> lock(mutex_); join(streams_[s], host_); return streams_[s]; }
  void wait(StreamKey s, const Clock& seen) { std::lock_guard<std::mutex> lock(mutex_); join(streams_[s], seen); }
  void host_waits(const Clock& seen) {  // and what was on its way to the host has arrived
    std::list<Transfer> arrived;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      join(host_, seen);
      for (auto it = transfers_.begin(); it != transfers_.end();)
        if (known(host_, it->stream, it->time)) arrived.splice(arrived.end(), transfers_, it++);
        else ++it;
    }
    for (auto& transfer : arrived) transfer.finish();
    raise_late_fault();
  }
  // Whether the host knows these to be done; the device gets on with its work while the host looks.
  bool host_looks(const Clock& seen) {
    bool all = true;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [s, t] : seen) all = all && known(host_, s, t);
    }
    host_waits(seen);
    return all;
  }
  void host_waits_for_device(int device) {
    Clock all;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [s, clock] : streams_) if (s.first == device && s.second >= 0) join(all, clock);
    }
    host_waits(all);
  }
  void later(StreamKey s, uint64_t time, std::function<void()> finish) {
    std::lock_guard<std::mutex> lock(mutex_);
    transfers_.push_back({s, time, std::move(finish)});
  }

  void made(const void* base, int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    memory_[base] = Memory{stream_of(device), {}, {}};
  }
  // An error unless every earlier access of these bytes that matters is known to be done in this stream.
  void access(const void* base, const char* begin, const char* end, StreamKey s, uint64_t time, bool writes,
              const std::string& what) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& accesses = memory_[base].accesses;
    auto& clock = streams_[s];
    for (auto it = accesses.begin(); it != accesses.end();) {
      bool overlaps = it->begin < end && begin < it->end;
      bool ordered = it->stream == s || known(clock, it->stream, it->time);
      TORCH_CHECK(!overlaps || ordered || !(writes || it->writes), what, writes ? " writes" : " reads", " in ",
                  name(s), " what ", it->what, it->writes ? " writes" : " reads", " in ", name(it->stream),
                  ", and nothing has ordered the two");
      bool replaced = ordered && it->begin >= begin && it->end <= end && (writes || (it->stream == s && !it->writes));
      it = replaced ? accesses.erase(it) : it + 1;
    }
    accesses.push_back({begin, end, s, time, writes, what});
  }
  void record(const void* base, StreamKey s) { std::lock_guard<std::mutex> lock(mutex_); memory_[base].recorded.insert(s); }
  // The allocator gives freed memory to the next tensor of the stream that made it.
  void freed(const void* base) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = memory_.find(base);
    if (it == memory_.end()) return;
    auto& memory = it->second;
    for (auto& a : memory.accesses)
      if (a.stream != memory.made_in && a.stream.second >= 0 && !memory.recorded.count(a.stream) &&
          !known(streams_[memory.made_in], a.stream, a.time) && !known(host_, a.stream, a.time))
        late_fault_ = "memory made in " + name(memory.made_in) + " was freed while " + a.what + " may still use it in " +
                      name(a.stream) + ": no record_stream";
    memory_.erase(it);
  }
  void raise_late_fault() {  // found where nothing can be raised
    std::string fault;
    { std::lock_guard<std::mutex> lock(mutex_); fault.swap(late_fault_); }
    TORCH_CHECK(fault.empty(), fault);
  }

 private:
  static void join(Clock& into, const Clock& other) { for (auto& [s, t] : other) if (into[s] < t) into[s] = t; }
  static bool known(const Clock& clock, StreamKey s, uint64_t time) {
    auto it = clock.find(s);
    return it != clock.end() && it->second >= time;
  }
  std::mutex mutex_;
  std::map<StreamKey, Clock> streams_;
  Clock host_;
  std::map<const void*, Memory> memory_;
  std::list<Transfer> transfers_;
  std::string late_fault_;
};
inline Order& order() { static auto* it = new Order; return *it; }

inline void note_wait() { if (warns_of_waits) TORCH_WARN("called a synchronizing CUDA operation"); }
}  // namespace hostcuda

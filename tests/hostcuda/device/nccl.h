// NCCL played over gloo: its checks, its own stream, communicators made by the first operation, abort.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <thread>
#include "tensors.h"

namespace hostcuda {
using W = c10::intrusive_ptr<c10d::Work>;
using Works = std::vector<W>;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;

struct Played : c10d::Work {  // completes by itself, as NCCL's does; a stream waits for it, and here also the host
  struct State {
    Works works;
    Clock clock;
    int device = current_device;
    std::shared_ptr<std::atomic<bool>> aborted;
    std::atomic<bool> done{false};
    std::exception_ptr error;
  };
  std::shared_ptr<State> state = std::make_shared<State>();
  Played(Works works, Clock clock, std::shared_ptr<std::atomic<bool>> aborted, std::chrono::milliseconds limit) {
    state->works = std::move(works);
    state->clock = std::move(clock);
    state->aborted = std::move(aborted);
    std::thread([state = state, limit] {
      try { for (auto& work : state->works) work->wait(limit); } catch (...) { state->error = std::current_exception(); }
      state->done = true;
    }).detach();
  }
  bool isCompleted() override {
    if (state->done) order().host_waits(state->clock);
    return state->done || *state->aborted;
  }
  bool isSuccess() const override { return state->done && !state->error; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds limit) override {
    auto end = std::chrono::steady_clock::now() + (limit == kNoTimeout ? std::chrono::minutes(10) : limit);
    while (!state->done) {
      TORCH_CHECK(!*state->aborted, "NCCL communicator was aborted");
      TORCH_CHECK(std::chrono::steady_clock::now() < end, "a collective operation of NCCL timed out");
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    if (state->error) std::rethrow_exception(state->error);
    order().wait(stream_of(state->device), state->clock);
    return true;
  }
};

class Nccl : public c10d::Backend {
 public:
  Nccl(int rank, int size, pybind11::function make)
      : Backend(rank, size), make_(make.inc_ref().ptr()), stream_(0, -next_stream++) {}  // no GIL where a group ends
  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds limit) override {
    limit_ = limit;
    std::lock_guard<std::mutex> lock(mutex_);  // while the communicator is made, its ranks have the first limit
    if (made_) made_->setTimeout(limit);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void startCoalescing() override { together_ = true; begun_.clear(); }
  W endCoalescing() override {
    together_ = false;
    return played(std::exchange(begun_, {}));
  }
  void eagerConnectSingleDevice(Device d) override {
    TORCH_CHECK(d.is_cuda() && d.index() == current_device, "eager_connect on ", d, ", current is cuda:", current_device);
    connected_ = true;
    auto self = c10::intrusive_ptr<Nccl>::unsafe_reclaim_from_nonowning(this);
    std::thread([self] { try { self->gloo(); } catch (...) {} }).detach();  // the first operation waits for it
  }
  void abort() override {
    *aborted_ = true;
    order().host_waits(order().reached(stream_));  // its kernels are ended
    std::lock_guard<std::mutex> lock(mutex_);
    std::thread([gone = std::move(made_)] {}).detach();  // its end waits for operations that peers do not answer
  }
  void shutdown() override { abort(); }
  bool connected() const { return connected_; }

  using B = c10d::Backend;
  W broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return play(o.rootRank == getRank() ? t : Tensors(), o.rootRank == getRank() ? Tensors() : t,
                [&](B& b) { auto c = hosts(t); return b.broadcast(c, o); });
  }
  W allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return play({}, t, [&](B& b) { auto c = hosts(t); return b.allreduce(c, o); });
  }
  W allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return play({}, t, [&](B& b) { auto c = hosts(t); return b.allreduce_coalesced(c, o); });
  }
  W reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return play({}, t, [&](B& b) { auto c = hosts(t); return b.reduce(c, o); });
  }
  W allgather(Lists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return play(in, flat(out), [&](B& b) { auto c = hosts(out); auto d = hosts(in); return b.allgather(c, d, o); });
  }
  W _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    TORCH_CHECK(out.numel() == in.numel() * getSize(), "output tensor size must be equal to world_size times input tensor size");
    return play({in}, {out}, [&](B& b) { auto c = to_host(out), d = to_host(in); return b._allgather_base(c, d, o); });
  }
  W allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return play(in, out, [&](B& b) { auto c = hosts(out), d = hosts(in); return b.allgather_into_tensor_coalesced(c, d, o); });
  }
  W gather(Lists& out, Tensors& in, const c10d::GatherOptions& o) override {
    return play(in, flat(out), [&](B& b) { auto c = hosts(out); auto d = hosts(in); return b.gather(c, d, o); });
  }
  W scatter(Tensors& out, Lists& in, const c10d::ScatterOptions& o) override {
    return play(flat(in), out, [&](B& b) { auto c = hosts(out); auto d = hosts(in); return b.scatter(c, d, o); });
  }
  W reduce_scatter(Tensors& out, Lists& in, const c10d::ReduceScatterOptions& o) override {
    return play(flat(in), out, [&](B& b) { auto c = hosts(out); auto d = hosts(in); return b.reduce_scatter(c, d, o); });
  }
  W _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return play({in}, {out}, [&](B& b) { auto c = to_host(out), d = to_host(in); return b._reduce_scatter_base(c, d, o); });
  }
  W reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    return play(in, out, [&](B& b) { auto c = hosts(out), d = hosts(in); return b.reduce_scatter_tensor_coalesced(c, d, o); });
  }
  W alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& to, std::vector<int64_t>& from,
                  const c10d::AllToAllOptions& o) override {
    return play({in}, {out}, [&](B& b) { auto c = to_host(out), d = to_host(in); return b.alltoall_base(c, d, to, from, o); });
  }
  W alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    return play(in, out, [&](B& b) { auto c = hosts(out), d = hosts(in); return b.alltoall(c, d, o); });
  }
  W send(Tensors& t, int to, int tag) override {
    return play(t, {}, [&](B& b) { auto c = hosts(t); return b.send(c, to, tag); });
  }
  W recv(Tensors& t, int from, int tag) override {
    return play({}, t, [&](B& b) { auto c = hosts(t); return b.recv(c, from, tag); });
  }
  W barrier(const c10d::BarrierOptions& o) override { return play({}, {}, [&](B& b) { return b.barrier(o); }); }

 private:
  static Tensors flat(const Lists& lists) {
    Tensors all;
    for (auto& list : lists) all.insert(all.end(), list.begin(), list.end());
    return all;
  }
  static Tensors hosts(const Tensors& t) { Tensors all; for (auto& one : t) all.push_back(to_host(one)); return all; }
  static Lists hosts(const Lists& t) { Lists all; for (auto& one : t) all.push_back(hosts(one)); return all; }
  static void check(const Tensor& t) {
    TORCH_CHECK(t.is_cuda() && !t.is_sparse(), "Tensors must be CUDA and dense");
    TORCH_CHECK(t.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    TORCH_CHECK(t.get_device() == current_device, "NCCL on ", t.device(), " while the current device is cuda:", current_device);
  }
  c10d::Backend& gloo() {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!*aborted_, "NCCL communicator was aborted");
    if (!made_ && !failed_) {
      pybind11::gil_scoped_acquire gil;
      try {
        made_ = pybind11::reinterpret_borrow<pybind11::function>(make_)().cast<c10::intrusive_ptr<c10d::Backend>>();
        if (limit_.load() != kNoTimeout) made_->setTimeout(limit_);
      } catch (std::exception& error) {
        failed_ = error.what();
      }
    }
    TORCH_CHECK(!failed_, "NCCL communicator was not made: ", *failed_);
    return *made_;
  }
  W played(Works works) { return c10::make_intrusive<Played>(std::move(works), order().reached(stream_), aborted_, limit_); }
  template <typename F> W play(const Tensors& reads, const Tensors& writes, F start) {
    for (auto& t : reads) check(t);
    for (auto& t : writes) check(t);
    stream_.first = current_device;
    order().wait(stream_, order().reached(stream_of(current_device)));
    auto time = order().next(stream_);
    for (auto& t : reads) access(t, stream_, time, false, "NCCL");
    for (auto& t : writes) access(t, stream_, time, true, "NCCL");
    W work = start(gloo());
    if (!together_) return played({work});
    begun_.push_back(work);
    return work;
  }
  PyObject* make_;
  StreamKey stream_;
  c10::intrusive_ptr<c10d::Backend> made_;
  std::mutex mutex_;
  std::atomic<std::chrono::milliseconds> limit_{kNoTimeout};
  std::optional<std::string> failed_;
  bool together_ = false, connected_ = false;
  Works begun_;
  std::shared_ptr<std::atomic<bool>> aborted_ = std::make_shared<std::atomic<bool>>(false);
};
}  // namespace hostcuda

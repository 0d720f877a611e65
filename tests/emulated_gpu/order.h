// The order of work on streams: late copies, and the accesses to memory that nothing orders.
//
// The emulated GPU does all work when it is launched, on whichever stream. A program that forgets to wait would thus
// never notice. While `order.is_checked`:
// - A copy between page-locked memory and the device that does not block the caller is made as late as possible. A copy
//   to the device is made when work of its stream follows, or when something waits for it; a copy to the host, only
//   when the host waits for it. Until then, the destination contains 77s.
// - Each operation on the device checks that its stream has waited for the streams that wrote its arguments, and for
//   those that read what it overwrites. Memory that is freed must not be in use by another stream than its own, unless
//   `Tensor.record_stream` was called.
// - Page-locked memory must not change between the copy to the device and the moment at which the host has waited for it.
#pragma once

#include <ATen/ATen.h>

#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

using Number = int64_t;  // of an operation; later operations have larger numbers
using StreamId = int64_t;

class Order {
 public:
  bool is_checked = false;

  // Begin an operation of a stream: make the copies to the device that precede it in the stream.
  Number begin(StreamId stream) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    finish(stream, counter_, false);
    return ++counter_;
  }

  // Check one access of an operation to the memory of a device.
  void access(const void* memory, StreamId stream, Number number, bool is_write, const std::string& name) {
    if (memory == nullptr) return;
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto& block = blocks_.try_emplace(memory, Block{stream}).first->second;
    for (const auto& [other, last] : block.writes) check(stream, other, last, name + " uses memory that");
    if (is_write)
      for (const auto& [other, last] : block.reads) check(stream, other, last, name + " overwrites memory that");
    (is_write ? block.writes : block.reads)[stream] = number;
  }

  void allocate(const void* memory, StreamId stream) {
    if (!is_checked || memory == nullptr) return;
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    blocks_.insert_or_assign(memory, Block{stream});
  }

  // Check that memory is free for new tensors of its stream, which may overwrite it immediately.
  void release(const void* memory) {
    if (!is_checked || memory == nullptr) return;
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    const auto found = blocks_.find(memory);
    if (found == blocks_.end()) return;
    auto block = std::move(found->second);
    blocks_.erase(found);
    for (const auto* uses : {&block.reads, &block.writes})
      for (const auto& [other, last] : *uses)
        if (!block.recorded.count(other)) check(block.stream, other, last, "memory is freed that");
  }

  void record_use(const void* memory, StreamId stream) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    const auto found = blocks_.find(memory);
    if (found != blocks_.end()) found->second.recorded.insert(stream);
  }

  // Let a copy that does not block be made late. `to` and `from` are aliases on the CPU; `owner` has the device's memory.
  void copy_late(StreamId stream, at::Tensor to, at::Tensor from, at::Tensor owner, bool is_to_device) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (is_to_device) check_unchanged(from.data_ptr());
    late_.push_back({counter_, stream, to, is_to_device ? from : from.clone(), {}, owner, is_to_device, false});
    to.fill_(77);
  }

  // Return the number of the last operation that was launched.
  Number now() {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    return counter_;
  }

  // Let a stream, or the host if `waiting` is negative, wait for the operations of a stream up to a number.
  void wait(StreamId waiting, StreamId stream, Number number) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    finish(stream, number, waiting < 0);
    auto& known = waiting < 0 ? known_by_host_ : known_[waiting];
    for (const auto& [other, last] : known_[stream]) known[other] = std::max(known[other], last);
    known[stream] = std::max(known[stream], number);
  }

  void wait_for_all() {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    std::set<StreamId> streams;
    for (const auto& copy : late_) streams.insert(copy.stream);
    for (const auto& [memory, block] : blocks_)
      for (const auto* uses : {&block.reads, &block.writes})
        for (const auto& [stream, last] : *uses) streams.insert(stream);
    for (const auto stream : streams) wait(-1, stream, counter_);
  }

  // Begin or end to check; return the first fault, or an empty text.
  const char* check_from_now(bool checks) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (!checks) wait_for_all();
    result_ = std::exchange(fault_, "");
    is_checked = checks;
    blocks_.clear(), late_.clear(), known_.clear(), known_by_host_.clear();
    return result_.c_str();
  }

  int64_t num_late = 0;  // copies that were made late

 private:
  struct Block {
    StreamId stream;  // for which it was allocated
    std::map<StreamId, Number> writes = {}, reads = {};
    std::set<StreamId> recorded = {};
  };

  struct Late {
    Number number;
    StreamId stream;
    at::Tensor to, from, copied, owner;
    bool is_to_device, is_done;
  };

  void check(StreamId stream, StreamId other, Number last, const std::string& what) {
    if (other == stream || last <= std::max(known_[stream][other], known_by_host_[other]) || !fault_.empty()) return;
    fault_ = what + " stream " + std::to_string(other) + " may still use, for which stream " + std::to_string(stream) +
             " has not waited";
  }

  void check_unchanged(const void* memory) {
    for (const auto& copy : late_)
      if (copy.is_to_device && copy.is_done && copy.from.data_ptr() == memory) check_unchanged(copy);
  }

  void check_unchanged(const Late& copy) {
    if (!at::equal(copy.from.contiguous().view(at::kByte), copy.copied.contiguous().view(at::kByte)) && fault_.empty())
      fault_ = "page-locked memory has changed before the host has waited for its copy to the device";
  }

  void finish(StreamId stream, Number number, bool is_for_host) {
    for (auto copy = late_.begin(); copy != late_.end();) {
      if (copy->stream != stream || copy->number > number) {
        ++copy;
        continue;
      }
      if (!copy->is_done && (copy->is_to_device || is_for_host)) {
        copy->to.copy_(copy->from);
        if (copy->is_to_device) copy->copied = copy->from.clone();
        copy->is_done = true, ++num_late;
        copy->to = copy->owner = at::Tensor();
      }
      if (is_for_host && copy->is_to_device) check_unchanged(*copy);
      copy = is_for_host ? late_.erase(copy) : std::next(copy);
    }
  }

  std::recursive_mutex mutex_;
  Number counter_ = 0;
  std::map<const void*, Block> blocks_;
  std::map<StreamId, std::map<StreamId, Number>> known_;  // by a stream: the last work of others that precedes its own
  std::map<StreamId, Number> known_by_host_;
  std::list<Late> late_;
  std::string fault_, result_;
};

// The device's caching allocator, and page-locked host memory: both use freed memory again as early as CUDA's may.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdlib>
#include <cstring>
#include <set>

#include "trace.h"

namespace simulated {

constexpr int POISON = 0xFF;  // NaN as a float, -1 as an integer
constexpr auto TYPE = c10::DeviceType::PrivateUse1;

inline thread_local int current_device = 0;
inline thread_local int64_t current_stream[DEVICES] = {};

inline int64_t stream_now(int device) { return current_stream[device]; }

struct Block {
  char* start;
  size_t nbytes;
  int device;
  int64_t stream;
  std::set<int64_t> readers;   // other streams, by record_stream
  std::vector<Recorded> ends;  // of the work that used it when it was freed
};

inline std::map<char*, Block> device_blocks;
inline std::map<std::tuple<int, int64_t, size_t>, std::vector<Block>> device_pool;
inline std::map<char*, Block> pinned_blocks;
inline std::vector<Block> pinned_pool;
inline c10::CachingDeviceAllocator::DeviceStats stats[DEVICES];

inline size_t rounded(size_t nbytes) { return (std::max<size_t>(nbytes, 1) + 511) / 512 * 512; }

inline char* fresh(size_t nbytes) {
  auto* start = static_cast<char*>(std::aligned_alloc(512, nbytes));
  if (!start) throw std::bad_alloc();
  std::memset(start, POISON, nbytes);
  return start;
}

inline void count(int device, int64_t nbytes) {
  for (auto kind : {c10::CachingAllocator::StatType::AGGREGATE, c10::CachingAllocator::StatType::SMALL_POOL}) {
    auto& bytes = stats[device].allocated_bytes[static_cast<size_t>(kind)];
    nbytes > 0 ? bytes.increase(nbytes) : bytes.decrease(-nbytes);
  }
}

// Freed memory is its stream's again at once, except that other streams noted as its readers must be done.
inline void free_device(void* pointer) {
  if (!pointer) return;
  std::vector<std::pair<uint64_t, Recorded>> marks;
  Block block;
  {
    Locked locked(mutex);
    auto found = device_blocks.find(static_cast<char*>(pointer));
    block = found->second;
    device_blocks.erase(found);
    for (auto reader : block.readers) {
      block.ends.push_back({new_event(), mark_of(block.device, reader)});
      marks.push_back({ticket(), block.ends.back()});
    }
    device_pool[{block.device, block.stream, block.nbytes}].push_back(block);
    count(block.device, -static_cast<int64_t>(block.nbytes));
  }
  for (auto& [at, end] : marks) tell(at, "record", end.mark.device, end.mark.stream, end.id, 0);
}

inline bool ended(const Block& block) {
  return std::all_of(block.ends.begin(), block.ends.end(), [](const Recorded& end) { return reached(end.mark); });
}

// The last freed block of this size that may be used again, or memory from the system.
inline Block taken(std::vector<Block>& pool, Block wanted) {  // locked
  for (auto block = pool.rbegin(); block != pool.rend(); ++block) {
    if (block->nbytes != wanted.nbytes || !ended(*block)) continue;
    wanted.start = block->start;
    wanted.ends = block->ends;
    pool.erase(std::next(block).base());
    return wanted;
  }
  wanted.start = fresh(wanted.nbytes);
  return wanted;
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    int device = current_device;
    if (nbytes == 0) return {nullptr, nullptr, &free_device, c10::Device(TYPE, device)};
    Block block{nullptr, rounded(nbytes), device, stream_now(device), {}, {}};
    uint64_t number;
    {
      Locked locked(mutex);
      block = taken(device_pool[{device, block.stream, block.nbytes}], block);
      // Poison comes in the stream's order, as whatever is written to the memory next.
      submit_work(device, block.stream, [start = block.start, n = block.nbytes] { std::memset(start, POISON, n); });
      count(device, block.nbytes);
      device_blocks[block.start] = {block.start, block.nbytes, device, block.stream, {}, {}};
      number = ticket();
    }
    for (auto& end : block.ends) tell(number, "wait", device, block.stream, end.id, 0);
    tell(number, "allocation", device, block.stream, reinterpret_cast<uint64_t>(block.start), block.nbytes);
    return {block.start, block.start, &free_device, c10::Device(TYPE, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    Locked locked(mutex);
    auto found = device_blocks.find(static_cast<char*>(pointer.get()));
    if (found != device_blocks.end() && stream.id() != found->second.stream) found->second.readers.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Locked locked(mutex);
    return stats[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Locked locked(mutex);
    for (auto& bytes : stats[device].allocated_bytes) bytes.reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Locked locked(mutex);
    for (auto& bytes : stats[device].allocated_bytes) bytes.reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { return {size_t(1) << 30, size_t(1) << 30}; }
};
inline DeviceMemory device_memory;

inline void free_pinned(void* pointer) {
  if (!pointer) return;
  Locked locked(mutex);
  auto found = pinned_blocks.find(static_cast<char*>(pointer));
  pinned_pool.push_back(found->second);
  pinned_blocks.erase(found);
}

// Used again when the copies that were given before it was freed are done, and not waited for.
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    // As CUDA: nothing has no address, and is not pinned.
    if (nbytes == 0) return {nullptr, nullptr, &free_pinned, c10::Device(c10::DeviceType::CPU)};
    Block block;
    uint64_t number;
    {
      Locked locked(mutex);
      block = taken(pinned_pool, {nullptr, rounded(nbytes), 0, 0, {}, {}});
      std::memset(block.start, POISON, block.nbytes);
      pinned_blocks[block.start] = {block.start, block.nbytes, 0, 0, {}, {}};
      number = ticket();
    }
    tell(number, "pinned", 0, 0, reinterpret_cast<uint64_t>(block.start), block.nbytes);
    return {block.start, block.start, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
};
inline PinnedMemory pinned_memory;

inline Block* pinned_block(const void* pointer) {  // locked
  auto* at = static_cast<char*>(const_cast<void*>(pointer));
  auto next = pinned_blocks.upper_bound(at);
  if (next == pinned_blocks.begin()) return nullptr;
  auto& block = std::prev(next)->second;
  return at < block.start + block.nbytes ? &block : nullptr;
}

}  // namespace simulated

// What torch asks of every device: the current device and stream of a thread, events, generators.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace simulated {

inline bool available = false;

inline void check_index(int64_t index) {
  TORCH_CHECK(index >= 0 && index < DEVICES, "simulated device: there is no device ", index, " among ", DEVICES);
}

inline void check_events() { TORCH_CHECK(offered.events, "simulated device: it has no events, and no stream of it can be waited for"); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int index(c10::Device device) { return device.index() < 0 ? current_device : device.index(); }
  static c10::Stream made(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, device), id);
  }

  c10::DeviceType type() const override { return TYPE; }
  c10::Device getDevice() const override { return {TYPE, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override {
    check_index(index(device));
    current_device = index(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = index(device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return available ? DEVICES : 0; }

  c10::Stream getStream(c10::Device device) const override { return made(index(device), stream_now(index(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return made(index(device), 0); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    check_index(index(device));
    TORCH_CHECK(offered.streams, "simulated device: it has one stream");
    static std::atomic<int64_t> streams{0};
    return made(index(device), 1 + streams++ % STREAMS);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    check_events();
    return reached(mark_of(stream.device_index(), stream.id()));
  }
  static void finish(int device, int64_t stream) {
    auto number = ticket();
    synchronize_stream(device, stream);
    tell(number, "synchronize stream", device, stream, 0, 0);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    check_events();
    finish(stream.device_index(), stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    auto number = ticket();
    synchronize_device(device);
    tell(number, "synchronize device", device, 0, 0, 0);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    check_events();
    if (!*event) *event = new Recorded{new_event(), {}};
    auto* recorded = static_cast<Recorded*>(*event);
    uint64_t number;
    {
      Locked locked(mutex);
      recorded->mark = mark_of(stream.device_index(), stream.id());
      number = ticket();
    }
    tell(number, "record", stream.device_index(), stream.id(), recorded->id, 0);
  }
  void block(void* event, const c10::Stream& stream) const override {
    check_events();
    if (!event) return;
    auto* recorded = static_cast<Recorded*>(event);
    uint64_t number;
    {
      Locked locked(mutex);
      submit_wait(stream.device_index(), stream.id(), recorded->mark);
      number = ticket();
    }
    tell(number, "wait", stream.device_index(), stream.id(), recorded->id, 0);
  }
  bool queryEvent(void* event) const override {
    check_events();
    if (!event) return true;
    auto* recorded = static_cast<Recorded*>(event);
    bool done = reached(recorded->mark);
    if (done) tell(ticket(), "synchronize event", 0, 0, recorded->id, 0);  // who saw it done may use what it made
    return done;
  }
  void synchronizeEvent(void* event) const override {
    check_events();
    if (!event) return;
    auto* recorded = static_cast<Recorded*>(event);
    synchronize(recorded->mark);
    tell(ticket(), "synchronize event", 0, 0, recorded->id, 0);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Recorded*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_memory.recordStream(pointer, stream);
  }
};

inline std::vector<at::Generator>& generators() {
  static std::vector<at::Generator> made = [] {
    std::vector<at::Generator> all;
    for (int device = 0; device < DEVICES; device++) all.push_back(at::detail::createCPUGenerator());
    return all;
  }();
  return made;
}

inline std::vector<at::Generator> users_generators;  // kept, so that no other gets the place of one

inline void check_generator(const at::Generator& given) {  // locked
  for (auto* known : {&generators(), &users_generators})
    for (auto& each : *known) if (each == given) return;
  TORCH_CHECK(false, "Expected a 'simulated' device type for generator but found 'cpu'");
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return available; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return available; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({TYPE, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({TYPE, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* pointer) const override {
    Locked locked(mutex);
    return pinned_block(pointer);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(offered.pinned, "simulated device: it pins no memory");
    return &pinned_memory;
  }
  at::Device getDeviceFromPtr(void* pointer) const override {
    Locked locked(mutex);
    auto* at = static_cast<char*>(pointer);
    auto next = device_blocks.upper_bound(at);
    TORCH_CHECK(next != device_blocks.begin(), "simulated device: this is no memory of it");
    return {TYPE, static_cast<c10::DeviceIndex>(std::prev(next)->second.device)};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return generators()[device < 0 ? current_device : device];
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    Locked locked(mutex);
    return users_generators.emplace_back(at::detail::createCPUGenerator());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override;
};

}  // namespace simulated

// Streams of the simulated device: queues of work that runs when somebody waits for it, or in a random lawful order.
#pragma once
#include <Python.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace simulated {

constexpr int DEVICES = 4;
constexpr int STREAMS = 1024;  // handed out in turn, as CUDA does with 32: another's stream may get what one has freed

// What it offers; tests take some of it away.
struct Offered {
  bool streams = true;             // others than the default one
  bool events = true;              // else no stream can be waited for, either
  bool pinned = true;
  std::set<std::string> missing;   // operators
};
inline Offered offered;

// Guards all state of this library. Work runs under it, and may free a tensor that Python knows, for which it needs the
// GIL: so nobody waits for this with the GIL held.
inline std::recursive_mutex mutex;

class Locked {
 public:
  explicit Locked(std::recursive_mutex& guarded) : guarded_(guarded) {
    if (guarded.try_lock()) return;
    if (!Py_IsInitialized() || !PyGILState_Check()) {
      guarded.lock();
      return;
    }
    PyThreadState* state = PyEval_SaveThread();
    guarded.lock();
    PyEval_RestoreThread(state);
  }
  ~Locked() { guarded_.unlock(); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  std::recursive_mutex& guarded_;
};

// A point of a stream's work.
struct Mark {
  int device = -1;
  int64_t stream = 0;
  uint64_t position = 0;
};

// What an event holds. `id` is never used again, unlike an address.
struct Recorded {
  uint64_t id;
  Mark mark;
};

inline uint64_t new_event() {
  static std::atomic<uint64_t> events{0};
  return ++events;
}

struct Piece {
  std::function<void()> work;  // none: the piece waits for `after`
  Mark after;
};

struct Line {
  std::deque<Piece> given;
  uint64_t submitted = 0;
  uint64_t finished = 0;
  std::exception_ptr failure;
};

enum class Order { latest, random, eager, threads };

using Key = std::pair<int, int64_t>;
inline std::map<Key, Line> lines;
inline std::set<Key> busy;  // streams that may have work: a process uses hundreds, and few at a time have any
inline Order order = Order::latest;
inline std::mt19937_64 draws;

inline bool reached(const Mark& mark) {
  Locked locked(mutex);
  return mark.device < 0 || lines[{mark.device, mark.stream}].finished >= mark.position;
}

inline void run_until(const Mark& mark) {  // locked
  if (mark.device < 0) return;
  auto& line = lines[{mark.device, mark.stream}];
  while (line.finished < mark.position) {
    Piece piece = std::move(line.given.front());
    line.given.pop_front();
    try {
      if (piece.work) piece.work();
      else run_until(piece.after);
    } catch (...) {
      if (!line.failure) line.failure = std::current_exception();
    }
    line.finished++;
  }
}

inline bool can_run(const Line& line) {
  return !line.given.empty() && (line.given.front().work || reached(line.given.front().after));
}

// Runs one piece of a random stream that may run one; false where none may.
inline bool run_one() {
  std::vector<Key> able;
  for (auto at = busy.begin(); at != busy.end();) {
    const auto& line = lines[*at];
    if (can_run(line)) able.push_back(*at);
    at = line.given.empty() ? busy.erase(at) : std::next(at);
  }
  if (able.empty()) return false;
  auto key = able[draws() % able.size()];
  run_until({key.first, key.second, lines[key].finished + 1});
  return true;
}

inline Mark mark_of(int device, int64_t stream) {
  Locked locked(mutex);
  return {device, stream, lines[{device, stream}].submitted};
}

// With a thread for each stream, which runs its work as soon as it may; who waits for work may be faster.
inline std::map<Key, std::thread> workers;
inline std::condition_variable_any moved_on;

inline void work_on(Key key) {
  std::unique_lock<std::recursive_mutex> lock(mutex);
  auto& line = lines[key];
  while (true) {
    moved_on.wait(lock, [&] { return order != Order::threads || can_run(line); });
    if (order != Order::threads) return;
    run_until({key.first, key.second, line.finished + 1});
    moved_on.notify_all();
    lock.unlock();  // who waits for the lock has its turn
    std::this_thread::yield();
    lock.lock();
  }
}

inline void end_threads() {  // not locked, without the GIL
  for (auto& [key, worker] : workers) worker.join();
  workers.clear();
}

inline void submit(int device, int64_t stream, Piece piece) {
  Locked locked(mutex);
  auto& line = lines[{device, stream}];
  line.given.push_back(std::move(piece));
  line.submitted++;
  busy.insert({device, stream});
  if (order == Order::eager) run_until(mark_of(device, stream));
  if (order == Order::random) while (draws() % 2 && run_one()) {}
  if (order != Order::threads) return;
  if (!workers.count({device, stream})) workers.emplace(Key{device, stream}, std::thread(work_on, Key{device, stream}));
  moved_on.notify_all();
}

inline void submit_work(int device, int64_t stream, std::function<void()> work) {
  submit(device, stream, {std::move(work), {}});
}

inline void submit_wait(int device, int64_t stream, const Mark& after) {
  if (after.device >= 0 && !(after.device == device && after.stream == stream)) submit(device, stream, {nullptr, after});
}

inline void raise_failure(Line& line) {  // locked
  if (auto failure = std::exchange(line.failure, nullptr)) std::rethrow_exception(failure);
}

inline void synchronize(const Mark& mark) {
  Locked locked(mutex);
  run_until(mark);
  if (mark.device >= 0) raise_failure(lines[{mark.device, mark.stream}]);
}

inline void synchronize_stream(int device, int64_t stream) { synchronize(mark_of(device, stream)); }

inline void synchronize_device(int device) {
  Locked locked(mutex);
  for (auto& [key, line] : lines) if (key.first == device) run_until({device, key.second, line.submitted});
  for (auto& [key, line] : lines) if (key.first == device) raise_failure(line);
}

}  // namespace simulated

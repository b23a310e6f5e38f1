// Reports every submission, wait and allocation to a Python function, in the order in which they took effect.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <string>
#include <tuple>
#include <vector>

#include "schedule.h"

namespace simulated {

namespace py = pybind11;

// First byte, bytes, whether it writes.
using Access = std::tuple<uint64_t, uint64_t, bool>;

inline py::object* listener = nullptr;
inline std::atomic<uint64_t> tickets{0};

// Taken under the lock: what took effect earlier has the smaller one.
inline uint64_t ticket() { return ++tickets; }

inline void tell(uint64_t number, const char* kind, int device, int64_t stream, uint64_t a, int64_t b,
                 const std::string& name = "", const std::vector<Access>& accesses = {}) {
  if (!listener || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  if (!listener) return;
  py::object call = *listener;
  PyObject *type, *value, *traceback;  // an exception may be on its way through the thread that frees memory
  PyErr_Fetch(&type, &value, &traceback);
  try {
    call(number, kind, device, stream, a, b, name, accesses);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("the trace of the simulated device");
  }
  PyErr_Restore(type, value, traceback);
}

}  // namespace simulated

// The state of the simulated HIP runtime: devices, modules, streams, graphs and allocations.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "code_object.h"
#include "hip_types.h"
#include "journal.h"
#include "sim_control.h"

namespace simhip {

// The machine's limits (CDNA4; facts also in the cost model's table).
constexpr uint32_t kComputeUnits = 256;
constexpr uint32_t kMaxBlock = 1024;
constexpr uint32_t kLdsBytes = 160 * 1024;
constexpr uint32_t kMaxGrid = 0x7fffffff;
constexpr uint32_t kClockKhz = 2400000;
constexpr uint64_t kMemoryBytes = uint64_t{288} << 30;

struct Module {
  int device = 0;
  CodeObject code;
};

// A hipFunction_t: which kernel of which module. Lives as long as its module.
struct Function {
  std::shared_ptr<const Module> module;
  const Kernel* kernel = nullptr;
};

// A launch that passed every check.
struct CheckedLaunch {
  std::shared_ptr<const Module> module;
  const Kernel* kernel = nullptr;
  std::vector<uint8_t> arguments;
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t dynamic_lds_bytes = 0;
  int device = 0;
};

struct Stream {
  int device = 0;
  bool blocking =
      true;  // waits for the null stream, so the null stream cannot be used while it captures
  hipStreamCaptureStatus capture = hipStreamCaptureStatusNone;
  hipStreamCaptureMode mode = hipStreamCaptureModeGlobal;
  std::thread::id capturing_thread;
  std::vector<CheckedLaunch> captured;
};

struct Allocation {
  size_t bytes = 0;
  int device = 0;
  bool owned = false;  // hipMalloc's, else registered by the test
};

using Graph = std::vector<CheckedLaunch>;

struct Runtime {
  // Never destroyed, as Journal.
  static Runtime& Get();

  int device_count = 8;
  std::vector<std::string> archs;  // one a device

  std::mutex mutex;  // guards all below; never held while a launch runs
  std::map<hipModule_t, std::shared_ptr<Module>> modules;
  std::map<hipFunction_t, std::unique_ptr<Function>> functions;
  std::map<hipStream_t, std::unique_ptr<Stream>> streams;
  std::map<hipGraph_t, std::unique_ptr<Graph>> graphs;
  std::map<hipGraphExec_t, std::unique_ptr<Graph>> graph_execs;
  std::map<uintptr_t, Allocation> allocations;

  // Both with `mutex` held. The stream named by a handle; the null and per-thread streams have no
  // entry.
  Stream* FindStream(hipStream_t stream);
  // Invalidate the captures that do not permit what comes; true if there was one. `Unsafe`: a call
  // that allocates, loads or synchronises, which the capture mode judges. `NullStream`: work on the
  // null stream.
  bool InvalidateForUnsafe();
  bool InvalidateForNullStream();

 private:
  Runtime();
  template <typename Rule>
  bool Invalidate(Rule&& forbids);
};

// The null stream and HIP's two reserved handles: not objects, but valid.
inline bool IsDefaultStream(hipStream_t stream) { return reinterpret_cast<uintptr_t>(stream) <= 2; }

// HIP's implicit device of the calling thread.
int& CurrentDevice();
// The device of a stream, else of the calling thread. Takes the runtime's mutex.
int DeviceOf(hipStream_t stream);
// What the last failed call of the calling thread says beyond its code.
std::string& LastErrorText();
hipError_t& LastError();

// hipErrorInvalidDevice, or hipErrorNoDevice where there is none, with a text.
hipError_t CheckDevice(int device, std::string* text);
// For calls that captures forbid, with the runtime's mutex held.
hipError_t RefuseInCapture(Runtime& runtime, std::string* text);

// Runs a launch: hands it to the launcher, or to the simulator, or only counts it. No lock is held.
hipError_t RunLaunch(const CheckedLaunch& launch, hipStream_t stream, std::string* text);
uint64_t LaunchCount();
void SetLauncher(SimhipLauncher launcher, void* user);

// Makes Python's half register itself as the launcher, if an interpreter lives in this process.
// Returns false with `text` set where one lives but the simulator cannot be imported.
bool AttachPython(std::string* text);

// Runs the body of one HIP call: injected failures, bookkeeping, no exception past the C boundary.
template <typename Body>
int Api(const char* name, hipStream_t stream, Body&& body) {
  hipError_t code;
  std::string text;
  try {
    const int device = DeviceOf(stream);  // before the body, which may destroy the stream
    code = Journal::Get().Injected(name);
    if (code != hipSuccess) {
      text = std::string(name) + ": failure injected by the test";
    } else {
      code = body(&text);
    }
    Journal::Get().Record(name, stream, stream == nullptr ? CurrentDevice() : device, code);
  } catch (const std::bad_alloc&) {
    code = hipErrorOutOfMemory;
  } catch (...) {
    code = hipErrorUnknown;
  }
  if (code != hipSuccess) {
    LastError() = code;
    LastErrorText().swap(text);
  }
  return code;
}

}  // namespace simhip

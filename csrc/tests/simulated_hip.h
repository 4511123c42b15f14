// The simulator's HIP library as a test sees it: what was called, what fails next, what is alive.
#pragma once

#include <string>
#include <vector>

#include "hip_types.h"
#include "sim_control.h"

namespace jax_sparse_mla {

// Functions of the library, by their own names.
struct SimulatedHip {
  static void Open(const char* path);
  static const SimulatedHip& Get();

  decltype(&simhip_set_launcher) set_launcher;
  decltype(&simhip_fail) fail;
  decltype(&simhip_clear_failures) clear_failures;
  decltype(&simhip_call_count) call_count;
  decltype(&simhip_get_call) get_call;
  decltype(&simhip_clear_calls) clear_calls;
  decltype(&simhip_launch_count) launch_count;
  decltype(&simhip_live) live;

  int (*GetLastError)();
  int (*GetDevice)(int*);
  int (*SetDevice)(int);
  int (*StreamCreateWithFlags)(hipStream_t*, unsigned);
  int (*StreamDestroy)(hipStream_t);
  int (*StreamBeginCapture)(hipStream_t, hipStreamCaptureMode);
  int (*StreamEndCapture)(hipStream_t, hipGraph_t*);
  int (*GraphInstantiate)(hipGraphExec_t*, hipGraph_t, void*, char*, size_t);
  int (*GraphLaunch)(hipGraphExec_t, hipStream_t);
  int (*GraphDestroy)(hipGraph_t);
  int (*GraphExecDestroy)(hipGraphExec_t);

  // Names of the calls since clear_calls, in order.
  std::vector<std::string> CallNames() const;
  int CurrentDevice() const;
};

// A stream of the simulator on a device.
class Stream {
 public:
  explicit Stream(int device);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  hipStream_t get() const { return stream_; }

 private:
  hipStream_t stream_ = nullptr;
};

}  // namespace jax_sparse_mla

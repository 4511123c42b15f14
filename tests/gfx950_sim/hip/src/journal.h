// Records HIP calls and makes chosen ones fail.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "hip_types.h"
#include "sim_control.h"

namespace simhip {

class Journal {
 public:
  // The process's journal. Never destroyed: HIP calls may come from other libraries' exit handlers.
  static Journal& Get();

  // The code an injected failure gives to this occurrence of `call`, else hipSuccess.
  hipError_t Injected(const char* call);
  // False if there is no such call.
  bool Inject(std::string_view call, int code, uint64_t occurrence, uint64_t times);
  void ClearInjected();

  void Record(const char* call, hipStream_t stream, int device, hipError_t code);
  uint64_t Count();
  bool At(uint64_t index, SimhipCall* out);
  void Clear();

 private:
  struct Failure {
    const char* call;
    int code;
    uint64_t skip;   // occurrences still to pass
    uint64_t times;  // failures still to give; 0 for ever
    bool spent;
  };

  Journal();
  void InjectFromEnvironment();

  std::mutex mutex_;
  std::vector<Failure> failures_;
  std::deque<SimhipCall> calls_;
};

}  // namespace simhip

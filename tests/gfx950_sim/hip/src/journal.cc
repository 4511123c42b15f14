#include "journal.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>

namespace simhip {
namespace {

constexpr size_t kMaxCalls = 1000000;

// Every HIP function of this library that can fail.
constexpr const char* kCalls[] = {
    "hipInit",
    "hipDriverGetVersion",
    "hipRuntimeGetVersion",
    "hipGetDeviceCount",
    "hipGetDevice",
    "hipSetDevice",
    "hipGetDevicePropertiesR0600",
    "hipDeviceGetAttribute",
    "hipDeviceGetName",
    "hipDeviceSynchronize",
    "hipModuleLoadData",
    "hipModuleUnload",
    "hipModuleGetFunction",
    "hipFuncGetAttribute",
    "hipModuleLaunchKernel",
    "hipStreamCreate",
    "hipStreamCreateWithFlags",
    "hipStreamDestroy",
    "hipStreamSynchronize",
    "hipStreamQuery",
    "hipStreamGetDevice",
    "hipStreamIsCapturing",
    "hipStreamBeginCapture",
    "hipStreamEndCapture",
    "hipGraphInstantiate",
    "hipGraphLaunch",
    "hipGraphDestroy",
    "hipGraphExecDestroy",
    "hipMalloc",
    "hipFree",
    "hipMemcpy",
    "hipMemcpyAsync",
    "hipMemset",
};

const char* FindCall(std::string_view name) {
  const auto* found =
      std::find_if(std::begin(kCalls), std::end(kCalls), [&](auto* call) { return name == call; });
  return found == std::end(kCalls) ? nullptr : *found;
}

uint64_t ThreadId() {
  thread_local const uint64_t id = static_cast<uint64_t>(syscall(SYS_gettid));
  return id;
}

}  // namespace

Journal& Journal::Get() {
  static Journal& journal = *new Journal;
  return journal;
}

Journal::Journal() { InjectFromEnvironment(); }

void Journal::InjectFromEnvironment() {
  const char* setting = std::getenv("GFX950_SIM_HIP_FAIL");
  std::string_view rest = setting != nullptr ? setting : "";
  while (!rest.empty()) {
    const std::string item(rest.substr(0, rest.find(',')));
    rest.remove_prefix(std::min(rest.size(), item.size() + 1));
    const std::string name = item.substr(0, item.find(':'));
    uint64_t numbers[3] = {hipErrorUnknown, 1, 1};  // code, occurrence, times
    size_t at = name.size();
    for (uint64_t& number : numbers) {
      if (at >= item.size()) break;
      number = std::strtoull(item.c_str() + at + 1, nullptr, 10);
      at = std::min(item.size(), item.find(':', at + 1));
    }
    Inject(name, static_cast<int>(numbers[0]), numbers[1], numbers[2]);
  }
}

hipError_t Journal::Injected(const char* call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  hipError_t result = hipSuccess;
  for (Failure& failure : failures_) {
    if (std::strcmp(failure.call, call) != 0 || failure.spent) continue;
    if (failure.skip > 0) {
      --failure.skip;
      continue;
    }
    result = static_cast<hipError_t>(failure.code);
    failure.spent = failure.times > 0 && --failure.times == 0;
  }
  return result;
}

bool Journal::Inject(std::string_view call, int code, uint64_t occurrence, uint64_t times) {
  const char* name = FindCall(call);
  if (name == nullptr) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  failures_.push_back({name, code, occurrence > 0 ? occurrence - 1 : 0, times, false});
  return true;
}

void Journal::ClearInjected() {
  const std::lock_guard<std::mutex> lock(mutex_);
  failures_.clear();
}

void Journal::Record(const char* call, hipStream_t stream, int device, hipError_t code) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (calls_.size() == kMaxCalls) calls_.pop_front();
  calls_.push_back({call, ThreadId(), stream, device, code});
}

uint64_t Journal::Count() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return calls_.size();
}

bool Journal::At(uint64_t index, SimhipCall* out) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (index >= calls_.size()) return false;
  *out = calls_[index];
  return true;
}

void Journal::Clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  calls_.clear();
}

}  // namespace simhip

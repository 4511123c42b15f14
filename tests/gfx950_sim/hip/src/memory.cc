// The HIP functions about memory: a device's memory is the host's.
#include <cstdlib>
#include <cstring>

#include "runtime.h"

namespace {

using simhip::Api;
using simhip::CheckDevice;
using simhip::CurrentDevice;
using simhip::RefuseInCapture;
using simhip::Runtime;
using Lock = std::lock_guard<std::mutex>;

}  // namespace

HIP_EXPORT int hipMalloc(void** pointer, size_t bytes) {
  return Api("hipMalloc", nullptr, [&](std::string* text) {
    if (pointer == nullptr) return hipErrorInvalidValue;
    if (const hipError_t code = CheckDevice(CurrentDevice(), text); code != hipSuccess) return code;
    Runtime& runtime = Runtime::Get();
    const Lock lock(runtime.mutex);
    if (const hipError_t code = RefuseInCapture(runtime, text); code != hipSuccess) return code;
    *pointer = nullptr;
    if (bytes == 0) return hipSuccess;
    if (bytes > simhip::kMemoryBytes) return hipErrorOutOfMemory;
    void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (memory == nullptr) return hipErrorOutOfMemory;
    runtime.allocations[reinterpret_cast<uintptr_t>(memory)] = {bytes, CurrentDevice(), true};
    *pointer = memory;
    return hipSuccess;
  });
}

HIP_EXPORT int hipFree(void* pointer) {
  return Api("hipFree", nullptr, [&](std::string* text) {
    if (pointer == nullptr) return hipSuccess;
    Runtime& runtime = Runtime::Get();
    const Lock lock(runtime.mutex);
    if (const hipError_t code = RefuseInCapture(runtime, text); code != hipSuccess) return code;
    const auto found = runtime.allocations.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == runtime.allocations.end() || !found->second.owned) {
      *text = "not a pointer that hipMalloc gave";
      return hipErrorInvalidValue;
    }
    runtime.allocations.erase(found);
    std::free(pointer);
    return hipSuccess;
  });
}

namespace {

hipError_t Copy(void* to, const void* from, size_t bytes, int kind, std::string* text) {
  if (bytes == 0) return hipSuccess;
  if (to == nullptr || from == nullptr || kind < 0 || kind > 4) return hipErrorInvalidValue;
  Runtime& runtime = Runtime::Get();
  const Lock lock(runtime.mutex);
  if (const hipError_t code = RefuseInCapture(runtime, text); code != hipSuccess) return code;
  std::memmove(to, from, bytes);
  return hipSuccess;
}

}  // namespace

HIP_EXPORT int hipMemcpy(void* to, const void* from, size_t bytes, int kind) {
  return Api("hipMemcpy", nullptr,
             [&](std::string* text) { return Copy(to, from, bytes, kind, text); });
}

HIP_EXPORT int hipMemcpyAsync(void* to, const void* from, size_t bytes, int kind,
                              hipStream_t stream) {
  return Api("hipMemcpyAsync", stream,
             [&](std::string* text) { return Copy(to, from, bytes, kind, text); });
}

HIP_EXPORT int hipMemset(void* pointer, int value, size_t bytes) {
  return Api("hipMemset", nullptr, [&](std::string* text) {
    if (pointer == nullptr && bytes > 0) return hipErrorInvalidValue;
    Runtime& runtime = Runtime::Get();
    const Lock lock(runtime.mutex);
    if (const hipError_t code = RefuseInCapture(runtime, text); code != hipSuccess) return code;
    if (bytes > 0) std::memset(pointer, value, bytes);
    return hipSuccess;
  });
}

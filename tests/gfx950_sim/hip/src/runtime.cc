#include "runtime.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace simhip {

Runtime& Runtime::Get() {
  static Runtime& runtime = *new Runtime;
  return runtime;
}

Runtime::Runtime() {
  if (const char* count = std::getenv("GFX950_SIM_HIP_DEVICES"); count != nullptr)
    device_count = std::clamp(std::atoi(count), 0, 64);
  const char* setting = std::getenv("GFX950_SIM_HIP_ARCH");
  std::string_view names = setting != nullptr ? setting : "gfx950";
  for (int device = 0; device < device_count; ++device) {
    const size_t comma = names.find(',');
    archs.emplace_back(names.substr(0, comma));
    if (comma != std::string_view::npos) names.remove_prefix(comma + 1);
  }
}

Stream* Runtime::FindStream(hipStream_t stream) {
  const auto found = streams.find(stream);
  return found == streams.end() ? nullptr : found->second.get();
}

template <typename Rule>
bool Runtime::Invalidate(Rule&& forbids) {
  bool any = false;
  for (auto& [handle, stream] : streams) {
    if (stream->capture == hipStreamCaptureStatusActive && forbids(*stream)) {
      stream->capture = hipStreamCaptureStatusInvalidated;
      any = true;
    }
  }
  return any;
}

bool Runtime::InvalidateForUnsafe() {
  return Invalidate([](const Stream& stream) {
    return stream.mode == hipStreamCaptureModeGlobal ||
           (stream.mode == hipStreamCaptureModeThreadLocal &&
            stream.capturing_thread == std::this_thread::get_id());
  });
}

bool Runtime::InvalidateForNullStream() {
  return Invalidate([](const Stream& stream) { return stream.blocking; });
}

hipError_t CheckDevice(int device, std::string* text) {
  const int count = Runtime::Get().device_count;
  if (device >= 0 && device < count) return hipSuccess;
  *text = "device " + std::to_string(device) + " of " + std::to_string(count);
  return count == 0 ? hipErrorNoDevice : hipErrorInvalidDevice;
}

hipError_t RefuseInCapture(Runtime& runtime, std::string* text) {
  if (!runtime.InvalidateForUnsafe()) return hipSuccess;
  *text = "not permitted while a stream is capturing";
  return hipErrorStreamCaptureUnsupported;
}

int& CurrentDevice() {
  thread_local int device = 0;
  return device;
}

int DeviceOf(hipStream_t stream) {
  if (!IsDefaultStream(stream)) {
    Runtime& runtime = Runtime::Get();
    const std::lock_guard<std::mutex> lock(runtime.mutex);
    if (const Stream* queue = runtime.FindStream(stream); queue != nullptr) return queue->device;
  }
  return CurrentDevice();
}

std::string& LastErrorText() {
  thread_local std::string text;
  return text;
}

hipError_t& LastError() {
  thread_local hipError_t code = hipSuccess;
  return code;
}

}  // namespace simhip

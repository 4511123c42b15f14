// hipModuleLaunchKernel: its checks, its arguments, and where the launch goes.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "runtime.h"

namespace simhip {
namespace {

struct Launcher {
  SimhipLauncher function = nullptr;
  void* user = nullptr;
};

std::mutex launcher_mutex;
Launcher launcher;  // guarded by launcher_mutex
std::atomic<uint64_t> launches{0};

Launcher CurrentLauncher() {
  const std::lock_guard<std::mutex> lock(launcher_mutex);
  return launcher;
}

bool OnlyChecks() {
  static const bool only = [] {
    const char* mode = std::getenv("GFX950_SIM_HIP_LAUNCH");
    return mode != nullptr && std::strcmp(mode, "check") == 0;
  }();
  return only;
}

std::string Shape(const uint32_t* shape) {
  return "(" + std::to_string(shape[0]) + ", " + std::to_string(shape[1]) + ", " +
         std::to_string(shape[2]) + ")";
}

hipError_t CheckShape(const Kernel& kernel, const CheckedLaunch& launch, std::string* text) {
  const uint64_t items = uint64_t{launch.block[0]} * launch.block[1] * launch.block[2];
  for (int axis = 0; axis < 3; ++axis) {
    if (launch.grid[axis] == 0 || launch.block[axis] == 0) {
      *text = "grid " + Shape(launch.grid) + " or block " + Shape(launch.block) + " has a zero";
      return hipErrorInvalidConfiguration;
    }
    // The dispatch packet holds the grid in work items, 32 bits an axis.
    if (uint64_t{launch.grid[axis]} * launch.block[axis] > std::numeric_limits<uint32_t>::max()) {
      *text = "grid " + Shape(launch.grid) + " times block " + Shape(launch.block) +
              " passes 2^32 - 1 work items on one axis";
      return hipErrorInvalidConfiguration;
    }
  }
  if (items > kMaxBlock) {
    *text = "block " + Shape(launch.block) + " has more than 1024 work items";
    return hipErrorInvalidConfiguration;
  }
  const bool fixed = kernel.required_block[0] != 0;
  if (items > kernel.max_block ||
      (fixed && std::memcmp(launch.block, kernel.required_block, sizeof(launch.block)) != 0)) {
    *text = "block " + Shape(launch.block) + " does not suit " + kernel.symbol +
            ", compiled for at most " + std::to_string(kernel.max_block) + " work items" +
            (fixed ? ", exactly " + Shape(kernel.required_block) : "");
    return hipErrorLaunchFailure;
  }
  const uint64_t lds = uint64_t{kernel.lds_bytes} + launch.dynamic_lds_bytes;
  if (lds > kLdsBytes) {
    *text = std::to_string(lds) + " bytes of LDS asked for, a compute unit has " +
            std::to_string(kLdsBytes);
    return hipErrorInvalidValue;
  }
  return hipSuccess;
}

hipError_t PackParameters(const Kernel& kernel, void** parameters, std::vector<uint8_t>* out,
                          std::string* text) {
  out->assign(kernel.argument_bytes, 0);
  size_t index = 0;
  for (const KernelArgument& argument : kernel.arguments) {
    if (argument.hidden) continue;
    if (parameters == nullptr || parameters[index] == nullptr) {
      *text = "kernelParams lacks argument " + std::to_string(index) + " of " + kernel.symbol;
      return hipErrorInvalidValue;
    }
    std::memcpy(out->data() + argument.offset, parameters[index], argument.size);
    ++index;
  }
  return hipSuccess;
}

hipError_t PackExtra(const Kernel& kernel, void** extra, std::vector<uint8_t>* out,
                     std::string* text) {
  const void* buffer = nullptr;
  size_t bytes = 0;
  for (int i = 0; extra[i] != HIP_LAUNCH_PARAM_END; i += 2) {
    if (extra[i] == HIP_LAUNCH_PARAM_BUFFER_POINTER) {
      buffer = extra[i + 1];
    } else if (extra[i] == HIP_LAUNCH_PARAM_BUFFER_SIZE && extra[i + 1] != nullptr) {
      bytes = *static_cast<const size_t*>(extra[i + 1]);
    } else {
      *text = "extra holds an unknown key";
      return hipErrorInvalidValue;
    }
  }
  uint32_t needed = 0;
  for (const KernelArgument& argument : kernel.arguments) {
    if (!argument.hidden) needed = std::max(needed, argument.offset + argument.size);
  }
  if (buffer == nullptr || bytes < needed) {
    *text = "extra gives " + std::to_string(bytes) + " bytes of arguments, " + kernel.symbol +
            " takes " + std::to_string(needed);
    return hipErrorInvalidValue;
  }
  out->assign(std::max<size_t>(bytes, kernel.argument_bytes), 0);
  std::memcpy(out->data(), buffer, bytes);
  return hipSuccess;
}

// Fills `launch` from the function, or captures it; `*captured` says which.
hipError_t Enqueue(hipFunction_t function, hipStream_t stream, void** parameters, void** extra,
                   CheckedLaunch* launch, bool* captured, std::string* text) {
  Runtime& runtime = Runtime::Get();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  const auto found = runtime.functions.find(function);
  if (found == runtime.functions.end()) {
    *text = "not a function of a loaded module";
    return hipErrorInvalidHandle;
  }
  Stream* queue = runtime.FindStream(stream);
  if (queue == nullptr && !IsDefaultStream(stream)) {
    *text = "not a stream";
    return hipErrorContextIsDestroyed;
  }
  launch->module = found->second->module;
  launch->kernel = found->second->kernel;
  launch->device = queue != nullptr ? queue->device : CurrentDevice();
  if (launch->module->device != launch->device) {
    *text = launch->kernel->symbol + " was loaded on device " +
            std::to_string(launch->module->device) + ", the stream is on device " +
            std::to_string(launch->device);
    return hipErrorInvalidDeviceFunction;
  }
  if (parameters != nullptr && extra != nullptr) {
    *text = "both kernelParams and extra are given";
    return hipErrorInvalidValue;
  }
  if (const hipError_t code = CheckShape(*launch->kernel, *launch, text); code != hipSuccess)
    return code;
  const hipError_t code =
      extra != nullptr ? PackExtra(*launch->kernel, extra, &launch->arguments, text)
                       : PackParameters(*launch->kernel, parameters, &launch->arguments, text);
  if (code != hipSuccess) return code;

  *captured = queue != nullptr && queue->capture != hipStreamCaptureStatusNone;
  if (queue == nullptr && runtime.InvalidateForNullStream()) {
    *text = "a launch on the null stream while another stream is capturing";
    return hipErrorStreamCaptureImplicit;
  }
  if (!*captured) return hipSuccess;
  if (queue->capture == hipStreamCaptureStatusInvalidated) return hipErrorStreamCaptureInvalidated;
  queue->captured.push_back(*launch);
  return hipSuccess;
}

}  // namespace

void SetLauncher(SimhipLauncher function, void* user) {
  const std::lock_guard<std::mutex> lock(launcher_mutex);
  launcher = {function, user};
}

uint64_t LaunchCount() { return launches.load(); }

hipError_t RunLaunch(const CheckedLaunch& launch, hipStream_t stream, std::string* text) {
  const uint64_t id = ++launches;
  if (OnlyChecks()) return hipSuccess;
  Launcher current = CurrentLauncher();
  if (current.function == nullptr) {
    if (!AttachPython(text)) return hipErrorLaunchFailure;
    current = CurrentLauncher();
    if (current.function == nullptr) return hipSuccess;
  }
  SimhipLaunch view{};
  view.id = id;
  view.symbol = launch.kernel->symbol.c_str();
  view.code = launch.module->code.bytes.data();
  view.code_size = launch.module->code.bytes.size();
  view.arguments = launch.arguments.data();
  view.arguments_size = launch.arguments.size();
  view.stream = stream;
  view.device = launch.device;
  std::memcpy(view.grid, launch.grid, sizeof(view.grid));
  std::memcpy(view.block, launch.block, sizeof(view.block));
  view.dynamic_lds_bytes = launch.dynamic_lds_bytes;
  char message[4096] = "";
  const int code = current.function(&view, message, sizeof(message), current.user);
  message[sizeof(message) - 1] = '\0';
  if (code != hipSuccess) *text = message;
  return static_cast<hipError_t>(code);
}

}  // namespace simhip

HIP_EXPORT int hipModuleLaunchKernel(hipFunction_t function, unsigned grid_x, unsigned grid_y,
                                     unsigned grid_z, unsigned block_x, unsigned block_y,
                                     unsigned block_z, unsigned dynamic_lds_bytes,
                                     hipStream_t stream, void** parameters, void** extra) {
  using simhip::CheckedLaunch;
  return simhip::Api("hipModuleLaunchKernel", stream, [&](std::string* text) {
    CheckedLaunch launch{};
    const uint32_t grid[3] = {grid_x, grid_y, grid_z};
    const uint32_t block[3] = {block_x, block_y, block_z};
    std::memcpy(launch.grid, grid, sizeof(grid));
    std::memcpy(launch.block, block, sizeof(block));
    launch.dynamic_lds_bytes = dynamic_lds_bytes;
    bool captured = false;
    const hipError_t code =
        simhip::Enqueue(function, stream, parameters, extra, &launch, &captured, text);
    if (code != hipSuccess || captured) return code;
    return simhip::RunLaunch(launch, stream, text);
  });
}

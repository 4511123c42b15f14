// The HIP functions about devices, modules and streams, and the last error.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "errors.h"
#include "runtime.h"

namespace {

using simhip::Api;
using simhip::CheckDevice;
using simhip::CurrentDevice;
using simhip::IsDefaultStream;
using simhip::RefuseInCapture;
using simhip::Runtime;
using Lock = std::lock_guard<std::mutex>;

hipError_t CheckStream(Runtime& runtime, hipStream_t stream, std::string* text) {
  if (IsDefaultStream(stream) || runtime.FindStream(stream) != nullptr) return hipSuccess;
  *text = "not a stream";
  return hipErrorContextIsDestroyed;
}

hipError_t CreateStream(hipStream_t* out, bool blocking) {
  Runtime& runtime = Runtime::Get();
  auto stream = std::make_unique<simhip::Stream>();
  stream->device = CurrentDevice();
  stream->blocking = blocking;
  const auto handle = reinterpret_cast<hipStream_t>(stream.get());
  const Lock lock(runtime.mutex);
  runtime.streams.emplace(handle, std::move(stream));
  *out = handle;
  return hipSuccess;
}

// The value of one attribute, or -1 where this library does not know it.
int Attribute(hipDeviceAttribute_t attribute) {
  switch (attribute) {
    case hipDeviceAttributeClockRate:
      return simhip::kClockKhz;
    case hipDeviceAttributeL2CacheSize:
      return 4 << 20;
    case hipDeviceAttributeComputeCapabilityMajor:
      return 9;
    case hipDeviceAttributeComputeCapabilityMinor:
      return 5;
    case hipDeviceAttributeMaxBlockDimX:
    case hipDeviceAttributeMaxBlockDimY:
    case hipDeviceAttributeMaxBlockDimZ:
    case hipDeviceAttributeMaxThreadsPerBlock:
      return simhip::kMaxBlock;
    case hipDeviceAttributeMaxGridDimX:
      return simhip::kMaxGrid;
    case hipDeviceAttributeMaxGridDimY:
    case hipDeviceAttributeMaxGridDimZ:
      return 65536;
    case hipDeviceAttributeMultiprocessorCount:
      return simhip::kComputeUnits;
    case hipDeviceAttributeMaxSharedMemoryPerBlock:
    case hipDeviceAttributeMaxSharedMemoryPerMultiprocessor:
      return simhip::kLdsBytes;
    case hipDeviceAttributeWarpSize:
      return 64;
    case hipDeviceAttributeNumberOfXccs:
      return 8;
  }
  return -1;
}

}  // namespace

HIP_EXPORT int hipInit(unsigned flags) {
  return Api("hipInit", nullptr,
             [&](std::string*) { return flags == 0 ? hipSuccess : hipErrorInvalidValue; });
}

HIP_EXPORT int hipDriverGetVersion(int* version) {
  return Api("hipDriverGetVersion", nullptr, [&](std::string*) {
    if (version == nullptr) return hipErrorInvalidValue;
    *version = 70000000;
    return hipSuccess;
  });
}

HIP_EXPORT int hipRuntimeGetVersion(int* version) {
  return Api("hipRuntimeGetVersion", nullptr, [&](std::string*) {
    if (version == nullptr) return hipErrorInvalidValue;
    *version = 70000000;
    return hipSuccess;
  });
}

HIP_EXPORT int hipGetDeviceCount(int* count) {
  return Api("hipGetDeviceCount", nullptr, [&](std::string*) {
    if (count == nullptr) return hipErrorInvalidValue;
    *count = Runtime::Get().device_count;
    return *count == 0 ? hipErrorNoDevice : hipSuccess;
  });
}

HIP_EXPORT int hipGetDevice(int* device) {
  return Api("hipGetDevice", nullptr, [&](std::string*) {
    if (device == nullptr) return hipErrorInvalidValue;
    *device = CurrentDevice();
    return Runtime::Get().device_count == 0 ? hipErrorNoDevice : hipSuccess;
  });
}

HIP_EXPORT int hipSetDevice(int device) {
  return Api("hipSetDevice", nullptr, [&](std::string* text) {
    const hipError_t code = CheckDevice(device, text);
    if (code == hipSuccess) CurrentDevice() = device;
    return code;
  });
}

HIP_EXPORT int hipGetDevicePropertiesR0600(hipDeviceProp_tR0600* properties, int device) {
  return Api("hipGetDevicePropertiesR0600", nullptr, [&](std::string* text) {
    if (properties == nullptr) return hipErrorInvalidValue;
    if (const hipError_t code = CheckDevice(device, text); code != hipSuccess) return code;
    const std::string arch = Runtime::Get().archs[device] + ":sramecc+:xnack-";
    std::memset(properties, 0, sizeof(*properties));
    const char name[] = "gfx950 simulator";
    std::memcpy(properties->name, name, sizeof(name));
    std::memcpy(properties->gcnArchName, arch.c_str(),
                std::min(arch.size(), sizeof(properties->gcnArchName) - 1));
    properties->totalGlobalMem = simhip::kMemoryBytes;
    properties->sharedMemPerBlock = simhip::kLdsBytes;
    properties->maxSharedMemoryPerMultiProcessor = simhip::kLdsBytes;
    properties->regsPerBlock = 65536;
    properties->warpSize = 64;
    properties->maxThreadsPerBlock = simhip::kMaxBlock;
    for (int axis = 0; axis < 3; ++axis) {
      properties->maxThreadsDim[axis] = simhip::kMaxBlock;
      properties->maxGridSize[axis] = axis == 0 ? static_cast<int>(simhip::kMaxGrid) : 65536;
    }
    properties->clockRate = simhip::kClockKhz;
    properties->major = 9;
    properties->minor = 5;
    properties->multiProcessorCount = simhip::kComputeUnits;
    properties->l2CacheSize = 4 << 20;
    return hipSuccess;
  });
}

HIP_EXPORT int hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int device) {
  return Api("hipDeviceGetAttribute", nullptr, [&](std::string* text) {
    if (value == nullptr) return hipErrorInvalidValue;
    if (const hipError_t code = CheckDevice(device, text); code != hipSuccess) return code;
    const int known = Attribute(attribute);
    if (known < 0) {
      *text = "device attribute " + std::to_string(attribute) + " is not simulated";
      return hipErrorNotSupported;
    }
    *value = known;
    return hipSuccess;
  });
}

HIP_EXPORT int hipDeviceGetName(char* name, int size, int device) {
  return Api("hipDeviceGetName", nullptr, [&](std::string* text) {
    if (name == nullptr || size <= 0) return hipErrorInvalidValue;
    if (const hipError_t code = CheckDevice(device, text); code != hipSuccess) return code;
    const char value[] = "gfx950 simulator";
    const size_t length = std::min<size_t>(sizeof(value) - 1, size - 1);
    std::memcpy(name, value, length);
    name[length] = '\0';
    return hipSuccess;
  });
}

HIP_EXPORT int hipDeviceSynchronize() {
  return Api("hipDeviceSynchronize", nullptr, [&](std::string* text) {
    Runtime& runtime = Runtime::Get();
    const Lock lock(runtime.mutex);
    return RefuseInCapture(runtime, text);
  });
}

HIP_EXPORT int hipModuleLoadData(hipModule_t* module, const void* image) {
  return Api("hipModuleLoadData", nullptr, [&](std::string* text) {
    if (module == nullptr || image == nullptr) return hipErrorInvalidValue;
    Runtime& runtime = Runtime::Get();
    const int device = CurrentDevice();
    if (const hipError_t code = CheckDevice(device, text); code != hipSuccess) return code;
    auto loaded = std::make_shared<simhip::Module>();
    loaded->device = device;
    if (const hipError_t code = simhip::ReadCodeObject(image, &loaded->code, text);
        code != hipSuccess)
      return code;
    if (loaded->code.arch != runtime.archs[device]) {
      *text = "the code object is for " + loaded->code.arch + ", device " + std::to_string(device) +
              " is " + runtime.archs[device];
      return hipErrorNoBinaryForGpu;
    }
    const Lock lock(runtime.mutex);
    if (const hipError_t code = RefuseInCapture(runtime, text); code != hipSuccess) return code;
    *module = reinterpret_cast<hipModule_t>(loaded.get());
    runtime.modules.emplace(*module, std::move(loaded));
    return hipSuccess;
  });
}

HIP_EXPORT int hipModuleUnload(hipModule_t module) {
  return Api("hipModuleUnload", nullptr, [&](std::string* text) {
    Runtime& runtime = Runtime::Get();
    const Lock lock(runtime.mutex);
    const auto found = runtime.modules.find(module);
    if (found == runtime.modules.end()) {
      *text = "not a loaded module";
      return hipErrorInvalidHandle;
    }
    for (auto it = runtime.functions.begin(); it != runtime.functions.end();) {
      it = it->second->module == found->second ? runtime.functions.erase(it) : std::next(it);
    }
    runtime.modules.erase(found);
    return hipSuccess;
  });
}

HIP_EXPORT int hipModuleGetFunction(hipFunction_t* function, hipModule_t module, const char* name) {
  return Api("hipModuleGetFunction", nullptr, [&](std::string* text) {
    if (function == nullptr || name == nullptr) return hipErrorInvalidValue;
    Runtime& runtime = Runtime::Get();
    const Lock lock(runtime.mutex);
    const auto found = runtime.modules.find(module);
    if (found == runtime.modules.end()) {
      *text = "not a loaded module";
      return hipErrorInvalidHandle;
    }
    const auto& loaded = found->second;
    // ROCm aborts the process here; an error is the kinder way to say no.
    if (loaded->device != CurrentDevice()) {
      *text = "the module was loaded on device " + std::to_string(loaded->device) +
              ", the thread is on device " + std::to_string(CurrentDevice());
      return hipErrorInvalidDevice;
    }
    const auto kernel = loaded->code.kernels.find(name);
    if (kernel == loaded->code.kernels.end()) {
      *text = std::string("the module has no kernel \"") + name + "\"";
      return hipErrorNotFound;
    }
    auto entry = std::make_unique<simhip::Function>();
    entry->module = loaded;
    entry->kernel = &kernel->second;
    *function = reinterpret_cast<hipFunction_t>(entry.get());
    runtime.functions.emplace(*function, std::move(entry));
    return hipSuccess;
  });
}

HIP_EXPORT int hipFuncGetAttribute(int* value, hipFunction_attribute attribute,
                                   hipFunction_t function) {
  return Api("hipFuncGetAttribute", nullptr, [&](std::string* text) {
    if (value == nullptr) return hipErrorInvalidValue;
    Runtime& runtime = Runtime::Get();
    const Lock lock(runtime.mutex);
    const auto found = runtime.functions.find(function);
    if (found == runtime.functions.end()) {
      *text = "not a function of a loaded module";
      return hipErrorInvalidHandle;
    }
    const simhip::Kernel& kernel = *found->second->kernel;
    switch (attribute) {
      case HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *value = static_cast<int>(kernel.max_block);
        return hipSuccess;
      case HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
        *value = static_cast<int>(kernel.lds_bytes);
        return hipSuccess;
      case HIP_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
        *value = 0;
        return hipSuccess;
      case HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
        *value = static_cast<int>(kernel.private_bytes);
        return hipSuccess;
      case HIP_FUNC_ATTRIBUTE_NUM_REGS:
        *value = static_cast<int>(kernel.vgprs);
        return hipSuccess;
    }
    *text = "function attribute " + std::to_string(attribute) + " is not simulated";
    return hipErrorInvalidValue;
  });
}

HIP_EXPORT int hipStreamCreate(hipStream_t* stream) {
  return Api("hipStreamCreate", nullptr, [&](std::string*) {
    return stream == nullptr ? hipErrorInvalidValue : CreateStream(stream, true);
  });
}

HIP_EXPORT int hipStreamCreateWithFlags(hipStream_t* stream, unsigned flags) {
  return Api("hipStreamCreateWithFlags", nullptr, [&](std::string*) {
    return stream == nullptr || flags > 1 ? hipErrorInvalidValue : CreateStream(stream, flags == 0);
  });
}

HIP_EXPORT int hipStreamDestroy(hipStream_t stream) {
  return Api("hipStreamDestroy", stream, [&](std::string* text) {
    Runtime& runtime = Runtime::Get();
    const Lock lock(runtime.mutex);
    if (runtime.streams.erase(stream) == 1) return hipSuccess;
    *text = "not a stream that hipStreamCreate made";
    return hipErrorInvalidHandle;
  });
}

HIP_EXPORT int hipStreamSynchronize(hipStream_t stream) {
  return Api("hipStreamSynchronize", stream, [&](std::string* text) {
    Runtime& runtime = Runtime::Get();
    const Lock lock(runtime.mutex);
    if (const hipError_t code = CheckStream(runtime, stream, text); code != hipSuccess) return code;
    simhip::Stream* queue = runtime.FindStream(stream);
    if (queue == nullptr) return RefuseInCapture(runtime, text);
    if (queue->capture == hipStreamCaptureStatusNone) return hipSuccess;
    queue->capture = hipStreamCaptureStatusInvalidated;
    *text = "not permitted while the stream is capturing";
    return hipErrorStreamCaptureUnsupported;
  });
}

HIP_EXPORT int hipStreamQuery(hipStream_t stream) {
  return Api("hipStreamQuery", stream, [&](std::string* text) {
    Runtime& runtime = Runtime::Get();
    const Lock lock(runtime.mutex);
    return CheckStream(runtime, stream, text);
  });
}

HIP_EXPORT int hipStreamGetDevice(hipStream_t stream, int* device) {
  return Api("hipStreamGetDevice", stream, [&](std::string* text) {
    if (device == nullptr) return hipErrorInvalidValue;
    Runtime& runtime = Runtime::Get();
    const Lock lock(runtime.mutex);
    if (const hipError_t code = CheckStream(runtime, stream, text); code != hipSuccess) return code;
    const simhip::Stream* queue = runtime.FindStream(stream);
    *device = queue != nullptr ? queue->device : CurrentDevice();
    return hipSuccess;
  });
}

// hipGetLastError clears what it returns; hipPeekAtLastError does not. Neither can fail or is
// recorded.
HIP_EXPORT int hipGetLastError() {
  const hipError_t code = simhip::LastError();
  simhip::LastError() = hipSuccess;
  return code;
}

HIP_EXPORT int hipPeekAtLastError() { return simhip::LastError(); }

HIP_EXPORT const char* hipGetErrorName(int code) { return simhip::DescribeError(code).name; }

HIP_EXPORT const char* hipGetErrorString(int code) { return simhip::DescribeError(code).text; }

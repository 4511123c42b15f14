// Stream capture and graphs of kernel launches.
#include "runtime.h"

namespace {

using simhip::Api;
using simhip::Runtime;
using Lock = std::lock_guard<std::mutex>;

}  // namespace

HIP_EXPORT int hipStreamIsCapturing(hipStream_t stream, hipStreamCaptureStatus* status) {
  return Api("hipStreamIsCapturing", stream, [&](std::string* text) {
    if (status == nullptr) return hipErrorInvalidValue;
    Runtime& runtime = Runtime::Get();
    const Lock lock(runtime.mutex);
    const simhip::Stream* queue = runtime.FindStream(stream);
    if (queue == nullptr && !simhip::IsDefaultStream(stream)) {
      *text = "not a stream";
      return hipErrorContextIsDestroyed;
    }
    *status = queue != nullptr ? queue->capture : hipStreamCaptureStatusNone;
    return hipSuccess;
  });
}

HIP_EXPORT int hipStreamBeginCapture(hipStream_t stream, hipStreamCaptureMode mode) {
  return Api("hipStreamBeginCapture", stream, [&](std::string* text) {
    if (mode < hipStreamCaptureModeGlobal || mode > hipStreamCaptureModeRelaxed)
      return hipErrorInvalidValue;
    Runtime& runtime = Runtime::Get();
    const Lock lock(runtime.mutex);
    simhip::Stream* queue = runtime.FindStream(stream);
    if (queue == nullptr) {
      *text = "the null stream cannot be captured";
      return hipErrorStreamCaptureUnsupported;
    }
    if (queue->capture != hipStreamCaptureStatusNone) {
      *text = "the stream is already capturing";
      return hipErrorStreamCaptureUnsupported;
    }
    queue->capture = hipStreamCaptureStatusActive;
    queue->mode = mode;
    queue->capturing_thread = std::this_thread::get_id();
    queue->captured.clear();
    return hipSuccess;
  });
}

HIP_EXPORT int hipStreamEndCapture(hipStream_t stream, hipGraph_t* graph) {
  return Api("hipStreamEndCapture", stream, [&](std::string* text) {
    if (graph == nullptr) return hipErrorInvalidValue;
    *graph = nullptr;
    Runtime& runtime = Runtime::Get();
    const Lock lock(runtime.mutex);
    simhip::Stream* queue = runtime.FindStream(stream);
    if (queue == nullptr || queue->capture == hipStreamCaptureStatusNone) {
      *text = "the stream is not capturing";
      return hipErrorStreamCaptureUnmatched;
    }
    const bool valid = queue->capture == hipStreamCaptureStatusActive;
    queue->capture = hipStreamCaptureStatusNone;
    auto captured = std::make_unique<simhip::Graph>(std::move(queue->captured));
    queue->captured.clear();
    if (!valid) {
      *text = "an operation that no capture permits was made while the stream was capturing";
      return hipErrorStreamCaptureInvalidated;
    }
    *graph = reinterpret_cast<hipGraph_t>(captured.get());
    runtime.graphs.emplace(*graph, std::move(captured));
    return hipSuccess;
  });
}

// The last three parameters describe errors and are left alone, as ROCm leaves them.
HIP_EXPORT int hipGraphInstantiate(hipGraphExec_t* exec, hipGraph_t graph, void*, char*, size_t) {
  return Api("hipGraphInstantiate", nullptr, [&](std::string*) {
    if (exec == nullptr) return hipErrorInvalidValue;
    Runtime& runtime = Runtime::Get();
    const Lock lock(runtime.mutex);
    const auto found = runtime.graphs.find(graph);
    if (found == runtime.graphs.end()) return hipErrorInvalidValue;
    auto copy = std::make_unique<simhip::Graph>(*found->second);
    *exec = reinterpret_cast<hipGraphExec_t>(copy.get());
    runtime.graph_execs.emplace(*exec, std::move(copy));
    return hipSuccess;
  });
}

HIP_EXPORT int hipGraphLaunch(hipGraphExec_t exec, hipStream_t stream) {
  return Api("hipGraphLaunch", stream, [&](std::string* text) {
    simhip::Graph launches;
    {
      Runtime& runtime = Runtime::Get();
      const Lock lock(runtime.mutex);
      const auto found = runtime.graph_execs.find(exec);
      if (found == runtime.graph_execs.end()) return hipErrorInvalidValue;
      launches = *found->second;
    }
    for (const simhip::CheckedLaunch& launch : launches) {
      if (const hipError_t code = simhip::RunLaunch(launch, stream, text); code != hipSuccess)
        return code;
    }
    return hipSuccess;
  });
}

HIP_EXPORT int hipGraphDestroy(hipGraph_t graph) {
  return Api("hipGraphDestroy", nullptr, [&](std::string*) {
    Runtime& runtime = Runtime::Get();
    const Lock lock(runtime.mutex);
    return runtime.graphs.erase(graph) == 1 ? hipSuccess : hipErrorInvalidValue;
  });
}

HIP_EXPORT int hipGraphExecDestroy(hipGraphExec_t exec) {
  return Api("hipGraphExecDestroy", nullptr, [&](std::string*) {
    Runtime& runtime = Runtime::Get();
    const Lock lock(runtime.mutex);
    return runtime.graph_execs.erase(exec) == 1 ? hipSuccess : hipErrorInvalidValue;
  });
}
